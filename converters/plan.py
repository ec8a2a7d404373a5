"""The import plan: a value made from a source's headers that says where every element goes.

`plan_import` closes the names of a source against its family, resolves aliases, and lays out the banks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dew_core.fields import DecoderFields
from ..families.errors import ConversionError, Finding, FindingsError
from ..families.family import Family, Spelling
from ..families.registry import find
from ..families.rules import Alias, Carried, Placement, View, leaf_shapes
from .closing import CarriedTensor, Closing, choose_spelling, close, respell_statements
from .codecs import Codec, Stored, codec_of
from .dtypes import FLOATS, is_float
from .layout import Layout, file_name, lay_out_leaves
from .safetensors_files import MappedFile
from .source import Source

if TYPE_CHECKING:
    from .banks import Banks

DTYPES = ("keep", "bfloat16", "float16", "float32")
COMPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class PlannedCopy:
    """One copy: `view` of the stored bank tensor is `source_view` of the source's tensor."""

    source: str
    source_view: View
    leaf: str
    bank: str
    key: str
    view: View


@dataclass(frozen=True)
class ImportPlan:
    """Everything an import will do.

    fields: the decoder's, after aliases. placements: rules in the source's names. layout: the banks. copies: by
    (bank, key). carried: kept verbatim. aliases: dropped as equal copies of another tensor. zeros: source regions
    that must be zero. dtype: "keep" or what matrices are cast to. inexact: why an export cannot be byte-exact,
    empty when it can. left: tensors that a text-only import leaves behind. warnings: for the user's attention;
    notices: for the record.
    """

    source: Source
    family: Family
    model_type: str
    fields: DecoderFields
    spelling: Spelling
    codec: Codec = field(repr=False)
    placements: tuple[Placement, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    copies: Mapping[tuple[str, str], tuple[PlannedCopy, ...]] = field(repr=False)
    carried: tuple[CarriedTensor, ...]
    aliases: tuple[Alias, ...]
    zeros: tuple[tuple[str, View], ...] = field(repr=False)
    dtype: str
    text_only: bool
    left: tuple[str, ...]
    inexact: tuple[str, ...]
    warnings: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def bank_bytes(self) -> int:
        """Bytes of the bank tensors, the carried ones included."""
        return sum(t.nbytes for t in self.layout.tensors) + self.carried_bytes

    @property
    def carried_bytes(self) -> int:
        return sum(self.source.tensors[item.name].entry.nbytes for item in self.carried)

    def run(self, out: str | Path, **options: Any) -> Banks:
        """Carries the plan out: `importing.run_import`."""
        from .importing import run_import

        return run_import(self, out, **options)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: a row per copy."""
        return {
            "source": {"name": self.source.label, "repo": self.source.repo, "revision": self.source.commit},
            "family": self.family.name,
            "model_type": self.model_type,
            "decoder": self.fields.to_json(),
            "dtype": self.dtype,
            "exact": not self.inexact,
            "inexact": list(self.inexact),
            "bytes": self.bank_bytes,
            "files": {
                file_name(bank): [
                    {
                        "key": tensor.key,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "from": [
                            {
                                "tensor": copy.source,
                                "dtype": self.source.tensors[copy.source].dtype,
                                "offset": copy.source_view.offset,
                                "strides": list(copy.source_view.strides),
                                "shape": list(copy.source_view.shape),
                                "at": copy.view.offset,
                            }
                            for copy in self.copies[bank, tensor.key]
                        ],
                    }
                    for tensor in self.layout.tensors
                    if tensor.bank == bank
                ]
                for bank in self.layout.banks()
            },
            "aliases": [{"tensor": alias.name, "of": alias.of} for alias in self.aliases],
            "carried": [{"tensor": item.name, "why": item.why} for item in self.carried],
            "left": list(self.left),
            "side_files": [item.path for item in self.source.side_files],
            "skipped": [{"file": item.path, "why": item.why} for item in self.source.skipped],
            "warnings": list(self.warnings),
            "notices": list(self.notices),
        }


def find_family(source: Source) -> tuple[Family, str]:
    """(family, model_type) of a source. Raises ConversionError when its model_type is absent or not registered."""
    model_type = source.config.get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError(f"{source.label}: config.json has no model_type, so the family is not known")
    return find(model_type), model_type


def plan_import(
    source: Source,
    *,
    dtype: str = "keep",
    bank_layers: int | None = None,
    text_only: bool = False,
) -> ImportPlan:
    """The plan that turns `source` into banks.

    dtype: "keep", or the float dtype that matrices (two axes or more) are cast to; vectors, integers and carried
    tensors keep theirs. bank_layers: the most layers of one bank. text_only: leave what is beside the decoder of a
    wrapper behind.

    Raises FindingsError with everything that does not fit (config keys, tensor names, shapes, dtypes) at once, and
    ConversionError for what ends the reading earlier.
    """
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if bank_layers is not None and bank_layers < 1:
        raise ConversionError(f"bank_layers is {bank_layers}; a bank holds at least one layer")
    if not source.has_weights:
        raise ConversionError(
            f"{source.label}: holds a config.json and no weights as safetensors; pickled ones are never read, "
            "load them with transformers where that is safe and save_pretrained() them"
        )
    family, model_type = find_family(source)
    codec = codec_of(source.config)
    reading = family.examine(source.config)
    if reading.findings:
        # The tensors are looked at as well when the config says enough for it, so that all is told at once.
        raise FindingsError(source.label, [*reading.findings, *_tensor_findings(source, family, reading.values)])
    fields = DecoderFields(**reading.values).replace(bank_layers=bank_layers)
    spelling, closing = close_source(source, family, fields, codec, text_only)
    warnings = []
    for alias in closing.aliases:
        if not _same_bytes(source, alias):
            fields = fields.replace(**alias.otherwise)
            warnings.append(
                f"{alias.name} differs from {alias.of}, although {alias.why}: it is kept as a parameter of its own"
            )
    if warnings:
        spelling, closing = close_source(source, family, fields, codec, text_only)
    return _assemble(
        source, family, model_type, fields, spelling, codec, closing, dtype, text_only, warnings, reading.notices
    )


def close_source(
    source: Source, family: Family, fields: DecoderFields, codec: Codec, text_only: bool = False
) -> tuple[Spelling, Closing]:
    """The source's spelling and its names closed. Raises FindingsError with everything that does not close."""
    spelling, closing, findings = examine_names(source, family, fields, codec, text_only)
    if findings:
        raise FindingsError(source.label, findings)
    return spelling, closing


def examine_names(
    source: Source, family: Family, fields: DecoderFields, codec: Codec, text_only: bool = False
) -> tuple[Spelling, Closing, list[Finding]]:
    """The source's spelling, what the family's statements make of its tensors, and everything that does not close."""
    statements = [*family.weights(fields), *family.carried(family.canonical(source.config).text)]
    stored = {name: Stored(name, item.dtype, item.shape) for name, item in source.tensors.items()}
    tensors = codec.logical(stored)
    spelling, findings = choose_spelling(family, statements, tensors)
    closing = close(respell_statements(statements, spelling), _beside(source, family), tensors)
    findings = [*findings, *closing.findings]
    if not text_only:
        findings += _broken_promises(source, family)
    return spelling, closing, findings


def _tensor_findings(source: Source, family: Family, values: Mapping[str, Any]) -> list[Finding]:
    try:
        close_source(source, family, DecoderFields(**values), codec_of(source.config))
    except FindingsError as error:
        return list(error.findings)
    except Exception:  # The fields of a config with findings may describe no decoder at all.
        return []
    return []


def is_wrapped(source: Source) -> bool:
    """Whether the decoder is the text half of a wrapper."""
    return isinstance(source.config.get("text_config"), Mapping)


def _beside(source: Source, family: Family) -> tuple[Carried, ...]:
    return family.wrapper.carried if family.wrapper is not None and is_wrapped(source) else ()


def _broken_promises(source: Source, family: Family) -> list[Finding]:
    if family.wrapper is None or not is_wrapped(source):
        return []
    return [
        Finding(
            f"config key {key!r}",
            f"no tensor that begins with {' or '.join(prefixes)}",
            "the tensors it promises",
            "import the text half alone (--text-only)",
        )
        for key, prefixes in family.wrapper.parts.items()
        if source.config.get(key) is not None and not any(name.startswith(prefixes) for name in source.tensors)
    ]


def _same_bytes(source: Source, alias: Alias) -> bool:
    one, other = source.tensors[alias.name], source.tensors[alias.of]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    files: dict[str, MappedFile] = {}
    for tensor in (one, other):
        if tensor.file not in files:
            files[tensor.file] = source.open_shard(tensor.file)
    left, right = (files[tensor.file].raw(tensor.name) for tensor in (one, other))
    return all(
        np.array_equal(left[start : start + COMPARE_BYTES], right[start : start + COMPARE_BYTES])
        for start in range(0, left.size, COMPARE_BYTES)
    )


def stored_dtype(source_dtype: str, dtype: str, axes: int) -> str:
    """The dtype a parameter of `axes` axes is stored in under `--dtype dtype`: only float matrices are cast."""
    return FLOATS[dtype] if dtype != "keep" and axes >= 2 and is_float(source_dtype) else source_dtype


def _assemble(
    source: Source,
    family: Family,
    model_type: str,
    fields: DecoderFields,
    spelling: Spelling,
    codec: Codec,
    closing: Closing,
    dtype: str,
    text_only: bool,
    warnings: Iterable[str],
    notices: Iterable[str],
) -> ImportPlan:
    source_dtypes: dict[str, str] = {}
    for place in closing.placements:
        source_dtypes.setdefault(place.leaf, source.tensors[place.source].dtype)
    leaves = {
        leaf: (stored_dtype(source_dtypes[leaf], dtype, len(shape)), shape)
        for leaf, shape in leaf_shapes(closing.placements).items()
    }
    layout = lay_out_leaves(fields, leaves)
    copies: dict[tuple[str, str], list[PlannedCopy]] = {}
    for place in closing.placements:
        leaf = layout.leaves[place.leaf]
        copies.setdefault((leaf.bank, leaf.key), []).append(
            PlannedCopy(place.source, place.source_view, place.leaf, leaf.bank, leaf.key, leaf.place(place.leaf_view))
        )
    left = tuple(item.name for item in closing.carried if item.wrapper) if text_only else ()
    carried = tuple(item for item in closing.carried if item.name not in left)
    inexact = []
    cast = [leaf for leaf, (stored, _) in leaves.items() if stored != source_dtypes[leaf]]
    if cast:
        inexact.append(f"{len(cast)} matrices were cast to {dtype}")
    if text_only and is_wrapped(source):
        inexact.append("only the text half of the wrapper was imported")
    differing = [leaf.key for leaf in layout.leaves.values() if "@" in leaf.key]
    told = [*source.notices, *notices]
    if differing:
        names = sorted({key.rpartition("@")[0] for key in differing})
        told.append(f"dtypes differ between layers, stored layer by layer: {', '.join(names)}")
    return ImportPlan(
        source=source,
        family=family,
        model_type=model_type,
        fields=fields,
        spelling=spelling,
        codec=codec,
        placements=closing.placements,
        layout=layout,
        copies={key: tuple(value) for key, value in copies.items()},
        carried=carried,
        aliases=closing.aliases,
        zeros=closing.zeros,
        dtype=dtype,
        text_only=text_only,
        left=left,
        inexact=tuple(inexact),
        warnings=tuple(warnings),
        notices=tuple(told),
    )
