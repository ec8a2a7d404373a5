"""Rotary positions between canonical config and decoder fields: one reading of `rope_parameters` for all families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import LayerKind, RopeScaling, YarnScaling
from .fields import Config, Line, Unreadable, count, flag, number, optional, positive, shown, value_of, via

KEY = "rope_parameters"

_MEMBERS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}

ROPE_TYPES = tuple(_MEMBERS)
"""The rope types that can be computed."""

PARTIAL = "partial_rotary_factor"


def read_rope(params: Mapping[str, Any], config: Config, default_theta: float, where: str = KEY) -> dict[str, Any]:
    """One rope record as decoder fields `rope_theta`, `rope_scaling`, `yarn` (transformers 5.24
    `modeling_rope_utils`). `original_max_position_embeddings` falls back to `max_position_embeddings`, and YaRN's
    `factor` to their ratio, as there. Raises Unreadable for an unknown type or member."""
    kind = params.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _MEMBERS:
        raise Unreadable(f"{where}.rope_type", kind, f"one of {', '.join(_MEMBERS)}", "not supported")
    unknown = sorted(set(params) - _MEMBERS[kind] - {"rope_type", "rope_theta"})
    if unknown:
        raise Unreadable(f"{where}.{unknown[0]}", params[unknown[0]], f"no such member of rope type {kind}")

    def member(name: str, check: Any, default: Any = ...) -> Any:
        if params.get(name) is None:
            if default is ...:
                raise Unreadable(f"{where}.{name}", params.get(name), f"a value: rope type {kind} needs it")
            return default
        return check(f"{where}.{name}", params[name])

    theta = float(member("rope_theta", positive, default_theta))
    read: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None, "yarn": None}
    longest = config.get("max_position_embeddings", ...)
    if longest is not ... and kind in ("llama3", "yarn"):
        count("max_position_embeddings", longest)
    if kind == "linear":
        read["rope_scaling"] = RopeScaling("linear", float(member("factor", positive)))
    elif kind == "llama3":
        read["rope_scaling"] = RopeScaling(
            "llama3",
            float(member("factor", positive)),
            float(member("low_freq_factor", positive)),
            float(member("high_freq_factor", positive)),
            member("original_max_position_embeddings", count, longest),
        )
    elif kind == "yarn":
        original = member("original_max_position_embeddings", count, longest)
        ratio = ... if longest is ... or original is ... else longest / original
        read["yarn"] = YarnScaling(
            factor=float(member("factor", positive, ratio)),
            original_max_position_embeddings=original,
            beta_fast=float(member("beta_fast", number, 32.0) or 32.0),
            beta_slow=float(member("beta_slow", number, 1.0) or 1.0),
            attention_factor=member("attention_factor", optional(positive), None),
            mscale=member("mscale", optional(number), None),
            mscale_all_dim=member("mscale_all_dim", optional(number), None),
            truncate=member("truncate", flag, True),
        )
    return read


def write_rope(theta: float, scaling: RopeScaling | None, yarn: YarnScaling | None) -> dict[str, Any]:
    """The canonical rope record of one kind of layer: the inverse of `read_rope`."""
    if yarn is not None:
        record: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, "factor": yarn.factor}
        record["original_max_position_embeddings"] = yarn.original_max_position_embeddings
        record |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow, "truncate": yarn.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(yarn, name) is not None:
                record[name] = getattr(yarn, name)
        return record
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    record = {"rope_type": scaling.rope_type, "rope_theta": theta, "factor": scaling.factor}
    if scaling.rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            record[name] = getattr(scaling, name)
    return record


def rope(default_theta: float = 10000.0) -> Line:
    """One rope for every layer. The default base is transformers 5.24 `RotaryEmbeddingConfigMixin.default_theta`."""

    def read(config: Config) -> Mapping[str, Any]:
        params = value_of(config, KEY, _mapping, {})
        return read_rope(params, config, default_theta)

    def write(fields: DecoderFields) -> Mapping[str, Any]:
        return {KEY: write_rope(fields.rope_theta, fields.rope_scaling, fields.yarn)}

    return via((KEY,), read, write)


def partial_rope(default_factor: float, default_theta: float = 10000.0) -> Line:
    """One rope for every layer that turns the first `partial_rotary_factor` of a head, stated at the top level, in
    `rope_parameters` or both (transformers 5.24 `Glm4RotaryEmbedding`, `Glm4MoeRotaryEmbedding`)."""

    def read(config: Config) -> Mapping[str, Any]:
        params = dict(value_of(config, KEY, _mapping, {}))
        inside, outside = params.pop(PARTIAL, None), config.get(PARTIAL)
        if inside is not None and outside is not None and inside != outside:
            raise Unreadable(PARTIAL, outside, f"{shown(inside)}, as in {KEY}")
        factor = next((value for value in (inside, outside) if value is not None), default_factor)
        if positive(PARTIAL, factor) > 1:
            raise Unreadable(PARTIAL, factor, "a fraction of the head")
        read = read_rope(params, config, default_theta)
        return read | {"partial_rotary_factor": float(factor), "partial_rotary_type": "prefix"}

    def write(fields: DecoderFields) -> Mapping[str, Any]:
        record = write_rope(fields.rope_theta, fields.rope_scaling, fields.yarn)
        return {KEY: record | {PARTIAL: fields.partial_rotary_factor}}

    return via((KEY, PARTIAL), read, write)


def rope_of_kind(kind: str, config: Config, default_theta: float) -> dict[str, Any]:
    """The rope of one layer type, from `rope_parameters` keyed by layer type.

    Raises Unreadable for flat parameters, which a per-type config class ignores, and for a nested `truncate`
    of false, which transformers 5.24 reads from the outer object only and so does not compute.
    """
    params = value_of(config, KEY, _mapping, {})
    for name, part in params.items():
        if part is not None and not isinstance(part, Mapping):
            raise Unreadable(KEY, dict(params), "an object per layer type", "key it by layer type")
        if part and part.get("truncate") is False:
            raise Unreadable(
                f"{KEY}.{name}.truncate",
                False,
                "true",
                "the reference class ignores a nested truncate; not supported",
            )
    return read_rope(params.get(kind) or {}, config, default_theta, f"{KEY}.{kind}")


def write_rope_of_kind(fields: DecoderFields, kind: str) -> dict[str, Any]:
    """The canonical rope record of one layer type: the inverse of `rope_of_kind`."""
    own = (fields.kinds or {}).get(kind, LayerKind())
    theta = fields.rope_theta if own.rope_theta is None else own.rope_theta
    return write_rope(theta, own.rope_scaling or fields.rope_scaling, own.yarn or fields.yarn)


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable(key, value, "an object")
    return value
