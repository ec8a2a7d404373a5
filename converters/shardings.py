"""Where parameters go: what flax and Orbax users have, as one sharding a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.layers import group_layers
from ..families.errors import ConversionError, Finding, FindingsError
from .layout import split_leaf
from .trees import flatten

Shardings = Any
"""What `placements` takes."""


def placements(mesh: Any, shardings: Shardings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Parameter path -> the sharding it is put with, None for JAX's default device. shapes: every parameter's.

    shardings may be

    - a sharding, or with a `mesh` a PartitionSpec, for all parameters;
    - a tree of them as `nn.get_partition_spec`, `nn.logical_to_mesh_sharding` or `jax.tree.map` over
      `jax.eval_shape(model.init, …)` give it, `{"params": …}` or what is inside; or a prefix of one, as
      `jax.jit(in_shardings=…)` takes it, whose leaf holds for all parameters below; or a flat mapping by path
      (`"layers_0_15/mlp/up_proj/kernel"`). None as a leaf replicates;
    - a function of (path, shape) that gives one of them.

    A parameter held by layer, because its dtype differs within a run, has its run's PartitionSpec without the layer
    axis. mesh alone, or with None: replicated.

    Raises FindingsError naming every parameter that has no sharding or whose shape its sharding does not divide, and
    every entry that is no parameter's. Raises ConversionError for a PartitionSpec without a mesh.
    """
    from jax.sharding import NamedSharding, PartitionSpec, Sharding

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    findings: list[Finding] = []

    def resolved(value: Any, path: str) -> Any:
        if value is None:
            return everywhere
        if isinstance(value, PartitionSpec):
            if mesh is None:
                raise ConversionError("a PartitionSpec needs a mesh; give load the mesh, or NamedShardings")
            try:
                return NamedSharding(mesh, value)
            except ValueError as error:
                raise ConversionError(f"parameter {path}: {value} does not fit the mesh ({error})") from None
        if not isinstance(value, Sharding):
            kind = type(value).__name__
            raise ConversionError(f"parameter {path}: a {kind} is given as its sharding; give a sharding or a spec")
        return value

    table = dict(flatten(_inside(shardings))) if isinstance(shardings, Mapping) else None
    used: set[str] = set()
    places = {}
    for path, shape in shapes.items():
        if table is not None:
            entry = next((name for name in _prefixes(path) if name in table), None)
            run = None if entry is not None else _run_entry(path, table)
            if entry is None and run is None:
                findings.append(Finding(f"parameter {path}", "no sharding for it", "one", "name it, or what it is in"))
                continue
            used.add(entry if entry is not None else str(run))
            value = table[entry] if entry is not None else _without_layers(table[str(run)])
        else:
            value = shardings(path, shape) if callable(shardings) else shardings
        places[path] = resolved(value, path)
        if places[path] is not None:
            try:
                _fit(places[path], shape)
            except ValueError as error:
                reason = str(error).partition("\n")[0].partition(". ")[0]
                fix = "shard another axis of it, or replicate it"
                findings.append(
                    Finding(f"parameter {path}", f"{places[path]} ({reason})", f"one of {list(shape)}", fix)
                )
    for name in sorted(set(table or ()) - used):
        findings.append(Finding(f"shardings entry {name}", "no parameter of that name", "one", "drop it"))
    if findings:
        raise FindingsError("shardings", findings)
    return places


def _fit(sharding: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError when `sharding` cannot divide an array of `shape`."""
    axes = len(getattr(sharding, "spec", ()))
    if axes > len(shape):
        raise ValueError(f"it names {axes} axes")
    sharding.shard_shape(shape)


def _inside(tree: Mapping[str, Any]) -> Any:
    return tree["params"] if set(tree) == {"params"} else tree


def _prefixes(path: str) -> Iterator[str]:
    """The path and what it lies in, innermost first; at the end "", the whole tree."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _run_entry(path: str, table: Mapping[str, Any]) -> str | None:
    """The entry for the run of layers that a parameter held by layer belongs to."""
    layer, below = split_leaf(path)
    if layer is None:
        return None
    for name in table:
        top, _, _ = name.partition("/")
        layers = group_layers(top)
        if layers is not None and layer in layers and name in _prefixes(f"{top}/{below}"):
            return name
    return None


def _without_layers(value: Any) -> Any:
    """The sharding of one layer of a run."""
    from jax.sharding import NamedSharding, PartitionSpec

    if isinstance(value, PartitionSpec):
        return PartitionSpec(*value[1:])
    if isinstance(value, NamedSharding):
        return NamedSharding(value.mesh, PartitionSpec(*value.spec[1:]), memory_kind=value.memory_kind)
    return value
