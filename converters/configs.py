"""The config.json and index an export writes: the source's own, with only what the export changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..families.errors import ConversionError
from ..families.family import Family, Spelling
from ..families.spelling import TEXT_CONFIG, respell
from .quantisation import RECORDS, record_of, respell_record, without_record
from .safetensors_files import Header
from .source import CONFIG, INDEX, read_json_object

_PROMOTED = ("dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys a wrapper may state for its text half, which a text-only config takes when the text config has none."""


def with_dtype(text: bytes, dtype: str) -> bytes:
    """config.json with its dtype keys set to `dtype`, in whichever spelling it uses (added when it has none)."""
    config = read_json_object(text, CONFIG)
    changed = respell(config, {"dtype": dtype})
    return text if changed == config else to_text(changed)


def text_config(text: bytes, family: Family) -> bytes:
    """The config.json of a wrapper's text half alone.

    Raises ConversionError when the config is not a wrapper's.
    """
    config = read_json_object(text, CONFIG)
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, Mapping):
        raise ConversionError("config.json is not a wrapper's: it is text-only already")
    result: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    result |= {key: value for key, value in inner.items() if key not in result}
    shared = family.wrapper.shared if family.wrapper is not None else ()
    for key in (*shared, *_PROMOTED):
        spelled = {"dtype", "torch_dtype"} if key in ("dtype", "torch_dtype") else {key}
        if key in config and not spelled & set(result):
            result[key] = config[key]
    return to_text(result)


def to_text(config: Mapping[str, Any]) -> bytes:
    """JSON as transformers writes a config."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def index_text(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """A new `model.safetensors.index.json`; total_size is the sum of the tensors' bytes."""
    value = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def resized_index(text: bytes, headers: Mapping[str, Header]) -> bytes:
    """The source's index for other shards: their tensors, in its own order where it names them, and their bytes."""
    index = read_json_object(text, INDEX)
    metadata = index.get("metadata")
    total = sum(header.data_bytes for header in headers.values())
    index["metadata"] = {**(metadata if isinstance(metadata, Mapping) else {}), "total_size": total}
    holders = {name: shard for shard, header in headers.items() for name in header.entries}
    if holders != index["weight_map"]:
        named = [name for name in index["weight_map"] if name in holders]
        index["weight_map"] = {name: holders[name] for name in dict.fromkeys((*named, *holders))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def without_records(text: bytes) -> bytes:
    """config.json without its quantisation records: its weights are plain."""
    config = read_json_object(text, CONFIG)
    plain = without_record(config)
    return text if plain == config else to_text(plain)


def with_record(text: bytes, record: Mapping[str, Any], spelling: Spelling) -> bytes:
    """A text-only config.json that states a wrapper's quantisation record, module names in a text-only spelling."""
    config = read_json_object(text, CONFIG)
    if record_of(config) is not None or not record:
        return text
    return to_text({**config, RECORDS[0]: respell_record(record, spelling)})
