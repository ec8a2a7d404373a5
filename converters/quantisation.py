"""Which codec a checkpoint's quantisation record asks for, and what an export without it leaves out of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..families.errors import ConversionError
from ..families.family import Spelling
from ..families.fields import shown
from ..families.spelling import TEXT_CONFIG
from .codecs import Codec, Plain, Stored
from .dtypes import FLOATS
from .fp8 import LISTS, fp8_codec
from .int4 import int4_codec
from .source import read_json_object

HF_QUANT = "hf_quant_config.json"
"""NVIDIA ModelOpt's own record, beside config.json; older exports have no other."""
RECORDS = ("quantization_config", "compression_config")
"""The keys of a config, or of a wrapper's text_config, that hold a quantisation record."""
MODES = ("keep", "decode")
"""Quantised weights as they are, codes and scales; or decoded, which no export can undo byte for byte."""

_EXAMPLES = 3


def record_of(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """The quantisation record of a config.json: its own, its text_config's, or ModelOpt's file's; None without one.

    Raises ConversionError for a record that is not an object, and for two that differ.
    """
    text = config.get(TEXT_CONFIG)
    found: list[Mapping[str, Any]] = []
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in RECORDS:
            record = part.get(key)
            if record is None:
                continue
            if not isinstance(record, Mapping):
                raise ConversionError(f"config.json: {key} is {shown(record)}, not an object")
            found.append(record)
    if any(record != found[0] for record in found):
        raise ConversionError(
            "config.json: its records of quantization_config differ; keep the one the weights are stored by"
        )
    if found:
        return found[0]
    inner = None if hf_quant is None else hf_quant.get("quantization", hf_quant)
    return inner if isinstance(inner, Mapping) else None


def codec_of(
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> Codec:
    """The codec that a config's quantisation record asks for.

    hf_quant: the parsed `hf_quant_config.json`, when there is one. stored: tensors to name as examples. Raises
    ConversionError naming the method, for one that is not built and for a record that contradicts itself.
    """
    record = record_of(config, hf_quant)
    if record is None:
        return Plain()
    for build in (fp8_codec, int4_codec):
        codec = build(record)
        if codec is not None:
            return codec
    where = HF_QUANT if record_of(config) is None else f"config.json: {RECORDS[0]}"
    raise ConversionError(
        f"{where} asks for {_method(record)} weights, which are not supported{_examples(stored or {})}"
    )


def read_hf_quant(directory: Path, side_files: Iterable[str]) -> Mapping[str, Any] | None:
    """ModelOpt's record among the side files of `directory`, None without one."""
    if HF_QUANT not in side_files:
        return None
    return read_json_object((directory / HF_QUANT).read_bytes(), HF_QUANT)


def without_record(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without its quantisation records, a text_config's included."""
    kept = {key: value for key, value in config.items() if key not in RECORDS}
    if isinstance(kept.get(TEXT_CONFIG), Mapping):
        kept[TEXT_CONFIG] = without_record(kept[TEXT_CONFIG])
    return kept


def respell_record(record: Mapping[str, Any], spelling: Spelling) -> dict[str, Any]:
    """A record whose lists of modules name them as a text-only checkpoint does; patterns are left as they are."""

    def module(name: Any) -> Any:
        for spelled, plain in ((spelling.body, Spelling.body), (spelling.head, Spelling.head)):
            if isinstance(name, str) and f"{name}.".startswith(spelled):
                return (plain + f"{name}."[len(spelled) :]).removesuffix(".")
        return name

    return {
        key: [module(name) for name in value] if key in LISTS and isinstance(value, list) else value
        for key, value in record.items()
    }


def _method(record: Mapping[str, Any]) -> str:
    said = [str(record[key]) for key in ("quant_method", "quant_algo", "format") if isinstance(record.get(key), str)]
    return repr(" ".join(said)) if said else "quantised"


def _examples(stored: Mapping[str, Stored]) -> str:
    coded = [item for item in stored.values() if item.dtype not in FLOATS.values()]
    if not coded:
        return ""
    shown = ", ".join(f"{item.name} {item.dtype} {list(item.shape)}" for item in coded[:_EXAMPLES])
    more = f" and {len(coded) - _EXAMPLES} more" if len(coded) > _EXAMPLES else ""
    return f": {shown}{more}"
