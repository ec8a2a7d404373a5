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

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
"""The top-level keys that spell rotary positions."""

TEXT_CONFIG = "text_config"


@dataclass(frozen=True)
class Canonical:
    """A config in canonical spelling.

    text: the decoder's keys. wrapper: a wrapper's own keys, empty for a text-only config. conflicts: keys spelled
    twice with different values.
    """

    text: Mapping[str, Any]
    wrapper: Mapping[str, Any]
    conflicts: tuple[Finding, ...]


def canonical(config: Mapping[str, Any], shared: Sequence[str] = (), scaled_kind: str | None = None) -> Canonical:
    """`config` in canonical spelling; `config` itself is not changed.

    shared: keys that a wrapper may state at its top level or in its text config; the text config's is taken.
    scaled_kind: for a family whose rotary positions are per layer type, the type that the old spelling's
    `rope_scaling` and `rope_theta` belong to (Gemma 3: `full_attention`, transformers 5.24
    `Gemma3TextConfig.convert_rope_params_to_dict`); None for a family with one rope.
    """
    conflicts: list[Finding] = []
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
        if "torch_dtype" in part:
            old = part.pop("torch_dtype")
            if part.setdefault("dtype", old) != old:
                conflicts.append(_conflict("dtype", "dtype", part["dtype"], "torch_dtype", old))

    rope = _rope(text, scaled_kind, conflicts)
    if rope:
        text["rope_parameters"] = rope
    return Canonical(text, wrapper, tuple(conflicts))


def _rope(text: dict[str, Any], scaled_kind: str | None, conflicts: list[Finding]) -> dict[str, Any]:
    stated = {key: text.pop(key) for key in ROPE_KEYS if key in text}
    rope = dict(stated.get("rope_parameters") or {})
    nested = bool(rope) and all(isinstance(value, Mapping | None) for value in rope.values())
    parts = {kind: dict(value or {}) for kind, value in rope.items()} if nested else None
    if parts is None and scaled_kind is not None:
        # Flat parameters of a per-type family stay flat: the family refuses them, since its class ignores them.
        if rope:
            return rope
        parts = {}
    for part in [rope] if parts is None else parts.values():
        _one_type(part, conflicts)

    scaling = stated.get("rope_scaling")
    target = rope if parts is None else parts.setdefault(scaled_kind or "full_attention", {})
    if isinstance(scaling, Mapping):
        scaling = dict(scaling)
        _one_type(scaling, conflicts)
        for key, value in scaling.items():
            if target.setdefault(key, value) != value:
                conflicts.append(_conflict(key, "rope_parameters", target[key], "rope_scaling", value))
    elif scaling is not None:
        conflicts.append(
            Finding("config key 'rope_scaling'", repr(scaling), "an object or null", "correct config.json")
        )
    _fill(target, "rope_theta", stated, "rope_theta", conflicts)
    if scaled_kind is not None and parts is not None:
        _fill(parts.setdefault("sliding_attention", {}), "rope_theta", stated, "rope_local_base_freq", conflicts)
    elif "rope_local_base_freq" in stated:
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


def _conflict(key: str, here: str, value: Any, there: str, other: Any) -> Finding:
    return Finding(
        f"config key {key!r}",
        f"{value!r} in {here} and {other!r} in {there}",
        "one value",
        "correct config.json",
    )


def respell(config: Mapping[str, Any], changes: Mapping[str, Any], scaled_kind: str | None = None) -> dict[str, Any]:
    """`config` with the canonical `changes` written in the spelling that `config` uses; key order is kept.

    A key that `config` states nowhere is added in canonical spelling (into the text config of a wrapper).
    """
    result = copy.deepcopy(dict(config))
    wrapped = isinstance(result.get(TEXT_CONFIG), dict)
    text = result[TEXT_CONFIG] if wrapped else result
    for key, value in changes.items():
        if key == "rope_parameters":
            _respell_rope(text, value, scaled_kind)
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


def _respell_rope(text: dict[str, Any], rope: Mapping[str, Any], scaled_kind: str | None) -> None:
    old = "rope_parameters" not in text and any(key in text for key in ROPE_KEYS)
    if not old:
        text["rope_parameters"] = copy.deepcopy(dict(rope))
        return
    main = dict(rope.get(scaled_kind, {}) if scaled_kind else rope)
    text["rope_theta"] = main.pop("rope_theta", text.get("rope_theta"))
    before = text.get("rope_scaling") or {}
    kind = main.pop("rope_type", "default")
    if "type" in before and "rope_type" not in before:
        scaling = {"type": kind, **main}
    else:
        scaling = {"rope_type": kind, **main}
    text["rope_scaling"] = None if kind == "default" else scaling
    if scaled_kind:
        local = rope.get("sliding_attention", {}).get("rope_theta")
        if local is not None:
            text["rope_local_base_freq"] = local
