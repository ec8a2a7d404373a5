"""The layer stack: its loops, and the view of the variables each loop reads.

Stored variables hold one subtree per layer (`layers_0`, …) or one bank per run of like layers (`layers_0_15`,
a leading layer axis on every leaf), or some leaves one way and some the other. The plain loop reads per-layer
subtrees, the scanned loop reads banks, and `StackView` turns either store into what a loop reads and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from .layers import LayerSpec, group_layers, group_name

INTERMEDIATES = "intermediates"
"""The collection flax's `capture_intermediates` fills."""

STREAMS = ("activation_batch", "activation_length", None, "activation_embed")
"""Logical axes of hyper-connections' [B, S, hc_mult, D] residual streams."""

WRITTEN = ("cache", "router", "qk", "indexer")
"""The collections a decoder block writes: its decode cache, and what its router, its attention and its indexer sow."""

Block = Callable[[int, str], nn.Module]
"""Layer `index`'s block under a module name: `(index, name) -> DecoderBlock`."""

Tree = dict[str, Any]


def layer_outputs(module: nn.Module, method: str) -> bool:
    """The `capture_intermediates` filter that keeps every layer's output, scanned runs included."""
    return method == "__call__" and module.name is not None and group_layers(module.name) is not None


def layer_output(intermediates: Mapping[str, Mapping[str, Sequence[jax.Array]]], index: int) -> jax.Array:
    """Layer `index`'s output [B, S, D] out of the collection `layer_outputs` filled.

    Raises KeyError when that layer's output was not captured.
    """
    name = group_name(index, 1)
    if name not in intermediates or "__call__" not in intermediates[name]:
        raise KeyError(
            f"no output of {name} in the intermediates: apply with capture_intermediates=layer_outputs "
            f"and mutable=['{INTERMEDIATES}']"
        )
    return intermediates[name]["__call__"][0]


def run_stack(
    layers: Sequence[nn.Module],
    block: Block,
    specs: Sequence[LayerSpec],
    groups: Sequence[tuple[int, int]],
    x: jax.Array,
    *,
    train: bool,
    decode: bool,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_store: dict | None,
    per_layer_input: Any,
    attention_metadata: Any = None,
) -> jax.Array:
    """Run the layers over x [B, S, D], one run at a time as `groups` says.

    A run of one layer is `layers[first]`, called as the plain loop calls it. A longer run is one block, named
    for its range, under flax's scan: every variable of it carries a leading layer axis, each iteration reads
    its own row of the weights and of `per_layer_input` (arrays of [B, S, L, …]), and random streams are split by layer.
    Sharing layers inside a scan read the `kv_store` that was filled before the run, a constant of the loop. Owning
    ones get none, since a dict cannot leave the loop; a provider is always a run of one.
    """
    shared = {"train": train, "decode": decode, "positions": positions, "segment_ids": segment_ids}
    shared["attention_metadata"] = attention_metadata

    def signal(first: int, count: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, first : first + count], 2, 0), per_layer_input)

    for first, count in groups:
        inputs = signal(first, count)
        if count == 1:
            row = jax.tree.map(lambda leaf: leaf[0], inputs)
            x = layers[first](x, kv_store=kv_store, per_layer_input=row, **shared)
            continue
        store = kv_store if specs[first].kv_shared else None

        def body(layer: nn.Module, carry: jax.Array, row: Any, store: dict | None = store) -> tuple:
            return layer(carry, kv_store=store, per_layer_input=row, **shared), None

        scan = nn.scan(body, variable_axes={True: 0}, split_rngs={True: True}, length=count)
        x, _ = scan(block(first, group_name(first, count)), x, inputs)
    return x


def _merged(bank: Mapping, rows: Mapping, where: str) -> Tree:
    """Two trees of different leaves as one. Raises ValueError naming a leaf that both hold."""
    one, other = flatten_dict(bank), flatten_dict(rows)
    for path in one.keys() & other.keys():
        leaf = "/".join((where, *path))
        raise ValueError(f"{leaf} is held by the bank and by the layers of its run: keep one of the two")
    return unflatten_dict({**one, **other})


def _stacked(rows: Sequence[Any], where: str) -> Any:
    structures = [jax.tree.structure(row) for row in rows]
    if any(structure != structures[0] for structure in structures):
        raise ValueError(f"the layers of {where} hold different leaves and cannot run as one scan")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


@dataclass(frozen=True)
class StackView:
    """The layer stack's variables as its loops read them.

    Outside, a collection holds one subtree per layer, `layers_N`. Inside a scanned run the same leaves are
    stacked along a leading layer axis under the run's name, `layers_3_7`. `stack` builds the inside from the
    outside and `unstack` the outside from the inside, so what a run reads, sows and caches lands leaf for
    leaf where the plain loop puts it. `banked` names the collections the store already holds the inside way:
    those are left alone in both directions, and the run scans the stored array itself. `broadcast` names
    collections the view does not touch.

    groups: the runs, (first, count). Pipelines are not built, so `stages` and `microbatches` are 1.
    """

    groups: tuple[tuple[int, int], ...]
    stages: int = 1
    microbatches: int = 1
    broadcast: tuple[str, ...] = ()
    banked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name}={getattr(self, name)}: pipelines are not supported, leave {name} at 1")

    def bank_names(self) -> list[str]:
        """Every run's stored name, in order: what a banked store's keys are."""
        return [group_name(first, count) for first, count in self.groups]

    def _runs(self, collection: str) -> list[tuple[int, int]]:
        if collection in self.banked or collection in self.broadcast:
            return []
        return [(first, count) for first, count in self.groups if count > 1]

    def stack(self, variables: Mapping[str, Mapping]) -> Tree:
        """Every collection with each run's layers stacked under the run's name, [count, ...] a leaf.

        A run already holding a bank of some leaves gets the layers' leaves stacked beside them.
        Raises ValueError when a run holds some of its layers and not others, or a leaf both ways.
        """
        out = {}
        for collection, tree in variables.items():
            tree = dict(tree)
            for first, count in self._runs(collection):
                name = group_name(first, count)
                names = [group_name(index, 1) for index in range(first, first + count)]
                held = [key for key in names if key in tree]
                if not held:
                    continue
                if len(held) < count:
                    missing = next(key for key in names if key not in tree)
                    raise ValueError(f"{collection} holds {held[0]} and not {missing}, layers of one run")
                rows = [tree.pop(key) for key in names]
                stacked = _stacked(rows, f"{collection}/{name}")
                where = f"{collection}/{name}"
                tree[name] = _merged(tree[name], stacked, where) if name in tree else stacked
            out[collection] = tree
        return out

    def unstack(self, variables: Mapping[str, Mapping]) -> Tree:
        """Every collection with each run's bank laid out as one subtree per layer; the inverse of `stack`.

        Leaves the store holds per layer already stay beside the bank's rows. Raises ValueError when a leaf is
        held both ways.
        """
        out = {}
        for collection, tree in variables.items():
            tree = dict(tree)
            for first, count in self._runs(collection):
                name = group_name(first, count)
                if name not in tree:
                    continue
                bank = tree.pop(name)
                for row in range(count):
                    key = group_name(first + row, 1)
                    layer = jax.tree.map(lambda leaf, row=row: leaf[row], bank)
                    where = f"{collection}/{name}"
                    tree[key] = _merged(layer, tree[key], where) if key in tree else layer
            out[collection] = tree
        return out

    def restored(self, variables: Mapping[str, Mapping], store: Mapping[str, Mapping]) -> Tree:
        """Per-layer `variables` laid out as `store` is: its banks' leaves as banks, the rest per layer.

        Where a loop's variables go back into a store of another layout than the loop's own.
        """
        out = dict(variables)
        for collection, tree in variables.items():
            held = store.get(collection, {})
            runs = tuple(run for run in self.groups if run[1] > 1 and group_name(*run) in held)
            if not runs:
                continue
            tree = dict(tree)
            for first, count in runs:
                name = group_name(first, count)
                if name in tree:
                    continue
                banked = flatten_dict(held[name]).keys()
                layers = {
                    group_name(i, 1): flatten_dict(tree.pop(group_name(i, 1))) for i in range(first, first + count)
                }
                bank = [{path: rows[path] for path in banked} for rows in layers.values()]
                tree[name] = unflatten_dict(_stacked(bank, f"{collection}/{name}"))
                for key, rows in layers.items():
                    rest = {path: leaf for path, leaf in rows.items() if path not in banked}
                    if rest:
                        tree[key] = unflatten_dict(rest)
            out[collection] = tree
        return out


def holds_banks(store: Mapping[str, Mapping]) -> bool:
    """Whether any collection of `store` holds a bank: a stack module's name that runs more than one layer."""
    return any(len(group_layers(key) or ()) > 1 for tree in store.values() for key in tree)


def banked_collections(store: Mapping[str, Mapping], groups: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """The collections of `store` whose runs of layers are banks alone.

    A run of one is the same tree either way. A collection may hold a run's bank beside that run's layers when
    the two
    hold different leaves, or one run as a bank and another per layer: such a collection is not banked, and
    `StackView` builds what a loop reads.
    Raises ValueError for a bank that is none of `groups`, for a leaf held both ways, and for a run of which a
    collection with banks holds nothing.
    """
    runs = {group_name(first, count): range(first, first + count) for first, count in groups if count > 1}
    banked = []
    for collection, tree in store.items():
        banks = [key for key in tree if len(group_layers(key) or ()) > 1]
        stray = [key for key in banks if key not in runs]
        if stray:
            raise ValueError(
                f"{collection} holds the bank {stray[0]}, which is no run of this decoder "
                f"({', '.join(runs) or 'it has none'}): build it with the bank_layers the store was written with"
            )
        if not banks:
            continue
        layered = False
        for name, layers in runs.items():
            rows = [tree[key] for key in (group_name(index, 1) for index in layers) if key in tree]
            layered = layered or bool(rows)
            if name not in tree and not rows:
                raise ValueError(f"{collection} holds {banks[0]} and nothing of {name}")
            for row in rows:
                _merged(tree.get(name, {}), row, f"{collection}/{name}")
        if not layered:
            banked.append(collection)
    return tuple(banked)


def first_layer_shapes(store: Mapping[str, Mapping], groups: Sequence[tuple[int, int]]) -> Tree:
    """Layer 0's variables in `store` as `jax.ShapeDtypeStruct`s, by collection: from its own subtree, the
    first row of the first bank, or both when each holds some of the leaves."""

    def shape(value: Any, drop: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape[drop:], value.dtype)

    row, bank = group_name(0, 1), group_name(*groups[0])
    shapes = {}
    for collection, tree in store.items():
        layer = jax.tree.map(lambda value: shape(value, 0), dict(tree.get(row, {})))
        if bank != row and bank in tree:
            layer = _merged(jax.tree.map(lambda value: shape(value, 1), tree[bank]), layer, f"{collection}/{bank}")
        if layer:
            shapes[collection] = layer
    return shapes


@dataclass(frozen=True)
class DecoderBank:
    """One decoder's stored layer namespace below every variables collection.

    namespace: the path of module names a container puts the decoder under, () for the decoder itself.
    view: the runs. scanned: whether the stack runs its banks under scan.
    """

    namespace: tuple[str, ...]
    view: StackView
    scanned: bool = True
