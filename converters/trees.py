"""Parameter trees as leaf paths: every form a training run keeps them in, brought to one.

A leaf path is `layers_3/self_attn/q_proj/kernel` or `norm/scale`: one leaf a layer, whatever way the tree holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dew_core.layers import group_layers
from ..families.errors import ConversionError, Finding


@dataclass(frozen=True)
class LeafArray:
    """A leaf's array: dtype, shape, and `read`, which gives it as a numpy array when it is needed."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def cut(self, shape: tuple[int, ...]) -> LeafArray:
        """The leading part of `shape` on every axis."""
        index = tuple(slice(0, size) for size in shape)
        return LeafArray(self.dtype, shape, lambda: self.read()[index])


def parameters(variables: Any) -> Any:
    """The parameter tree inside `variables`: `{"params": tree}`, doubly wrapped, or the tree itself."""
    tree = variables
    while isinstance(tree, Mapping) and "params" in tree:
        tree = tree["params"]
    return tree


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, array) of every leaf. Keys may be dotted; a leaf may be boxed, as `{"value": array}` or in an object
    with a `value` (flax `Partitioned`, nnx `Variable`)."""
    if isinstance(tree, Mapping):
        if set(tree) == {"value"} and not isinstance(tree["value"], Mapping):
            yield prefix, tree["value"]
            return
        for key, item in tree.items():
            name = str(key).replace(".", "/")
            yield from flatten(item, f"{prefix}/{name}" if prefix else name)
    elif not hasattr(tree, "shape") and hasattr(tree, "value"):
        yield from flatten(tree.value, prefix)
    else:
        yield prefix, _unboxed(tree)


def _unboxed(leaf: Any) -> Any:
    """The array in a box that passes its array's attributes through (an nnx `Variable`), or the leaf itself."""
    if hasattr(leaf, "get_value"):
        return leaf.get_value()
    value = getattr(leaf, "value", None)
    return value if hasattr(value, "dtype") and hasattr(value, "shape") else leaf


def layer_leaves(variables: Any) -> tuple[dict[str, LeafArray], list[Finding]]:
    """Leaf path -> array, with each bank's rows as the leaves of its layers; and what cannot be read.

    Raises ConversionError when `variables` is not a tree of arrays.
    """
    tree = parameters(variables)
    if not isinstance(tree, Mapping):
        raise ConversionError(f"variables are a {type(tree).__name__}, not a tree of arrays")
    leaves: dict[str, LeafArray] = {}
    findings: list[Finding] = []
    for path, array in flatten(tree):
        for leaf, value in _rows(path, array, findings):
            if leaf in leaves:
                findings.append(Finding(f"parameter {leaf}", "it twice", "it once", "drop the bank or the layer"))
            leaves[leaf] = value
    return leaves, findings


def _rows(path: str, array: Any, findings: list[Finding]) -> Iterator[tuple[str, LeafArray]]:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        findings.append(Finding(f"parameter {path}", type(array).__name__, "an array", "drop it"))
        return
    if not getattr(array, "is_fully_addressable", True):
        findings.append(
            Finding(
                f"parameter {path}",
                "an array with parts on other processes",
                "a fully addressable one",
                "gather it first, and save from one process",
            )
        )
        return
    top, _, below = path.partition("/")
    layers = group_layers(top)
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    if layers is None or len(layers) == 1:
        yield path, LeafArray(dtype, shape, lambda: np.asarray(array))
        return
    if not shape or shape[0] != len(layers):
        findings.append(
            Finding(f"parameter {path}", f"shape {list(shape)}", f"{len(layers)} layers on axis 0", "stack its layers")
        )
        return
    for row, layer in enumerate(layers):
        yield f"layers_{layer}/{below}", LeafArray(dtype, shape[1:], lambda row=row: np.asarray(array[row]))


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of path -> leaf."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
