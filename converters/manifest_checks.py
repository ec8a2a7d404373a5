"""What a manifest may say, field by field: read from a file that may be damaged, edited or another program's."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..dew_core.fields import DecoderFields
from ..dew_core.refusals import unbuildable
from ..families.errors import ConversionError, Finding
from ..families.fields import MOST, MOST_LAYERS, is_finite, shown
from ..families.registry import find
from .checksums import FAST, FORMS
from .codecs import PLAIN
from .decoding import FP8, INT4
from .dtypes import FLOATS
from .layout import beside_files
from .source import CONFIG, INDEX

AGAIN = "import the checkpoint again"
CODECS = (PLAIN, FP8, INT4)
QUANTIZED = (None, "keep", "decode")
_COUNTED = ("vocab_size", "emb_features", "num_layers", "num_heads", "max_seq_len")

Check = Callable[[Any], bool]


def manifest_findings(value: Mapping[str, Any]) -> list[Finding]:
    """Every field of a manifest of this format version that is missing or cannot be what an import wrote, by name."""
    found = _Fields()
    found.check(value, "family", _text, "a family's name")
    found.check(value, "model_type", _text, "a model_type")
    found.check(value, "decoder", _object, "an object of decoder fields")
    found.check(value, "source", _object, "an object")
    found.check(value, "spelling", _object, "an object")
    found.check(value, "dtype", _among("keep", *FLOATS), f"one of keep, {', '.join(FLOATS)}")
    found.check(value, "inexact", _texts, "a list of reasons")
    found.check(value, "text_only", _flag, "true or false")
    found.check(value, "codec", _among(*CODECS), f"one of {', '.join(CODECS)}")
    found.check(value, "quantized", _among(*QUANTIZED), 'null, "keep" or "decode"')
    found.check(value, "coded", _object, "an object")
    found.check(value, "files", lambda files: _object(files) and bool(files), "an object of bank files")
    found.check(value, "aliases", _object, "an object of tensors")
    found.check(value, "carried", _object, "an object of tensors")
    found.check(value, "zeros", _texts, "a list of tensors")
    found.check(value, "side_files", _texts, "a list of files")
    if "beside" in value:
        found.check(value, "beside", _object, "an object of files")
    if found.findings:
        return found.findings
    _decoder(found, value["decoder"])
    _source(found, value["source"], value["side_files"])
    _family(found, value)
    _files(found, value)
    for field in ("aliases", "carried"):
        for name in value[field]:
            found.check(value[field], name, _text, "a text", field)
    for name in value["side_files"]:
        found.inside("side_files", name)
    if not found.findings and "beside" in value:
        source = value["source"]
        wanted = set(beside_files(source["index"], value["side_files"], source["shards"]))
        for name in sorted(wanted ^ set(value["beside"])):
            stated, needed = ("nothing", "a checksum") if name in wanted else ("a checksum", "it in side_files")
            found.say(f"beside.{name}", stated, needed)
    return found.findings


class _Fields:
    """The findings so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def say(self, field: str, found: str, needed: str, fix: str = AGAIN) -> None:
        self.findings.append(Finding(f"field {field}", found, needed, fix))

    def check(self, holder: Mapping[str, Any], key: str, check: Check, needed: str, within: str = "") -> bool:
        """Whether `holder` states `key` and `check` takes it; a finding when not."""
        field = f"{within}.{key}" if within else key
        if key not in holder:
            self.say(field, "nothing", needed)
        elif not check(holder[key]):
            self.say(field, shown(holder[key]), needed)
        else:
            return True
        return False

    def inside(self, field: str, name: str) -> None:
        if not _stays_inside(name):
            self.say(field, f"{shown(name)}, which leads out of the directory", "a path in it")


def _decoder(found: _Fields, value: Mapping[str, Any]) -> None:
    if "vocab_size" not in value:
        found.say("decoder.vocab_size", "nothing", "a whole number of at least 1")
        return
    try:
        fields = DecoderFields.from_json(value)
    except ValueError as error:
        found.say("decoder", str(error), "decoder fields as this version has them")
        return
    except TypeError:
        found.say("decoder", "a record without its members, or with others", "records as this version has them")
        return
    before = len(found.findings)
    for name, hint in get_type_hints(DecoderFields).items():
        if not _conforms(getattr(fields, name), hint):
            found.say(f"decoder.{name}", shown(value[name]), "a value that field can have")
        elif name in _COUNTED and getattr(fields, name) < 1:
            found.say(f"decoder.{name}", shown(value[name]), "a whole number of at least 1")
    if len(found.findings) > before:
        return
    if fields.num_layers > MOST_LAYERS:
        found.say("decoder.num_layers", shown(fields.num_layers), f"at most {MOST_LAYERS} layers")
        return
    why = unbuildable(fields)
    if why is not None:
        found.say("decoder", why, "fields that a decoder can be built of")


def _conforms(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of a decoder field's declared type; a whole number is a float too."""
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_conforms(value, member) for member in members)
    if origin is Literal:
        return any(value == member and type(value) is type(member) for member in members)
    if origin is tuple:
        return isinstance(value, tuple) and all(_conforms(item, members[0]) for item in value)
    if origin is not None:
        return isinstance(value, Mapping) and all(_conforms(item, members[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(type(value)) if isinstance(value, hint) else {}
        # A class variable is annotated too, and is no member of the instance.
        return isinstance(value, hint) and all(
            _conforms(held, hints[name]) for name, held in vars(value).items() if name in hints
        )
    return isinstance(value, hint)


def _source(found: _Fields, source: Mapping[str, Any], side_files: Sequence[str]) -> None:
    found.check(source, "name", _text, "the checkpoint's name", "source")
    for key in ("repo", "revision", "path"):
        found.check(source, key, _text_or_null, "a text or null", "source")
    index = found.check(source, "index", _flag, "true or false", "source")
    shards = found.check(source, "shards", _names, "a list of distinct shards", "source")
    if not found.check(source, "files", _object, "an object of files", "source"):
        return
    files = source["files"]
    for name, item in files.items():
        field = f"source.files.{name}"
        found.inside(field, name)
        if not _object(item):
            found.say(field, shown(item), "an object of size and etag")
            continue
        found.check(item, "size", _size, "a number of bytes", field)
        found.check(item, "etag", _text_or_null, "a text or null", field)
    for shard in source["shards"] if shards else ():
        found.inside("source.shards", shard)
    needed = [CONFIG, *([INDEX] if index and source["index"] else []), *(source["shards"] if shards else ())]
    for name in (*needed, *side_files):
        if name not in files:
            found.say(f"source.files.{name}", "nothing", "the size the file had")


def _family(found: _Fields, value: Mapping[str, Any]) -> None:
    try:
        family = find(value["model_type"])
    except ConversionError as error:
        found.say(
            "model_type", f"{shown(value['model_type'])} ({error})", "one that is registered", "install its family"
        )
        return
    if value["family"] != family.name:
        found.say("family", shown(value["family"]), f"{family.name!r}, which reads {value['model_type']}")
    spellings = [{"body": item.body, "head": item.head} for item in family.spellings]
    if value["spelling"] not in spellings:
        found.say("spelling", shown(value["spelling"]), f"one of {', '.join(map(str, spellings))}")


def _files(found: _Fields, value: Mapping[str, Any]) -> None:
    for name, tensors in value["files"].items():
        field = f"files.{name}"
        if "/" in name or not name.endswith(".safetensors"):
            found.say(field, shown(name), "the plain name of a safetensors file")
        found.inside(field, name)
        if not _object(tensors):
            found.say(field, shown(tensors), "an object of tensors")
            continue
        for key, item in tensors.items():
            _checksum(found, f"{field}.{key}", item)
    for name, item in value.get("beside", {}).items():
        found.inside(f"beside.{name}", name)
        _checksum(found, f"beside.{name}", item)
    for name, codings in value["coded"].items():
        held = value["files"].get(name)
        if not _object(held) or not _object(codings):
            found.say(f"coded.{name}", shown(codings), "an object of tensors, for a bank file of files")
            continue
        for key, item in codings.items():
            field = f"coded.{name}.{key}"
            if key not in held:
                found.say(field, "a coding", "a tensor of that name in files")
            if not _object(item):
                found.say(field, shown(item), "an object")
                continue
            found.check(item, "format", _among(FP8, INT4), f"one of {FP8}, {INT4}", field)
            found.check(item, "dtype", _among(*FLOATS.values()), f"one of {', '.join(FLOATS.values())}", field)
            if found.check(item, "shape", _counts, "a list of sizes", field):
                axes = len(item["shape"])
                for part in ("codes", "scale"):
                    found.check(item, part, lambda grain, n=axes: _counts(grain) and len(grain) == n, "a grain", field)


def _checksum(found: _Fields, field: str, item: Any) -> None:
    for name, form in FORMS.items():
        stated = item.get(name) if isinstance(item, Mapping) else item
        if stated is None and name != FAST:
            continue
        if not isinstance(stated, str) or form.fullmatch(stated) is None:
            digits = 16 if name == FAST else 64
            found.say(f"{field}.{name}", shown(stated), f"a checksum of {digits} hexadecimal digits")
            return


def _among(*values: Any) -> Check:
    return lambda value: any(value is known or (isinstance(value, str) and value == known) for known in values)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _text_or_null(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _names(value: Any) -> bool:
    return _texts(value) and bool(value) and len(set(value)) == len(value)


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(_size(item) and item > 0 for item in value)


def _stays_inside(name: str) -> bool:
    return not (name.startswith("/") or "\0" in name or "\\" in name or ".." in name.split("/") or not name)
