"""The bank layout: which file, key and row a leaf of a layer is.

A run of layers is a file named after it, `layers_0_15.safetensors`. Its keys are leaf paths below the layer,
`self_attn/q_proj/kernel`, and its arrays have the run's layers on axis 0. A run of one layer, `layers_5`, has no
such axis: its arrays are the layer's own. What is not in a layer is in `top.safetensors` under its whole path.

Where the source's dtype of one leaf differs between the layers of a run, nothing is cast: that leaf is stored a
layer at a time, under `self_attn/q_norm/scale@3` for layer 3 (the absolute index), without a layer axis and in its
own dtype.

A leaf stored as codes has its scales beside it, under `<leaf>:scale` (and `<leaf>:scale@3`): both lie the same way,
as one array a run or layer by layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import LayerPlan, group_layers, layer_plan
from ..families.rules import View
from .dtypes import nbytes
from .source import CONFIG, INDEX

TOP = "top"
CARRIED = "carried"
SUFFIX = ".safetensors"
HEADERS = "headers"
SOURCE = "source"
MARK = ":"
"""What stands between a leaf's path and the name of a part of it; no parameter's name holds one."""

_LAYER = re.compile(r"layers_(0|[1-9]\d*)/(.+)")
_ROW_KEY = re.compile(r"(.+)@(0|[1-9]\d*)")


def beside_files(has_index: bool, side_files: Iterable[str], shards: Iterable[str]) -> list[str]:
    """What a bank directory keeps beside its weights, as paths in it: the source's config, index and side files, and
    the headers of its shards."""
    names = [CONFIG, *([INDEX] if has_index else []), *side_files]
    return [*(f"{SOURCE}/{name}" for name in names), *(f"{HEADERS}/{shard}.json" for shard in shards)]


@dataclass(frozen=True)
class Leaf:
    """Where a leaf is stored: row `row` of `rows` of `key` in bank `bank`; rows is 1 without a layer axis."""

    bank: str
    key: str
    row: int
    rows: int
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored array: the leaf's, below the layer axis if there is one."""
        return self.shape if self.rows == 1 else (self.rows, *self.shape)

    def place(self, view: View) -> View:
        """A view of the leaf as a view of the stored array."""
        return view if self.rows == 1 else view.prepend(self.row, self.rows)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a bank file."""

    bank: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


@dataclass(frozen=True)
class Layout:
    """Leaf path -> where it is stored, and every stored tensor, in bank and key order."""

    leaves: Mapping[str, Leaf]
    tensors: tuple[StoredTensor, ...]

    def banks(self) -> tuple[str, ...]:
        """The names of the banks, in order of their first tensor."""
        return tuple(dict.fromkeys(tensor.bank for tensor in self.tensors))


def split_leaf(path: str) -> tuple[int | None, str]:
    """(layer, path below it) of a leaf path; (None, path) for a leaf outside the layers."""
    match = _LAYER.fullmatch(path)
    return (int(match[1]), match[2]) if match else (None, path)


def split_key(key: str) -> tuple[str, int | None]:
    """(leaf path below the layer, layer) of a stored key; the layer is None but for a leaf stored by layer."""
    match = _ROW_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else (key, None)


def part_leaf(leaf: str, role: str) -> str:
    """The path a part of a leaf is stored under: the leaf's own for its codes, whose role is ""."""
    return f"{leaf}{MARK}{role}" if role else leaf


def is_part(path: str) -> bool:
    """Whether a path or a key names scales, which are no parameter of their own."""
    return MARK in path


def stored_leaf(bank: str, key: str, layer: int | None = None) -> str:
    """The leaf path that `key` of `bank` holds for `layer`: the inverse of the layout."""
    below, own = split_key(key)
    if bank == TOP:
        return key
    layers = group_layers(bank)
    index = own if own is not None else layer
    if layers is None or index is None or index not in layers:
        raise ValueError(f"{bank} holds no layer {index}")
    return f"layers_{index}/{below}"


def lay_out_leaves(fields: DecoderFields, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of `leaves`: path -> (stored dtype, shape), for the runs of `fields`."""
    plan = layer_plan(fields)
    placed: dict[str, Leaf] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for path, (_, shape) in leaves.items():
        bank, key, row, count = _address(plan, path)
        placed[path] = Leaf(bank, key, row, count, shape)
        rows.setdefault((bank, key), []).append(path)
    tensors: list[StoredTensor] = []
    uneven = {
        (bank, key.partition(MARK)[0])
        for (bank, key), paths in rows.items()
        if len({leaves[path] for path in paths}) != 1 or len(paths) != placed[paths[0]].rows
    }
    for (bank, key), paths in rows.items():
        leaf = placed[paths[0]]
        if (bank, key.partition(MARK)[0]) not in uneven:
            tensors.append(StoredTensor(bank, key, leaves[paths[0]][0], leaf.stored_shape))
            continue
        for path in paths:
            dtype, shape = leaves[path]
            own = f"{key}@{split_leaf(path)[0]}"
            placed[path] = Leaf(bank, own, 0, 1, shape)
            tensors.append(StoredTensor(bank, own, dtype, shape))
    return Layout(placed, tuple(sorted(tensors, key=lambda tensor: _bank_order(tensor.bank))))


def _address(plan: LayerPlan, path: str) -> tuple[str, str, int, int]:
    layer, below = split_leaf(path)
    if layer is None:
        return TOP, path, 0, 1
    bank, row, count = plan.bank_of(layer)
    return bank, below, row, count


def _bank_order(bank: str) -> tuple[int, int]:
    layers = group_layers(bank)
    return (0, 0) if layers is None else (1, layers.start)


def file_name(bank: str) -> str:
    """The file of a bank."""
    return bank + SUFFIX


def by_bank(tensors: Iterable[StoredTensor]) -> dict[str, list[StoredTensor]]:
    """The tensors of each bank, in order."""
    banks: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        banks.setdefault(tensor.bank, []).append(tensor)
    return banks
