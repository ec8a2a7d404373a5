"""Loading: banks, a checkpoint directory or a hub id as a decoder and its variables.

The one module here that imports JAX, when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import group_layers
from ..families.errors import ConversionError, Finding, FindingsError
from .banks import check_banks, is_bank_directory, open_banks
from .copying import default_threads, gather
from .dtypes import FLOATS, NUMPY
from .importing import planned_parts
from .leaves import parameter_path, read_banks
from .plan import ImportPlan, plan_import
from .source import ShardMaps, open_source
from .trees import flatten, nested

if TYPE_CHECKING:
    from ..dew_core.transformer import CausalTransformer

Shardings = Any
"""What says where each parameter goes: one sharding (or, with a mesh, PartitionSpec) for all, a tree or a mapping of
them by path, or a function of (path, shape)."""


def load(
    path: str | Path,
    dtype: str | None = None,
    scan_layers: bool = True,
    mesh: Any = None,
    shardings: Shardings = None,
    check: bool = False,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
) -> tuple[CausalTransformer, dict[str, Any]]:
    """The decoder and its variables, `{"params": …}`, of a bank directory, a checkpoint directory or a hub id.

    scan_layers: the variables hold a bank a run, else a subtree a layer. A leaf whose dtype differs between the
    layers of a run is held by layer either way. On a CPU, arrays alias the mapped file wherever it is aligned.

    dtype: None keeps each parameter's own; else floating parameters are cast, save vectors that would lose
    precision by it. mesh, shardings: parameters are put there, each process reading what its devices hold; a mesh
    alone replicates.

    check: first read every file of a bank directory and compare its checksums, each process for itself.

    Raises ConversionError when the checkpoint cannot be read, FindingsError naming every parameter path that is not
    the decoder's own, and under `check` every tensor and file whose bytes are not those that were written.
    """
    import jax

    from ..dew_core.transformer import CausalTransformer

    if dtype is not None and dtype not in FLOATS:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    fields, leaves = read_parameters(path, revision, token, cache_dir, offline, check)
    model = CausalTransformer(**fields.replace(scan_layers=scan_layers).kwargs())
    if not scan_layers:
        leaves = dict(_by_layer(leaves))
    check_leaves(model, {name: array.shape for name, array in leaves.items()}, str(path))
    place = _placement(mesh, shardings)
    params = {}
    for name, array in leaves.items():
        sharding = place(name, array.shape)
        if sharding is None:
            value = jax.device_put(array)
        elif sharding.is_fully_addressable and len(sharding.device_set) == 1:
            value = jax.device_put(array, sharding)
        else:
            value = jax.make_array_from_callback(array.shape, sharding, lambda at, array=array: array[at])
        target = _cast(name, array, dtype)
        params[name] = value if target is None else value.astype(target)
    return model, {"params": nested(params)}


def read_parameters(
    path: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    check: bool = False,
) -> tuple[DecoderFields, dict[str, np.ndarray]]:
    """(decoder fields, parameter path -> array) of banks or of a checkpoint, banked; arrays alias files where they
    can. Codes are decoded to their logical dtype. check: as `load` has it. Imports no JAX."""
    if is_bank_directory(Path(path).expanduser()):
        banks = open_banks(path, private=True)
        if check and (damaged := check_banks(banks)):
            raise FindingsError(str(path), damaged)
        return banks.manifest.fields, read_banks(banks)
    if check:
        raise ConversionError(f"{path}: has no checksums to check; import it, and load the banks")
    plan = plan_import(open_source(path, revision, token, cache_dir, offline), quantized="decode")
    return plan.fields, assemble(plan)


def assemble(plan: ImportPlan, threads: int | None = None) -> dict[str, np.ndarray]:
    """Parameter path -> array of what an import by `plan` would store, in memory."""
    maps = ShardMaps(plan.source, private=True)

    def one(key: tuple[str, str]) -> np.ndarray:
        bank, name = key
        tensor = stored[key]
        parts = planned_parts(plan, maps, plan.copies[key])
        if len(parts) == 1 and parts[0].view.whole:
            whole = parts[0].read()
            if isinstance(whole, np.ndarray) and whole.dtype == NUMPY[tensor.dtype] and whole.flags.c_contiguous:
                return whole.reshape(tensor.shape)
        return gather(tensor.shape, NUMPY[tensor.dtype], parts, f"{bank}/{name}")

    stored = {(tensor.bank, tensor.key): tensor for tensor in plan.layout.tensors}
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return {parameter_path(*key): array for key, array in zip(stored, pool.map(one, stored), strict=True)}


def _by_layer(leaves: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in leaves.items():
        bank, _, below = name.partition("/")
        layers = group_layers(bank)
        if layers is None or len(layers) == 1:
            yield name, array
        else:
            yield from ((f"layers_{layer}/{below}", array[row]) for row, layer in enumerate(layers))


def check_leaves(model: CausalTransformer, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises FindingsError naming every path at which `shapes` is not the tree of `model.init`, leaf for leaf."""
    import jax
    import jax.numpy as jnp

    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    wanted = dict(_shapes_by_layer({path: tuple(leaf.shape) for path, leaf in flatten(tree)}))
    held = dict(_shapes_by_layer(shapes))
    fix = "the family's rules and the decoder disagree"
    findings = []
    for path in sorted(set(wanted) | set(held)):
        if wanted.get(path) != held.get(path):
            found, needed = (
                f"shape {list(side[path])}" if path in side else "nothing there" for side in (held, wanted)
            )
            findings.append(Finding(f"parameter {path}", found, needed, fix))
    if findings:
        raise FindingsError(where, findings)


def _shapes_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, shape in shapes.items():
        bank, _, below = path.partition("/")
        layers = group_layers(bank)
        if layers is None or len(layers) == 1 or shape[:1] != (len(layers),):
            yield path, shape
        else:
            yield from ((f"layers_{layer}/{below}", shape[1:]) for layer in layers)


def _cast(path: str, array: np.ndarray, dtype: str | None) -> np.dtype | None:
    """What a parameter is cast to on request, None to leave it."""
    floats = {NUMPY[name] for name in FLOATS.values()}
    if dtype is None or array.dtype not in floats or array.dtype == NUMPY[FLOATS[dtype]]:
        return None
    target = NUMPY[FLOATS[dtype]]
    layers = group_layers(path.partition("/")[0])
    axes = array.ndim - (layers is not None and len(layers) > 1)
    widens = np.promote_types(array.dtype, target) == target
    return target if widens or axes >= 2 else None


def _placement(mesh: Any, shardings: Shardings) -> Callable[[str, tuple[int, ...]], Any]:
    from jax.sharding import NamedSharding, PartitionSpec

    def resolved(value: Any) -> Any:
        if isinstance(value, PartitionSpec):
            if mesh is None:
                raise ConversionError("a PartitionSpec needs a mesh; give load the mesh, or NamedShardings")
            return NamedSharding(mesh, value)
        return value

    if shardings is None:
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return lambda path, shape: everywhere
    if isinstance(shardings, Mapping):
        tree = shardings["params"] if set(shardings) == {"params"} else shardings
        table = dict(flatten(tree))

        def look_up(path: str, shape: tuple[int, ...]) -> Any:
            if path not in table:
                raise ConversionError(f"parameter {path}: shardings names no sharding for it")
            return resolved(table[path])

        return look_up
    if callable(shardings):
        return lambda path, shape: resolved(shardings(path, shape))
    one = resolved(shardings)
    return lambda path, shape: one
