"""The lines of sigmoid-routed experts and of prediction depths, as DeepSeek V3 and its descendants state them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import Mixture
from .fields import Config, Line, Unreadable, count, flag, layer_count, positive, value_of, via
from .rules import Carried

DEPTHS = ("num_nextn_predict_layers", "num_mtp_layers")
"""The releases' key, and transformers 5's (`DeepseekV3Config.attribute_map`, `Glm4MoeConfig.attribute_map`)."""


def whole(key: str, value: Any) -> int:
    """A whole number, 0 included; null is 0. Raises Unreadable."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unreadable(key, value, "a whole number")
    return value


def sigmoid_experts(
    experts: int,
    chosen: int,
    groups: int,
    kept: int,
    first_dense: int,
    width: int,
    shared: int,
    normalised: bool,
    scaling: float,
    layers: int,
) -> Line:
    """Experts chosen by a sigmoid with a correction bias within the best groups, beside shared ones (transformers 5.24
    `DeepseekV3MoE`, `DeepseekV3TopkRouter`; `Glm4MoeMoE`, `Glm4MoeTopkRouter`). Layers from `first_k_dense_replace` on
    are sparse. Each argument is the config class's default. `n_shared_experts` of 0 or null is none.
    """

    def read(config: Config) -> Mapping[str, Any]:
        total = value_of(config, "n_routed_experts", count, experts)
        taken = value_of(config, "num_experts_per_tok", count, chosen)
        parts = value_of(config, "n_group", count, groups)
        limit = value_of(config, "topk_group", count, kept)
        if total % parts or total // parts < 2:
            raise Unreadable("n_group", parts, f"a divisor of n_routed_experts, {total}, with two experts a group")
        if limit > parts:
            raise Unreadable("topk_group", limit, f"at most n_group, {parts}")
        if taken > limit * (total // parts):
            raise Unreadable(
                "num_experts_per_tok", taken, f"at most the {limit * (total // parts)} experts of kept groups"
            )
        depth = value_of(config, "num_hidden_layers", layer_count, layers)
        features = value_of(config, "moe_intermediate_size", count, width)
        mixture = Mixture(
            experts=total,
            top_k=taken,
            layers=tuple(range(min(value_of(config, "first_k_dense_replace", whole, first_dense), depth), depth)),
            score_function="sigmoid",
            norm_topk_prob=value_of(config, "norm_topk_prob", flag, normalised),
            scaling=float(value_of(config, "routed_scaling_factor", positive, scaling)),
            groups=parts,
            groups_per_token=limit,
            bias=True,
            expert_features=features,
            shared_features=features * value_of(config, "n_shared_experts", whole, shared),
        )
        return {"mixture": mixture}

    def write(d: DecoderFields) -> Mapping[str, Any]:
        mixture = d.mixture
        if mixture is None or mixture.expert_features is None:
            return {}
        sparse = mixture.layers if mixture.layers is not None else range(d.num_layers)
        return {
            "n_routed_experts": mixture.experts,
            "num_experts_per_tok": mixture.top_k,
            "n_group": mixture.groups,
            "topk_group": mixture.groups_per_token,
            "first_k_dense_replace": min(sparse, default=d.num_layers),
            "moe_intermediate_size": mixture.expert_features,
            "n_shared_experts": mixture.shared_features // mixture.expert_features,
            "norm_topk_prob": mixture.norm_topk_prob,
            "routed_scaling_factor": mixture.scaling,
        }

    keys = (
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
    )
    return via(keys, read, write)


def depths(config: Config) -> int:
    """How many prediction-depth layers a config announces, none where it names no count."""
    return max((whole(key, config[key]) for key in DEPTHS if key in config), default=0)


def prediction_depths() -> Line:
    """The count of prediction-depth layers, which are carried and not computed."""

    def read(config: Config) -> Mapping[str, Any]:
        depths(config)
        return {}

    def notice(config: Config) -> str | None:
        found = depths(config)
        return f"{found} prediction-depth layer(s) are carried for export and not computed" if found else None

    return via(DEPTHS, read, lambda d: {}, "carried", notice)


def carried_depths(layers: int) -> Callable[[Config], Iterator[Carried]]:
    """`Family.carried` of a family whose prediction depths are numbered on from its last layer. layers: the config
    class's default of `num_hidden_layers`."""

    def carried(config: Config) -> Iterator[Carried]:
        last = value_of(config, "num_hidden_layers", layer_count, layers)
        for index in range(last, last + depths(config)):
            yield Carried(f"model.layers.{index}.", "a prediction-depth layer, which the decoder does not compute")

    return carried
