"""Rules carried over to the parts of a logical tensor: what a view of a weight is for its codes and block scales.

A part of a logical tensor has a grain: how many logical elements, per axis, one of its elements stands for ([1, 1]
for FP8 codes, [128, 128] for their block scales, [1, 8] for eight 4-bit codes in a word). A rule is a strided view
of the logical tensor and one of a leaf; where blocks stay whole, the same rule holds of the parts, with every axis
counted in blocks. A rule that cuts a block (a slice that is not at a block's edge) leaves a finer grain that both
sides' blocks are made of: the part is then stored at that grain, its elements repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from ..families.rules import View

Grain = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """An axis that a view of a source and a view of a leaf share, and that runs along one axis of each.

    length: steps. source, leaf: the axes of the bases. source_step, leaf_step: elements of them a step.
    """

    length: int
    source: int
    source_step: int
    leaf: int
    leaf_step: int


@dataclass(frozen=True)
class Shared:
    """A rule's two views, cut into axes that each run along one axis of either base; where the views begin."""

    axes: tuple[Axis, ...]
    source_base: Grain
    source_start: Grain
    leaf_base: Grain
    leaf_start: Grain

    def source_view(self) -> View:
        """The source's elements, an axis for each of `axes`."""
        steps = _contiguous(self.source_base)
        strides = tuple(steps[axis.source] * axis.source_step for axis in self.axes)
        return View(self.source_base, self._shape, strides, _dot(self.source_start, steps))

    def leaf_view(self) -> View:
        """The leaf's elements, in the same order."""
        steps = _contiguous(self.leaf_base)
        strides = tuple(steps[axis.leaf] * axis.leaf_step for axis in self.axes)
        return View(self.leaf_base, self._shape, strides, _dot(self.leaf_start, steps))

    @property
    def _shape(self) -> Grain:
        return tuple(axis.length for axis in self.axes)


@dataclass(frozen=True)
class BlockPlacement:
    """A rule as it holds of a part: `source_view` of the source's grid is `leaf_view` of the leaf's.

    repeat: how often, per axis, the stored part's elements are repeated (and cut to the source grid's shape) to make
    that grid; () where no rule cuts a block. spans: logical elements an index of each of the views' axes spans.
    """

    source_view: View
    leaf_view: View
    repeat: Grain
    spans: Grain


@lru_cache(maxsize=65536)
def shared_axes(source: View, leaf: View) -> Shared | None:
    """The views of a rule as `Shared`, or None when one of them is no walk along the axes of its base."""
    pending = [(n, s, t) for n, s, t in zip(source.shape, source.strides, leaf.strides, strict=True) if n != 1]
    axes: list[Axis] = []
    while pending:
        length, one, other = pending.pop(0)
        found, needed = _along(length, one, source.base), _along(length, other, leaf.base)
        if found is None or needed is None:
            return None
        for inner in (found[2], needed[2]):
            if inner < length:
                if length % inner:
                    return None
                pending[:0] = [(length // inner, one * inner, other * inner), (inner, one, other)]
                break
        else:
            axes.append(Axis(length, found[0], found[1], needed[0], needed[1]))
    shared = Shared(
        tuple(axes), source.base, _unravel(source.offset, source.base), leaf.base, _unravel(leaf.offset, leaf.base)
    )
    for base, start, which in (
        (shared.source_base, shared.source_start, [(a.source, a.source_step, a.length) for a in axes]),
        (shared.leaf_base, shared.leaf_start, [(a.leaf, a.leaf_step, a.length) for a in axes]),
    ):
        reach = list(start)
        for axis, step, length in which:
            reach[axis] += step * (length - 1)
        if any(last >= size for last, size in zip(reach, base, strict=True)):
            return None
    return shared


def _along(length: int, stride: int, base: Sequence[int]) -> tuple[int, int, int] | None:
    """(base axis, step, how many steps stay on it) of a stride; None when it follows no axis."""
    steps = _contiguous(base)
    for axis, (size, step) in enumerate(zip(base, steps, strict=True)):
        if size > 1 and step <= stride < step * size:
            if stride % step:
                return None
            along = stride // step
            if along * (length - 1) < size:
                return axis, along, length
            return (axis, along, size // along) if size % along == 0 else None
    return None


@lru_cache(maxsize=65536)
def leaf_grain(shared: Shared, grain: Grain) -> Grain:
    """The largest grain of the leaf whose every block lies inside one block of the source.

    Leading axes of a leaf (all but its last two) have a grain of 1.
    """
    result = []
    for axis, size in enumerate(shared.leaf_base):
        inside = [a for a in shared.axes if a.leaf == axis]
        inner = [a for a in inside if a.leaf_step == 1]
        if axis < len(shared.leaf_base) - 2 or len(inner) != 1:
            result.append(1)
            continue
        span = _unbroken(shared, inner[0], grain)
        if len(inside) == 1 and inner[0].length == size:
            result.append(span)
            continue
        others = [a.leaf_step for a in inside if a.leaf_step > 1]
        result.append(gcd(span, inner[0].length, shared.leaf_start[axis], *others))
    return tuple(result)


def _unbroken(shared: Shared, axis: Axis, grain: Grain) -> int:
    """The most steps of `axis` that, counted from its start, always stay inside one block of the source."""
    along = [a for a in shared.axes if a.source == axis.source and a is not axis]
    start, step = shared.source_start[axis.source], axis.source_step
    inner = sum(a.source_step * (a.length - 1) for a in along if a.source_step < step)
    if start % step + inner >= step:
        return 1
    outer = [a.source_step for a in along if a.source_step > step]
    block = gcd(grain[axis.source], start - start % step, *outer)
    return block // step if block % step == 0 else 1


def place_part(shared: Shared, grain: Grain, wanted: Grain, source_grain: Grain) -> BlockPlacement:
    """The rule on a part of `grain`, stored in the leaf at the grain `wanted`, seen in the source at `source_grain`.

    `wanted` divides `leaf_grain`, `source_grain` is `seen_grain` (or a divisor of it).
    """
    source_grid, leaf_grid = grid(shared.source_base, source_grain), grid(shared.leaf_base, wanted)
    source_steps, leaf_steps = _contiguous(source_grid), _contiguous(leaf_grid)
    shape, source_strides, leaf_strides, spans = [], [], [], []
    for axis in shared.axes:
        span = _span(axis, wanted)
        shape.append(-(-axis.length // span))
        spans.append(span)
        source_strides.append(source_steps[axis.source] * (span * axis.source_step // source_grain[axis.source]))
        leaf_strides.append(leaf_steps[axis.leaf] * (span * axis.leaf_step // wanted[axis.leaf]))
    starts = (
        _dot([at // size for at, size in zip(start, step, strict=True)], steps)
        for start, step, steps in (
            (shared.source_start, source_grain, source_steps),
            (shared.leaf_start, wanted, leaf_steps),
        )
    )
    repeat = tuple(size // seen for size, seen in zip(grain, source_grain, strict=True))
    return BlockPlacement(
        View(source_grid, tuple(shape), tuple(source_strides), next(starts)),
        View(leaf_grid, tuple(shape), tuple(leaf_strides), next(starts)),
        () if set(repeat) == {1} else repeat,
        tuple(spans),
    )


def seen_grain(shared: Shared, grain: Grain, wanted: Grain) -> Grain:
    """The grain at which the source's part has to be seen so that a step of a leaf's block is whole steps of it."""
    result = list(grain)
    for axis in shared.axes:
        result[axis.source] = gcd(result[axis.source], _span(axis, wanted) * axis.source_step)
    return tuple(result)


def _span(axis: Axis, wanted: Grain) -> int:
    return wanted[axis.leaf] if axis.leaf_step == 1 else 1


def grid(shape: Sequence[int], grain: Sequence[int]) -> Grain:
    """How many blocks of `grain` cover `shape`, the last of an axis cut at its edge."""
    return tuple(-(-size // step) for size, step in zip(shape, grain, strict=True))


def common_grain(grains: Iterable[Grain]) -> Grain:
    """The largest grain that divides all of `grains`."""
    return tuple(gcd(*sizes) for sizes in zip(*grains, strict=True))


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _unravel(offset: int, shape: Sequence[int]) -> Grain:
    result = []
    for step in _contiguous(shape):
        result.append(offset // step if step else 0)
        offset %= max(step, 1)
    return tuple(result)


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
