"""The spellings of config.json that transformers versions and releases wrote, brought to one, for all families.

The canonical form is transformers 5's: `dtype`; one `rope_parameters`, flat or per layer type, with `rope_type`
and `rope_theta` inside; a wrapper's text config at the top. `canonical` reads any spelling, `respell` writes
changes back in the spelling a given config uses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import Finding
from .fields import is_finite, shown
from .rope import ROPE_TYPES

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
"""The top-level keys that spell rotary positions."""

TEXT_CONFIG = "text_config"

DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double", "float8_e4m3fn", "float8_e5m2")
"""The floating dtypes torch has names for, as `dtype` states them, with or without `torch.` before."""


@dataclass(frozen=True)
class KindRope:
    """How the old spellings of a family with a rope per layer type distribute over the types.

    scaled: the type that `rope_scaling` and `rope_theta` belong to. local: the other type. local_theta: the old key
    of its base: Gemma 3's `rope_local_base_freq`; `rope_theta` where both types share one base (OLMo 3).
    """

    scaled: str = "full_attention"
    local: str = "sliding_attention"
    local_theta: str = "rope_local_base_freq"


@dataclass(frozen=True)
class Canonical:
    """A config in canonical spelling.

    text: the decoder's keys. wrapper: a wrapper's own keys, empty for a text-only config. conflicts: keys spelled
    twice with different values.
    """

    text: Mapping[str, Any]
    wrapper: Mapping[str, Any]
    conflicts: tuple[Finding, ...]


def canonical(config: Mapping[str, Any], shared: Sequence[str] = (), kind_rope: KindRope | None = None) -> Canonical:
    """`config` in canonical spelling; `config` itself is not changed.

    shared: keys that a wrapper may state at its top level or in its text config; the text config's is taken.
    kind_rope: for a family whose rotary positions are per layer type, how the old spellings distribute
    (transformers 5.24 `Gemma3TextConfig.convert_rope_params_to_dict`); None for a family with one rope.
    """
    conflicts: list[Finding] = []
    if TEXT_CONFIG in config and not isinstance(config[TEXT_CONFIG], Mapping):
        conflicts.append(_unfit(TEXT_CONFIG, config[TEXT_CONFIG], "an object"))
        config = {key: value for key, value in config.items() if key != TEXT_CONFIG}
    if isinstance(config.get(TEXT_CONFIG), Mapping):
        text = copy.deepcopy(dict(config[TEXT_CONFIG]))
        wrapper = {key: value for key, value in config.items() if key != TEXT_CONFIG}
        for key in shared:
            if key not in wrapper:
                continue
            value = wrapper.pop(key)
            if text.setdefault(key, value) != value:
                conflicts.append(_conflict(key, TEXT_CONFIG, text[key], "the top level", value))
    else:
        text, wrapper = copy.deepcopy(dict(config)), {}

    for part in (text, wrapper):
        for key in ("dtype", "torch_dtype"):
            if not _is_dtype(part.get(key)):
                conflicts.append(_unfit(key, part.pop(key), f"one of {', '.join(DTYPES)}"))
        if "torch_dtype" in part:
            old = part.pop("torch_dtype")
            if part.setdefault("dtype", old) != old:
                conflicts.append(_conflict("dtype", "dtype", part["dtype"], "torch_dtype", old))

    rope = _rope(text, kind_rope, conflicts)
    if rope:
        text["rope_parameters"] = rope
    return Canonical(text, wrapper, tuple(conflicts))


def _rope(text: dict[str, Any], kind_rope: KindRope | None, conflicts: list[Finding]) -> dict[str, Any]:
    stated = {key: text.pop(key) for key in ROPE_KEYS if key in text}
    for key, value in stated.items():
        if value is None:
            continue
        if key in ("rope_parameters", "rope_scaling"):
            if not isinstance(value, Mapping):
                conflicts.append(_unfit(key, value, "an object or null"))
                stated[key] = None
        elif isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value) or value <= 0:
            conflicts.append(_unfit(key, value, "a finite number above 0"))
            stated[key] = None
    rope = dict(stated.get("rope_parameters") or {})
    nested = bool(rope) and all(isinstance(value, Mapping | None) for value in rope.values())
    parts = {kind: dict(value or {}) for kind, value in rope.items()} if nested else None
    if parts is None and kind_rope is not None:
        # Flat parameters of a per-type family stay flat: the family refuses them, since its class ignores them.
        if rope:
            return rope
        parts = {}
    for part in [rope] if parts is None else parts.values():
        _one_type(part, conflicts)

    scaling = stated.get("rope_scaling")
    target = rope if parts is None else parts.setdefault((kind_rope or KindRope()).scaled, {})
    if isinstance(scaling, Mapping):
        scaling = dict(scaling)
        _one_type(scaling, conflicts)
        for key, value in scaling.items():
            if target.setdefault(key, value) != value:
                conflicts.append(_conflict(key, "rope_parameters", target[key], "rope_scaling", value))
                if key == "rope_type" and value not in ROPE_TYPES:
                    conflicts.append(_unfit("rope_scaling.rope_type", value, f"one of {', '.join(ROPE_TYPES)}"))
    _fill(target, "rope_theta", stated, "rope_theta", conflicts)
    if kind_rope is not None and parts is not None:
        _fill(parts.setdefault(kind_rope.local, {}), "rope_theta", stated, kind_rope.local_theta, conflicts)
    if "rope_local_base_freq" in stated and (kind_rope is None or kind_rope.local_theta != "rope_local_base_freq"):
        text["rope_local_base_freq"] = stated["rope_local_base_freq"]
    if parts is None:
        return rope
    return {kind: part for kind, part in parts.items() if part}


def _one_type(part: dict[str, Any], conflicts: list[Finding]) -> None:
    if "type" in part:
        old = part.pop("type")
        if part.setdefault("rope_type", old) != old:
            conflicts.append(_conflict("rope type", "rope_type", part["rope_type"], "type", old))


def _fill(part: dict[str, Any], key: str, stated: Mapping[str, Any], spelled: str, conflicts: list[Finding]) -> None:
    if stated.get(spelled) is None:
        return
    if part.setdefault(key, stated[spelled]) != stated[spelled]:
        conflicts.append(_conflict(key, "rope_parameters", part[key], spelled, stated[spelled]))


def _is_dtype(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES)


def _unfit(key: str, value: Any, needed: str) -> Finding:
    return Finding(f"config key {key!r}", shown(value), needed, "correct config.json")


def _conflict(key: str, here: str, value: Any, there: str, other: Any) -> Finding:
    return Finding(
        f"config key {key!r}",
        f"{shown(value)} in {here} and {shown(other)} in {there}",
        "one value",
        "correct config.json",
    )


def respell(config: Mapping[str, Any], changes: Mapping[str, Any], kind_rope: KindRope | None = None) -> dict[str, Any]:
    """`config` with the canonical `changes` written in the spelling that `config` uses; key order is kept.

    A key that `config` states nowhere is added in canonical spelling (into the text config of a wrapper).
    """
    result = copy.deepcopy(dict(config))
    wrapped = isinstance(result.get(TEXT_CONFIG), dict)
    text = result[TEXT_CONFIG] if wrapped else result
    for key, value in changes.items():
        if key == "rope_parameters":
            _respell_rope(text, value, kind_rope)
        elif key == "dtype":
            holders = [part for part in (text, result) if "dtype" in part or "torch_dtype" in part] or [text]
            for part in holders:
                for name in [n for n in ("dtype", "torch_dtype") if n in part] or ["dtype"]:
                    part[name] = value
        elif wrapped and key not in text and key in result:
            result[key] = value
        else:
            text[key] = value
    return result


def _respell_rope(text: dict[str, Any], rope: Mapping[str, Any], kind_rope: KindRope | None) -> None:
    old = "rope_parameters" not in text and any(key in text for key in ROPE_KEYS)
    main = dict(rope.get(kind_rope.scaled, {}) if kind_rope else rope)
    local = rope.get(kind_rope.local, {}).get("rope_theta") if kind_rope else None
    shared = kind_rope is not None and kind_rope.local_theta == "rope_theta"
    if not old or (shared and local not in (None, main.get("rope_theta"))):
        # The old spelling cannot say two bases where the family has one key for both.
        for key in ROPE_KEYS:
            text.pop(key, None)
        text["rope_parameters"] = copy.deepcopy(dict(rope))
        return
    text["rope_theta"] = main.pop("rope_theta", text.get("rope_theta"))
    kind = main.pop("rope_type", "default")
    if "partial_rotary_factor" in main:
        text["partial_rotary_factor"] = main.pop("partial_rotary_factor")
    before = text.get("rope_scaling") or {}
    named = "type" if "type" in before and "rope_type" not in before else "rope_type"
    text["rope_scaling"] = None if kind == "default" else {named: kind, **main}
    if kind_rope and local is not None:
        text[kind_rope.local_theta] = local
