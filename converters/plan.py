"""The import plan: a value made from a source's headers that says where every element goes.

`plan_import` closes the names of a source against its family, resolves aliases, and lays out the banks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dew_core.fields import DecoderFields
from ..families.errors import ConversionError, Finding, FindingsError, within
from ..families.family import Family, Spelling
from ..families.fields import shown
from ..families.registry import find
from ..families.rules import Alias, Carried, Placement, View, leaf_shapes
from .closing import CarriedTensor, Closing, choose_spelling, close, refuse_too_many, respell_statements
from .codecs import Codec, Grouping, Logical
from .dtypes import FLOATS, is_float, nbytes
from .layout import CARRIED, Layout, Leaf, file_name, is_part, lay_out_leaves
from .parts import Coding, expand
from .quantisation import MODES, codec_of, read_hf_quant
from .shards import ShardFile
from .source import Source, refuse_without_weights

if TYPE_CHECKING:
    from .banks import Banks

DTYPES = ("keep", "bfloat16", "float16", "float32")
COMPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class PlannedCopy:
    """One copy: what `place` takes of its source goes where its leaf is stored, `at`.

    The source is a stored tensor, or under `quantized="decode"` a logical one.
    """

    place: Placement
    at: Leaf

    @property
    def source(self) -> str:
        return self.place.source

    @property
    def view(self) -> View:
        """Of the stored bank tensor."""
        return self.at.place(self.place.leaf_view)


@dataclass(frozen=True)
class ImportPlan:
    """Everything an import will do.

    fields: the decoder's, after aliases. tensors: the source's logical tensors. placements: rules on them, in the
    source's names. quantized: "keep" or "decode", None when no tensor is quantised. codings: leaf -> how its codes
    decode. layout: the banks. copies: by (bank, key). carried: kept for export, stored tensors, or logical ones when
    decoding. aliases: dropped as equal copies of another tensor. zeros: source regions that must be zero. dtype:
    "keep" or what matrices are cast to. inexact: why an export cannot be byte-exact, empty when it can. left: tensors
    that a text-only import leaves behind. warnings: for the user's attention; notices: for the record.
    """

    source: Source
    family: Family
    model_type: str
    fields: DecoderFields
    spelling: Spelling
    codec: Codec = field(repr=False)
    tensors: Mapping[str, Logical] = field(repr=False)
    placements: tuple[Placement, ...] = field(repr=False)
    quantized: str | None
    codings: Mapping[str, Coding] = field(repr=False)
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
    def wrapped(self) -> bool:
        """Whether the decoder is the text half of a wrapper."""
        return is_wrapped(self.source)

    @property
    def bank_bytes(self) -> int:
        """Bytes of the bank tensors, the carried ones included."""
        return sum(t.nbytes for t in self.layout.tensors) + self.carried_bytes

    @property
    def file_bytes(self) -> dict[str, int]:
        """Bank file -> bytes of its tensors."""
        sizes = {file_name(bank): 0 for bank in self.layout.banks()}
        for tensor in self.layout.tensors:
            sizes[file_name(tensor.bank)] += tensor.nbytes
        return sizes | ({file_name(CARRIED): self.carried_bytes} if self.carried else {})

    @property
    def carried_bytes(self) -> int:
        return sum(nbytes(dtype, shape) or 0 for dtype, shape in map(self.describe, (c.name for c in self.carried)))

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a stored tensor, or of a logical one."""
        if self.quantized == "decode" and name in self.tensors:
            return self.tensors[name].dtype, self.tensors[name].shape
        return self.source.tensors[name].dtype, self.source.tensors[name].shape

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
            "codec": self.codec.name,
            "quantized": self.quantized,
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
                                "dtype": self.describe(copy.source)[0],
                                "offset": copy.place.source_view.offset,
                                "strides": list(copy.place.source_view.strides),
                                "shape": list(copy.place.source_view.shape),
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
        found = "no model_type" if model_type is None else f"the model_type {shown(model_type)}"
        raise ConversionError(f"{source.label}: config.json has {found}, so the family is not known")
    try:
        return find(model_type), model_type
    except ConversionError as error:
        raise ConversionError(f"{source.label}: config.json's model_type: {error}") from error.__cause__


def plan_import(
    source: Source,
    *,
    dtype: str = "keep",
    bank_layers: int | None = None,
    text_only: bool = False,
    quantized: str = "keep",
) -> ImportPlan:
    """The plan that turns `source` into banks.

    dtype: "keep", or the float dtype that matrices (two axes or more) are cast to; vectors, integers, codes, scales
    and carried tensors keep theirs. bank_layers: the most layers of one bank. text_only: leave what is beside the
    decoder of a wrapper behind. quantized: "keep" codes and scales, or "decode" them, carried ones too.

    Raises FindingsError with everything that does not fit (config keys, tensor names, shapes, dtypes) at once, and
    ConversionError for what ends the reading earlier.
    """
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantized not in MODES:
        raise ConversionError(f"quantized {quantized!r} is not one of {', '.join(MODES)}")
    if bank_layers is not None and bank_layers < 1:
        raise ConversionError(f"bank_layers is {bank_layers}; a bank holds at least one layer")
    refuse_without_weights(source)
    family, model_type = find_family(source)
    codec = source_codec(source)
    reading = family.examine(source.config)
    if reading.findings:
        # The tensors are looked at as well when the config says enough for it, so that all is told at once.
        tensors = _tensor_findings(source, family, reading.values) if reading.complete else []
        raise FindingsError(source.label, [*reading.findings, *tensors])
    fields = DecoderFields(**reading.values).replace(bank_layers=bank_layers)
    spelling, closing, grouping = close_source(source, family, fields, codec, text_only)
    warnings = []
    for alias in closing.aliases:
        if not _same_bytes(source, grouping.tensors[alias.name], grouping.tensors[alias.of]):
            fields = fields.replace(**alias.otherwise)
            warnings.append(
                f"{alias.name} differs from {alias.of}, although {alias.why}: it is kept as a parameter of its own"
            )
    if warnings:
        spelling, closing, grouping = close_source(source, family, fields, codec, text_only)
    notices = (*reading.notices, *closing.notices, *grouping.notices)
    return _assemble(
        source,
        family,
        model_type,
        fields,
        spelling,
        codec,
        grouping,
        closing,
        dtype,
        text_only,
        quantized,
        warnings,
        notices,
    )


def source_codec(source: Source) -> Codec:
    """The codec of a source. Raises ConversionError when its method is not built, naming some of its tensors."""
    try:
        hf_quant = read_hf_quant(source.root, [item.path for item in source.side_files])
        return codec_of(source.config, hf_quant, source.stored)
    except ConversionError as error:
        raise within(source.label, error) from error.__cause__


def close_source(
    source: Source, family: Family, fields: DecoderFields, codec: Codec, text_only: bool = False
) -> tuple[Spelling, Closing, Grouping]:
    """The source's spelling, its names closed, and its logical tensors. Raises FindingsError with everything that does
    not close."""
    spelling, closing, grouping, findings = examine_names(source, family, fields, codec, text_only)
    if findings:
        raise FindingsError(source.label, findings)
    return spelling, closing, grouping


def examine_names(
    source: Source, family: Family, fields: DecoderFields, codec: Codec, text_only: bool = False
) -> tuple[Spelling, Closing, Grouping, list[Finding]]:
    """The source's spelling, what the family's statements make of its tensors, those as logical ones, and everything
    that does not close."""
    statements = [*family.weights(fields), *family.carried(family.canonical(source.config).text)]
    refuse_too_many(statements, source.label)
    grouping = codec.group(source.stored)
    spelling, findings = choose_spelling(family, statements, grouping.tensors)
    closing = close(respell_statements(statements, spelling), _beside(source, family), grouping.tensors)
    findings = [*grouping.findings, *findings, *closing.findings]
    if closing.misshapen:
        findings[:0] = _sizes_not_stated(family, source, fields)
    if not text_only:
        findings += _broken_promises(source, family)
    return spelling, closing, grouping, findings


def _sizes_not_stated(family: Family, source: Source, fields: DecoderFields) -> list[Finding]:
    """A finding that names the sizes which the config leaves to its class, where the weights are of others."""
    taken = family.unstated_sizes(source.config, fields)
    if not taken:
        return []
    named = ", ".join(f"{key} ({value} was taken)" for key, value in taken.items())
    return [Finding("config.json", f"no {named}", "the sizes that the weights have", "state those that are other")]


def _tensor_findings(source: Source, family: Family, values: Mapping[str, Any]) -> list[Finding]:
    try:
        close_source(source, family, DecoderFields(**values), source_codec(source))
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


def _same_bytes(source: Source, one: Logical, other: Logical) -> bool:
    files: dict[str, ShardFile] = {}

    def raw(name: str) -> np.ndarray:
        tensor = source.tensors[name]
        if tensor.file not in files:
            files[tensor.file] = source.open_shard(tensor.file)
        return files[tensor.file].raw(name)

    if len(one.parts) != len(other.parts):
        return False
    for pair in zip(one.parts, other.parts, strict=True):
        left, right = (source.tensors[name] for name in pair)
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        a, b = map(raw, pair)
        starts = range(0, a.size, COMPARE_BYTES)
        if not all(np.array_equal(a[at : at + COMPARE_BYTES], b[at : at + COMPARE_BYTES]) for at in starts):
            return False
    return True


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
    grouping: Grouping,
    closing: Closing,
    dtype: str,
    text_only: bool,
    quantized: str,
    warnings: Iterable[str],
    notices: Iterable[str],
) -> ImportPlan:
    tensors = grouping.tensors
    coded = any(tensor.quantised for tensor in tensors.values())
    placements, codings = closing.placements, {}
    if coded:
        _refuse_coded_zeros(source, closing, tensors)
    if coded and quantized == "keep":
        expansion = expand(closing.placements, tensors, source.stored)
        if expansion.findings:
            raise FindingsError(source.label, expansion.findings)
        placements, codings = expansion.placements, expansion.codings
    held: dict[str, str] = {}
    for place in placements:
        tensor = tensors.get(place.source) if quantized == "decode" else None
        held.setdefault(place.leaf, source.tensors[place.source].dtype if tensor is None else tensor.dtype)
    leaves = {
        leaf: (held[leaf] if is_part(leaf) else stored_dtype(held[leaf], dtype, len(shape)), shape)
        for leaf, shape in leaf_shapes(placements).items()
    }
    layout = lay_out_leaves(fields, leaves)
    copies: dict[tuple[str, str], list[PlannedCopy]] = {}
    for place in placements:
        leaf = layout.leaves[place.leaf]
        copies.setdefault((leaf.bank, leaf.key), []).append(PlannedCopy(place, leaf))
    carried = closing.carried if coded and quantized == "decode" else carried_parts(closing, tensors)
    left = tuple(item.name for item in carried if item.wrapper) if text_only else ()
    carried = tuple(item for item in carried if item.name not in left)
    inexact = []
    cast = [leaf for leaf, (stored, _) in leaves.items() if stored != held[leaf]]
    if cast:
        inexact.append(f"{len(cast)} matrices were cast to {dtype}")
    if coded and quantized == "decode":
        inexact.append(f"{codec.name} weights were decoded")
    if text_only and is_wrapped(source):
        inexact.append("only the text half of the wrapper was imported")
    differing = [leaf.key for leaf in layout.leaves.values() if "@" in leaf.key]
    told = [*source.notices, *notices, *source.left_behind]
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
        tensors=tensors,
        placements=closing.placements,
        quantized=quantized if coded else None,
        codings=codings,
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


def carried_parts(closing: Closing, tensors: Mapping[str, Logical]) -> tuple[CarriedTensor, ...]:
    """What is carried, as stored tensors: carried tensors' parts, and what lies beside any tensor."""
    carried = []
    kept = {item.name: item for item in closing.carried}
    for name, tensor in tensors.items():
        if name in kept:
            carried += [replace(kept[name], name=part) for part in (*tensor.parts, *tensor.beside)]
        else:
            carried += [CarriedTensor(part, f"beside {name}: no weight depends on it", False) for part in tensor.beside]
    return tuple(carried)


def _refuse_coded_zeros(source: Source, closing: Closing, tensors: Mapping[str, Logical]) -> None:
    findings = [
        Finding(f"tensor {name}", "padding in quantised weights", "padding in plain ones", "not supported")
        for name in dict.fromkeys(name for name, _ in closing.zeros)
        if tensors[name].quantised
    ]
    if findings:
        raise FindingsError(source.label, findings)
