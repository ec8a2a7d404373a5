"""`verify`: the same weights on both sides, every check, one report."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..converters.banks import Banks, is_bank_directory, open_banks
from ..converters.dtypes import FLOATS
from ..converters.loading import load
from ..converters.plan import ImportPlan, plan_import
from ..converters.source import Source, open_source
from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan
from ..families.errors import ConversionError
from ..families.registry import find
from ..families.rules import leaf_shapes
from . import checks as run
from .choice_checks import routing, selection
from .decoders import JaxDecoder, own_leaves
from .fixtures import write_checkpoint
from .probes import SHORTEST, Probe, make_probe, prompt_probe
from .references import chooses_keys, load_reference
from .render_text import CHECKS as TITLES
from .results import CheckResult, LayerError, Report
from .round_trip import round_trip

CHECKS = tuple(TITLES)
"""The checks, in the order they run and are told in."""
PACKAGES = ("dewconv", "jax", "jaxlib", "flax", "torch", "transformers", "numpy", "safetensors", "ml-dtypes")
DTYPE_OF = {stored: name for name, stored in FLOATS.items()}

Progress = Callable[[str], None]
"""Told the name of each step as it starts."""


def verify(
    target: str | Path | None = None,
    *,
    against: str | Path | None = None,
    checks: Iterable[str] | str | None = None,
    tokens: int | None = None,
    prompt: str | None = None,
    seed: int = 0,
    dtype: str | None = None,
    family: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Verify a bank directory, a Hugging Face directory or hub id, or a family's tiny variant.

    target: what JAX runs; of a bank directory torch runs the source it came from, or `against`. Without a target,
    `family` and `variant` name a tiny checkpoint that is written for the purpose.
    checks: one or some of `CHECKS`, all when unset. tokens: length of the probe, or of nothing with a `prompt` (a
    text, which needs the source's tokenizer.json). dtype: the one compute dtype to compare in; unset, float32 and then
    the checkpoint's own.

    Raises ConversionError when there is nothing to compare with (no source, no weights, no such class), and for
    unknown checks or variants.
    """
    started = time.monotonic()
    wanted = _wanted(checks)
    told = progress or (lambda step: None)
    with _checkpoint(target, against, family, variant, seed, revision, token, cache_dir, offline) as case:
        plan, banks = case.plan, case.banks
        fields = case.fields
        probe = _probe(case, tokens, prompt, seed)
        _refuse_beyond_memory(fields, probe)
        results: list[CheckResult] = []
        layers: dict[str, tuple[LayerError, ...]] = {}
        notices = [*plan.warnings, *plan.notices, *probe.notices]
        for compute in _dtypes(plan, dtype):
            told(f"{compute}: loading")
            torch_side = load_reference(plan.source.root, plan.family, plan.source.config, compute)
            widened = compute if compute == "float32" or dtype else None
            # The checksums once, before anything is computed: damage is not to be taken for another model.
            _, variables = load(case.jax_path, dtype=widened, check=banks is not None and not results)
            decoder = JaxDecoder(fields, variables["params"], compute, quick=family is not None)
            comparison = run.Comparison(torch_side, decoder, probe, plan.placements, plan.spelling.of)
            if comparison.repeats:
                notices.append(
                    f"in {compute} both sides take the experts and keys torch chose; routing and selection compare the "
                    "choices"
                    if chooses_keys(fields)
                    else f"in {compute} both sides take the experts torch chose; routing compares the choices"
                )
            for name in wanted if not comparison.repeats else _with_choices(wanted):
                told(f"{compute}: {name}")
                results += _one(comparison, name, layers)
            del torch_side, variables, decoder, comparison
            gc.collect()
        if "round_trip" in wanted:
            told("round trip")
            results.append(round_trip(plan.source, plan.family, banks))
        return Report(
            target=case.label,
            family=plan.family.name,
            variant=variant,
            model=_model(plan, case),
            checks=tuple(results),
            layers=layers,
            versions=versions(),
            probe=probe.summary(),
            notices=tuple(dict.fromkeys(notices)),
            seconds=time.monotonic() - started,
        )


def _wanted(checks: Iterable[str] | str | None) -> tuple[str, ...]:
    named = CHECKS if checks is None else (checks,) if isinstance(checks, str) else tuple(checks)
    unknown = [name for name in named if name not in CHECKS]
    if unknown:
        raise ConversionError(f"no check is called {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    return tuple(name for name in CHECKS if name in named)


def _with_choices(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The checks, and `routing` and `selection` with any that repeats choices: nothing else would judge them."""
    judges = ("routing", "selection") if wanted != ("round_trip",) else ()
    return tuple(name for name in CHECKS if name in wanted or name in judges)


def _one(c: run.Comparison, name: str, layers: dict[str, tuple[LayerError, ...]]) -> list[CheckResult]:
    """One check in one dtype, in every layout it runs in."""
    match name:
        case "logits":
            return [run.logits(c), run.logits_unrolled(c)]
        case "layers":
            result, layers[c.dtype] = run.layers(c)
            return [result]
        case "rounding":
            return [run.rounding(c)]
        case "routing":
            return [routing(c)] if c.jax.fields.mixture is not None else []
        case "selection":
            return [selection(c)] if c.torch.indexers or chooses_keys(c.jax.fields) else []
        case "decode":
            return [run.decode(c)]
        case "padding":
            return [run.padding(c)]
        case "greedy":
            return [run.greedy(c)]
        case "gradients":
            if c.dtype != "float32":
                return [CheckResult(name, c.dtype, None, note="gradients are compared in float32")]
            return [run.gradients(c)]
    return []


@dataclass(frozen=True)
class _Case:
    """What is compared: the plan of the torch side's source, and the decoder and weights of JAX's."""

    label: str
    plan: ImportPlan
    fields: DecoderFields
    jax_path: Path
    banks: Banks | None
    shortest: int


@contextmanager
def _checkpoint(
    target: str | Path | None,
    against: str | Path | None,
    family: str | None,
    variant: str | None,
    seed: int,
    revision: str | None,
    token: str | None,
    cache_dir: str | Path | None,
    offline: bool,
) -> Iterator[_Case]:
    if (target is None) == (family is None):
        raise ConversionError("name either a target or a family with a variant")
    if family is not None:
        owner = find(family)
        chosen = next(iter(owner.variants)) if variant is None else variant
        if chosen not in owner.variants:
            raise ConversionError(f"{owner.name} has no variant {chosen!r}; it has {', '.join(owner.variants)}")
        with TemporaryDirectory(prefix="dewconv-variant-") as scratch:
            record = owner.variants[chosen]
            path = write_checkpoint(Path(scratch) / chosen, record, owner, seed)
            plan = plan_import(replace(open_source(path), label=f"{owner.name} variant {chosen}"))
            yield _Case(f"{owner.name}/{chosen}", plan, plan.fields, path, None, record.length)
        return
    where = Path(str(target)).expanduser()
    if is_bank_directory(where):
        banks = open_banks(where)
        plan = plan_import(_source_of(banks, against, token, cache_dir, offline))
        _refuse_others(str(target), banks.manifest.family, banks.manifest.fields, plan)
        yield _Case(str(target), plan, banks.manifest.fields, where, banks, SHORTEST)
        return
    own = plan_import(open_source(str(target), revision, token, cache_dir, offline))
    plan = own
    if against is not None:
        plan = plan_import(open_source(against, None, token, cache_dir, offline))
        _refuse_others(str(target), own.family.name, own.fields, plan)
    yield _Case(str(target), plan, own.fields, own.source.root, None, SHORTEST)


def _refuse_others(target: str, family: str, fields: DecoderFields, plan: ImportPlan) -> None:
    """Raises ConversionError when the reference's weights are not those of a decoder of `fields`: there is nothing to
    compare."""
    if family != plan.family.name:
        raise ConversionError(
            f"{target} is of the family {family}, {plan.source.label} of {plan.family.name}: they are not one model"
        )
    if fields == plan.fields:
        return  # one decoder, and its tree need not be traced to tell
    ours, theirs = own_leaves(fields), leaf_shapes(plan.placements)
    apart = [leaf for leaf in sorted(ours.keys() | theirs.keys()) if ours.get(leaf) != theirs.get(leaf)]
    if apart:
        found, needed = (_shape(side, apart[0]) for side in (ours, theirs))
        raise ConversionError(
            f"{target} and {plan.source.label} are not one model: {apart[0]} is {found} in the first and {needed} in "
            f"the second, and {len(apart) - 1} more differ; name the checkpoint that {target} came from with --against"
        )


def _shape(leaves: Mapping[str, tuple[int, ...]], leaf: str) -> str:
    return str(list(leaves[leaf])) if leaf in leaves else "absent"


def _refuse_beyond_memory(fields: DecoderFields, probe: Probe) -> None:
    """Raises ConversionError for a probe whose attention alone is more than this machine holds.

    Eager attention has every head's scores at once, [rows, heads, tokens, tokens] in float32, and as many masked,
    normalised and cast.
    """
    needed = 4 * 4 * probe.rows * fields.num_heads * probe.length**2
    held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > held:
        raise ConversionError(
            f"a probe of {probe.length} tokens needs {needed / 1e9:,.0f} GB for attention's scores alone and this "
            f"machine has {held / 1e9:,.0f}; ask for fewer with --tokens"
        )


def _source_of(
    banks: Banks, against: str | Path | None, token: str | None, cache_dir: str | Path | None, offline: bool
) -> Source:
    if against is not None:
        return open_source(against, None, token, cache_dir, offline)
    record = banks.manifest.source
    path = record.get("path")
    # The record is UTF-8, whatever the encoding of file names is here.
    if path and (at := Path(os.fsdecode(path.encode()))).is_dir():
        source = open_source(at)
        # What was streamed left its weights on the hub.
        if source.has_weights or not record.get("repo"):
            return source
    if record.get("repo"):
        return open_source(record["repo"], record.get("revision"), token, cache_dir, offline)
    raise ConversionError(
        f"{banks.path}: the source these banks came from ({record.get('name')}) is not at {path}; "
        "name it with --against"
    )


def _probe(case: _Case, tokens: int | None, prompt: str | None, seed: int) -> Probe:
    plan = case.plan
    if prompt is None:
        return make_probe(plan.fields, plan.source.config, tokens=tokens, shortest=case.shortest, seed=seed)
    path = plan.source.root / "tokenizer.json"
    if not path.is_file():
        raise ConversionError(f"{plan.source.label}: has no tokenizer.json, which a prompt needs; leave the prompt out")
    from tokenizers import Tokenizer

    return prompt_probe(plan.fields, Tokenizer.from_file(str(path)).encode(prompt).ids[:tokens])


def _dtypes(plan: ImportPlan, dtype: str | None) -> tuple[str, ...]:
    """float32, then the dtype most of the checkpoint's elements are stored in; or the one asked for."""
    if dtype is not None:
        if dtype not in FLOATS:
            raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
        return (dtype,)
    sizes = _sizes(plan)
    most = DTYPE_OF.get(max(sizes, key=lambda name: sizes[name]), "float32")
    return ("float32",) if most == "float32" else ("float32", most)


def _sizes(plan: ImportPlan) -> dict[str, int]:
    """Parameters by dtype, a quantised tensor's by that of its values."""
    sizes: dict[str, int] = {}
    for place in plan.placements:
        dtype = plan.tensors[place.source].dtype
        sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(place.source_view.shape))
    return sizes


def _model(plan: ImportPlan, case: _Case) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for spec in layer_plan(plan.fields).specs:
        kinds[spec.layer_type] = kinds.get(spec.layer_type, 0) + 1
    dtypes = _sizes(plan)
    return {
        "parameters": sum(dtypes.values()),
        "layers": plan.fields.num_layers,
        "kinds": kinds,
        "dtypes": dtypes,
        "features": plan.fields.emb_features,
        "vocab": plan.fields.vocab_size,
        "source": plan.source.repo or plan.source.label,
        "revision": plan.source.commit,
        "target": "banks" if case.banks is not None else "checkpoint",
    }


def versions() -> dict[str, str]:
    """The versions of what takes part, Python's included."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
