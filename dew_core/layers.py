"""The layer plan: kinds resolved, one `LayerSpec` a layer, and the runs that scan and bank together.

Computed from the decoder fields alone, without JAX: the decoder builds itself from it and the converters lay files
out by it, so the two cannot disagree. Names and behaviour are the decoder reference's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import LayerKind, MixerBase, ResidualSite, RopeScaling, YarnScaling

DEFAULT_KIND = "full_attention"
"""The kind of every layer of a model whose `layer_types` is unset."""


@dataclass(frozen=True)
class ResolvedKind:
    """One kind of layer with the model's defaults filled in; only window and chunk stay optional."""

    window: int | None
    chunk: int | None
    num_kv_heads: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    yarn: YarnScaling | None
    head_dim: int
    mixer: MixerBase | None


@dataclass(frozen=True)
class LayerSpec:
    """What one layer of the stack is, resolved: everything its parameters and computation depend on that the
    layers do not share. Two layers with equal specs have parameters of equal shapes and run one program.

    width is the dense feed-forward width; sparsity the gaussian top-k fraction on the gate, 0 for none; provider
    the layer's own index when a later layer reads its keys and values.
    """

    layer_type: str
    kind: ResolvedKind
    routed: bool
    hash_routed: bool
    width: int
    sparsity: float
    kv_shared: bool
    provider: int | None
    residual_site: ResidualSite | None


def scan_groups(specs: Sequence[LayerSpec], bank_layers: int | None = None) -> tuple[tuple[int, int], ...]:
    """The stack as runs of layers, (first, count) each, in order.

    Consecutive layers of equal specs form one run; `bank_layers` splits a longer run into consecutive runs of at
    most that many layers. A layer that provides keys and values to a later one is a run of its own.
    Raises ValueError when `bank_layers` is below 1.
    """
    if bank_layers is not None and bank_layers < 1:
        raise ValueError(f"bank_layers is {bank_layers}: a bank holds at least one layer")
    groups: list[tuple[int, int]] = []
    for index, spec in enumerate(specs):
        if groups:
            first, count = groups[-1]
            room = bank_layers is None or count < bank_layers
            if room and specs[first] == spec and spec.provider is None:
                groups[-1] = (first, count + 1)
                continue
        groups.append((index, 1))
    return tuple(groups)


def group_name(first: int, count: int) -> str:
    """The module name of a run: `layers_3_7` runs layers 3 through 7, `layers_3` layer 3 alone."""
    return f"layers_{first}" if count == 1 else f"layers_{first}_{first + count - 1}"


def group_layers(name: str) -> range | None:
    """The layers a stack module name runs: `layers_3_7` as range(3, 8), `layers_3` as range(3, 4), else None."""
    match = re.fullmatch(r"layers_(0|[1-9]\d*)(?:_(0|[1-9]\d*))?", name)
    if match is None:
        return None
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if match[2] is not None and last <= first:
        return None
    return range(first, last + 1)


@dataclass(frozen=True)
class LayerPlan:
    """A decoder's layers: the kinds by name, a spec a layer, and the runs as (first, count)."""

    kinds: Mapping[str, ResolvedKind]
    specs: tuple[LayerSpec, ...]
    groups: tuple[tuple[int, int], ...]

    @property
    def bank_names(self) -> tuple[str, ...]:
        """Every run's stored name, in order."""
        return tuple(group_name(first, count) for first, count in self.groups)

    def bank_of(self, layer: int) -> tuple[str, int, int]:
        """(bank name, row, rows) of a layer. Raises IndexError past the last layer."""
        for first, count in self.groups:
            if first <= layer < first + count:
                return group_name(first, count), layer - first, count
        raise IndexError(f"layer {layer} of {len(self.specs)}")


def resolve_kind(fields: Any, kind: LayerKind) -> ResolvedKind:
    """`kind` with the model's values where it states none. `fields` is a `DecoderFields` or the decoder itself."""

    def own(value: Any, default: Any) -> Any:
        return default if value is None else value

    mixer = own(kind.mixer, fields.mixer)
    model_kv = own(fields.num_kv_heads, fields.num_heads)
    mixer_dim = None if mixer is None else mixer.head_dim
    model_dim = own(fields.head_dim, own(mixer_dim, fields.emb_features // fields.num_heads))

    return ResolvedKind(
        window=kind.window,
        chunk=kind.chunk,
        num_kv_heads=own(kind.num_kv_heads, model_kv),
        rope_theta=own(kind.rope_theta, fields.rope_theta),
        rope_scaling=own(kind.rope_scaling, fields.rope_scaling),
        yarn=own(kind.yarn, fields.yarn),
        head_dim=own(kind.head_dim, model_dim),
        mixer=mixer,
    )


def layer_types(fields: Any) -> tuple[str, ...]:
    """One kind name a layer: `layer_types`, or `DEFAULT_KIND` throughout when unset (the one kind of `kinds`
    when there is exactly one)."""
    if fields.layer_types is not None:
        return tuple(fields.layer_types)
    names = tuple(fields.kinds or ())
    return (names[0] if len(names) == 1 else DEFAULT_KIND,) * fields.num_layers


def layer_kinds(fields: Any, types: Sequence[str]) -> dict[str, ResolvedKind]:
    """Every kind the pattern names, resolved.

    Raises ValueError when the pattern is not one kind a layer, when `kinds` describes a kind no layer has, or
    when a kind sets both a window and a chunk.
    """
    if len(types) != fields.num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, num_layers is {fields.num_layers}")
    stated = dict(fields.kinds or {})
    unused = sorted(set(stated) - set(types))
    if unused:
        raise ValueError(f"kinds describes {', '.join(unused)}, which no layer of layer_types is")
    resolved = {}
    for name in dict.fromkeys(types):
        kind = stated.get(name, LayerKind())
        if kind.window is not None and kind.chunk is not None:
            raise ValueError(f"kind {name!r} sets a window and a chunk; a kind has one or neither")
        resolved[name] = resolve_kind(fields, kind)
    return resolved


def mlp_widths(fields: Any) -> tuple[int, ...]:
    """Each layer's dense feed-forward width: `mlp_features`, or 4 x `emb_features` when unset.

    Raises ValueError when a tuple of widths is not one a layer.
    """
    width = fields.mlp_features
    if width is None:
        width = 4 * fields.emb_features
    if isinstance(width, int):
        return (width,) * fields.num_layers
    if len(width) != fields.num_layers:
        raise ValueError(f"mlp_features names {len(width)} widths, num_layers is {fields.num_layers}")
    return tuple(width)


def sparse_layers(fields: Any) -> tuple[int, ...]:
    """The layers whose feed-forward routes to experts: the mixture's `layers`, or every `every`-th counting from
    the end of the first group, or all of them; none without a mixture."""
    mixture = fields.mixture
    if mixture is None or mixture.parallel:
        return ()
    if mixture.layers is not None:
        return tuple(sorted(mixture.layers))
    step = 1 if mixture.every is None else mixture.every
    return tuple(range(step - 1, fields.num_layers, step))


def sharing_layers(fields: Any) -> tuple[int, ...]:
    """The layers that read what an earlier layer stashed, in order: the trailing `num_kv_shared_layers`, or those that
    `kv_shared_layers` names.

    Raises ValueError when both are set, and for a layer that is named twice or is none.
    """
    trailing, named = fields.num_kv_shared_layers, fields.kv_shared_layers
    if trailing and named is not None:
        raise ValueError("num_kv_shared_layers and kv_shared_layers are both set: name the sharing layers one way")
    if named is not None:
        if len(set(named)) < len(named) or any(not 0 <= layer < fields.num_layers for layer in named):
            raise ValueError(f"kv_shared_layers={tuple(named)!r}: it names layers of {fields.num_layers}, each once")
        return tuple(sorted(named))
    if not 0 <= trailing < fields.num_layers:
        raise ValueError(f"num_kv_shared_layers={trailing}: some of num_layers={fields.num_layers} are left to share")
    return tuple(range(fields.num_layers - trailing, fields.num_layers))


def kv_sharing(fields: Any) -> dict[int, int]:
    """Sharing layer -> the provider it reads: the last earlier layer of its own type that does not share itself.

    Raises ValueError as `sharing_layers` does, and when there is no such layer.
    """
    types, sharing = layer_types(fields), sharing_layers(fields)
    providers: dict[int, int] = {}
    for layer in sharing:
        owning = [i for i in range(layer) if i not in sharing and types[i] == types[layer]]
        if not owning:
            field = "num_kv_shared_layers" if fields.kv_shared_layers is None else "kv_shared_layers"
            raise ValueError(f"{field}: layer {layer} shares, and no {types[layer]} layer before it has its own")
        providers[layer] = owning[-1]
    return providers


def layer_plan(fields: Any) -> LayerPlan:
    """The plan of a decoder's layers from its fields (a `DecoderFields` or the decoder itself).

    Raises ValueError as `layer_kinds`, `mlp_widths`, `kv_sharing` and `scan_groups` do.
    """
    types = layer_types(fields)
    kinds = layer_kinds(fields, types)
    widths = mlp_widths(fields)
    routed = set(sparse_layers(fields))
    hashed = set(() if fields.mixture is None else fields.mixture.hash_layers or ())
    sparsity = fields.activation_sparsity_pattern or (0.0,) * fields.num_layers
    sharing = kv_sharing(fields)
    providers = set(sharing.values())
    specs = tuple(
        LayerSpec(
            layer_type=types[index],
            kind=kinds[types[index]],
            routed=index in routed,
            hash_routed=index in hashed,
            width=widths[index],
            sparsity=sparsity[index],
            kv_shared=index in sharing,
            provider=index if index in providers else None,
            residual_site=None,
        )
        for index in range(fields.num_layers)
    )
    return LayerPlan(kinds, specs, scan_groups(specs, fields.bank_layers))
