"""Storage codecs: how a logical tensor is stored in a checkpoint.

A codec groups stored tensors into logical ones: a name, a shape, a dtype, and the stored parts it is made of, codes
first. `decoding.py` says what a format's codes and scales make; `grains.py` carries a family's rules, which speak of
logical tensors alone, over to the parts. What a tensor is follows from the dtype its header states and the
quantisation record of the config (`quantisation.py`), never from a cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..families.errors import Finding
from .safetensors_files import Header

PLAIN = "plain"
ROLES = ("", "scale")
"""What a quantised tensor's parts are, in order: codes, and what they are multiplied by."""

_VALUES = ("F64", "F32", "F16", "BF16")
"""Dtypes of whole bytes that are codes of a quantisation, or no number a parameter can be."""
_BESIDE = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale")
"""Scales of activations and caches, named beside a weight: they are not the weight's."""


@dataclass(frozen=True)
class Stored:
    """A stored tensor as a header states it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(headers: Iterable[Header]) -> dict[str, Stored]:
    """What a checkpoint's headers state, by name."""
    entries = (entry for header in headers for entry in header.entries.values())
    return {entry.name: Stored(entry.name, entry.dtype, entry.shape) for entry in entries}


@dataclass(frozen=True)
class Logical:
    """A logical tensor: its name, logical dtype and shape, and the stored tensors it is made of.

    format: "plain", or what `decoding` knows. parts: codes, then scales. grains: for each part, how many logical
    elements, per axis, an element of it stands for. beside: stored tensors that no value depends on, kept verbatim.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    format: str = PLAIN
    grains: tuple[tuple[int, ...], ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        return self.format != PLAIN


@dataclass(frozen=True)
class Grouping:
    """Stored tensors as logical ones by name, in the order of their codes; what does not fit; what is worth saying."""

    tensors: Mapping[str, Logical]
    findings: tuple[Finding, ...] = ()
    notices: tuple[str, ...] = ()


class Codec(Protocol):
    """One way of storing logical tensors."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def group(self, stored: Mapping[str, Stored]) -> Grouping:
        """The logical tensors that `stored` make. A tensor that belongs to no other is itself one."""
        ...


@dataclass(frozen=True)
class Plain:
    """Every tensor stored as itself."""

    name: str = PLAIN

    def group(self, stored: Mapping[str, Stored]) -> Grouping:
        return Grouping({name: plain_tensor(item) for name, item in stored.items()})


def plain_tensor(item: Stored) -> Logical:
    """A stored tensor as the logical tensor it is by itself."""
    return Logical(item.name, item.dtype, item.shape, (item.name,))


def assemble_groups(
    stored: Mapping[str, Stored],
    quantised: Mapping[str, Logical],
    findings: list[Finding],
    notices: list[str],
) -> Grouping:
    """A grouping of `quantised` (codes' stored name -> logical tensor) and, for the rest, each tensor by itself.

    Scales of activations and caches go beside the weight they are named after, quantised or not.
    """
    parts = {part for item in quantised.values() for part in (*item.parts, *item.beside)}
    names = {item.name for item in quantised.values()} | {name for name in stored if name not in parts}
    beside: dict[str, list[str]] = {}
    for name in stored:
        stem, _, last = name.rpartition(".")
        if last in _BESIDE and f"{stem}.weight" in names and name not in parts:
            beside.setdefault(f"{stem}.weight", []).append(name)
    attached = {name for held in beside.values() for name in held}
    tensors: dict[str, Logical] = {}
    for name, item in stored.items():
        if name in quantised:
            logical = quantised[name]
        elif name in parts or name in attached:
            continue
        else:
            logical = plain_tensor(item)
        held = (*logical.beside, *beside.get(logical.name, ()))
        tensors[logical.name] = Logical(
            logical.name, logical.dtype, logical.shape, logical.parts, logical.format, logical.grains, held
        )
    return Grouping(tensors, tuple(findings), tuple(notices))


def is_value(dtype: str) -> bool:
    """Whether elements of this dtype are values a parameter can hold as they are."""
    return dtype in _VALUES


def weight_schemes(record: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """What a compressed-tensors record says of weights, a scheme for each of its config_groups; None for a record of
    another method or without groups."""
    groups = record.get("config_groups")
    if record.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return None
    schemes = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        own = group.get("format")
        schemes.append({**weights, "format": record.get("format") if own is None else own})
    return schemes
