"""The round trip: import and export give the source back, byte for byte, and transformers loads what was exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from ..converters.banks import Banks
from ..converters.exporting import export_checkpoint
from ..converters.importing import import_checkpoint
from ..converters.source import Source, open_source
from ..families.errors import ConversionError
from ..families.family import Family
from .references import load_reference
from .results import CheckResult

NAME = "round_trip"
STORED = "stored"
"""The dtype of a check that computes nothing: each tensor's own."""


def round_trip(source: Source, family: Family, banks: Banks | None = None, reload: bool = True) -> CheckResult:
    """Export `banks`, or an import of `source` made for it, into a temporary directory and hold it against `source`.

    reload: load the export with transformers, which must find nothing missing, unexpected or of another shape.
    """
    with TemporaryDirectory(prefix="dewconv-round-trip-") as scratch:
        if banks is None:
            banks = import_checkpoint(source, Path(scratch) / "banks")
        if banks.manifest.inexact:
            reasons = "; ".join(banks.manifest.inexact)
            return CheckResult(NAME, STORED, None, note=f"the banks cannot give the source back: {reasons}")
        out = Path(scratch) / "exported"
        export_checkpoint(banks, out)
        exported = open_source(out)
        differences = list(compare_sources(source, exported))
        note = differences[0] if differences else ""
        if reload:
            try:
                load_reference(out, family, exported.config, "float32")
            except ConversionError as error:
                differences.append(str(error))
                note = note or str(error).splitlines()[-1].strip()
        figures = {
            "tensors": len(source.tensors),
            "bytes": source.weight_bytes,
            "shards": len(source.headers),
            "side_files": len(source.side_files),
            "differences": len(differences),
            "reloaded": "transformers" if reload else "no",
        }
        return CheckResult(NAME, STORED, not differences, figures, note=note)


def compare_sources(source: Source, other: Source) -> Iterator[str]:
    """How `other` differs from `source`, a line each: names, shards, dtypes, shapes, tensor bytes, config, index and
    side files."""
    for name in sorted(source.tensors.keys() | other.tensors.keys()):
        if name not in other.tensors or name not in source.tensors:
            yield f"tensor {name}: {'missing' if name in source.tensors else 'extra'}"
            continue
        one, two = source.tensors[name], other.tensors[name]
        if (one.file, one.dtype, one.shape) != (two.file, two.dtype, two.shape):
            yield f"tensor {name}: {one.dtype} {one.shape} in {one.file} became {two.dtype} {two.shape} in {two.file}"
    for shard in sorted(source.headers.keys() & other.headers.keys()):
        left, right = source.open_shard(shard), other.open_shard(shard)
        for name in sorted(source.headers[shard].entries.keys() & other.headers[shard].entries.keys()):
            one, two = left.raw(name), right.raw(name)
            if one.size != two.size or not (one == two).all():
                yield f"tensor {name}: bytes differ"
        if source.headers[shard].text != other.headers[shard].text:
            yield f"shard {shard}: the header differs"
    if source.config_text != other.config_text:
        yield "config.json: bytes differ"
    if source.index_text != other.index_text:
        yield "model.safetensors.index.json: bytes differ"
    for path in sorted({item.path for item in source.side_files} | {item.path for item in other.side_files}):
        one, two = source.root / path, other.root / path
        if not one.is_file() or not two.is_file() or one.read_bytes() != two.read_bytes():
            yield f"{path}: differs"
