"""Export: banks back to a Hugging Face checkpoint, by the same rules read the other way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..families.errors import ConversionError, Finding, FindingsError, within
from ..families.family import Spelling
from ..families.rules import Placement, placements, settle
from ..families.spelling import TEXT_CONFIG
from .banks import BankCheck, Banks, check_beside
from .checksums import FAST, of_bytes
from .closing import respell_statements
from .codecs import Logical, stored_tensors
from .configs import index_text, resized_index, text_config, with_dtype, with_record, without_records
from .copying import Part
from .dtypes import numpy_dtype
from .layout import CARRIED, SOURCE, Layout, Leaf, is_part, lay_out_leaves, split_leaf
from .manifest import MANIFEST
from .manifest_checks import AGAIN
from .parts import expand, target_parts
from .plan import DTYPES, stored_dtype
from .quantisation import HF_QUANT, codec_of, read_hf_quant, record_of
from .replacing import checkpoints
from .resuming import Identity
from .safetensors_files import (
    Header,
    TensorEntry,
    TensorSpec,
    lay_out_in_order,
    read_header,
)
from .source import CONFIG, INDEX, SINGLE
from .staging import copy_file, output_path, refuse_output, staged, write_bytes
from .writing import FileJob, Progress, raw_part, write_files

DEFAULT_SHARD_BYTES = 50 * 10**9
"""The shard size of a layout that has to be made anew (transformers 5.24 `save_pretrained`)."""
UNCHECKED = (
    "the manifest has no checksums of the files beside the weights (config, tokenizer, headers), so they are not "
    "known to be the source's own"
)
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def shard_bytes(size: int | str) -> int:
    """A shard size in bytes: a number, or text as transformers takes it ("5GB" is 5 * 10^9, "5GiB" 5 * 2^30)."""
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        match = _SIZE.fullmatch(str(size).strip())
        if match is None:
            raise ConversionError(f"shard size {size!r} is not a size such as 5GB")
        value = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if value < 1:
        raise ConversionError(f"shard size {size!r} must be above 0")
    return value


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export will do.

    headers: shard -> the header it will have. tensors: every tensor of them by name. config: config.json's bytes.
    index: the index's bytes, None for a single file. side_files: copied from the banks. exact: tensors, shards and
    side files are the source's, byte for byte, as long as the banks' values are. notices: what is worth saying.
    """

    banks: Banks
    headers: Mapping[str, Header] = field(repr=False)
    tensors: Mapping[str, HeldTensor] = field(repr=False)
    config: bytes = field(repr=False)
    index: bytes | None = field(repr=False)
    side_files: tuple[str, ...]
    exact: bool
    notices: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(header.data_bytes for header in self.headers.values())

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: a row per tensor."""
        return {
            "banks": str(self.banks.path),
            "exact": self.exact,
            "bytes": self.weight_bytes,
            "shards": {
                name: [
                    {"tensor": e.name, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.nbytes}
                    for e in header.by_offset
                ]
                for name, header in self.headers.items()
            },
            "side_files": list(self.side_files),
            "notices": list(self.notices),
        }


def plan_export(
    banks: Banks,
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    text_only: bool = False,
) -> ExportPlan:
    """The plan that turns `banks` into a checkpoint.

    Without options it has the source's shards: the same names, dtypes, shapes, order and header bytes. dtype casts
    float matrices and says so in config.json. max_shard_size divides the tensors anew. text_only drops what is
    beside the decoder of a wrapper and writes the text half as a checkpoint of its own.

    Raises ConversionError for options that cannot be met, FindingsError when the banks do not hold what the
    family's rules need.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    cast = dtype is not None and dtype != "keep"
    wrapped = isinstance(banks.config.get(TEXT_CONFIG), Mapping)
    if text_only and not wrapped:
        raise ConversionError(f"{banks.path}: is a text-only checkpoint already; export it without text_only")
    text_only = text_only or (banks.manifest.text_only and wrapped)
    tensors = held_tensors(banks)
    if text_only:
        tensors = _text_half(banks, tensors)
    held_leaves(banks, tensors)
    chosen = banks.manifest.dtype if not cast else str(dtype)
    specs: dict[str, list[TensorSpec]] = {}
    for item in tensors:
        spec = TensorSpec(item.name, _export_dtype(item, chosen), item.entry.shape)
        specs.setdefault(item.shard, []).append(spec)
    size = None if max_shard_size is None else shard_bytes(max_shard_size)
    if text_only and size is None:
        size = DEFAULT_SHARD_BYTES
    headers, index = _shards(banks, specs, size)
    config = banks.config_text
    if text_only:
        config = text_config(config, banks.family)
    if banks.manifest.quantized == "decode":
        config = without_records(config)
    elif banks.manifest.quantized and text_only:
        config = with_record(config, record_of(banks.config) or {}, banks.manifest.spelling)
    if chosen != "keep":
        config = with_dtype(config, chosen)
    left = (*(IMAGE_FILES if text_only else ()), *((HF_QUANT,) if banks.manifest.quantized == "decode" else ()))
    count = sum(_export_dtype(item, chosen) != item.entry.dtype for item in tensors)
    kept = all(header is banks.source_headers.get(shard) for shard, header in headers.items())
    whole = kept and len(headers) == len(banks.manifest.shards)
    return ExportPlan(
        banks=banks,
        headers=headers,
        tensors={item.name: item for item in tensors},
        config=config,
        index=index,
        side_files=tuple(name for name in banks.manifest.side_files if name not in left),
        exact=whole and not banks.manifest.inexact and config == banks.config_text and bool(banks.manifest.beside),
        notices=(
            *banks.manifest.inexact,
            *((f"{count} matrices are cast to {chosen}",) if cast and count else ()),
            *(() if banks.manifest.beside else (UNCHECKED,)),
        ),
    )


def export_checkpoint(
    banks: Banks,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    text_only: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ExportPlan:
    """Plans the export of `banks` (`plan_export`) and carries it out at `out` (`run_export`)."""
    plan = plan_export(banks, dtype=dtype, max_shard_size=max_shard_size, text_only=text_only)
    run_export(plan, out, overwrite=overwrite, resume=resume, progress=progress, threads=threads)
    return plan


def run_export(
    plan: ExportPlan,
    out: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Writes the checkpoint of `plan` at `out`, which exists whole afterwards or not at all.

    The banks' checksums are taken as they are copied, and the headers of what was written are read again and held
    against the plan, before `out` appears. resume: as an import's (`importing.run_import`). Raises ConversionError, and
    FindingsError naming what is damaged.
    """
    out = output_path(out)
    banks = plan.banks
    replaceable = checkpoints({name: banks.path / SOURCE / name for name in plan.side_files})
    refuse_output(out, overwrite, (banks.path,), replaceable)
    altered = check_beside(banks)
    check = BankCheck(banks)
    needed = plan.weight_bytes + sum((banks.path / SOURCE / name).stat().st_size for name in plan.side_files)
    with staged(out, overwrite, replaceable, needed=needed, identity=_identity(plan), resume=resume) as work:
        stage = work.path
        write_files(stage, _jobs(plan, check), progress, threads, journal=work.journal)
        damaged = [*check.findings(threads), *altered]
        if damaged:
            raise FindingsError(str(banks.path), damaged)
        for name in plan.side_files:
            copy_file(banks.path / SOURCE / name, stage / name)
        _check_written(plan, stage)
        if plan.index is not None:
            write_bytes(stage / INDEX, plan.index)
        write_bytes(stage / CONFIG, plan.config)


def _identity(plan: ExportPlan) -> Identity:
    """What this export makes of what: the manifest has the checksums of all that is read, which every export checks."""
    return {
        "options": {"config": of_bytes(plan.config)[FAST], "index": of_bytes(plan.index or b"")[FAST]},
        "source": {MANIFEST: of_bytes(plan.banks.manifest.to_bytes())[FAST]},
        "files": {shard: of_bytes(header.text)[FAST] for shard, header in plan.headers.items()},
    }


@dataclass(frozen=True)
class HeldTensor:
    """A tensor to be exported as `name`: its shard and entry in the source, and where its values are."""

    name: str
    shard: str
    entry: TensorEntry
    places: tuple[Placement, ...]
    carried: bool
    matrix: bool


def held_tensors(banks: Banks) -> list[HeldTensor]:
    """Every tensor of the shards to be written, in the order of the source's data: the source's own, or under
    `quantized="decode"` its logical ones, each where its codes were."""
    manifest = banks.manifest
    logical = logical_tensors(banks)
    decoded = manifest.quantized == "decode"
    _refuse_unknown(banks, logical)
    aliases = {
        name: other
        for alias, of in manifest.aliases.items()
        for name, other in ([(alias, of)] if decoded else zip(logical[alias].parts, logical[of].parts, strict=True))
    }
    codes = {item.parts[0]: item for item in logical.values() if decoded and item.quantised}
    gone = {name for item in logical.values() if decoded for name in (*item.parts[1:], *item.beside)}
    places: dict[str, list[Placement]] = {}
    for place in _stored_placements(banks, logical):
        places.setdefault(place.source, []).append(place)
    tensors = []
    for shard, header in banks.source_headers.items():
        for entry in header.by_offset:
            if entry.name in gone:
                continue
            if entry.name in codes:
                spec = TensorSpec(codes[entry.name].name, codes[entry.name].dtype, codes[entry.name].shape)
                entry = TensorEntry(spec.name, spec.dtype, spec.shape, 0, spec.nbytes)
            held = places.get(aliases.get(entry.name, entry.name), [])
            matrix = any(len(place.leaf_view.base) >= 2 and not is_part(place.leaf) for place in held)
            carried = entry.name in manifest.carried
            if held or carried or entry.name in manifest.zeros or not manifest.text_only:
                tensors.append(HeldTensor(entry.name, shard, entry, tuple(held), carried, matrix))
    return tensors


def _refuse_unknown(banks: Banks, logical: Mapping[str, Logical]) -> None:
    """Raises FindingsError naming every tensor of the manifest that the source's headers do not have."""
    manifest = banks.manifest
    known = {*logical, *(name for header in banks.source_headers.values() for name in header.entries)}
    aliased = [*manifest.aliases, *manifest.aliases.values()]
    unknown = [("aliases", name) for name in aliased if name not in logical]
    unknown += [("carried", name) for name in manifest.carried if name not in known]
    unknown += [("zeros", name) for name in manifest.zeros if name not in known]
    findings = [
        Finding(f"field {field}", repr(name), "a tensor of the source's headers", AGAIN)
        for field, name in dict.fromkeys(unknown)
    ]
    if findings:
        raise FindingsError(str(banks.path / MANIFEST), findings)


def logical_tensors(banks: Banks) -> Mapping[str, Logical]:
    """The source's logical tensors."""
    stored = stored_tensors(banks.source_headers.values())
    try:
        hf_quant = read_hf_quant(banks.path / SOURCE, banks.manifest.side_files)
        return codec_of(banks.config, hf_quant, stored).group(stored).tensors
    except ConversionError as error:
        raise within(str(banks.path / SOURCE), error) from error.__cause__


def logical_placements(banks: Banks, logical: Mapping[str, Logical]) -> list[Placement]:
    """The family's rules at every index, in the source's names of its logical tensors."""
    statements = respell_statements(banks.family.weights(banks.manifest.fields), banks.manifest.spelling)
    return placements(settle(statements, logical)[0])


def _stored_placements(banks: Banks, logical: Mapping[str, Logical]) -> list[Placement]:
    """The rules as the banks hold them: on the source's stored tensors, or on logical ones that were decoded.

    Raises FindingsError when the stored parts do not follow the rules.
    """
    places = logical_placements(banks, logical)
    if banks.manifest.quantized != "keep":
        return places
    expansion = expand(places, logical, stored_tensors(banks.source_headers.values()))
    if expansion.findings:
        raise FindingsError(str(banks.path), expansion.findings)
    return list(expansion.placements)


def bank_layout(banks: Banks, places: Sequence[Placement]) -> dict[str, Leaf]:
    """Leaf path -> where the banks hold it: as one array a run, or layer by layer."""
    fields = banks.manifest.fields
    shapes = {place.leaf: ("", place.leaf_view.base) for place in places}
    layout: Layout = lay_out_leaves(fields, shapes)
    leaves = {}
    for path, leaf in layout.leaves.items():
        own = f"{leaf.key}@{split_leaf(path)[0]}"
        by_layer = not banks.has(leaf.bank, leaf.key) and banks.has(leaf.bank, own)
        leaves[path] = Leaf(leaf.bank, own, 0, 1, leaf.shape) if by_layer else leaf
    return leaves


def _text_half(banks: Banks, tensors: Sequence[HeldTensor]) -> list[HeldTensor]:
    wrapper = banks.family.wrapper
    beside = tuple(item.prefix for item in wrapper.carried) if wrapper is not None else ()
    spelling, plain = banks.manifest.spelling, Spelling()
    result = []
    for item in tensors:
        if item.carried and item.name.startswith(beside):
            continue
        name = item.name
        for spelled, written in ((spelling.body, plain.body), (spelling.head, plain.head)):
            if name.startswith(spelled):
                name = written + name[len(spelled) :]
                break
        result.append(HeldTensor(name, item.shard, item.entry, item.places, item.carried, item.matrix))
    return result


def held_leaves(banks: Banks, tensors: Sequence[HeldTensor]) -> dict[str, Leaf]:
    """Where the banks hold every leaf of `tensors`, by leaf path. Raises FindingsError naming every tensor that they do
    not hold in the shape the rules need."""
    findings = []
    leaves = bank_layout(banks, [place for item in tensors for place in item.places])
    for item in tensors:
        if item.carried and not banks.has(CARRIED, item.entry.name):
            findings.append(Finding(f"tensor {item.entry.name}", "nothing in carried", "its bytes", AGAIN))
        elif not item.carried and not item.places and item.entry.name not in banks.manifest.zeros:
            findings.append(
                Finding(f"tensor {item.entry.name}", "no rule for it", "a rule", "use the dewconv it was imported with")
            )
    for path, leaf in leaves.items():
        if not banks.has(leaf.bank, leaf.key):
            findings.append(Finding(f"parameter {path}", f"nothing in {leaf.bank}", f"{leaf.key}", AGAIN))
            continue
        shape = banks.headers[f"{leaf.bank}.safetensors"].entries[leaf.key].shape
        if shape != leaf.stored_shape:
            findings.append(
                Finding(f"parameter {path}", f"shape {list(shape)}", f"shape {list(leaf.stored_shape)}", AGAIN)
            )
    if findings:
        raise FindingsError(str(banks.path), findings)
    return leaves


def _export_dtype(item: HeldTensor, dtype: str) -> str:
    return stored_dtype(item.entry.dtype, dtype, 2) if item.matrix and not item.carried else item.entry.dtype


def _shards(
    banks: Banks, specs: Mapping[str, Sequence[TensorSpec]], size: int | None
) -> tuple[dict[str, Header], bytes | None]:
    """The shards' headers and the index: the source's own wherever nothing about them changed."""
    if size is None:
        headers = {}
        for shard, wanted in specs.items():
            own = banks.source_headers[shard]
            same = [(e.name, e.dtype, e.shape) for e in own.by_offset] == [(s.name, s.dtype, s.shape) for s in wanted]
            headers[shard] = own if same else lay_out_in_order(wanted, own.metadata)
        index = banks.index_text
        if index is not None and any(headers[shard] is not banks.source_headers[shard] for shard in headers):
            index = resized_index(index, headers)
        return headers, index
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in (spec for wanted in specs.values() for spec in wanted):
        if groups[-1] and filled + spec.nbytes > size:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    metadata = next(iter(banks.source_headers.values())).metadata or {"format": "pt"}
    if len(groups) == 1:
        return {SINGLE: lay_out_in_order(groups[0], metadata)}, None
    headers = {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": lay_out_in_order(group, metadata)
        for number, group in enumerate(groups, 1)
    }
    weight_map = {name: shard for shard, header in headers.items() for name in header.entries}
    return headers, index_text(weight_map, sum(header.data_bytes for header in headers.values()))


def _jobs(plan: ExportPlan, check: BankCheck) -> list[FileJob]:
    """The shards to be written. The layers of a bank are read in order, so that `check` takes each as it is read."""
    banks = plan.banks
    leaves = bank_layout(banks, [place for item in plan.tensors.values() for place in item.places])

    def read(place: Placement) -> np.ndarray:
        leaf = leaves[place.leaf]
        check.take(leaf.bank, leaf.key, (leaf.row + 1, leaf.rows))
        return leaf.place(place.leaf_view).apply(banks.array(leaf.bank, leaf.key))

    def carried(name: str) -> np.ndarray:
        check.take(CARRIED, name)
        return banks.open(CARRIED).raw(name)

    def parts(entry: TensorEntry) -> Sequence[Part]:
        item = plan.tensors[entry.name]
        if item.carried:
            return (raw_part(entry, lambda: carried(item.entry.name)),)
        return target_parts(item.places, numpy_dtype(entry.dtype), read, entry.name)

    def rank(entry: TensorEntry) -> int:
        return max((leaves[place.leaf].row for place in plan.tensors[entry.name].places), default=0)

    return [FileJob(shard, header, parts, rank) for shard, header in plan.headers.items()]


def _check_written(plan: ExportPlan, stage: Path) -> None:
    for shard, header in plan.headers.items():
        written = read_header(stage / shard)
        if written.text != header.text:
            raise ConversionError(f"{shard}: what was written differs from the plan; the disk may be faulty")
