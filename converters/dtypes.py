"""Element types: safetensors dtype strings and the numpy (ml_dtypes) dtypes that hold the same bytes.

The names are those of the safetensors format (safetensors 0.8 `Dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ..families.errors import ConversionError

NUMPY: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The dtypes whose elements are whole bytes."""

PACKED_BITS: dict[str, int] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""The dtypes whose elements share bytes: they can be carried, and read only by a codec that unpacks them."""

FLOATS: dict[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""The dtypes a user can ask for, and a config's `dtype` key names, by their safetensors names."""

_NAMES = {dtype: name for name, dtype in NUMPY.items()}
_BITS_AS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def is_known(name: str) -> bool:
    """Whether `name` is a safetensors dtype."""
    return name in NUMPY or name in PACKED_BITS


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a safetensors dtype name. Raises ConversionError for an unknown or packed one."""
    try:
        return NUMPY[name]
    except KeyError:
        raise ConversionError(f"dtype {name!r} cannot be read as an array of whole elements") from None


def safetensors_dtype(dtype: np.dtype) -> str:
    """The safetensors name of a numpy dtype. Raises ConversionError when the format has none."""
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        raise ConversionError(f"safetensors has no dtype for {np.dtype(dtype)}") from None


def nbytes(name: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor, or None when its packed elements do not fill whole bytes."""
    bits = PACKED_BITS.get(name) or 8 * NUMPY[name].itemsize
    total = bits * math.prod(shape)
    return None if total % 8 else total // 8


def is_float(name: str) -> bool:
    """Whether the dtype is a plain floating-point one, which `--dtype` may cast (not a quantised code)."""
    return name in FLOATS.values()


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers of the same width: copying them can alter no NaN and runs at the speed
    of numpy's own types."""
    return array.view(_BITS_AS[array.dtype.itemsize])
