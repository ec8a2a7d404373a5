"""4-bit integer weights as compressed-tensors packs them (`pack-quantized`; Kimi K2-Thinking's and K2.5's experts).

    X.weight_packed  I32 [o, i/8]: eight codes a word, the lowest bits first, each stored plus 8
    X.weight_scale   BF16, F16 or F32 [o, i/group_size], or [o, 1] a channel
    X.weight_shape   [2]: o and i

The logical tensor is `X.weight`, [o, i]. Only symmetric schemes are read: no zero points, no column order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..families.errors import ConversionError, Finding
from ..families.fields import shown
from .codecs import Grouping, Logical, Stored, assemble_groups, weight_schemes
from .decoding import INT4, NIBBLES

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
SCALES = ("BF16", "F16", "F32")
_ASYMMETRIC = {"_zero_point": "zero points", "_g_idx": "an order of columns"}


@dataclass(frozen=True)
class Int4:
    """group: the columns of a scale, None for a whole row."""

    group_size: int | None
    name: str = INT4

    def group(self, stored: Mapping[str, Stored]) -> Grouping:
        quantised: dict[str, Logical] = {}
        findings: list[Finding] = []
        for name, item in stored.items():
            if name.endswith(f".weight{PACKED}"):
                quantised[name] = self._join(name.removesuffix(PACKED), item, stored, findings)
            for end in (SCALE, SHAPE):
                weight = name.removesuffix(end)
                if name.endswith(f".weight{end}") and f"{weight}{PACKED}" not in stored:
                    findings.append(
                        Finding(
                            f"tensor {weight}{PACKED}",
                            f"nothing beside {name}",
                            "packed codes",
                            "remove what belongs to no weight, or add its codes",
                        )
                    )
        notices = []
        if stored and not quantised and not findings:
            notices.append("config.json asks for packed int4 weights, and none is stored so: all are read as stored")
        return assemble_groups(stored, quantised, findings, notices)

    def _join(self, weight: str, codes: Stored, stored: Mapping[str, Stored], findings: list[Finding]) -> Logical:
        """The logical tensor; what does not fit is a finding, and the tensor then cannot be decoded."""
        scale, shape = stored.get(f"{weight}{SCALE}"), stored.get(f"{weight}{SHAPE}")
        where = f"tensor {codes.name}"
        damaged = "the file is damaged or is another format's"
        if codes.dtype != "I32" or len(codes.shape) != 2:
            findings.append(Finding(where, f"{codes.dtype} {list(codes.shape)}", "I32 of two axes", damaged))
            return Logical(weight, "BF16", codes.shape, (codes.name,), INT4)
        for end, what in _ASYMMETRIC.items():
            if f"{weight}{end}" in stored:
                findings.append(
                    Finding(f"tensor {weight}{end}", what, "symmetric weights", "such weights are not supported")
                )
        rows, columns = codes.shape[0], NIBBLES * codes.shape[1]
        group = columns if self.group_size is None else self.group_size
        wanted = (rows, -(-columns // group)) if columns else (rows, 0)
        if scale is None:
            findings.append(
                Finding(where, "no scale", f"{weight}{SCALE} {list(wanted)}", "codes mean nothing without their scale")
            )
            return Logical(weight, "BF16", (rows, columns), (codes.name,), INT4)
        if scale.dtype not in SCALES or scale.shape != wanted:
            needed = f"{' or '.join(SCALES)} {list(wanted)}"
            findings.append(Finding(f"tensor {scale.name}", f"{scale.dtype} {list(scale.shape)}", needed, damaged))
        if shape is not None and (shape.dtype not in ("I32", "I64") or shape.shape != (2,)):
            findings.append(Finding(f"tensor {shape.name}", f"{shape.dtype} {list(shape.shape)}", "I32 [2]", damaged))
        return Logical(
            weight,
            "F16" if scale.dtype == "F16" else "BF16",
            (rows, columns),
            (codes.name, scale.name),
            INT4,
            ((1, NIBBLES), (1, group)),
            () if shape is None else (shape.name,),
        )


def int4_codec(record: Mapping[str, Any]) -> Int4 | None:
    """The codec of a compressed-tensors record whose every scheme is symmetric packed int4; None for any other.

    Raises ConversionError for groups that no word of codes fits, and for several group sizes.
    """
    schemes = weight_schemes(record)
    if not schemes or not all(_is_packed_int4(scheme) for scheme in schemes):
        return None
    sizes = [scheme.get("group_size") if scheme.get("strategy") == "group" else None for scheme in schemes]
    size = sizes[0]
    if any(other != size for other in sizes):
        raise ConversionError(f"config.json: quantization_config has several group sizes: {sorted(map(str, sizes))}")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % NIBBLES):
        raise ConversionError(
            f"config.json: quantization_config has group_size {shown(size)}; a multiple of 8 is needed"
        )
    return Int4(size)


def _is_packed_int4(scheme: Mapping[str, Any]) -> bool:
    return (
        scheme.get("format") == "pack-quantized"
        and scheme.get("type") == "int"
        and scheme.get("num_bits") == 4
        and scheme.get("symmetric") is True
        and scheme.get("strategy") in ("group", "channel")
    )
