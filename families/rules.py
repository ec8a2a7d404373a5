"""Rules: one tensor-to-parameter correspondence each, read in both directions.

A rule names a strided view of a source tensor and a strided view of a parameter leaf, of equal shape. Import
assigns right from left, export left from right, so an inverse is never written and an element cannot be lost.
Nothing here does arithmetic on an element.
"""

from __future__ import annotations

import math
import string
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from .errors import Finding


@dataclass(frozen=True)
class View:
    """A strided view of a C-contiguous array of shape `base`: offset and strides count elements."""

    base: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, *shape: int) -> View:
        """The whole of an array of `shape`."""
        return cls(shape, shape, _contiguous(shape))

    @property
    def size(self) -> int:
        """Elements of the view."""
        return math.prod(self.shape)

    @property
    def T(self) -> View:
        """The axes reversed."""
        return self.transpose(*reversed(range(len(self.shape))))

    def transpose(self, *axes: int) -> View:
        """The axes in the order given. Raises ValueError when `axes` is not a permutation."""
        if sorted(axes) != list(range(len(self.shape))):
            raise ValueError(f"axes {axes} are not a permutation of {len(self.shape)} axes")
        return View(self.base, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def reshape(self, *shape: int) -> View:
        """The same elements in the same order under another shape; -1 stands for one length to be worked out.

        Raises ValueError when the sizes differ or no strides describe the result (a copy would be needed).
        """
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            if shape.count(-1) > 1 or not known or self.size % known:
                raise ValueError(f"cannot view {self.shape} as {shape}")
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot view {self.shape} as {shape}")
        # Merge axes that follow each other in memory, then cut the merged axes into the new ones.
        runs: list[tuple[int, int]] = []
        for length, stride in zip(self.shape, self.strides, strict=True):
            if length == 1:
                continue
            if runs and runs[-1][1] == length * stride:
                runs[-1] = (runs[-1][0] * length, stride)
            else:
                runs.append((length, stride))
        strides: list[int] = []
        rest = list(reversed(runs))
        for length in reversed(shape):
            if length == 1 or self.size == 0:
                strides.append(0)
                continue
            total, stride = rest[0]
            if total % length:
                raise ValueError(f"no strided view of {self.shape} has shape {shape}")
            strides.append(stride)
            rest[0] = (total // length, stride * length)
            if rest[0][0] == 1:
                rest.pop(0)
        return View(self.base, shape, tuple(reversed(strides)), self.offset)

    def __getitem__(self, index: Any) -> View:
        """Basic indexing with ints, slices and Ellipsis, as numpy reads it. Raises IndexError out of range."""
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (len(self.shape) - len(items) + 1)
        items += [slice(None)] * (len(self.shape) - len(items))
        if len(items) > len(self.shape):
            raise IndexError(f"{len(items)} indices into {len(self.shape)} axes")
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        for item, length, stride in zip(items, self.shape, self.strides, strict=True):
            if isinstance(item, slice):
                start, stop, step = item.indices(length)
                if step < 1:
                    raise IndexError(f"step {step}: views run forwards")
                shape.append(len(range(start, stop, step)))
                strides.append(stride * step)
                offset += start * stride
            elif -length <= item < length:
                offset += (item % length) * stride
            else:
                raise IndexError(f"index {item} of an axis of {length}")
        return View(self.base, tuple(shape), tuple(strides), offset)

    def prepend(self, position: int, length: int) -> View:
        """This view inside row `position` of a stack of `length` such bases."""
        base = (length, *self.base)
        return View(base, self.shape, self.strides, self.offset + position * math.prod(self.base))

    def apply(self, array: np.ndarray) -> np.ndarray:
        """This view of `array`: no copy. Raises ValueError when `array` is not C-contiguous of shape `base`."""
        if array.shape != self.base or not array.flags.c_contiguous:
            raise ValueError(f"needs a contiguous array of shape {self.base}, got {array.shape}")
        if self.size == 0:
            return np.empty(self.shape, array.dtype)
        item = array.itemsize
        flat = array.reshape(-1)[self.offset :]
        strides = tuple(stride * item for stride in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=array.flags.writeable)

    @property
    def whole(self) -> bool:
        """Whether the view is its base, element for element in order: a plain copy of bytes."""
        return self.size == math.prod(self.base) and self._coalesced() in ((), ((self.size, 1),))

    def _coalesced(self) -> tuple[tuple[int, int], ...]:
        runs: list[tuple[int, int]] = []
        for length, stride in zip(self.shape, self.strides, strict=True):
            if length == 1:
                continue
            if runs and runs[-1][1] == length * stride:
                runs[-1] = (runs[-1][0] * length, stride)
            else:
                runs.append((length, stride))
        return tuple(runs)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def tiles(views: Sequence[View]) -> str | None:
    """None when the views cover their common base exactly once; else what is wrong, in a few words."""
    base = views[0].base
    total = math.prod(base)
    covered = sum(view.size for view in views)
    if len(views) == 1 and views[0].size == total and not _overlaps_itself(views[0]):
        return None
    # Count in the largest block that every view takes whole, so that a mask stays small.
    runs = [sorted(view._coalesced(), key=lambda run: run[1]) for view in views if view.size]
    block = math.gcd(total, *(view.offset for view in views))
    for view_runs in runs:
        inner, outer = (view_runs[0], view_runs[1:]) if view_runs and view_runs[0][1] == 1 else ((1, 1), view_runs)
        block = math.gcd(block, inner[0], *(stride for _, stride in outer))
    block = max(block, 1)
    counts = np.zeros(total // block, np.uint8)
    for view, view_runs in zip((v for v in views if v.size), runs, strict=True):
        index = np.array([view.offset // block])
        for length, stride in view_runs:
            step, steps = (1, length // block) if stride == 1 else (stride // block, length)
            index = (index[:, None] + np.arange(steps) * step).reshape(-1)
        np.add.at(counts, index, 1)
    if (counts > 1).any():
        return f"{int((counts > 1).sum()) * block} elements taken more than once"
    if (counts == 0).any():
        return f"{total - covered} of {total} elements taken by no rule"
    return None


def _overlaps_itself(view: View) -> bool:
    reach = 0
    for length, stride in sorted(view._coalesced(), key=lambda run: run[1]):
        if stride <= reach:
            return True
        reach += (length - 1) * stride
    return False


@dataclass(frozen=True)
class Placement:
    """A rule at one set of indices: a view of one source tensor, a view of one leaf, of equal shape."""

    source: str
    source_view: View
    leaf: str
    leaf_view: View


@dataclass(frozen=True)
class Rule:
    """`source_view` of `source` is `leaf_view` of `leaf`, for every combination of the indices in `over`.

    `{l}`, `{e}`, … in the names are replaced by the values in `over`. An index that stands in the source's name
    and not in the leaf's is a position in the leaf: the leaf gets a leading axis of that many rows, in the order
    of `over`. Raises ValueError when the views' shapes differ or a name holds an index that `over` does not.
    """

    source: str
    source_view: View
    leaf: str
    leaf_view: View
    over: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.source_view.shape != self.leaf_view.shape:
            raise ValueError(
                f"{self.source}: a view of shape {self.source_view.shape} cannot be {self.leaf} {self.leaf_view.shape}"
            )
        if names_in(self.source) != set(self.over) or not names_in(self.leaf) <= set(self.over):
            raise ValueError(f"{self.source} -> {self.leaf}: indices {sorted(self.over)} do not fit the names")

    @property
    def stacked(self) -> tuple[str, ...]:
        """The indices that are positions in the leaf, outermost first."""
        inside = names_in(self.leaf)
        return tuple(name for name in self.over if name not in inside)

    def sources(self) -> Iterator[str]:
        """The source's name at every combination of the indices."""
        for values in product(*self.over.values()):
            yield self.source.format_map(dict(zip(self.over, values, strict=True)))

    def placements(self) -> Iterator[Placement]:
        """The rule at every combination of its indices."""
        rows = {name: {value: row for row, value in enumerate(self.over[name])} for name in reversed(self.stacked)}
        for values in product(*self.over.values()):
            at = dict(zip(self.over, values, strict=True))
            view = self.leaf_view
            for name, row_of in rows.items():
                view = _row_view(view, row_of[at[name]], len(row_of))
            yield Placement(self.source.format_map(at), self.source_view, self.leaf.format_map(at), view)


@lru_cache(maxsize=65536)
def _row_view(view: View, row: int, rows: int) -> View:
    """`View.prepend`: the rules of alike layers share their views."""
    return view.prepend(row, rows)


@dataclass(frozen=True)
class Alias:
    """A tensor that may be on disk as an equal copy of another one: `name` is `of`.

    Absent is fine. An equal copy is dropped and restored on export. A different one is kept: the decoder fields
    in `otherwise` are set, under which the family's rules place it, and the user is warned.
    """

    name: str
    of: str
    otherwise: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Carried:
    """Tensors whose names start with `prefix` are kept verbatim for export and not computed with. told: what they are
    in the notice that counts those of the file; without it there is none."""

    prefix: str
    why: str
    told: str = ""


@dataclass(frozen=True)
class Zeros:
    """A part of a source tensor that holds only zeros: checked on import, written back on export."""

    source: str
    view: View
    over: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def regions(self) -> Iterator[tuple[str, View]]:
        """(tensor, view) at every combination of the indices."""
        for values in product(*self.over.values()):
            yield self.source.format_map(dict(zip(self.over, values, strict=True))), self.view


@dataclass(frozen=True)
class OneOf:
    """Rules for one thing that releases store in several forms: the names on disk decide which.

    what: the thing, for messages ("the experts of layer 3"). forms: a name for each form and its rules, the hub's
    first. All forms fill the same leaves, so a bank does not know which it came from, and export writes the form
    that was read.
    """

    what: str
    forms: Mapping[str, tuple[Rule, ...]]

    def chosen(self, names: Container[str]) -> tuple[tuple[Rule, ...], Finding | None]:
        """The rules of the form that `names` holds tensors of (the first form when of none), and a finding when
        it holds tensors of two."""
        met = {
            form: next((name for rule in rules for name in rule.sources() if name in names), None)
            for form, rules in self.forms.items()
        }
        held = [form for form, name in met.items() if name is not None]
        rules = self.forms[held[0]] if held else next(iter(self.forms.values()))
        if len(held) < 2:
            return rules, None
        found = " and ".join(f"{form} ({met[form]})" for form in held)
        return rules, Finding(self.what, found, "one form", "remove the tensors of the other form")


Statement = Rule | Alias | Carried | Zeros | OneOf
"""What a family's `weights` may yield."""


def settle(statements: Iterable[Statement], names: Container[str]) -> tuple[list[Statement], list[Finding]]:
    """`statements` with every `OneOf` replaced by the rules of the form that the tensor `names` have."""
    settled: list[Statement] = []
    findings: list[Finding] = []
    for item in statements:
        if isinstance(item, OneOf):
            rules, finding = item.chosen(names)
            settled += rules
            findings += [finding] if finding is not None else []
        else:
            settled.append(item)
    return settled, findings


def names_in(template: str) -> set[str]:
    """The index names in a template: {"l", "e"} for "layers.{l}.experts.{e}.w"."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def placements(statements: Iterable[Statement]) -> list[Placement]:
    """Every rule of `statements` at every combination of its indices, in order; of a `OneOf`, its first form's."""
    settled, _ = settle(statements, ())
    return [place for item in settled if isinstance(item, Rule) for place in item.placements()]


def leaf_shapes(places: Iterable[Placement]) -> dict[str, tuple[int, ...]]:
    """The full shape of every leaf. Raises ValueError when two rules disagree about a leaf's shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places:
        shape = shapes.setdefault(place.leaf, place.leaf_view.base)
        if shape != place.leaf_view.base:
            raise ValueError(f"{place.leaf}: rules of shape {shape} and {place.leaf_view.base}")
    return shapes


def leaf_findings(places: Sequence[Placement]) -> list[Finding]:
    """A finding for every leaf that the placements do not fill exactly once."""
    views: dict[str, list[View]] = {}
    for place in places:
        views.setdefault(place.leaf, []).append(place.leaf_view)
    findings = []
    for leaf, parts in views.items():
        wrong = _tiles_memoised(tuple(parts))
        if wrong is not None:
            findings.append(Finding(f"parameter {leaf}", wrong, "every element filled once", "mend the family's rules"))
    return findings


def source_findings(places: Sequence[Placement], zeros: Iterable[Zeros] = ()) -> list[Finding]:
    """A finding for every source tensor whose elements are not all taken exactly once."""
    views: dict[str, list[View]] = {}
    for place in places:
        views.setdefault(place.source, []).append(place.source_view)
    for item in zeros:
        for source, view in item.regions():
            views.setdefault(source, []).append(view)
    findings = []
    for source, parts in views.items():
        wrong = _tiles_memoised(tuple(parts))
        if wrong is not None:
            findings.append(Finding(f"tensor {source}", wrong, "every element taken once", "mend the family's rules"))
    return findings


_TILED: dict[tuple[View, ...], str | None] = {}


def _tiles_memoised(views: tuple[View, ...]) -> str | None:
    if views not in _TILED:
        if len(_TILED) > 4096:
            _TILED.clear()
        _TILED[views] = tiles(views)
    return _TILED[views]


def assign_leaves(places: Iterable[Placement], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameter leaves from source tensors in memory, in the tensors' dtype: leaf path -> array.

    The whole-array form of what import does file to file; gradients and other tensors of the weights' shapes
    map through the same rules. Raises KeyError for a tensor that is not there.
    """
    leaves: dict[str, np.ndarray] = {}
    for place in places:
        array = np.asarray(tensors[place.source], order="C")
        if place.leaf not in leaves:
            leaves[place.leaf] = np.zeros(place.leaf_view.base, array.dtype)
        place.leaf_view.apply(leaves[place.leaf])[...] = place.source_view.apply(array)
    return leaves


def assign_sources(places: Iterable[Placement], leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The source tensors from parameter leaves in memory: the other direction of `assign_leaves`."""
    tensors: dict[str, np.ndarray] = {}
    for place in places:
        leaf = np.asarray(leaves[place.leaf], order="C")
        if place.source not in tensors:
            tensors[place.source] = np.zeros(place.source_view.base, leaf.dtype)
        place.source_view.apply(tensors[place.source])[...] = place.leaf_view.apply(leaf)
    return tensors
