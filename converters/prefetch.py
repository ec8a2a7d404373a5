"""Having bytes read before they are touched: those of a map, so that a file that cannot be read is an error and not a
signal, and those of memory that is filled on request.

Touching a page of a map whose file was cut off, or whose disk fails, ends the process (SIGBUS). madvise with
MADV_POPULATE_READ (Linux 5.14) reads the pages first, many at a time, and says what went wrong; where the system has
no such advice nothing is read ahead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from math import prod
from typing import Any, Self

import numpy as np

from ..families.errors import ConversionError

POPULATE_READ = 22
REPEATED_BYTES = 32 << 20
"""The most that is asked for again at each step of a transpose, which touches all of it at each."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_can_populate = True


NEAR = 1 << 16
"""Bytes between two runs of an awaited array that are rather read than asked around."""
MOST_RUNS = 4096
"""More runs than this are read as one."""


class Awaited(mmap.mmap):
    """Anonymous memory whose bytes are made when they are asked for (`fetch`)."""

    def __new__(cls, size: int) -> Self:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)

    def fill(self, start: int, stop: int) -> None:
        """Has the bytes [start, stop) there. Raises ConversionError when that cannot be done."""
        raise NotImplementedError


def _awaited(array: np.ndarray) -> Awaited | None:
    """The awaited memory an array lies in, None for any other."""
    owner: Any = array
    while owner is not None and not isinstance(owner, Awaited):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def runs(array: np.ndarray) -> list[tuple[int, int]]:
    """(first, stop) of the stretches of memory that an array's elements lie in, relative to its lowest byte."""
    run, outer = array.itemsize, []
    for stride, length in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1):
        if not outer and stride - run <= NEAR:
            run = max(run, (length - 1) * stride + run)
        else:
            outer.append((stride, length))
    if prod(length for _, length in outer) > MOST_RUNS:
        return [(0, span_bytes(array))]
    starts = [0]
    for stride, length in outer:
        starts = [start + index * stride for start in starts for index in range(length)]
    return [(start, start + run) for start in sorted(starts)]


def span_bytes(array: np.ndarray) -> int:
    """How much memory lies between the first and the last byte of `array`."""
    if array.size == 0:
        return 0
    reach = sum((n - 1) * abs(stride) for n, stride in zip(array.shape, array.strides, strict=True))
    return reach + array.itemsize


def fetch(array: np.ndarray, name: str) -> None:
    """Reads what `array` lies in. Raises ConversionError, naming the tensor `name`, when it cannot be read."""
    global _can_populate
    size = span_bytes(array)
    if size == 0:
        return
    below = sum((n - 1) * -stride for n, stride in zip(array.shape, array.strides, strict=True) if stride < 0)
    start = array.__array_interface__["data"][0] - below
    memory = _awaited(array)
    if memory is not None:
        offset = start - np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        for low, high in runs(array):
            memory.fill(offset + low, offset + high)
        return
    if not _can_populate:
        return
    page = start - start % mmap.PAGESIZE
    if _madvise(page, start + size - page, POPULATE_READ) == 0:
        return
    fault = ctypes.get_errno()
    if fault == errno.EINVAL:
        _can_populate = False
    elif fault not in (errno.ENOMEM, errno.EAGAIN, errno.EINTR):
        raise ConversionError(
            f"{name}: cannot be read any more: its file was cut off since it was opened, or the disk fails "
            f"({os.strerror(fault)})"
        )
