"""Filling a tensor from views of others: in order, in bounded memory, by a few threads.

What won when measured: read a map of the source, gather panels into a small scratch buffer per thread, write
them at known offsets, fsync once. Transposes are cut into tiles narrow enough to stay in the first-level cache.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import gcd, prod
from threading import Event
from typing import Protocol, TypeVar

import numpy as np

from ..families.errors import ConversionError
from ..families.rules import View
from .dtypes import as_bits
from .prefetch import REPEATED_BYTES, fetch, span_bytes

SCRATCH_BYTES = 4 << 20
"""About how much one thread gathers before it writes."""
MIN_PANEL_ROWS, MAX_PANEL_ROWS = 64, 1024
"""Rows of a panel of a transpose: long ones let the processor fetch ahead in each row of the source."""
CACHE_WAYS, CACHE_WAY_BYTES = 8, 4096
"""A first-level data cache: addresses of equal remainder by 4096 share its 8 lines (more on newer processors)."""
MIN_TILE, MAX_TILE = 16, 128

T = TypeVar("T")


class Lazy(Protocol):
    """An array whose values are made when they are written: what of numpy's own behaviour copying asks for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, item: int | slice, /) -> Lazy: ...
    def squeeze(self, axes: Sequence[int], /) -> Lazy: ...
    def transpose(self, order: Sequence[int], /) -> Lazy: ...

    def write(self, out: np.ndarray, /) -> None:
        """Puts the values into `out`, of this shape and dtype."""
        ...


@dataclass(frozen=True)
class Part:
    """One copy into a tensor: `view` of the tensor is filled by the array that `read` gives, of `view`'s shape."""

    view: View
    read: Callable[[], np.ndarray | Lazy]


def _last(view: View) -> int:
    """The element of its base after a view's last one."""
    return view.offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)) + 1


@dataclass(frozen=True)
class _Piece:
    """A block of a part, its axes ordered by falling stride in the target.

    strides, offset: where it lies in the target, in elements. moved: bits are moved, no value is cast.
    """

    source: np.ndarray | Lazy
    strides: tuple[int, ...]
    offset: int
    moved: bool

    @property
    def last(self) -> int:
        """The target element after the block's last one."""
        reach = sum((n - 1) * s for n, s in zip(self.source.shape, self.strides, strict=True))
        return self.offset + reach + 1

    def take(self, axis_start: int, axis_stop: int) -> _Piece:
        """The block's rows `axis_start:axis_stop` on its outermost axis."""
        offset = self.offset + axis_start * self.strides[0]
        return _Piece(self.source[axis_start:axis_stop], self.strides, offset, self.moved)

    def row(self, index: int) -> _Piece:
        """One row of the outermost axis, without that axis."""
        offset = self.offset + index * self.strides[0]
        return _Piece(self.source[index], self.strides[1:], offset, self.moved)


def _piece(part: Part, dtype: np.dtype, name: str) -> _Piece:
    source = part.read()
    if source.shape != part.view.shape:
        raise ValueError(f"a source of shape {source.shape} cannot fill a view of {part.view.shape}")
    if isinstance(source, np.ndarray) and not source.flags.c_contiguous and span_bytes(source) > REPEATED_BYTES:
        fetch(source, name)
    moved = False
    if isinstance(source, np.ndarray) and source.dtype == dtype:
        source, moved = as_bits(source), True
    order = sorted(range(source.ndim), key=lambda axis: (-part.view.strides[axis], axis))
    order = [axis for axis in order if source.shape[axis] != 1]
    lone = tuple(axis for axis in range(source.ndim) if axis not in order)
    source = source.squeeze(lone)
    ranks = {axis: rank for rank, axis in enumerate(sorted(order))}
    strides = tuple(part.view.strides[axis] for axis in order)
    return _Piece(source.transpose([ranks[axis] for axis in order]), strides, part.view.offset, moved)


def _cut(piece: _Piece, low: int, high: int) -> Iterator[_Piece]:
    """The blocks of `piece` whose target elements lie in [low, high)."""
    if piece.last <= low or piece.offset >= high:
        return
    if low <= piece.offset and piece.last <= high:
        yield piece
        return
    stride = piece.strides[0]
    rows = len(piece.source)
    reach = piece.row(0).last - piece.offset
    # Rows [first, stop) lie inside whole; the rows just outside may overlap an edge.
    first = min(max(-((piece.offset - low) // stride), 0), rows)
    stop = max(min((high - piece.offset - reach) // stride + 1, rows), 0)
    before = max((low - piece.offset - reach) // stride + 1, 0)
    after = min(-((piece.offset - high) // stride), rows)
    if first < stop:
        for index in range(before, first):
            yield from _cut(piece.row(index), low, high)
        yield piece.take(first, stop)
        for index in range(stop, after):
            yield from _cut(piece.row(index), low, high)
    else:
        for index in range(before, after):
            yield from _cut(piece.row(index), low, high)


def tile_columns(stride: int) -> int:
    """Columns of one step of a transpose whose columns lie `stride` bytes apart in the source.

    As many as the first-level cache can hold a line of each: a stride of a multiple of 4096, as widths that are
    powers of two have, puts all lines into one set. Measured at strides of 768, 2048 and 6144 bytes, twice as fast
    as one width for all.
    """
    lines = CACHE_WAYS * CACHE_WAY_BYTES // gcd(stride, CACHE_WAY_BYTES)
    return min(max(lines, MIN_TILE), MAX_TILE)


def copy_tiled(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, a transpose in tiles that stay in the first-level cache."""
    if source.ndim >= 2 and abs(source.strides[-1]) > abs(source.strides[-2]):
        tile = tile_columns(abs(source.strides[-1]))
        for start in range(0, source.shape[-1], tile):
            target[..., start : start + tile] = source[..., start : start + tile]
    else:
        target[...] = source


def _is_packed(piece: _Piece) -> bool:
    if not piece.moved or not isinstance(piece.source, np.ndarray):
        return False
    expected = 1
    for length, stride in zip(reversed(piece.source.shape), reversed(piece.strides), strict=True):
        if stride != expected:
            return False
        expected *= length
    return piece.source.flags.c_contiguous


def _slab(shape: Sequence[int], itemsize: int, direct: bool) -> int:
    """Elements gathered at a time: whole rows of the last axis, at least 64 of them where a transpose reads
    columns, so that it uses the cache lines it touches."""
    row = max(shape[-1], 1) if shape else 1
    rows = max(SCRATCH_BYTES // (row * itemsize), 1)
    return row * (rows if direct else max(min(rows, MAX_PANEL_ROWS), MIN_PANEL_ROWS))


def blocks(
    shape: Sequence[int], dtype: np.dtype, parts: Sequence[Part], name: str, start: int = 0
) -> Iterator[np.ndarray]:
    """The elements of a C-contiguous tensor of `shape` from element `start` on, in order, as contiguous blocks of one
    axis.

    Each block is valid until the next is asked for. Elements that no part fills are zero. A part of another dtype
    is cast; one of the same dtype is moved bit for bit. Raises ConversionError, naming the tensor `name`, when a
    cast to float16 turns a finite value into an infinity.
    """
    total = prod(shape)
    # What fills the tensor is read when its turn comes: thousands of parts may lie in as many files.
    waiting = deque(sorted((p for p in parts if p.view.size and _last(p.view) > start), key=lambda p: p.view.offset))
    active = [_piece(waiting.popleft(), dtype, name)] if waiting else []
    direct = all(isinstance(piece.source, np.ndarray) and piece.source.flags.c_contiguous for piece in active)
    slab = _slab(shape, dtype.itemsize, direct)
    scratch: np.ndarray | None = None
    for low in range(start, total, slab):
        high = min(low + slab, total)
        while waiting and waiting[0].view.offset < high:
            active.append(_piece(waiting.popleft(), dtype, name))
        inside = [cut for piece in active for cut in _cut(piece, low, high)]
        active = [piece for piece in active if piece.last > high]
        for piece in inside:
            if isinstance(piece.source, np.ndarray) and span_bytes(piece.source) <= REPEATED_BYTES:
                fetch(piece.source, name)
        if len(inside) == 1 and inside[0].source.size == high - low and _is_packed(inside[0]):
            yield np.asarray(inside[0].source).reshape(-1)
            continue
        if scratch is None:
            scratch = np.empty(min(slab, total), dtype)
        block = scratch[: high - low]
        if sum(piece.source.size for piece in inside) < high - low:
            as_bits(block)[...] = 0
        for piece in inside:
            _fill(block, piece, low, name)
        yield as_bits(block)


def _fill(block: np.ndarray, piece: _Piece, low: int, name: str) -> None:
    target = as_bits(block) if piece.moved else block
    place = np.lib.stride_tricks.as_strided(
        target[piece.offset - low :],
        piece.source.shape,
        tuple(stride * target.itemsize for stride in piece.strides),
    )
    source = piece.source
    if not isinstance(source, np.ndarray | np.generic):
        if source.dtype == place.dtype:
            source.write(place)
            return
        made = np.empty(source.shape, source.dtype)
        source.write(made)
        source = made
    with np.errstate(over="ignore"):
        copy_tiled(place, source)
    if not piece.moved and place.dtype == np.float16 and (np.isinf(place) & np.isfinite(source)).any():
        raise ConversionError(f"{name}: holds values beyond float16's range; use bfloat16 or float32")


def gather(shape: Sequence[int], dtype: np.dtype, parts: Sequence[Part], name: str) -> np.ndarray:
    """The whole tensor as a new array whose memory starts at a multiple of 64 bytes."""
    array = aligned_empty(shape, dtype)
    flat = as_bits(array.reshape(-1))
    position = 0
    for block in blocks(shape, dtype, parts, name):
        flat[position : position + block.size] = as_bits(block)
        position += block.size
    return array


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU backend can use without a copy: its memory starts at a multiple of 64."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def default_threads() -> int:
    """A few threads, one more than there are cores since some wait: beyond four a disk is what is waited for."""
    return min(4, (os.cpu_count() or 1) + 1)


def run_parallel(
    work: Callable[[T, Event], None], items: Iterable[T], size: Callable[[T], int], threads: int | None
) -> None:
    """`work(item, stop)` for every item, largest first, on a few threads.

    The first exception stops the rest (`stop` is set for those under way) and is raised.
    """
    stop = Event()
    ordered = sorted(items, key=size, reverse=True)
    with ThreadPoolExecutor(threads or default_threads(), "dewconv-copy") as pool:
        futures = [pool.submit(work, item, stop) for item in ordered]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed = any(f.done() and not f.cancelled() and f.exception() for f in futures)
            if failed or not all(f.done() for f in futures):
                stop.set()
                for future in futures:
                    future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()
