"""The config.json and index an export writes: the source's own, with only what the export changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..families.errors import ConversionError
from ..families.family import Family
from ..families.spelling import TEXT_CONFIG, respell
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


def resized_index(text: bytes, total_size: int) -> bytes:
    """The source's index with another total_size."""
    index = read_json_object(text, INDEX)
    metadata = index.get("metadata")
    index["metadata"] = {**(metadata if isinstance(metadata, Mapping) else {}), "total_size": total_size}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
