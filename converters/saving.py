"""Saving: changed weights as a bank directory, with names, config and side files from the checkpoint they began as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..dew_core.fields import DecoderFields
from ..families.errors import Finding, FindingsError
from ..families.rules import View, leaf_shapes
from .banks import Banks, is_bank_directory, open_banks
from .checksums import Checksums
from .codecs import Logical
from .copying import Part
from .dtypes import safetensors_dtype
from .exporting import logical_placements, logical_tensors
from .importing import carried_job, copy_source, fill_carried, manifest_of
from .layout import CARRIED, Layout, by_bank, file_name, lay_out_leaves
from .manifest import MANIFEST, Manifest
from .parts import whole_tensor
from .plan import ImportPlan, plan_import
from .replacing import BANKS
from .safetensors_files import TensorEntry, TensorSpec, lay_out
from .source import ShardMaps, Source, open_source
from .staging import copy_file, output_path, refuse_output, staged, write_bytes
from .trees import LeafArray, layer_leaves
from .writing import FileJob, Progress, raw_part, write_files

CHANGED = "the weights were saved from a model"
RUNTIME = (
    "attention_impl",
    "bank_layers",
    "depth_scaled_init",
    "dropout_rate",
    "dtype",
    "force_fp32_for_softmax",
    "initializer_range",
    "kv_cache",
    "max_seq_len",
    "precision",
    "remat",
    "scan_layers",
)
"""Decoder fields that a run sets for itself: they are not the checkpoint's, and are never written to it."""


@dataclass(frozen=True)
class _Like:
    """What `like` gives: a manifest without files, the leaves' shapes, where it is, how its parts are copied."""

    manifest: Manifest
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    root: Path
    copy_beside: Callable[[Path], Mapping[str, Checksums]]
    carried: Sequence[tuple[TensorSpec, Part]] = field(repr=False)


def save(
    path: str | Path,
    model: Any,
    variables: Any,
    like: str | Path | Banks | Source,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Banks:
    """Writes `variables` as a bank directory at `path`, which `export_checkpoint` turns into a checkpoint.

    like: the banks or checkpoint whose config, tensor names, dtypes and side files the export will have. model: the
    decoder the variables belong to; it must be the one `like` describes, run-time fields apart. None skips that.

    variables may be `{"params": tree}` or the tree; dicts, FrozenDicts or nnx states with boxed leaves; a bank a
    run, a subtree a layer, or a mix. Arrays may lie in memory any way. They are stored in their own dtype; an export
    gives each tensor the dtype it had. Rows of an embedding or head beyond the vocabulary, added for sharding, are
    left out.

    Raises FindingsError naming every leaf that is missing, not the decoder's (a LoRA's), or of another shape, and
    every array that lies on other processes. Raises ConversionError as an import does.
    """
    out = output_path(path)
    source = _like(like)
    _refuse_other_decoder(model, source.manifest.fields)
    leaves, findings = layer_leaves(variables)
    leaves = _fitted(leaves, source, findings)
    if findings:
        raise FindingsError(f"{out}: the variables are not those of {source.root}", findings)
    decoder = source.manifest.fields
    if model is not None:
        decoder = decoder.replace(bank_layers=model.bank_layers)
    layout = lay_out_leaves(
        decoder, {leaf: (safetensors_dtype(leaves[leaf].dtype), shape) for leaf, shape in source.shapes.items()}
    )
    refuse_output(out, overwrite, (source.root,), BANKS)
    jobs = [*_bank_jobs(layout, leaves), *carried_job(source.carried)]
    with staged(out, overwrite, BANKS, needed=sum(tensor.nbytes for tensor in layout.tensors)) as stage:
        checksums = write_files(stage.path, jobs, progress, threads)
        manifest = _manifest(source.manifest, decoder, checksums, source.copy_beside(stage.path))
        write_bytes(stage.path / MANIFEST, manifest.to_bytes())
    return open_banks(out)


def _like(like: str | Path | Banks | Source) -> _Like:
    if isinstance(like, Banks):
        return _like_banks(like)
    if isinstance(like, Source):
        return _like_plan(plan_import(like, quantized="decode"))
    if is_bank_directory(Path(like).expanduser()):
        return _like_banks(open_banks(like))
    return _like_plan(plan_import(open_source(like), quantized="decode"))


def _like_banks(banks: Banks) -> _Like:
    manifest = banks.manifest

    def copy_beside(stage: Path) -> dict[str, Checksums]:
        copied = {name: copy_file(banks.path / name, stage / name) for name in manifest.beside_files}
        # What was damaged since the import is not taken for whole by copying it.
        return {name: manifest.beside.get(name, found) for name, found in copied.items()}

    logical = logical_tensors(banks)
    carried = _decoded(manifest.carried, logical) if manifest.quantized == "keep" else manifest.carried
    parts = [_carried_part(banks, name, logical) for name in carried]
    shapes = leaf_shapes(logical_placements(banks, logical))
    return _Like(replace(manifest, carried=carried), shapes, banks.path, copy_beside, parts)


def _decoded(carried: Mapping[str, str], logical: Mapping[str, Logical]) -> dict[str, str]:
    """What is carried of a checkpoint whose quantised tensors are decoded."""
    return {name: carried[tensor.parts[0]] for name, tensor in logical.items() if tensor.parts[0] in carried}


def _carried_part(banks: Banks, name: str, logical: Mapping[str, Logical]) -> tuple[TensorSpec, Part]:
    held = banks.headers[file_name(CARRIED)].entries
    if name in held:
        tensor = logical.get(name)
        if banks.manifest.quantized != "keep" or tensor is None or not tensor.quantised:
            spec = TensorSpec(name, held[name].dtype, held[name].shape)
            return spec, raw_part(spec, lambda: banks.open(CARRIED).raw(name))
    tensor = logical[name]
    spec = TensorSpec(name, tensor.dtype, tensor.shape)
    return spec, Part(View.of(*spec.shape), lambda: whole_tensor(tensor, lambda part: banks.array(CARRIED, part)))


def _like_plan(plan: ImportPlan) -> _Like:
    source = plan.source
    maps = ShardMaps(source)
    return _Like(
        manifest_of(plan, {}, {}),
        leaf_shapes(plan.placements),
        source.root,
        lambda stage: copy_source(source, stage),
        fill_carried(plan, maps),
    )


def _refuse_other_decoder(model: Any, wanted: DecoderFields) -> None:
    """Raises FindingsError naming every decoder field in which `model` is not the decoder of the checkpoint."""
    if model is None:
        return
    runtime = {name: getattr(wanted, name) for name in RUNTIME}
    given = {f.name: getattr(model, f.name) for f in fields(DecoderFields) if hasattr(model, f.name)}
    ours = DecoderFields(**{**given, **runtime}).to_json()
    theirs = wanted.to_json()
    findings = [
        Finding(
            f"decoder field {name}",
            f"{ours.get(name, 'its default')!r} in the model",
            f"{theirs.get(name, 'its default')!r}, as the checkpoint has it",
            "save it like a checkpoint of that config",
        )
        for name in sorted(set(ours) | set(theirs))
        if ours.get(name) != theirs.get(name)
    ]
    if findings:
        raise FindingsError("the model is not the one of the checkpoint", findings)


def _fitted(leaves: Mapping[str, LeafArray], source: _Like, findings: list[Finding]) -> dict[str, LeafArray]:
    """The leaves cut to the checkpoint's vocabulary; what is missing, foreign or misshapen becomes a finding."""
    fitted = {}
    vocab = source.manifest.fields.vocab_size
    for leaf in sorted(set(leaves) - set(source.shapes)):
        findings.append(
            Finding(f"parameter {leaf}", "a leaf the checkpoint has no tensor for", "none", "merge it or drop it")
        )
    for leaf, shape in source.shapes.items():
        array = leaves.get(leaf)
        if array is None:
            findings.append(Finding(f"parameter {leaf}", "nothing", f"shape {list(shape)}", "save the whole tree"))
            continue
        if array.shape != shape and _is_padded(array.shape, shape, vocab):
            array = array.cut(shape)
        if array.shape != shape:
            findings.append(
                Finding(
                    f"parameter {leaf}", f"shape {list(array.shape)}", f"shape {list(shape)}", "it is another model's"
                )
            )
        fitted[leaf] = array
    return fitted


def _is_padded(given: tuple[int, ...], wanted: tuple[int, ...], vocab: int) -> bool:
    return len(given) == len(wanted) and all(
        a == b or (b == vocab and a > b) for a, b in zip(given, wanted, strict=True)
    )


def _bank_jobs(layout: Layout, leaves: Mapping[str, LeafArray]) -> list[FileJob]:
    held: dict[tuple[str, str], list[Part]] = {}
    for path, leaf in layout.leaves.items():
        part = Part(leaf.place(View.of(*leaf.shape)), leaves[path].read)
        held.setdefault((leaf.bank, leaf.key), []).append(part)

    def parts_of(bank: str) -> Callable[[TensorEntry], Sequence[Part]]:
        return lambda entry: held[bank, entry.name]

    return [
        FileJob(file_name(bank), lay_out(TensorSpec(t.key, t.dtype, t.shape) for t in tensors), parts_of(bank))
        for bank, tensors in by_bank(layout.tensors).items()
    ]


def _manifest(
    like: Manifest,
    decoder: DecoderFields,
    checksums: Mapping[str, Mapping[str, Checksums]],
    beside: Mapping[str, Checksums],
) -> Manifest:
    values = {f.name: getattr(like, f.name) for f in fields(Manifest)}
    values["fields"] = decoder
    values["quantized"] = None if like.quantized is None else "decode"
    values["coded"] = {}
    values["beside"] = beside
    values["inexact"] = tuple(dict.fromkeys((*like.inexact, CHANGED)))
    values["files"] = checksums
    return Manifest(**values)
