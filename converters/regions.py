"""Parameters that are read a region at a time: what a device holds of one, without the rest.

A region is a slice an axis, each with a start and a stop and of step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..families.rules import View
from .copying import Lazy, Part, aligned_empty, copy_tiled, gather
from .dtypes import as_bits

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of `shape` and `dtype`. read: a region as an array in C order, which aliases a file where it lies
    there like that."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Region], np.ndarray] = field(repr=False)

    def whole(self) -> np.ndarray:
        return self.read(whole_region(self.shape))

    def row(self, index: int) -> Parameter:
        """One index of the first axis, without that axis."""

        def read(region: Region) -> np.ndarray:
            return self.read((slice(index, index + 1), *region))[0]

        return Parameter(self.shape[1:], self.dtype, read)


def whole_region(shape: Sequence[int]) -> Region:
    """All of an array of `shape`."""
    return tuple(slice(0, size) for size in shape)


def settled(index: Any, shape: Sequence[int]) -> Region:
    """A region as JAX states it: slices whose ends may be None."""
    return tuple(slice(*item.indices(size)[:2]) for item, size in zip(index, shape, strict=True))


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(max(item.stop - item.start, 0) for item in region)


def stored_parameter(array: np.ndarray | Lazy) -> Parameter:
    """A parameter that is an array, of a file or to be decoded."""
    shape, dtype = tuple(array.shape), array.dtype

    def read(region: Region) -> np.ndarray:
        if isinstance(array, np.ndarray):
            part = array[region]
            if part.flags.c_contiguous:
                return part
            made = aligned_empty(part.shape, dtype)
            copy_tiled(as_bits(made), as_bits(part))
            return made
        made = aligned_empty(region_shape(region), dtype)
        cut_lazy(array, region).write(made)
        return made

    return Parameter(shape, dtype, read)


def stacked_parameter(layers: Sequence[np.ndarray | Lazy]) -> Parameter:
    """A parameter whose first axis is `layers`, of one shape and dtype."""
    shape, dtype = (len(layers), *layers[0].shape), layers[0].dtype
    rows = [stored_parameter(layer) for layer in layers]

    def read(region: Region) -> np.ndarray:
        made = aligned_empty(region_shape(region), dtype)
        for at, row in enumerate(range(region[0].start, region[0].stop)):
            as_bits(made)[at] = as_bits(rows[row].read(region[1:]))
        return made

    return Parameter(shape, dtype, read)


def assembled_parameter(
    shape: tuple[int, ...], dtype: np.dtype, parts: Callable[[], Sequence[Part]], name: str
) -> Parameter:
    """A parameter that parts of other arrays fill. parts: gives them; each views an array of `shape`."""

    def read(region: Region) -> np.ndarray:
        found = list(parts())
        if len(found) == 1 and found[0].view.whole and found[0].view.shape == shape:
            whole = found[0].read()
            if isinstance(whole, np.ndarray) and whole.dtype == dtype and whole.flags.c_contiguous:
                return stored_parameter(whole).read(region)
        if region == whole_region(shape):
            return gather(shape, dtype, found, name)
        cut = [cut_part(part, region) for part in found]
        if any(part is None for part in cut):
            return stored_parameter(gather(shape, dtype, found, name)).read(region)
        inside = [part for part in cut if part is not None and part.view.size]
        return gather(region_shape(region), dtype, inside, name)

    return Parameter(shape, dtype, read)


def cut_lazy(array: Lazy, region: Region) -> Lazy:
    """A region of an array that is decoded when it is written."""
    for axis, item in enumerate(region):
        if (item.start, item.stop) != (0, array.shape[axis]):
            order = [axis, *(other for other in range(array.ndim) if other != axis)]
            back = sorted(range(array.ndim), key=order.__getitem__)
            array = array.transpose(order)[item].transpose(back)
    return array


def cut_part(part: Part, region: Region) -> Part | None:
    """What of `part` lies in a region of the array it views, as a part of that region; it may be empty. None when an
    axis of the view runs along several of the array's, or several along one."""
    view, base = part.view, part.view.base
    sizes = region_shape(region)
    if view.size == 0:
        return Part(View(sizes, view.shape, (0,) * len(view.shape)), part.read)
    outer, inner = View.of(*base).strides, View.of(*sizes).strides
    starts, left = [], view.offset
    for stride in outer:
        starts.append(left // stride)
        left %= stride
    along: dict[int, tuple[int, int]] = {}
    for axis, (length, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if length == 1:
            continue
        at = next((a for a, unit in enumerate(outer) if base[a] > 1 and unit <= stride and stride % unit == 0), None)
        if at is None or at in along or starts[at] + (length - 1) * (stride // outer[at]) >= base[at]:
            return None
        along[at] = axis, stride // outer[at]
    index = [slice(0, length) for length in view.shape]
    strides = [0] * len(view.shape)
    offset, empty = 0, 0 in sizes
    for at, (item, start) in enumerate(zip(region, starts, strict=True)):
        axis, step = along.get(at, (None, 1))
        first, count = 0, 1
        if axis is not None:
            first = max(-((start - item.start) // step), 0)
            count = min(-((start - item.stop) // step), view.shape[axis]) - first
            index[axis] = slice(first, first + max(count, 0))
            strides[axis] = step * inner[at]
        position = start + first * step - item.start
        empty = empty or count < 1 or not 0 <= position < sizes[at]
        offset += position * inner[at]
    shape = (0,) * len(view.shape) if empty else region_shape(tuple(index))
    cut = View(sizes, shape, tuple(strides), 0 if empty else offset)

    def read() -> np.ndarray | Lazy:
        source = part.read()
        return source[tuple(index)] if isinstance(source, np.ndarray) else cut_lazy(source, tuple(index))

    return Part(cut, read)
