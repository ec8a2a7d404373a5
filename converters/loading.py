"""Loading: banks, a checkpoint directory or a hub id as a decoder and its variables.

The one module here that imports JAX, when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import group_layers
from ..families.errors import ConversionError, Finding, FindingsError
from .banks import check_banks, is_bank_directory, open_banks
from .copying import default_threads
from .dtypes import FLOATS, NUMPY
from .importing import planned_parts
from .layout import split_leaf
from .leaves import bank_parameters, parameter_path
from .plan import ImportPlan, plan_import
from .regions import Parameter, assembled_parameter, settled
from .shardings import Shardings, placements
from .source import ShardMaps, open_source
from .trees import flatten, nested

if TYPE_CHECKING:
    from ..dew_core.transformer import CausalTransformer


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
    precision by it. mesh, shardings: where parameters are put (`shardings.placements` says what may be given); a mesh
    alone replicates. Each process reads the bytes its own devices hold and no others.

    check: first read every file of a bank directory and compare its checksums, each process for itself.

    Raises ConversionError when the checkpoint cannot be read, FindingsError naming every parameter path that is not
    the decoder's own, and under `check` every tensor and file whose bytes are not those that were written.
    """
    from ..dew_core.transformer import CausalTransformer

    if dtype is not None and dtype not in FLOATS:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    decoder, found = open_parameters(path, revision, token, cache_dir, offline, check)
    model = CausalTransformer(**decoder.replace(scan_layers=scan_layers).kwargs())
    if not scan_layers:
        found = dict(_by_layer(found))
    check_leaves(model, {name: item.shape for name, item in found.items()}, str(path))
    places = placements(mesh, shardings, {name: item.shape for name, item in found.items()})

    def one(name: str) -> Any:
        return _put(found[name], places[name], _cast(name, found[name], dtype))

    with ThreadPoolExecutor(default_threads()) as pool:
        params = dict(zip(found, pool.map(one, found), strict=True))
    return model, {"params": nested(params)}


def _put(parameter: Parameter, sharding: Any, target: np.dtype | None) -> Any:
    """A parameter as an array of JAX's, each region read once however many devices of this process hold it."""
    import jax

    if sharding is None:
        value = jax.device_put(parameter.whole())
        return value if target is None else value.astype(target)
    regions: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(parameter.shape).items():
        region = settled(index, parameter.shape)
        key = tuple((item.start, item.stop) for item in region)
        if key not in regions:
            regions[key] = parameter.read(region)
        here = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        piece = jax.device_put(regions[key], here)
        # Cast by one device alone: a computation of all processes would have to be begun by all in one order.
        pieces.append(piece if target is None else piece.astype(target))
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, pieces)


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
    decoder, found = open_parameters(path, revision, token, cache_dir, offline, check)
    with ThreadPoolExecutor(default_threads()) as pool:
        return decoder, dict(zip(found, pool.map(Parameter.whole, found.values()), strict=True))


def open_parameters(
    path: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    check: bool = False,
) -> tuple[DecoderFields, dict[str, Parameter]]:
    """As `read_parameters`, with parameters that are not read yet."""
    if is_bank_directory(Path(path).expanduser()):
        banks = open_banks(path, private=True)
        if check and (damaged := check_banks(banks)):
            raise FindingsError(str(path), damaged)
        return banks.manifest.fields, bank_parameters(banks)
    if check:
        raise ConversionError(f"{path}: has no checksums to check; import it, and load the banks")
    plan = plan_import(open_source(path, revision, token, cache_dir, offline), quantized="decode")
    return plan.fields, planned_parameters(plan)


def planned_parameters(plan: ImportPlan) -> dict[str, Parameter]:
    """Parameter path -> parameter of what an import by `plan` would store."""
    maps = ShardMaps(plan.source, private=True)

    def one(bank: str, key: str, dtype: str, shape: tuple[int, ...]) -> Parameter:
        copies = plan.copies[bank, key]
        return assembled_parameter(shape, NUMPY[dtype], lambda: planned_parts(plan, maps, copies), f"{bank}/{key}")

    return {
        parameter_path(item.bank, item.key): one(item.bank, item.key, item.dtype, item.shape)
        for item in plan.layout.tensors
    }


def _by_layer(found: Mapping[str, Parameter]) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in found.items():
        bank, _, below = name.partition("/")
        layers = group_layers(bank)
        if layers is None or len(layers) == 1:
            yield name, parameter
        else:
            yield from ((f"layers_{layer}/{below}", parameter.row(row)) for row, layer in enumerate(layers))


def check_leaves(model: CausalTransformer, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises FindingsError naming every path at which `shapes` is not the tree of `model.init`, leaf for leaf."""
    held = dict(_shapes_by_layer(shapes))
    if held == _repeated_shapes(model):
        return
    wanted = init_shapes(model)
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


def init_shapes(model: CausalTransformer) -> dict[str, tuple[int, ...]]:
    """Parameter path, layer by layer -> shape, of `model.init`."""
    import jax
    import jax.numpy as jnp

    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return dict(_shapes_by_layer({path: tuple(leaf.shape) for path, leaf in flatten(tree)}))


def _repeated_shapes(model: CausalTransformer) -> dict[str, tuple[int, ...]] | None:
    """The shapes of `model.init` from its first layers, as many as hold one of each spec: layers of equal specs have
    parameters of equal shapes, and tracing all of them would take longer than loading. None when the model cannot be
    cut there."""
    specs = model.plan.specs
    first = [specs.index(spec) for spec in specs]
    count = max(first, default=0) + 1
    if count == len(specs):
        return None
    lists = {f.name: getattr(model, f.name) for f in fields(DecoderFields) if hasattr(model, f.name)}
    cut = {name: value[:count] for name, value in lists.items() if _is_list(value) and len(value) == len(specs)}
    if model.mixture is not None:
        below = {name: _below(getattr(model.mixture, name), count) for name in ("layers", "hash_layers")}
        cut["mixture"] = replace(model.mixture, **below)
    try:
        small = model.clone(num_layers=count, **cut)
        if small.plan.specs != specs[:count]:
            return None
        shapes = init_shapes(small)
    except ValueError:
        return None
    top = {path: shape for path, shape in shapes.items() if split_leaf(path)[0] is None}
    layers: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for path, shape in shapes.items():
        layer, below = split_leaf(path)
        if layer is not None:
            layers.setdefault(layer, []).append((below, shape))
    for index, like in enumerate(first):
        top |= {f"layers_{index}/{below}": shape for below, shape in layers.get(like, ())}
    return top


def _below(layers: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
    return None if layers is None else tuple(layer for layer in layers if layer < count)


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and not hasattr(value, "_fields")


def _shapes_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, shape in shapes.items():
        bank, _, below = path.partition("/")
        layers = group_layers(bank)
        if layers is None or len(layers) == 1 or shape[:1] != (len(layers),):
            yield path, shape
        else:
            yield from ((f"layers_{layer}/{below}", shape[1:]) for layer in layers)


def _cast(path: str, parameter: Parameter, dtype: str | None) -> np.dtype | None:
    """What a parameter is cast to on request, None to leave it."""
    floats = {NUMPY[name] for name in FLOATS.values()}
    if dtype is None or parameter.dtype not in floats or parameter.dtype == NUMPY[FLOATS[dtype]]:
        return None
    target = NUMPY[FLOATS[dtype]]
    layers = group_layers(path.partition("/")[0])
    axes = len(parameter.shape) - (layers is not None and len(layers) > 1)
    widens = target.itemsize > parameter.dtype.itemsize  # between bfloat16 and float16 neither holds the other
    return target if widens or axes >= 2 else None
