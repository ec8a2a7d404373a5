"""The fields language: one line per fact between config.json and the decoder fields, read and written.

Reading is claiming: a line reads the keys it names, and a key that no line reads is refused by name, since it may
change the computation. An unset key takes the config class's documented default, which the line states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dew_core.fields import DecoderFields
from .errors import Finding

SHOWN = 80
"""The most characters of a config's value that a message repeats."""
REQUIRED: Any = object()
"""The default of a key that must be stated."""

Config = Mapping[str, Any]
"""A config in canonical spelling (`spelling.canonical`)."""


class Unreadable(Exception):
    """A value that a line cannot read. `finding` says which and why."""

    def __init__(self, key: str, found: Any, needed: str, fix: str = "correct config.json") -> None:
        self.finding = Finding(f"config key {key!r}", shown(found), needed, fix)
        super().__init__(str(self.finding))


def shown(value: Any) -> str:
    """A config's value in a message: as JSON writes it (a text in single quotes), cut where it is long."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, or a value that JSON has not
        text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass(frozen=True)
class Line:
    """One fact: the config keys it claims, how they are read into decoder fields, how fields are written back.

    read takes the whole canonical config and returns decoder fields by name, or raises Unreadable. write takes
    decoder fields and returns canonical config keys. notice, when it returns text, tells the user of something
    read that the reference class does not compute.
    """

    keys: tuple[str, ...]
    read: Callable[[Config], Mapping[str, Any]]
    write: Callable[[DecoderFields], Mapping[str, Any]]
    why: str = ""
    notice: Callable[[Config], str | None] = lambda config: None


MOST = 2**31 - 1
"""The largest size or position that the decoder's 32-bit integers count."""


def count(key: str, value: Any) -> int:
    """A whole number from 1 to `MOST`; booleans are not numbers. Raises Unreadable."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unreadable(key, value, "a whole number of at least 1")
    if value > MOST:
        raise Unreadable(key, value, f"a whole number of at most {MOST}")
    return value


MOST_LAYERS = 10_000
"""More layers than this are a damaged config: refused before anything is made for each of them."""


def layer_count(key: str, value: Any) -> int:
    """A whole number from 1 to `MOST_LAYERS`. Raises Unreadable."""
    if count(key, value) > MOST_LAYERS:
        raise Unreadable(key, value, f"at most {MOST_LAYERS} layers")
    return value


MOST_EXPERTS = 10_000
"""More experts a layer than this are a damaged config, refused like too many layers."""


def expert_count(key: str, value: Any) -> int:
    """A whole number from 1 to `MOST_EXPERTS`. Raises Unreadable."""
    if count(key, value) > MOST_EXPERTS:
        raise Unreadable(key, value, f"at most {MOST_EXPERTS} experts")
    return value


def number(key: str, value: Any) -> float:
    """A finite number that a float can hold; booleans are not numbers. Raises Unreadable."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise Unreadable(key, value, "a finite number")
    return value


def is_finite(value: float) -> bool:
    """Whether `value` is finite as a float (JSON's whole numbers have no end)."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def positive(key: str, value: Any) -> float:
    """A finite number above 0. Raises Unreadable."""
    if number(key, value) <= 0:
        raise Unreadable(key, value, "a number above 0")
    return value


def flag(key: str, value: Any) -> bool:
    """true or false. Raises Unreadable."""
    if not isinstance(value, bool):
        raise Unreadable(key, value, "true or false")
    return value


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """`check`, or null."""
    return lambda key, value: None if value is None else check(key, value)


def value_of(config: Config, key: str, check: Callable[[str, Any], Any], default: Any = REQUIRED) -> Any:
    """The checked value of `key`, or `default` when unset. Raises Unreadable when a required key is unset."""
    if key not in config:
        if default is REQUIRED:
            raise Unreadable(key, "nothing", "a value: the family has no default", "state it in config.json")
        return default
    return check(key, config[key])


def same(key: str, field: str, check: Callable[[str, Any], Any], default: Any = REQUIRED) -> Line:
    """The decoder field `field` is the config's `key`; `default` is the config class's."""
    return Line(
        (key,),
        lambda config: {field: value_of(config, key, check, default)},
        lambda fields: {key: getattr(fields, field)},
    )


def fixed(key: str, value: Any, why: str) -> Line:
    """`key` must be `value` where it is stated (the family's class computes nothing else that is built here)."""

    def read(config: Config) -> Mapping[str, Any]:
        if key in config and (config[key] != value or isinstance(config[key], bool) != isinstance(value, bool)):
            raise Unreadable(key, config[key], shown(value), why)
        return {}

    return Line((key,), read, lambda fields: {key: value}, why)


def inert(*keys: str, why: str) -> Line:
    """Keys that cannot change what the decoder computes."""
    return Line(keys, lambda config: {}, lambda fields: {}, why)


def via(
    keys: Sequence[str],
    read: Callable[[Config], Mapping[str, Any]],
    write: Callable[[DecoderFields], Mapping[str, Any]],
    why: str = "",
    notice: Callable[[Config], str | None] = lambda config: None,
) -> Line:
    """What needs code: `keys` are claimed, `read` may look at the whole config."""
    return Line(tuple(keys), read, write, why, notice)


@dataclass(frozen=True)
class Reading:
    """What a table of lines made of a config: decoder field values, findings, and notices for the user.

    complete: every line could be read, so `values` are the config's and not partly defaults.
    """

    values: Mapping[str, Any]
    findings: tuple[Finding, ...]
    notices: tuple[str, ...]
    complete: bool = True


def read_lines(lines: Iterable[Line], config: Config) -> Reading:
    """Read `config` by `lines`. A key that no line claims is a finding."""
    lines = tuple(lines)
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    notices: list[str] = []
    claimed: set[str] = set()
    complete = True
    for line in lines:
        claimed |= set(line.keys)
        try:
            values.update(line.read(config))
        except Unreadable as error:
            if error.finding not in findings:
                findings.append(error.finding)
            complete = False
            continue
        text = line.notice(config)
        if text:
            notices.append(text)
    for key in config:
        if key not in claimed:
            findings.append(
                Finding(
                    f"config key {key!r}",
                    shown(config[key]),
                    "no such key: nothing here reads it, and it may change the computation",
                    "remove it if it is not the model's, or use a version that supports it",
                )
            )
    return Reading(values, tuple(findings), tuple(notices), complete)


def write_lines(lines: Iterable[Line], fields: DecoderFields) -> dict[str, Any]:
    """The canonical config keys that `lines` write for `fields`, in the order of the lines."""
    config: dict[str, Any] = {}
    for line in lines:
        config.update(line.write(fields))
    return config
