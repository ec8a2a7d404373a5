"""Decoding codes: block-scaled arrays that are looked at like arrays and decoded a region at a time.

A format says what a code and a scale make:

    fp8     codes F8_E4M3 (OCP 8-bit floating point 1.0: S EEEE MMM, bias 7, NaN at S.1111.111, no infinities);
            value = float32(code) * float32(scale)
    int4    codes I32 of eight 4-bit integers, the lowest bits first, each stored plus 8
            (compressed-tensors 0.20 `pack-quantized`); value = (code - 8) * float32(scale)

The product is rounded once to the logical dtype, to nearest even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import ml_dtypes
import numpy as np

from .copying import MAX_PANEL_ROWS, copy_tiled
from .dtypes import as_bits
from .prefetch import fetch

FP8, INT4 = "fp8", "int4"
NIBBLES = 8
"""4-bit codes in a word."""
INT4_ZERO = 8
"""What is added to a 4-bit integer to store it."""
PANEL = 1 << 17
"""Elements decoded at a time: their indices stay in a second-level cache."""
MIN_ROWS = 32
"""Rows of a panel where there are as many: what is done once a panel is then little of it."""

_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Blocked:
    """An array whose elements stand for blocks: `spans[a]` indices of a larger array along axis a, which begins
    `starts[a]` indices into the first block."""

    array: np.ndarray
    spans: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def whole(cls, array: np.ndarray, spans: Sequence[int]) -> Blocked:
        return cls(array, tuple(spans), (0,) * len(spans))

    def take(self, axis: int, start: int, stop: int) -> Blocked:
        """Indices [start, stop) of `axis`."""
        span, begin = self.spans[axis], self.starts[axis] + start
        first, last = begin // span, -(-(self.starts[axis] + stop) // span)
        index = (*(slice(None),) * axis, slice(first, last))
        starts = (*self.starts[:axis], begin - first * span, *self.starts[axis + 1 :])
        return Blocked(self.array[index], self.spans, starts)

    def at(self, axis: int, index: int) -> Blocked:
        """One index of `axis`, without that axis."""
        array = self.array[(*(slice(None),) * axis, (self.starts[axis] + index) // self.spans[axis])]
        return Blocked(array, _without(self.spans, axis), _without(self.starts, axis))

    def transpose(self, order: Sequence[int]) -> Blocked:
        spans, starts = (tuple(values[axis] for axis in order) for values in (self.spans, self.starts))
        return Blocked(self.array.transpose(order), spans, starts)

    def lead(self) -> Blocked:
        """With a new first axis of one."""
        return Blocked(self.array[None], (1, *self.spans), (0, *self.starts))


@dataclass(frozen=True)
class Coded:
    """An array of `shape` and `dtype` in the form of codes and scales: a `copying.Lazy`. Looking at a part of it
    costs nothing; `write` decodes. name: what it is called when it cannot be read."""

    format: str
    shape: tuple[int, ...]
    dtype: np.dtype
    codes: Blocked
    scales: Blocked
    name: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, item: int | slice) -> Coded:
        """An index or a slice of the first axis."""
        if isinstance(item, slice):
            start, stop, _ = item.indices(self.shape[0])
            shape = (max(stop - start, 0), *self.shape[1:])
            return replace(
                self, shape=shape, codes=self.codes.take(0, start, stop), scales=self.scales.take(0, start, stop)
            )
        return replace(self, shape=self.shape[1:], codes=self.codes.at(0, item), scales=self.scales.at(0, item))

    def squeeze(self, axes: Sequence[int]) -> Coded:
        """Without `axes`, whose length is one."""
        result = self
        for axis in sorted(axes, reverse=True):
            result = replace(
                result,
                shape=_without(result.shape, axis),
                codes=result.codes.at(axis, 0),
                scales=result.scales.at(axis, 0),
            )
        return result

    def transpose(self, order: Sequence[int]) -> Coded:
        shape = tuple(self.shape[axis] for axis in order)
        return replace(self, shape=shape, codes=self.codes.transpose(order), scales=self.scales.transpose(order))

    def write(self, out: np.ndarray) -> None:
        """Decodes into `out`, of this shape and dtype. Raises ConversionError when codes or scales cannot be read."""
        if self.size == 0:
            return
        if self.ndim < 2:
            whole = replace(self, shape=(1, *self.shape), codes=self.codes.lead(), scales=self.scales.lead())
            whole.write(out[None])
            return
        if self.ndim > 2:
            for index in range(self.shape[0]):
                self[index].write(out[index])
            return
        fetch(self.codes.array, self.name)
        fetch(self.scales.array, self.name)
        if self.format == INT4:
            _write_int4(self.codes, self.scales, out)
        else:
            _write_fp8(self.codes, self.scales, out)


def _write_fp8(codes: Blocked, scales: Blocked, out: np.ndarray) -> None:
    bits = as_bits(codes.array)
    span, start = scales.spans[1], scales.starts[1]
    grid = scales.array.astype(np.float32)
    rows, columns = out.shape
    scratch = _Scratch(out.size)
    if columns > 1 and bits.strides[1] != 1:
        turned = np.empty(out.shape, np.uint8)
        for top in range(0, rows, MAX_PANEL_ROWS):
            copy_tiled(turned[top : top + MAX_PANEL_ROWS], bits[top : top + MAX_PANEL_ROWS])
        bits = turned
    for above, (top, bottom) in _bands(rows, scales.spans[0], scales.starts[0]):
        height = min(bottom - top, max(PANEL // columns, MIN_ROWS))
        width = max(PANEL // height, 1)
        if span < columns and width > span:
            width -= width % span
        for left in range(0, columns, width):
            right = min(left + width, columns)
            first, last = (start + left) // span, (start + right - 1) // span + 1
            blocks = (start + np.arange(left, right)) // span - first
            area = bits[top:bottom, left:right], out[top:bottom, left:right]
            # A table of 256 values a block pays where blocks are large.
            if len(above) == 1 and last - first <= 256 and 1024 * (last - first) <= area[0].size:
                _look_up(*area, grid[above.start, first:last], blocks, height, scratch)
            else:
                factors = grid[above.start : above.stop, first:last]
                into = (scales.starts[0] + np.arange(top, bottom)) // scales.spans[0] - above.start
                _multiply(*area, factors if last - first == 1 else factors[:, blocks], into, height, scratch)


def _bands(rows: int, span: int, start: int) -> list[tuple[range, tuple[int, int]]]:
    """Rows to decode together: those of one row of blocks, or of several thin ones. (rows of blocks, rows)."""
    together = max(MIN_ROWS // span, 1)
    blocks = -(-(start + rows) // span)
    return [
        (
            range(first, min(first + together, blocks)),
            (max(first * span - start, 0), min((first + together) * span - start, rows)),
        )
        for first in range(0, blocks, together)
    ]


def _look_up(
    bits: np.ndarray, out: np.ndarray, factors: np.ndarray, blocks: np.ndarray, height: int, scratch: _Scratch
) -> None:
    """By a table of 256 values for each block of columns: `blocks` says which one a column is in."""
    with np.errstate(all="ignore"):
        tables = as_bits((_FP8_VALUES * factors[:, None]).astype(out.dtype)).reshape(-1)
    offsets = (256 * blocks).astype(np.uint16)
    for row in range(0, len(out), height):
        codes = bits[row : row + height]
        index = scratch.index(codes if len(factors) == 1 else scratch.add(codes, offsets))
        np.take(tables, index, out=as_bits(out[row : row + height]), mode="clip")


def _multiply(
    bits: np.ndarray, out: np.ndarray, factors: np.ndarray, above: np.ndarray, height: int, scratch: _Scratch
) -> None:
    """Value by value: `factors` has a column for each of the block's, or one for all; `above` says which row a row is
    in."""
    for row in range(0, len(out), height):
        codes = bits[row : row + height]
        values = scratch.values(codes.shape)
        np.take(_FP8_VALUES, scratch.index(codes), out=values, mode="clip")
        here = above[row : row + height]
        with np.errstate(all="ignore"):
            values *= factors[here[0]] if here[0] == here[-1] else factors[here]
            out[row : row + height] = values


class _Scratch:
    """Memory of one panel, used again for each."""

    def __init__(self, most: int) -> None:
        self._size = min(most, 2 * PANEL)
        self._held: dict[str, np.ndarray] = {}

    def _take(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        size = int(np.prod(shape))
        if name not in self._held or self._held[name].size < size:
            self._held[name] = np.empty(max(size, self._size), dtype)
        return self._held[name][:size].reshape(shape)

    def add(self, codes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return np.add(codes, offsets, out=self._take("sums", codes.shape, np.uint16))

    def index(self, codes: np.ndarray) -> np.ndarray:
        """`codes` as numpy's own index type, which `np.take` would otherwise make anew."""
        index = self._take("index", codes.shape, np.intp)
        index[...] = codes
        return index

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._take("values", shape, np.float32)


def _write_int4(codes: Blocked, scales: Blocked, out: np.ndarray) -> None:
    if codes.spans[0] != NIBBLES:
        turned = np.empty(out.shape[::-1], out.dtype)
        _write_int4(codes.transpose((1, 0)), scales.transpose((1, 0)), turned)
        copy_tiled(as_bits(out), as_bits(turned).T)
        return
    columns = out.shape[1]
    width = max(PANEL // codes.array.shape[0], 64)
    for left in range(0, columns, width):
        right = min(left + width, columns)
        _unpack(codes.take(1, left, right), scales.take(1, left, right), out[:, left:right])


def _unpack(codes: Blocked, scales: Blocked, out: np.ndarray) -> None:
    """Words along the rows: row r is nibble (start + r) % 8 of its word. A word's eight codes share a scale."""
    start = codes.starts[0]
    rows, columns = out.shape
    words = np.empty(codes.array.shape, codes.array.dtype)
    copy_tiled(words, codes.array)
    begin = scales.starts[0] - start
    grid = scales.array.astype(np.float32)
    if scales.spans[1] > 1:
        grid = grid[:, (scales.starts[1] + np.arange(columns)) // scales.spans[1]]
    factors = grid[(begin + NIBBLES * np.arange(len(words))) // scales.spans[0]]
    nibbles = np.empty_like(words)
    values = np.empty(words.shape, np.float32)
    for nibble in range(NIBBLES):
        first = (nibble - start) % NIBBLES
        if first >= rows:
            continue
        count = len(range(first, rows, NIBBLES))
        word = (start + first) // NIBBLES
        here, decoded = nibbles[:count], values[:count]
        np.right_shift(words[word : word + count], 4 * nibble, out=here)
        here &= 15
        np.subtract(here, INT4_ZERO, out=decoded, dtype=np.float32, casting="unsafe")
        with np.errstate(all="ignore"):
            decoded *= factors[word : word + count]
            out[first::NIBBLES] = decoded


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :])
