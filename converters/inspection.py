"""A checkpoint looked at and not converted: family, decoder, layer runs, rules and sizes, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import group_name, layer_plan
from ..families.errors import ConversionError
from ..families.family import Family
from ..families.rules import Alias, Rule, View, leaf_shapes, settle
from .closing import CarriedTensor, respell_statements
from .codecs import Codec, Plain
from .dtypes import FLOATS, nbytes
from .parts import expand
from .plan import carried_parts, examine_names, find_family, source_codec
from .source import Source


@dataclass(frozen=True)
class Run:
    """A run of layers: the bank's name, its layers, and their layer type."""

    bank: str
    layers: int
    layer_type: str


@dataclass(frozen=True)
class RuleLine:
    """A rule as one line: the tensor's template and view, the parameter's, and the values of the indices."""

    tensor: str
    tensor_view: str
    parameter: str
    parameter_view: str
    indices: Mapping[str, str]

    def __str__(self) -> str:
        over = "".join(f"  {name}={values}" for name, values in self.indices.items())
        return f"{self.tensor} {self.tensor_view} == {self.parameter} {self.parameter_view}{over}"


@dataclass(frozen=True)
class Inspection:
    """What is known of a source from its config and headers.

    fields: None when the config cannot be read. parameters: elements of the decoder's leaves. parameter_bytes: as the
    headers store them, or in the config's dtype without weights. float32_bytes: as a CPU decodes them. unmapped:
    tensors that no rule reads. problems: why an import would be refused, one line each.
    """

    source: Source
    family: Family
    model_type: str
    fields: DecoderFields | None
    runs: tuple[Run, ...]
    rules: tuple[RuleLine, ...]
    aliases: tuple[Alias, ...]
    carried: tuple[CarriedTensor, ...]
    unmapped: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    largest: tuple[str, int] | None
    problems: tuple[str, ...]
    notices: tuple[str, ...] = field(default=())

    @property
    def float32_bytes(self) -> int:
        return 4 * self.parameters

    @property
    def carried_bytes(self) -> int:
        return sum(self.source.tensors[item.name].entry.nbytes for item in self.carried)

    def to_json(self) -> dict[str, Any]:
        """The inspection as JSON values."""
        source = self.source
        return {
            "source": {
                "name": source.label,
                "repo": source.repo,
                "revision": source.commit,
                "shards": {name: header.file_bytes for name, header in source.headers.items()},
                "tensors": len(source.tensors),
                "bytes": source.weight_bytes,
                "side_files": [item.path for item in source.side_files],
                "skipped": [{"file": item.path, "why": item.why} for item in source.skipped],
            },
            "family": self.family.name,
            "model_type": self.model_type,
            "decoder": None if self.fields is None else self.fields.to_json(),
            "runs": [{"bank": run.bank, "layers": run.layers, "layer_type": run.layer_type} for run in self.runs],
            "rules": [
                {
                    "tensor": line.tensor,
                    "tensor_view": line.tensor_view,
                    "parameter": line.parameter,
                    "parameter_view": line.parameter_view,
                    "indices": dict(line.indices),
                }
                for line in self.rules
            ],
            "aliases": [{"tensor": alias.name, "of": alias.of, "why": alias.why} for alias in self.aliases],
            "carried": [{"tensor": item.name, "why": item.why} for item in self.carried],
            "unmapped": list(self.unmapped),
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "carried_bytes": self.carried_bytes,
            "float32_bytes": self.float32_bytes,
            "largest": None if self.largest is None else {"tensor": self.largest[0], "bytes": self.largest[1]},
            "problems": list(self.problems),
            "notices": list(self.notices),
        }


def inspect_source(source: Source, bank_layers: int | None = None) -> Inspection:
    """What `source` is, whether or not it can be imported; reads no weight.

    Raises ConversionError when its family is not known.
    """
    family, model_type = find_family(source)
    reading = family.examine(source.config)
    problems = [str(finding) for finding in reading.findings]
    found: dict[str, Any] = {
        "fields": None,
        "runs": (),
        "rules": (),
        "aliases": (),
        "carried": (),
        "unmapped": (),
        "parameters": 0,
        "parameter_bytes": 0,
    }
    if not reading.findings:
        fields = DecoderFields(**reading.values).replace(bank_layers=bank_layers)
        found |= {"fields": fields, "runs": _runs(fields), **_tensors(source, family, fields, problems)}
    largest = max(source.tensors.values(), key=lambda item: item.entry.nbytes, default=None)
    return Inspection(
        source=source,
        family=family,
        model_type=model_type,
        largest=None if largest is None else (largest.name, largest.entry.nbytes),
        problems=tuple(problems),
        notices=(*source.notices, *reading.notices, *found.pop("notices", ())),
        **found,
    )


def _runs(fields: DecoderFields) -> tuple[Run, ...]:
    plan = layer_plan(fields)
    return tuple(Run(group_name(first, count), count, plan.specs[first].layer_type) for first, count in plan.groups)


def _tensors(source: Source, family: Family, fields: DecoderFields, problems: list[str]) -> dict[str, Any]:
    try:
        codec: Codec = source_codec(source)
    except ConversionError as error:
        problems.append(str(error))
        codec = Plain()
    spelling, closing, grouping, findings = examine_names(source, family, fields, codec)
    if source.has_weights:
        kept = [] if findings else expand(closing.placements, grouping.tensors, source.stored).findings
        problems += [str(finding) for finding in (*findings, *kept)]
    settled, _ = settle(respell_statements(family.weights(fields), spelling), grouping.tensors)
    shapes = leaf_shapes(closing.placements)
    held = {place.leaf: grouping.tensors.get(place.source) for place in closing.placements}
    coded = {part for tensor in held.values() if tensor is not None and tensor.quantised for part in tensor.parts}
    stated = FLOATS.get(str(family.canonical(source.config).text.get("dtype")), "F32")
    dtypes = {
        leaf: stated if tensor is None else tensor.dtype
        for leaf, tensor in held.items()
        if tensor is None or not tensor.quantised
    }
    stored = sum(source.tensors[part].entry.nbytes for part in coded)
    claimed = {place.source for place in closing.placements} | {name for name, _ in closing.zeros}
    claimed |= {alias.name for alias in closing.aliases} | {item.name for item in closing.carried}
    return {
        "rules": tuple(_line(item) for item in settled if isinstance(item, Rule)),
        "notices": closing.notices,
        "aliases": closing.aliases,
        "carried": carried_parts(closing, grouping.tensors),
        "unmapped": tuple(name for name in grouping.tensors if name not in claimed),
        "parameters": sum(map(prod, shapes.values())),
        "parameter_bytes": stored + sum(nbytes(dtype, shapes[leaf]) or 0 for leaf, dtype in dtypes.items()),
    }


def _line(rule: Rule) -> RuleLine:
    """`rule` in words. The parameter's template shows a position in the leaf as a leading index."""
    rows = "".join(f"[{{{name}}}]" for name in rule.stacked)
    return RuleLine(
        tensor=rule.source,
        tensor_view=view_text(rule.source_view),
        parameter=rule.leaf + rows,
        parameter_view=view_text(rule.leaf_view),
        indices={name: ranges(values) for name, values in rule.over.items()},
    )


def view_text(view: View) -> str:
    """A view in words: `[24, 28]`, `[28, 24].T`, or the base with shape, strides and offset."""
    base = f"[{', '.join(map(str, view.base))}]"
    whole = View.of(*view.base)
    if view == whole:
        return base
    if view == whole.T:
        return f"{base}.T"
    at = f" from {view.offset}" if view.offset else ""
    return f"{base} as {list(view.shape)} by {list(view.strides)}{at}"


def ranges(values: Sequence[int]) -> str:
    """Indices in short: `0..3,5`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
