"""The bank directory: what an import writes, `save` writes and everything else reads.

    OUT/
      dewconv.json             the manifest (`manifest.py`)
      layers_0_15.safetensors  one file per run of layers; keys and arrays as `layout.py` says
      top.safetensors          what is not in a layer
      carried.safetensors      tensors kept verbatim for export, under the source's names
      headers/<shard>.json     the source's shard headers, byte for byte, so that shards can be written again as
                               they were: names, dtypes, shapes, order, metadata and padding
      source/                  config.json, the index, and the side files, byte for byte

Bank files are plain safetensors whose data start at a multiple of 4096 and whose tensors lie at multiples of 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import xxhash

from ..families.errors import ConversionError, Finding, FindingsError
from ..families.family import Family
from ..families.registry import find
from .copying import default_threads
from .layout import CARRIED, SUFFIX
from .manifest import Manifest, read_manifest
from .safetensors_files import Header, MappedFile, parse_header, read_header
from .source import CONFIG, INDEX, read_json_object

HEADERS = "headers"
SOURCE = "source"


@dataclass
class Banks:
    """A bank directory, opened: its manifest and its headers have been read and agree; no weight has been."""

    path: Path
    manifest: Manifest
    headers: Mapping[str, Header] = field(repr=False)
    _maps: dict[str, MappedFile] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @cached_property
    def family(self) -> Family:
        """The family the manifest names. Raises ConversionError when it is not registered."""
        return find(self.manifest.model_type)

    @cached_property
    def config_text(self) -> bytes:
        """The source's config.json."""
        return (self.path / SOURCE / CONFIG).read_bytes()

    @property
    def config(self) -> dict[str, Any]:
        return read_json_object(self.config_text, CONFIG)

    @cached_property
    def index_text(self) -> bytes | None:
        """The source's index file, None when it was a single file."""
        return (self.path / SOURCE / INDEX).read_bytes() if self.manifest.has_index else None

    @cached_property
    def source_headers(self) -> dict[str, Header]:
        """Shard name -> the header it had in the source, in order."""
        sizes = self.manifest.source["files"]
        return {
            shard: parse_header((self.path / HEADERS / f"{shard}.json").read_bytes(), int(sizes[shard]["size"]), shard)
            for shard in self.manifest.shards
        }

    def open(self, bank: str) -> MappedFile:
        """The map of a bank's file, opened once."""
        name = bank + SUFFIX
        with self._lock:
            if name not in self._maps:
                self._maps[name] = MappedFile(self.path / name, self.headers[name])
            return self._maps[name]

    def has(self, bank: str, key: str) -> bool:
        """Whether `key` is stored in `bank`."""
        header = self.headers.get(bank + SUFFIX)
        return header is not None and key in header.entries

    def array(self, bank: str, key: str) -> np.ndarray:
        """A stored tensor as a read-only array that aliases the file."""
        return self.open(bank).view(key)

    def stored(self) -> Iterable[tuple[str, str]]:
        """(bank, key) of every parameter tensor; carried tensors are not parameters."""
        for name, header in self.headers.items():
            bank = name.removesuffix(SUFFIX)
            if bank != CARRIED:
                for key in header.entries:
                    yield bank, key


def is_bank_directory(path: Path) -> bool:
    """Whether `path` is laid out as a bank directory (it has a manifest)."""
    return (path / "dewconv.json").is_file()


def open_banks(path: str | Path) -> Banks:
    """The bank directory at `path`.

    Raises ConversionError when there is no readable manifest, and FindingsError naming every file that is missing
    or does not hold the tensors the manifest lists. `check_banks` compares the bytes themselves.
    """
    directory = Path(path).expanduser()
    manifest = read_manifest(directory)
    findings: list[Finding] = []
    headers: dict[str, Header] = {}
    again = "import the checkpoint again"
    for name, tensors in manifest.files.items():
        if not (directory / name).is_file():
            findings.append(Finding(f"bank file {name}", "no such file", "the file the manifest lists", again))
            continue
        try:
            header = read_header(directory / name)
        except ConversionError as error:
            findings.append(Finding(f"bank file {name}", f"a damaged header ({error})", "a whole file", again))
            continue
        headers[name] = header
        for key in sorted(set(header.entries) ^ set(tensors)):
            found, needed = ("no such tensor", "it") if key in tensors else ("a tensor", "only those of the manifest")
            findings.append(Finding(f"{name}: {key}", found, needed, again))
    beside = [f"{SOURCE}/{CONFIG}", *(f"{HEADERS}/{shard}.json" for shard in manifest.shards)]
    beside += [f"{SOURCE}/{name}" for name in manifest.side_files]
    for name in [*beside, *([f"{SOURCE}/{INDEX}"] if manifest.has_index else [])]:
        if not (directory / name).is_file():
            findings.append(Finding(name, "no such file", "the file the import wrote", again))
    if findings:
        raise FindingsError(str(directory), findings)
    return Banks(directory, manifest, headers)


def checksum(data: bytes | np.ndarray) -> str:
    """The checksum of stored bytes: xxh3, 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data if isinstance(data, bytes) else data.data)


def check_banks(banks: Banks, threads: int | None = None) -> list[Finding]:
    """A finding for every stored tensor whose bytes are not those that were written: reads every bank file."""

    def one(item: tuple[str, str]) -> Finding | None:
        name, key = item
        expected = banks.manifest.files[name][key].get("xxh3")
        found = checksum(banks.open(name.removesuffix(SUFFIX)).raw(key))
        if found == expected:
            return None
        return Finding(f"{name}: {key}", f"checksum {found}", f"{expected}", "the file was altered or is damaged")

    items = [(name, key) for name, tensors in banks.manifest.files.items() for key in tensors]
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return [finding for finding in pool.map(one, items) if finding is not None]
