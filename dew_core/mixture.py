"""What a mixture of experts cannot be, from its record alone and without JAX, so that a plan is refused before
anything is converted."""

from __future__ import annotations

import math

from .records import Mixture

SCORE_FUNCTIONS = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")
IMPLEMENTATIONS = ("auto", "ragged_dot", "blocks")
"""The grouped matmuls the experts can run on (`grouped.grouped_matmul`)."""

_UNBUILT = {
    "parallel": (False, "experts beside the dense feed-forward (Gemma 4)"),
    "dispatch": ("global", "expert parallelism"),
    "hash_layers": (None, "routing by a token table (DeepSeek V4)"),
    "latent_features": (None, "latent experts (Kimi K3)"),
    "latent_norm": (False, "latent experts (Kimi K3)"),
}


def refuse_unbuildable_mixture(mixture: Mixture, num_layers: int | None = None) -> None:
    """Raise ValueError, naming the field, for a mixture that contradicts itself or that is not built.

    num_layers: the decoder's depth, which `layers` and `every` are held against; None leaves them unchecked.
    """
    for name, (default, machinery) in _UNBUILT.items():
        if getattr(mixture, name) != default:
            value = getattr(mixture, name)
            raise ValueError(f"{name}={value!r}: {machinery} is not supported yet; leave {name} at {default!r}")
    _refuse_choices(mixture)
    _refuse_topology(mixture)
    _refuse_sizes(mixture)
    if num_layers is not None:
        _refuse_placement(mixture, num_layers)


def _refuse_choices(mixture: Mixture) -> None:
    choices = {"score_function": SCORE_FUNCTIONS, "group_score": GROUP_SCORES, "implementation": IMPLEMENTATIONS}
    for name, allowed in choices.items():
        if getattr(mixture, name) not in allowed:
            raise ValueError(f"{name}={getattr(mixture, name)!r}: it is one of {', '.join(allowed)}")


def _refuse_topology(mixture: Mixture) -> None:
    for name in ("experts", "top_k", "groups", "groups_per_token"):
        if getattr(mixture, name) < 1:
            raise ValueError(f"{name}={getattr(mixture, name)!r}: a mixture has at least one")
    experts, top_k, groups = mixture.experts, mixture.top_k, mixture.groups
    if top_k > experts:
        raise ValueError(f"top_k={top_k} is more than experts={experts}")
    if experts % groups:
        raise ValueError(f"experts={experts} does not divide into groups={groups}")
    if mixture.groups_per_token > groups:
        raise ValueError(f"groups_per_token={mixture.groups_per_token} is more than groups={groups}")
    size = experts // groups
    if groups > 1 and mixture.group_score == "top2" and size < 2:
        raise ValueError(f"group_score='top2' needs two experts a group: experts={experts} in groups={groups} has one")
    if top_k > mixture.groups_per_token * size:
        raise ValueError(
            f"top_k={top_k} is more than the {mixture.groups_per_token * size} experts in a token's "
            f"groups_per_token={mixture.groups_per_token} groups of {size}"
        )


def _refuse_sizes(mixture: Mixture) -> None:
    if mixture.expert_features is not None and mixture.expert_features < 1:
        raise ValueError(f"expert_features={mixture.expert_features}: an expert has at least one, or None")
    if mixture.shared_features < 0:
        raise ValueError(f"shared_features={mixture.shared_features}: a width, or 0 for no shared expert")
    if mixture.shared_gate and not mixture.shared_features:
        raise ValueError("shared_gate=True needs shared_features: there is no shared expert to gate")
    for name in ("scaling", "capacity_factor"):
        value = getattr(mixture, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: a factor is a finite number above 0")


def _refuse_placement(mixture: Mixture, num_layers: int) -> None:
    if mixture.layers is not None and mixture.every is not None:
        raise ValueError("layers and every both place the sparse layers: set one")
    if mixture.every is not None and mixture.every < 1:
        raise ValueError(f"every={mixture.every}: a cadence is at least 1")
    for index, layer in enumerate(mixture.layers or ()):
        if not 0 <= layer < num_layers:
            raise ValueError(f"layers names {layer}, outside num_layers={num_layers}")
        if layer in (mixture.layers or ())[:index]:
            raise ValueError(f"layers names {layer} twice")
