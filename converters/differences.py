"""Two checkpoints or bank directories held against each other, tensor by tensor, under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..families.rules import Placement
from .banks import Banks, is_bank_directory, open_banks
from .copying import gather
from .dtypes import NUMPY, as_bits, safetensors_dtype
from .exporting import held_leaves, held_tensors
from .layout import CARRIED, SUFFIX
from .parts import target_parts
from .safetensors_files import TensorEntry
from .shards import ShardFile
from .source import Source, open_source, refuse_without_weights

BLOCK = 1 << 20
"""Elements compared at a time."""

Kind = Literal["equal", "values", "dtype", "shape", "only in A", "only in B"]


@dataclass(frozen=True)
class NamedTensor:
    """A tensor under its checkpoint name; `read` gives it as an array (packed dtypes as their bytes).

    stated: what is known of its bytes without reading them, () for nothing. Tensors of equal statements are equal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] = field(repr=False)
    stated: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Difference:
    """One tensor's comparison.

    a, b: "BF16 [24, 28]", or None where it is missing. differing: elements that are not equal bit for bit. max_error:
    the largest absolute difference of two values, at index `at`; None for equal tensors and for other shapes.
    read: the values were compared; else both sides state equal checksums, or one of them is missing.
    """

    name: str
    kind: Kind
    a: str | None
    b: str | None
    differing: int = 0
    max_error: float | None = None
    at: tuple[int, ...] | None = None
    read: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "tensor": self.name,
            "kind": self.kind,
            "a": self.a,
            "b": self.b,
            "differing": self.differing,
            "max_error": self.max_error,
            "at": None if self.at is None else list(self.at),
        }


def open_tensors(target: str | Path, **options: Any) -> dict[str, NamedTensor]:
    """The tensors of a bank directory, a checkpoint directory or a hub id, by checkpoint name, in name order.

    `options` are `open_source`'s. Raises ConversionError when it cannot be opened, or holds no weights.
    """
    if is_bank_directory(Path(target).expanduser()):
        return bank_tensors(open_banks(target))
    source = open_source(target, **options)
    refuse_without_weights(source)
    return source_tensors(source)


def source_tensors(source: Source) -> dict[str, NamedTensor]:
    """A checkpoint's tensors: views of its mapped files."""
    maps: dict[str, ShardFile] = {}

    def read(name: str) -> np.ndarray:
        tensor = source.tensors[name]
        if tensor.file not in maps:
            maps[tensor.file] = source.open_shard(tensor.file)
        return _read(maps[tensor.file], tensor.entry)

    return {
        name: NamedTensor(name, tensor.dtype, tensor.shape, lambda name=name: read(name))
        for name, tensor in sorted(source.tensors.items())
    }


def bank_tensors(banks: Banks) -> dict[str, NamedTensor]:
    """The checkpoint's tensors as banks hold them: what an export in the stored dtypes would write."""
    held = held_tensors(banks)
    leaves = held_leaves(banks, held)

    def read(place: Placement) -> np.ndarray:
        leaf = leaves[place.leaf]
        return leaf.place(place.leaf_view).apply(banks.array(leaf.bank, leaf.key))

    def stated(bank: str, key: str) -> tuple[Any, ...]:
        name = bank + SUFFIX
        entry = banks.headers[name].entries[key]
        return entry.dtype, entry.shape, tuple(sorted(banks.manifest.files[name][key].items()))

    def placed(place: Placement) -> tuple[Any, ...]:
        leaf = leaves[place.leaf]
        return (place, leaf.row, *stated(leaf.bank, leaf.key))

    tensors = {}
    for item in sorted(held, key=lambda item: item.name):
        name, entry = item.name, item.entry
        if item.carried:
            file = banks.open(CARRIED)
            known = stated(CARRIED, entry.name)
            tensors[name] = NamedTensor(name, entry.dtype, entry.shape, lambda f=file, e=entry: _read(f, e), known)
            continue
        if not item.places and name not in banks.manifest.zeros:
            continue
        dtypes = [banks.array(leaves[place.leaf].bank, leaves[place.leaf].key).dtype for place in item.places]
        dtype = np.result_type(*dtypes) if dtypes else NUMPY[entry.dtype]
        parts = target_parts(item.places, dtype, read, name)
        tensors[name] = NamedTensor(
            name,
            safetensors_dtype(dtype),
            entry.shape,
            lambda e=entry, d=dtype, p=parts: gather(e.shape, d, p, e.name),
            tuple(map(placed, item.places)),
        )
    return tensors


def _read(file: ShardFile, entry: TensorEntry) -> np.ndarray:
    return file.view(entry.name) if entry.dtype in NUMPY else file.raw(entry.name)


def differences(
    a: Mapping[str, NamedTensor], b: Mapping[str, NamedTensor], believe: bool = True
) -> Iterator[Difference]:
    """Every tensor of either side compared, in name order. Holds one tensor of each side at a time.

    believe: tensors of which both sides state the same (banks whose manifests have equal checksums) are equal and are
    not read. Else every tensor is.
    """
    for name in sorted(set(a) | set(b)):
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            yield Difference(name, "only in B" if one is None else "only in A", _text(one), _text(other), read=False)
        elif believe and one.stated and one.stated == other.stated:
            yield Difference(name, "equal", _text(one), _text(other), read=False)
        else:
            yield compare(one, other)


def compare(a: NamedTensor, b: NamedTensor) -> Difference:
    """Two tensors of one name."""
    if a.shape != b.shape:
        return Difference(a.name, "shape", _text(a), _text(b))
    left, right = a.read().reshape(-1), b.read().reshape(-1)
    same = a.dtype == b.dtype
    if left.shape != right.shape:
        return Difference(a.name, "dtype", _text(a), _text(b))
    differing, worst, where = 0, None, None
    for start in range(0, left.size, BLOCK):
        one, other = left[start : start + BLOCK], right[start : start + BLOCK]
        if same:
            unequal = as_bits(one) != as_bits(other) if one.dtype.itemsize <= 8 else one != other
            if not unequal.any():
                continue
            differing += int(unequal.sum())
        error = _errors(one, other)
        if not same:
            differing += int((error != 0).sum())
        index = int(error.argmax())
        if worst is None or error[index] > worst:
            worst, where = float(error[index]), start + index
    kind: Kind = "dtype" if not same else "values" if differing else "equal"
    at = None
    if where is not None and left.size == _size(a.shape):
        at = tuple(int(i) for i in np.unravel_index(where, a.shape)) if a.shape else ()
    return Difference(a.name, kind, _text(a), _text(b), differing, worst, at if differing else None)


def _errors(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Absolute differences in float64: two NaNs are equal, a NaN against a number is infinitely far."""
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = (value.astype(np.complex128 if value.dtype.kind == "c" else np.float64) for value in (one, other))
        error = np.abs(x - y)
    error[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    error[np.isnan(error)] = np.inf
    return error


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _text(tensor: NamedTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
