"""Rules on logical tensors as rules on what is stored: how a bank holds codes and scales, and how they are read.

A leaf that a quantised tensor fills is stored as its parts: codes under the leaf's own path, scales under
`<leaf>:scale`. Each lies as the leaf does, transposed and stacked by the same rule, an element for every block of
the leaf. `Coding` says how a stored pair decodes; the manifest keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..families.errors import Finding
from ..families.rules import Placement, View
from .codecs import ROLES, Logical, Stored
from .copying import Part, gather
from .decoding import Blocked, Coded
from .dtypes import numpy_dtype
from .grains import (
    BlockPlacement,
    Grain,
    Shared,
    common_grain,
    leaf_grain,
    place_part,
    seen_grain,
    shared_axes,
)
from .layout import part_leaf, split_leaf


@dataclass(frozen=True)
class PartPlacement(Placement):
    """A rule as it holds of a stored part. The source's view is of its grid: the stored tensor, each element
    repeated `repeat` times per axis and cut to the view's base. () where nothing is repeated."""

    repeat: Grain = ()


@dataclass(frozen=True)
class Coding:
    """How a stored leaf decodes: its format, logical dtype and shape, and the grains of codes and scales."""

    format: str
    dtype: str
    shape: tuple[int, ...]
    grains: tuple[Grain, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "codes": list(self.grains[0]),
            "scale": list(self.grains[1]),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Coding:
        grains = (tuple(value["codes"]), tuple(value["scale"]))
        return cls(str(value["format"]), str(value["dtype"]), tuple(value["shape"]), grains)

    def stack(self, rows: int) -> Coding:
        """Of `rows` such leaves on a new first axis."""
        return Coding(self.format, self.dtype, (rows, *self.shape), tuple((1, *grain) for grain in self.grains))

    def array(self, codes: np.ndarray, scales: np.ndarray, name: str) -> Coded:
        """The leaf that stored codes and scales are, called `name` where it cannot be read."""
        parts = (Blocked.whole(array, grain) for array, grain in zip((codes, scales), self.grains, strict=True))
        return Coded(self.format, self.shape, numpy_dtype(self.dtype), *parts, name=name)


@dataclass(frozen=True)
class Expansion:
    """Rules on stored tensors (those of plain tensors as they are), each coded leaf's coding, and what does not fit."""

    placements: tuple[Placement, ...]
    codings: Mapping[str, Coding]
    findings: tuple[Finding, ...]


def expand(placements: Sequence[Placement], tensors: Mapping[str, Logical], stored: Mapping[str, Stored]) -> Expansion:
    """`placements`, on logical tensors, as placements on the stored ones.

    A part's grain in a leaf is the largest whose blocks no rule cuts, the same in every layer. Findings: a leaf
    stored in two ways, packed codes that a rule would take apart.
    """
    if not any(tensor.quantised for tensor in tensors.values()):
        return Expansion(tuple(placements), {}, ())
    findings = _mixed(placements, tensors, stored)
    pairs: list[tuple[Placement, Logical, Shared]] = []
    for place in placements:
        tensor = tensors[place.source]
        if not tensor.quantised:
            continue
        shared = shared_axes(place.source_view, place.leaf_view)
        if shared is None:
            findings.append(_cut(place, "along a line that crosses its rows"))
        else:
            pairs.append((place, tensor, shared))
    wanted: dict[tuple[str, int], Grain] = {}
    for place, tensor, shared in pairs:
        for index, grain in enumerate(tensor.grains):
            key = split_leaf(place.leaf)[1], index
            found = leaf_grain(shared, grain)
            wanted[key] = common_grain((wanted.get(key, found), found))
    seen: dict[tuple[str, int], Grain] = {}
    for place, tensor, shared in pairs:
        for index, grain in enumerate(tensor.grains):
            key = place.source, index
            found = seen_grain(shared, grain, wanted[split_leaf(place.leaf)[1], index])
            seen[key] = common_grain((seen.get(key, found), found))
    result: list[Placement] = [place for place in placements if not tensors[place.source].quantised]
    codings: dict[str, Coding] = {}
    for place, tensor, shared in pairs:
        grains = []
        for index, (role, name, grain) in enumerate(zip(ROLES, tensor.parts, tensor.grains, strict=True)):
            here = wanted[split_leaf(place.leaf)[1], index]
            grains.append(here)
            leaf = part_leaf(place.leaf, role)
            if set(grain) == {1}:
                result.append(Placement(name, place.source_view, leaf, place.leaf_view))
                continue
            part = place_part(shared, grain, here, seen[place.source, index])
            if part.repeat and not role:
                findings.append(_cut(place, f"inside its words of {list(grain)} codes"))
            result.append(PartPlacement(name, part.source_view, leaf, part.leaf_view, part.repeat))
        codings[place.leaf] = Coding(tensor.format, tensor.dtype, place.leaf_view.base, tuple(grains))
    return Expansion(tuple(result), codings, tuple(dict.fromkeys(findings)))


def _cut(place: Placement, how: str) -> Finding:
    return Finding(
        f"tensor {place.source}",
        f"a rule that cuts it {how}",
        "a rule that keeps its codes together",
        "import it decoded (--quantized decode)",
    )


def _mixed(
    placements: Iterable[Placement], tensors: Mapping[str, Logical], stored: Mapping[str, Stored]
) -> list[Finding]:
    """A finding for every leaf whose tensors are not all stored in one way."""
    ways: dict[str, dict[tuple[str, ...], str]] = {}
    for place in placements:
        tensor = tensors[place.source]
        way = tuple(stored[part].dtype for part in tensor.parts)
        ways.setdefault(place.leaf, {}).setdefault(way, place.source)
    return [
        Finding(
            f"parameter {leaf}",
            " and ".join(f"{' x '.join(way)} ({name})" for way, name in found.items()),
            "one way of storing the tensors of one parameter",
            "import it decoded (--quantized decode)",
        )
        for leaf, found in ways.items()
        if len(found) > 1
    ]


def source_part(place: Placement, array: np.ndarray) -> np.ndarray:
    """What a placement takes of the stored tensor `array`."""
    if not isinstance(place, PartPlacement):
        return place.source_view.apply(array)
    return place.source_view.apply(_grid(array, place.repeat, place.source_view.base))


def _grid(array: np.ndarray, repeat: Grain, base: Grain) -> np.ndarray:
    if not repeat:
        return array.reshape(base)
    array = array.reshape([-(-size // times) for size, times in zip(base, repeat, strict=True)])
    for axis, times in enumerate(repeat):
        array = np.repeat(array, times, axis)
    return np.ascontiguousarray(array[tuple(slice(0, size) for size in base)])


def target_parts(
    places: Sequence[Placement], dtype: np.dtype, read: Callable[[Placement], np.ndarray], name: str
) -> tuple[Part, ...]:
    """What fills the stored tensor `name` of `dtype` from leaves: `read` gives a placement's view of its leaf.

    A repeated part is put together as its grid, of which one element a block is kept.
    """
    repeat = next((p.repeat for p in places if isinstance(p, PartPlacement) and p.repeat), ())
    if not repeat:
        return tuple(Part(place.source_view, lambda place=place: read(place)) for place in places)
    base = places[0].source_view.base

    def kept() -> np.ndarray:
        parts = [Part(place.source_view, lambda place=place: read(place)) for place in places]
        whole = gather(base, dtype, parts, name)
        return np.ascontiguousarray(whole[tuple(slice(None, None, times) for times in repeat)])

    shape = tuple(-(-size // times) for size, times in zip(base, repeat, strict=True))
    return (Part(View.of(*shape), kept),)


def decoded_part(place: Placement, tensor: Logical, read: Callable[[str], np.ndarray]) -> Part:
    """What a rule takes of a quantised tensor, decoded as it is copied. `read` maps a stored tensor by name.

    Where the rule's views follow no axis, or cut packed words, the whole tensor is decoded first.
    """
    shared = shared_axes(place.source_view, place.leaf_view)
    placed = None if shared is None else _own_grains(shared, tensor)
    if shared is None or placed is None:
        return Part(place.leaf_view, lambda: place.source_view.apply(decode_whole(tensor, read)))

    def coded() -> Coded:
        blocked = [
            Blocked.whole(source_part(PartPlacement("", p.source_view, "", p.leaf_view, p.repeat), read(name)), p.spans)
            for name, p in zip(tensor.parts, placed, strict=True)
        ]
        return Coded(tensor.format, shared.leaf_view().shape, numpy_dtype(tensor.dtype), *blocked, name=tensor.name)

    return Part(shared.leaf_view(), coded)


def _own_grains(shared: Shared, tensor: Logical) -> list[BlockPlacement] | None:
    placed = []
    for index, grain in enumerate(tensor.grains):
        wanted = leaf_grain(shared, grain)
        part = place_part(shared, grain, wanted, seen_grain(shared, grain, wanted))
        if index == 0 and part.repeat:
            return None
        placed.append(part)
    return placed


def whole_tensor(tensor: Logical, read: Callable[[str], np.ndarray]) -> Coded:
    """A quantised tensor, its values made as they are copied."""
    blocked = [
        Blocked.whole(read(name).reshape([-(-n // g) for n, g in zip(tensor.shape, grain, strict=True)]), grain)
        for name, grain in zip(tensor.parts, tensor.grains, strict=True)
    ]
    return Coded(tensor.format, tensor.shape, numpy_dtype(tensor.dtype), *blocked, name=tensor.name)


def decode_whole(tensor: Logical, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A logical tensor's values, of its dtype and shape: a plain one's as they lie."""
    if not tensor.quantised:
        return read(tensor.parts[0])
    part = Part(View.of(*tensor.shape), lambda: whole_tensor(tensor, read))
    return gather(tensor.shape, numpy_dtype(tensor.dtype), [part], tensor.name)
