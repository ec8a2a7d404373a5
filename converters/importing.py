"""Import: one copy, from the source's map straight into the bank files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..families.errors import ConversionError, Finding, FindingsError, decoded
from ..families.rules import View
from .banks import Banks, open_banks
from .checksums import FAST, Checksums, of_bytes, wanted
from .copying import Part
from .decoding import INT4
from .dtypes import as_bits
from .int4 import SHAPE
from .layout import CARRIED, HEADERS, SOURCE, by_bank, file_name
from .manifest import MANIFEST, Manifest
from .parts import Coding, PartPlacement, decoded_part, source_part, whole_tensor
from .plan import ImportPlan, PlannedCopy, plan_import
from .replacing import BANKS
from .resuming import Identity
from .safetensors_files import TensorEntry, TensorSpec, lay_out
from .source import CONFIG, INDEX, ShardMaps, Source
from .staging import copy_file, output_path, refuse_output, staged, write_bytes
from .writing import FileJob, Progress, raw_part, write_files

PROVEN_GATE = 3
"""The gate a family must have passed for its checkpoints to be imported unasked: export is byte-exact."""

GateOf = Callable[[str], int | None]
"""Family name -> the highest gate its card shows, None without a card."""


def import_checkpoint(
    source: Source,
    out: str | Path,
    *,
    dtype: str = "keep",
    bank_layers: int | None = None,
    text_only: bool = False,
    quantized: str = "keep",
    overwrite: bool = False,
    gate_of: GateOf | None = None,
    unverified: bool = False,
    sha256: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Banks:
    """Plans the import of `source` (`plan_import`) and carries it out at `out` (`run_import`).

    gate_of: how far a family is proven; when given, a family below G3 is refused unless `unverified`.
    Raises ConversionError, with nothing left at `out` that was not there.
    """
    plan = plan_import(source, dtype=dtype, bank_layers=bank_layers, text_only=text_only, quantized=quantized)
    if gate_of is not None and not unverified:
        refuse_unproven(plan.family.name, gate_of(plan.family.name))
    return run_import(plan, out, overwrite=overwrite, sha256=sha256, resume=resume, progress=progress, threads=threads)


def refuse_unproven(family: str, gate: int | None) -> None:
    """Raises ConversionError for a family whose card does not show G3."""
    if gate is None or gate < PROVEN_GATE:
        status = "has no card" if gate is None else f"has passed G{gate} only"
        raise ConversionError(
            f"family {family} {status}: its export is not proven byte-exact (G{PROVEN_GATE}); "
            "import it unverified (--unverified) to go on all the same"
        )


def run_import(
    plan: ImportPlan,
    out: str | Path,
    *,
    overwrite: bool = False,
    sha256: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Banks:
    """Writes the banks of `plan` at `out`, which exists whole afterwards or not at all.

    An existing `out` stays whole until the new one is complete, and is refused without `overwrite`. sha256: the
    manifest has the SHA-256 of every tensor and file beside its xxh3. resume: what this import fails to finish stays,
    and what an earlier one left is gone on from; the result is the same byte for byte.

    Raises ConversionError, also when a source tensor's declared zero padding is not zero, a packed one's shape is not
    what is recorded beside it, or what an earlier import left is of another source or of other options.
    """
    out = output_path(out)
    refuse_output(out, overwrite, (plan.source.root,), BANKS)
    maps = ShardMaps(plan.source)
    _check_zeros(plan, maps)
    _check_shapes(plan, maps)
    jobs = [*_bank_jobs(plan, maps), *carried_job(fill_carried(plan, maps))]
    algorithms = wanted(sha256)
    needed = plan.bank_bytes + sum(item.size for item in plan.source.side_files)
    with staged(
        out, overwrite, BANKS, needed=needed, identity=_identity(plan, jobs, algorithms), resume=resume
    ) as stage:
        checksums = write_files(
            stage.path,
            jobs,
            progress,
            threads or plan.source.shards.threads,
            algorithms=algorithms,
            journal=stage.journal,
        )
        beside = copy_source(plan.source, stage.path, algorithms)
        write_bytes(stage.path / MANIFEST, manifest_of(plan, checksums, beside).to_bytes())
    return open_banks(out)


def _identity(plan: ImportPlan, jobs: Sequence[FileJob], algorithms: Sequence[str]) -> Identity:
    """What this import makes of what. A file of the source is the same while its size is and its etag; where it has
    none, while its header's bytes (a text's bytes) and its time of change are."""
    source = plan.source
    texts = {CONFIG: source.config_text, INDEX: source.index_text or b""}
    texts |= {shard: header.text for shard, header in source.headers.items()}
    record = _source_record(source)
    files: dict[str, Any] = {}
    for name, known in record["files"].items():
        text = of_bytes(texts[name])[FAST] if name in texts else None
        changed = None if known["etag"] else (source.root / name).stat().st_mtime_ns
        files[name] = {**known, "text": text, "changed": changed}
    options = {"dtype": plan.dtype, "quantized": plan.quantized, "text_only": plan.text_only}
    return {
        "options": {**options, "checksums": list(algorithms), "bank_layers": plan.fields.bank_layers},
        "source": files,
        "files": {job.name: of_bytes(job.header.text)[FAST] for job in jobs},
    }


def copy_source(source: Source, stage: Path, algorithms: Sequence[str] = (FAST,)) -> dict[str, Checksums]:
    """Writes what a bank directory keeps of its source beside weights: config, index, side files, headers. Returns
    file -> checksums."""
    texts = {f"{SOURCE}/{CONFIG}": source.config_text}
    if source.index_text is not None:
        texts[f"{SOURCE}/{INDEX}"] = source.index_text
    texts |= {f"{HEADERS}/{shard}.json": header.text for shard, header in source.headers.items()}
    copied: dict[str, Checksums] = {name: write_bytes(stage / name, text, algorithms) for name, text in texts.items()}
    for item in source.side_files:
        name = f"{SOURCE}/{item.path}"
        copied[name] = copy_file(source.root / item.path, stage / name, algorithms)
    return copied


def manifest_of(
    plan: ImportPlan, checksums: Mapping[str, Mapping[str, Checksums]], beside: Mapping[str, Checksums]
) -> Manifest:
    """The manifest of banks laid out by `plan`. checksums, beside: of tensors and of the files beside them."""
    return Manifest(
        family=plan.family.name,
        model_type=plan.model_type,
        fields=plan.fields,
        source=_source_record(plan.source),
        spelling=plan.spelling,
        dtype=plan.dtype,
        inexact=plan.inexact,
        text_only=plan.text_only,
        codec=plan.codec.name,
        quantized=plan.quantized,
        coded=_coded(plan),
        files=checksums,
        beside=beside,
        aliases={alias.name: alias.of for alias in plan.aliases},
        carried={item.name: item.why for item in plan.carried},
        zeros=tuple(dict.fromkeys(name for name, _ in plan.zeros)),
        side_files=tuple(item.path for item in plan.source.side_files),
    )


def _coded(plan: ImportPlan) -> dict[str, dict[str, Coding]]:
    coded: dict[str, dict[str, Coding]] = {}
    for path, coding in plan.codings.items():
        leaf = plan.layout.leaves[path]
        coded.setdefault(file_name(leaf.bank), {})[leaf.key] = coding if leaf.rows == 1 else coding.stack(leaf.rows)
    return coded


def _source_record(source: Source) -> dict[str, Any]:
    names = [CONFIG, *([INDEX] if source.index_text is not None else []), *source.headers]
    names += [item.path for item in source.side_files]
    return {
        "name": source.repo or decoded(source.root.resolve().name),
        "repo": source.repo,
        "revision": source.commit,
        "path": decoded(str(source.root.resolve())),
        "files": {name: {"size": source.size(name), "etag": source.etag(name)} for name in names},
        "shards": list(source.headers),
        "index": source.index_text is not None,
    }


def _bank_jobs(plan: ImportPlan, maps: ShardMaps) -> list[FileJob]:
    jobs = []
    for bank, tensors in by_bank(plan.layout.tensors).items():
        header = lay_out(TensorSpec(tensor.key, tensor.dtype, tensor.shape) for tensor in tensors)
        jobs.append(FileJob(file_name(bank), header, _parts_of(plan, maps, bank)))
    return jobs


def _parts_of(plan: ImportPlan, maps: ShardMaps, bank: str) -> Callable[[TensorEntry], tuple[Part, ...]]:
    return lambda entry: planned_parts(plan, maps, plan.copies[bank, entry.name])


def planned_parts(plan: ImportPlan, maps: ShardMaps, copies: tuple[PlannedCopy, ...]) -> tuple[Part, ...]:
    """The parts of a stored tensor, read from the source's maps; quantised tensors of a decoding plan as values."""
    read = stored_reader(plan, maps)

    def part(copy: PlannedCopy) -> Part:
        tensor = plan.tensors.get(copy.source) if plan.quantized == "decode" else None
        if tensor is not None and tensor.quantised:
            decoded = decoded_part(copy.place, tensor, read)
            return Part(copy.at.place(decoded.view), decoded.read)
        return Part(copy.view, lambda: source_part(copy.place, taken(copy)))

    def taken(copy: PlannedCopy) -> np.ndarray:
        # What is repeated is read here; the rest where it is copied, a piece at a time.
        repeated = isinstance(copy.place, PartPlacement) and copy.place.repeat
        file = maps[plan.source.tensors[copy.source].file]
        return file.view(copy.source) if repeated else file.unread(copy.source)

    return tuple(map(part, copies))


def stored_reader(plan: ImportPlan, maps: ShardMaps) -> Callable[[str], np.ndarray]:
    """What maps a stored tensor of the source by name."""
    return lambda name: maps[plan.source.tensors[name].file].view(name)


def fill_carried(plan: ImportPlan, maps: ShardMaps) -> list[tuple[TensorSpec, Part]]:
    """Each carried tensor and what fills it: its bytes, or the values of a quantised one of a decoding plan."""
    result = []
    for item in plan.carried:
        spec = TensorSpec(item.name, *plan.describe(item.name))
        tensor = plan.tensors.get(item.name)
        if plan.quantized == "decode" and tensor is not None and tensor.quantised:
            read = stored_reader(plan, maps)
            result.append((spec, Part(View.of(*spec.shape), lambda t=tensor, r=read: whole_tensor(t, r))))
        else:
            file = maps[plan.source.tensors[item.name].file]
            result.append((spec, raw_part(spec, lambda f=file, n=item.name: f.raw(n))))
    return result


def carried_job(carried: Sequence[tuple[TensorSpec, Part]]) -> list[FileJob]:
    """The file of the carried tensors, none when there are none."""
    parts = {spec.name: (part,) for spec, part in carried}
    header = lay_out(spec for spec, _ in carried)
    return [FileJob(file_name(CARRIED), header, lambda entry: parts[entry.name])] if carried else []


def _check_shapes(plan: ImportPlan, maps: ShardMaps) -> None:
    """Raises FindingsError naming every packed tensor whose own record of its shape says another."""
    findings = []
    for name, tensor in plan.tensors.items():
        for beside in tensor.beside if tensor.format == INT4 else ():
            if not beside.endswith(SHAPE):
                continue
            said = maps[plan.source.tensors[beside].file].view(beside).tolist()
            if said != list(tensor.shape):
                fix = "the file is damaged or is another format's"
                findings.append(Finding(f"tensor {beside}", f"{said}", f"{list(tensor.shape)}, as {name} is", fix))
    if findings:
        raise FindingsError(plan.source.label, findings)


def _check_zeros(plan: ImportPlan, maps: ShardMaps) -> None:
    """Raises FindingsError naming every tensor whose declared padding holds a bit that is not zero."""
    findings = []
    for name, view in plan.zeros:
        array = maps[plan.source.tensors[name].file].view(name)
        if as_bits(view.apply(array)).any():
            findings.append(
                Finding(f"tensor {name}", "values in its padding", "zeros", "the family does not compute with them")
            )
    if findings:
        raise FindingsError(plan.source.label, findings)
