"""The mixers registry: the token mixer of a layer, from the name of its record to its module.

A mixer is a record (`records.MixerBase`), which needs no JAX, and a builder here, which turns the record and a layer's
geometry into a factory of modules. The module becomes `self_attn` and takes `CausalSelfAttention`'s call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as record_fields
from functools import partial
from typing import Any

import flax.linen as nn

from .attention import CausalSelfAttention
from .mla import LatentAttention
from .records import MLA, MixerBase, RopeScaling, YarnScaling


@dataclass(frozen=True)
class MixerContext:
    """One layer's attention geometry, the kind's overrides and the model's defaults resolved.

    mixer: the layer's record, None for grouped-query attention. A mixer of another kind reads its own record, and of
    num_kv_heads and head_dim nothing.
    """

    layer_type: str
    kv_shared: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    yarn: YarnScaling | None
    partial_rotary_factor: float | None
    partial_rotary_type: str
    window: int | None
    chunk: int | None
    mixer: MixerBase | None = None

    @property
    def name(self) -> str:
        """The mixer's name in `MIXERS`."""
        return GROUPED if self.mixer is None else self.mixer.name


GROUPED = "attention"
"""The name of grouped-query attention, which a record of None stands for."""

Factory = Callable[..., nn.Module]
"""Builds a layer's mixer from flax's own keywords (`name`)."""

Shared = Mapping[str, Any]
"""The decoder-wide attention fields that every mixer takes, by `CausalSelfAttention`'s names."""

_GEOMETRY = (
    "num_heads",
    "rope_theta",
    "rope_scaling",
    "yarn",
    "partial_rotary_factor",
    "partial_rotary_type",
    "window",
    "chunk",
)
_GROUPED_ALONE = ("qk_norm", "qk_norm_scope", "norm_eps", "attention_sinks", "output_gate")


def grouped_query(context: MixerContext, shared: Shared) -> Factory:
    """Grouped-query attention."""
    geometry = {name: getattr(context, name) for name in (*_GEOMETRY, "num_kv_heads", "head_dim")}
    return partial(CausalSelfAttention, **geometry, **shared)


def latent(context: MixerContext, shared: Shared) -> Factory:
    """Multi-head latent attention. The fields of grouped-query attention alone are refused where they are set
    (`refuse_unbuildable_fields`)."""
    if not isinstance(context.mixer, MLA):
        raise TypeError(f"the mla mixer is built from an MLA record, not {context.mixer!r}")
    sizes = {f.name: getattr(context.mixer, f.name) for f in record_fields(context.mixer)}
    geometry = {name: getattr(context, name) for name in _GEOMETRY}
    used = {name: value for name, value in shared.items() if name not in _GROUPED_ALONE}
    place = {"kv_shared": context.kv_shared, "layer_type": context.layer_type}
    return partial(LatentAttention, **sizes, **geometry, **place, **used)


MIXERS: Mapping[str, Callable[[MixerContext, Shared], Factory]] = {GROUPED: grouped_query, MLA.name: latent}
"""Name -> builder of a layer's mixer."""


def mixer_factory(context: MixerContext, shared: Shared) -> Factory:
    """The mixer of one layer as a factory taking a name. Raises ValueError for one that is not registered."""
    if context.name not in MIXERS:
        raise ValueError(f"mixer={context.mixer!r} is not supported yet; registered are {', '.join(MIXERS)}")
    return MIXERS[context.name](context, shared)
