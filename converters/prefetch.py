"""Having mapped bytes read before they are touched, so that a file that cannot be read is an error and not a signal.

Touching a page of a map whose file was cut off, or whose disk fails, ends the process (SIGBUS). madvise with
MADV_POPULATE_READ (Linux 5.14) reads the pages first, many at a time, and says what went wrong; where the system has
no such advice nothing is read ahead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from ..families.errors import ConversionError

POPULATE_READ = 22
REPEATED_BYTES = 32 << 20
"""The most that is asked for again at each step of a transpose, which touches all of it at each."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_can_populate = True


def span_bytes(array: np.ndarray) -> int:
    """How much memory lies between the first and the last byte of `array`."""
    if array.size == 0:
        return 0
    reach = sum((n - 1) * abs(stride) for n, stride in zip(array.shape, array.strides, strict=True))
    return reach + array.itemsize


def fetch(array: np.ndarray, name: str) -> None:
    """Reads the pages `array` lies in. Raises ConversionError, naming the tensor `name`, when they cannot be read."""
    global _can_populate
    size = span_bytes(array)
    if not _can_populate or size == 0:
        return
    below = sum((n - 1) * -stride for n, stride in zip(array.shape, array.strides, strict=True) if stride < 0)
    start = array.__array_interface__["data"][0] - below
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
