"""FP8 weights: E4M3 codes and the scales they are multiplied by, a block, a channel or a tensor each.

    X.weight            F8_E4M3 [o, i]
    X.weight_scale_inv  F32, BF16, F16 or F8_E8M0 [ceil(o/128), ceil(i/128)]: multiplied by, despite its name
                        (DeepSeek-V3's `weight_dequant`, transformers 5.24 `Fp8Dequantize`); also `X.scale`
    X.weight_scale      [o, 1] or [o] a channel, [] or [1] a tensor (compressed-tensors, ModelOpt)

Fused experts are [E, o, i] with a grid each. Blocks at the edges are cut. A scale may lie in another shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..families.errors import ConversionError, Finding
from ..families.fields import shown
from .codecs import Grouping, Logical, Stored, assemble_groups, weight_schemes
from .decoding import FP8
from .grains import grid

CODES = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
VALUE = "BF16"
"""What the product is rounded to: the dtype of every release of the format."""
_OTHER_CODES = {"F8_E5M2": "E5M2", "F8_E4M3FNUZ": "E4M3FNUZ", "F8_E5M2FNUZ": "E5M2FNUZ"}
_MODELOPT = {
    "FP8": ("tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel",),
    "FP8_PB_WO": ("block",),
}
"""ModelOpt's quant_algo -> what a scale is for."""
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""The keys of a record that list modules whose weights are plain."""


@dataclass(frozen=True)
class Fp8:
    """block: the shape of a block, where scales are for blocks. scales: what one may be for. listed: modules said
    not to be converted; a tensor is what its header says it is, so they are a cross-check alone."""

    block: tuple[int, int] | None
    scales: tuple[str, ...]
    listed: tuple[str, ...] = ()
    name: str = FP8

    def group(self, stored: Mapping[str, Stored]) -> Grouping:
        quantised: dict[str, Logical] = {}
        findings: list[Finding] = []
        claimed: set[str] = set()
        for name, item in stored.items():
            scales = [stored[other] for other in companions(name) if other in stored]
            if item.dtype in _OTHER_CODES:
                fix = "weights in this form are not supported"
                findings.append(Finding(f"tensor {name}", f"dtype {item.dtype}", CODES, fix))
            elif item.dtype in ("I8", "U8") and scales:
                findings.append(
                    Finding(
                        f"tensor {name}",
                        f"dtype {item.dtype} beside {scales[0].name}: packed FP4 (mxfp4)",
                        CODES,
                        "mxfp4 weights are not supported",
                    )
                )
                claimed |= {scale.name for scale in scales}
            elif item.dtype == CODES:
                claimed |= {scale.name for scale in scales}
                quantised[name] = self._join(item, scales, findings)
        findings += _orphans(stored, claimed)
        return assemble_groups(stored, quantised, findings, self._notices(stored, quantised))

    def _join(self, item: Stored, scales: Sequence[Stored], findings: list[Finding]) -> Logical:
        """The logical tensor; without its scale, which is then a finding, when that does not fit."""
        alone = Logical(item.name, VALUE, item.shape, (item.name, *(scale.name for scale in scales)), FP8)
        where = f"tensor {item.name}"
        if len(scales) != 1:
            found = " and ".join(scale.name for scale in scales) or "no scale"
            findings.append(
                Finding(
                    where,
                    f"{CODES} with {found}",
                    f"one scale, {companions(item.name)[0]} say",
                    "codes mean nothing without their scale; the checkpoint is incomplete or is another format's",
                )
            )
            return alone
        scale = scales[0]
        if scale.dtype not in SCALES:
            fix = "the file is damaged or is another format's"
            findings.append(Finding(f"tensor {scale.name}", f"dtype {scale.dtype}", " or ".join(SCALES), fix))
            return alone
        fitting = self._grains(item.shape)
        for grain in fitting:
            wanted = grid(item.shape, grain)
            if scale.shape == wanted or (prod(wanted) == prod(scale.shape) and _squeezed(scale.shape, wanted)):
                return Logical(item.name, VALUE, item.shape, (item.name, scale.name), FP8, ((1,) * len(grain), grain))
        needed = " or ".join(str(list(grid(item.shape, grain))) for grain in fitting) or "a weight of two axes or more"
        fix = "the weight, its scale and quantization_config disagree"
        findings.append(Finding(f"tensor {scale.name}", f"shape {list(scale.shape)}", f"shape {needed}", fix))
        return alone

    def _grains(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        if len(shape) < 2 or not prod(shape):
            return []
        leading = (1,) * (len(shape) - 2)
        grains: dict[str, tuple[int, ...]] = {"channel": (*leading, 1, shape[-1]), "tensor": shape}
        if self.block is not None:
            grains["block"] = (*leading, *self.block)
        return [grains[kind] for kind in self.scales]

    def _notices(self, stored: Mapping[str, Stored], quantised: Mapping[str, Logical]) -> list[str]:
        if stored and not quantised:
            return ["config.json asks for fp8 weights, and none is stored so: all are read as stored"]
        if not self.listed:
            return []
        matches = _matcher(self.listed)
        both = [name for name in quantised if matches(name.removesuffix(".weight"))]
        if not both:
            return []
        more = f" and {len(both) - 1} more" if len(both) > 1 else ""
        return [f"{both[0]}{more}: stored in FP8, and listed as not converted; read as stored"]


def companions(name: str) -> list[str]:
    """The names a scale of the weight `name` may have."""
    names = [f"{name}_scale_inv", f"{name}_scale"]
    return [*names, f"{name.removesuffix('.weight')}.scale"] if name.endswith(".weight") else names


def _names(record: Mapping[str, Any], key: str) -> Sequence[str]:
    """A record's list of modules, none where it states none. Raises ConversionError unless it is a list of names."""
    stated = record.get(key)
    if stated is None:
        return ()
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise ConversionError(f"config.json: quantization_config has {key} {shown(stated)}; a list of names is needed")
    return stated


def fp8_codec(record: Mapping[str, Any]) -> Fp8 | None:
    """The codec of a quantisation record, None when it asks for another method.

    Reads transformers' `quant_method: fp8`, ModelOpt's `quant_algo`, and compressed-tensors' float schemes. Raises
    ConversionError for an fp8 record that cannot be followed.
    """
    listed = tuple(name for key in LISTS for name in _names(record, key))
    method = record.get("quant_method")
    if method == "fp8":
        form = record.get("fmt", "e4m3")
        if form not in ("e4m3", "float8_e4m3fn"):
            raise ConversionError(f"config.json: quantization_config has fmt {shown(form)}; only e4m3 is supported")
        size = record.get("weight_block_size")
        if size is None:
            return Fp8(None, ("tensor", "channel"), listed)
        return Fp8(_block(size, "weight_block_size"), ("block",), listed)
    algorithm = record.get("quant_algo")
    if method in (None, "modelopt") and isinstance(algorithm, str) and algorithm.upper() in _MODELOPT:
        kinds = _MODELOPT[algorithm.upper()]
        return Fp8((128, 128) if "block" in kinds else None, kinds, listed)
    schemes = weight_schemes(record)
    if not schemes or not all(_is_float8(scheme) for scheme in schemes):
        return None
    kinds = tuple(dict.fromkeys(str(scheme.get("strategy")) for scheme in schemes))
    if not set(kinds) <= {"tensor", "channel", "block"}:
        return None
    sizes = {_block(scheme.get("block_structure"), "block_structure") for scheme in schemes if _is_block(scheme)}
    if len(sizes) > 1:
        raise ConversionError(f"config.json: quantization_config has blocks of several sizes: {sorted(sizes)}")
    return Fp8(next(iter(sizes), None), kinds, listed)


def _is_float8(scheme: Mapping[str, Any]) -> bool:
    form = scheme.get("format") in ("float-quantized", "naive-quantized", None)
    return form and scheme.get("type") == "float" and scheme.get("num_bits") == 8 and scheme.get("symmetric") is True


def _is_block(scheme: Mapping[str, Any]) -> bool:
    return scheme.get("strategy") == "block"


def _block(value: Any, key: str) -> tuple[int, int]:
    written = re.fullmatch(r"(\d{1,6})x(\d{1,6})", value) if isinstance(value, str) else None
    if written:
        value = [int(size) for size in written.groups()]
    fits = (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )
    if not fits:
        raise ConversionError(
            f"config.json: quantization_config has {key} {shown(value)}; two sizes above 0 are needed"
        )
    return int(value[0]), int(value[1])


def _squeezed(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether two shapes differ in axes of one alone: [o] for [o, 1], [] for [1, 1]."""
    return [size for size in shape if size != 1] == [size for size in wanted if size != 1]


def _orphans(stored: Mapping[str, Stored], claimed: set[str]) -> list[Finding]:
    findings = []
    for name in stored:
        weight = next((name.removesuffix(end) for end in ("_scale_inv", "_scale") if name.endswith(end)), None)
        if weight is None or name in claimed or not (name.endswith("_scale_inv") or weight.endswith(".weight")):
            continue
        held = f"dtype {stored[weight].dtype}" if weight in stored else "nothing"
        findings.append(
            Finding(f"tensor {weight}", f"{held} beside its scale {name}", CODES, "remove the scale, or add its codes")
        )
    return findings


def _matcher(listed: Sequence[str]) -> Any:
    """Whether a module is listed: by name or by the name of what holds it, whatever prefix a wrapper puts before
    either, or by a pattern (`re:…`, or with `*`)."""
    patterns = [entry for entry in listed if entry.startswith("re:") or "*" in entry]
    compiled = [
        re.compile(entry[3:] if entry.startswith("re:") else re.escape(entry).replace(r"\*", ".*"))
        for entry in patterns
        if _compiles(entry)
    ]
    names = {_bare(entry.removesuffix(".weight")) for entry in listed if entry not in patterns}

    def matches(module: str) -> bool:
        parts = _bare(module).split(".")
        held = any(".".join(parts[: end + 1]) in names for end in range(len(parts)))
        return held or any(pattern.fullmatch(module) or pattern.match(module) for pattern in compiled)

    return matches


def _compiles(entry: str) -> bool:
    try:
        re.compile(entry[3:] if entry.startswith("re:") else re.escape(entry))
    except re.error:
        return False
    return True


def _bare(name: str) -> str:
    """A module's name without what wrappers put before it."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("model", "language_model"):
        parts = parts[1:]
    return ".".join(parts)
