"""Storage codecs: how a logical tensor is stored in a checkpoint.

A codec presents stored tensors as logical ones: a shape, a dtype, and the values of a region. `plain` stores a
logical tensor as itself. A codec whose logical tensors are several stored ones (a weight and its block scales)
claims them all and decodes regions; a config that asks for one that is not here is refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..families.errors import ConversionError
from ..families.rules import View
from .dtypes import NUMPY

_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
"""Dtypes of whole bytes that are codes of a quantisation, or no number a parameter can be."""


@dataclass(frozen=True)
class Stored:
    """A stored tensor as a header states it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Logical:
    """A logical tensor: its name, logical dtype and shape, and the stored tensors it is made of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


class Codec(Protocol):
    """One way of storing logical tensors."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def logical(self, stored: Mapping[str, Stored]) -> dict[str, Logical]:
        """The logical tensors that `stored` make, by name. Raises ConversionError for parts that do not fit."""
        ...

    def decode(self, tensor: Logical, view: View, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The values of `view` of a logical tensor, of the view's shape. `read` maps a stored tensor by name."""
        ...


@dataclass(frozen=True)
class Plain:
    """A logical tensor stored as itself: a view of it costs no copy."""

    name: str = "plain"

    def logical(self, stored: Mapping[str, Stored]) -> dict[str, Logical]:
        return {name: Logical(name, item.dtype, item.shape, (name,)) for name, item in stored.items()}

    def decode(self, tensor: Logical, view: View, read: Callable[[str], np.ndarray]) -> np.ndarray:
        return view.apply(read(tensor.parts[0]))


def is_value(dtype: str) -> bool:
    """Whether elements of this dtype are values a parameter can hold as they are."""
    return dtype in NUMPY and dtype not in _CODES


def codec_of(config: Mapping[str, Any]) -> Codec:
    """The codec that a config's quantisation record asks for. Raises ConversionError naming a method not built."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            record = part.get(key)
            if record is not None:
                raise ConversionError(f"config.json: {key} asks for {_method(record)} weights, which are not supported")
    return Plain()


def _method(record: Any) -> str:
    if isinstance(record, Mapping):
        for key in ("quant_method", "quant_algo", "format"):
            if isinstance(record.get(key), str):
                return repr(record[key])
    return "quantised"
