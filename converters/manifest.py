"""The manifest of a bank directory, `dewconv.json`: what the banks are and where they came from.

One JSON object:

    format, version     "dewconv banks", 1
    family, model_type  the family's name, and the config's model_type it is found by
    decoder             the decoder fields (`DecoderFields.to_json`)
    source              name, repo, revision, path, files (name -> size, etag), shards in order, index (true/false)
    spelling            the tensor prefixes of the source
    dtype, inexact      the dtype asked for; why an export cannot be byte-exact, [] when it can
    text_only           only the text half of a wrapper was imported
    codec               how the source stores logical tensors ("plain", "fp8", "int4")
    quantized           of quantised weights: "keep" as codes and scales, or "decode"; null for a plain checkpoint
    coded               bank file -> key -> how codes decode (`parts.Coding`): format, dtype and shape of the leaf,
                        and how many of its elements, per axis, an element of codes and of scales stands for
    files               bank file -> key -> {"xxh3": checksum of the stored bytes}, with "sha256" where it was asked for
    beside              every file under source/ and headers/ -> the same of its bytes; absent in banks that were
                        written before it was
    aliases             tensor -> the tensor it is an equal copy of
    carried             tensor -> why it is kept verbatim
    zeros               tensors with declared zero padding
    side_files          the files under source/ copied byte for byte
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dew_core.fields import DecoderFields
from ..families.errors import ConversionError, FindingsError
from ..families.family import Spelling
from ..families.fields import shown
from .checksums import Checksums
from .layout import beside_files
from .manifest_checks import AGAIN, manifest_findings
from .parts import Coding
from .source import MANIFEST, read_json_object

FORMAT = "dewconv banks"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The manifest as values; the module says what each is."""

    family: str
    model_type: str
    fields: DecoderFields
    source: Mapping[str, Any]
    spelling: Spelling
    dtype: str
    inexact: tuple[str, ...]
    text_only: bool
    codec: str
    quantized: str | None
    coded: Mapping[str, Mapping[str, Coding]]
    files: Mapping[str, Mapping[str, Checksums]]
    beside: Mapping[str, Checksums]
    aliases: Mapping[str, str]
    carried: Mapping[str, str]
    zeros: tuple[str, ...]
    side_files: tuple[str, ...]

    @property
    def shards(self) -> tuple[str, ...]:
        """The source's shards, in order."""
        return tuple(self.source["shards"])

    @property
    def has_index(self) -> bool:
        return bool(self.source["index"])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "family": self.family,
            "model_type": self.model_type,
            "decoder": self.fields.to_json(),
            "source": dict(self.source),
            "spelling": {"body": self.spelling.body, "head": self.spelling.head},
            "dtype": self.dtype,
            "inexact": list(self.inexact),
            "text_only": self.text_only,
            "codec": self.codec,
            "quantized": self.quantized,
            "coded": {
                name: {key: item.to_json() for key, item in codings.items()} for name, codings in self.coded.items()
            },
            "files": {name: dict(tensors) for name, tensors in self.files.items()},
            "beside": {name: dict(item) for name, item in self.beside.items()},
            "aliases": dict(self.aliases),
            "carried": dict(self.carried),
            "zeros": list(self.zeros),
            "side_files": list(self.side_files),
        }

    @property
    def beside_files(self) -> list[str]:
        """What the bank directory keeps beside its weights, as paths in it."""
        return beside_files(self.has_index, self.side_files, self.shards)

    def to_bytes(self) -> bytes:
        return (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a bank directory, every field of it checked (`manifest_checks`).

    Raises ConversionError when there is none, or it is of another format or version; FindingsError naming every field
    that is missing or cannot be what an import wrote.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ConversionError(f"{directory}: is not a bank directory, it has no {MANIFEST}")
    value = read_json_object(path.read_bytes(), str(path))
    if value.get("format") != FORMAT:
        raise ConversionError(f"{path}: format is {shown(value.get('format'))}, not {FORMAT!r}; {AGAIN}")
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        raise ConversionError(
            f"{path}: has format version {shown(version)}, this dewconv reads {VERSION}; "
            + ("use a newer dewconv" if newer else AGAIN)
        )
    value = {"quantized": None, "coded": {}, **value}  # not in manifests of the first imports
    findings = manifest_findings(value)
    if findings:
        raise FindingsError(str(path), findings)
    return Manifest(
        family=value["family"],
        model_type=value["model_type"],
        fields=DecoderFields.from_json(value["decoder"]),
        source=value["source"],
        spelling=Spelling(**value["spelling"]),
        dtype=value["dtype"],
        inexact=tuple(value["inexact"]),
        text_only=value["text_only"],
        codec=value["codec"],
        quantized=value["quantized"],
        coded={
            name: {key: Coding.from_json(item) for key, item in codings.items()}
            for name, codings in value["coded"].items()
        },
        files=value["files"],
        beside=value.get("beside", {}),
        aliases=value["aliases"],
        carried=value["carried"],
        zeros=tuple(value["zeros"]),
        side_files=tuple(value["side_files"]),
    )
