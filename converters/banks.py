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

from ..families.errors import ConversionError, Finding, FindingsError
from ..families.family import Family
from ..families.registry import find
from .checksums import Checksums, Digest, of_file, unlike
from .copying import default_threads
from .layout import CARRIED, HEADERS, SOURCE, SUFFIX, part_leaf, split_key
from .manifest import Manifest, read_manifest
from .manifest_checks import AGAIN
from .prefetch import fetch
from .safetensors_files import Header, MappedFile, parse_header, read_header
from .side_files import fault_of_file
from .source import CONFIG, INDEX, read_json_object

FETCHED_BYTES = 16 << 20
"""What is read ahead of a checksum at a time."""
ALTERED = "the file was altered or is damaged"


@dataclass
class Banks:
    """A bank directory, opened: its manifest and its headers have been read and agree; no weight has been.

    private: whether the maps of its files are (`MappedFile`).
    """

    path: Path
    manifest: Manifest
    headers: Mapping[str, Header] = field(repr=False)
    private: bool = False
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
        return read_json_object(self.config_text, str(self.path / SOURCE / CONFIG))

    @cached_property
    def index_text(self) -> bytes | None:
        """The source's index file, None when it was a single file."""
        return (self.path / SOURCE / INDEX).read_bytes() if self.manifest.has_index else None

    @cached_property
    def source_headers(self) -> dict[str, Header]:
        """Shard name -> the header it had in the source, in order."""
        sizes = self.manifest.source["files"]
        return {
            shard: parse_header((self.path / name).read_bytes(), sizes[shard]["size"], str(self.path / name))
            for shard, name in ((shard, f"{HEADERS}/{shard}.json") for shard in self.manifest.shards)
        }

    def open(self, bank: str) -> MappedFile:
        """The map of a bank's file, opened once."""
        name = bank + SUFFIX
        with self._lock:
            if name not in self._maps:
                self._maps[name] = MappedFile(self.path / name, self.headers[name], self.private)
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


def open_banks(path: str | Path, private: bool = False) -> Banks:
    """The bank directory at `path`. private: as `Banks` has it.

    Raises ConversionError when there is no readable manifest, and FindingsError naming every file that is missing
    or does not hold the tensors the manifest lists. `check_banks` compares the bytes themselves.
    """
    if not str(path):
        raise ConversionError("the bank directory has an empty name; name one")
    directory = Path(path).expanduser()
    manifest = read_manifest(directory)
    findings: list[Finding] = []
    headers: dict[str, Header] = {}
    roots = [directory.resolve()]
    for name, tensors in manifest.files.items():
        fault = fault_of_file(directory / name, roots)
        if fault is not None:
            findings.append(Finding(f"bank file {name}", fault, "the file the manifest lists", AGAIN))
            continue
        try:
            header = read_header(directory / name)
        except ConversionError as error:
            findings.append(Finding(f"bank file {name}", f"a damaged header ({error})", "a whole file", AGAIN))
            continue
        headers[name] = header
        for key in sorted(set(header.entries) ^ set(tensors)):
            found, needed = ("no such tensor", "it") if key in tensors else ("a tensor", "only those of the manifest")
            findings.append(Finding(f"{name}: {key}", found, needed, AGAIN))
    findings += _unfit_codings(manifest, headers)
    for name in manifest.beside_files:
        fault = fault_of_file(directory / name, roots)
        if fault is not None:
            findings.append(Finding(name, fault, "the file the import wrote", AGAIN))
    if findings:
        raise FindingsError(str(directory), findings)
    return Banks(directory, manifest, headers, private)


def _unfit_codings(manifest: Manifest, headers: Mapping[str, Header]) -> list[Finding]:
    """A finding for every coding whose codes or scales are missing, or are not of the shape it says."""
    findings = []
    for name, codings in manifest.coded.items():
        entries = headers[name].entries if name in headers else {}
        for key, coding in codings.items():
            below, layer = split_key(key)
            scales = part_leaf(below, "scale") + ("" if layer is None else f"@{layer}")
            for part, grain in zip((key, scales), coding.grains, strict=True):
                shape = tuple(-(-size // each) for size, each in zip(coding.shape, grain, strict=True))
                found = entries[part].shape if part in entries else None
                if name in headers and found != shape:
                    said = "no such tensor" if found is None else f"shape {list(found)}"
                    findings.append(Finding(f"{name}: {part}", said, f"shape {list(shape)}, as coded says", AGAIN))
    return findings


class _Progressive:
    """The checksums of a stored tensor, taken from its start as far as has been asked for."""

    def __init__(self, data: np.ndarray, algorithms: Iterable[str], name: str) -> None:
        self._data, self._name = data, name
        self._digest = Digest(algorithms)
        self._done = 0
        self._lock = Lock()

    def take(self, end: int) -> None:
        """Takes the bytes up to `end` in, those that have not been yet."""
        with self._lock:
            while self._done < end:
                part = self._data[self._done : min(end, self._done + FETCHED_BYTES)]
                fetch(part, self._name)
                self._digest.update(part.data)
                self._done += part.size

    def whole(self) -> Checksums:
        """The checksums of the whole tensor."""
        self.take(self._data.nbytes)
        return self._digest.values()


class BankCheck:
    """The checksums of banks, taken while their tensors are read for something else, so that a disk reads them once.

    `take` before a row of a stored tensor is read; `findings` at the end reads what nothing else did. Any thread may
    call either.
    """

    def __init__(self, banks: Banks) -> None:
        self._banks = banks
        self._digests: dict[tuple[str, str], _Progressive] = {}
        self._lock = Lock()

    def take(self, bank: str, key: str, rows: tuple[int, int] = (1, 1)) -> None:
        """The stored tensor is about to be read up to row `rows[0]`, exclusive, of `rows[1]`."""
        stop, count = rows
        nbytes = self._banks.headers[bank + SUFFIX].entries[key].nbytes
        self._of(bank, key).take(nbytes if stop == count else nbytes // count * stop)

    def findings(self, threads: int | None = None) -> list[Finding]:
        """A finding for every stored tensor whose bytes are not those that were written."""

        def one(item: tuple[str, str]) -> Finding | None:
            name, key = item
            found = self._of(name.removesuffix(SUFFIX), key).whole()
            return _damage(f"{name}: {key}", found, self._banks.manifest.files[name][key])

        items = [(name, key) for name, tensors in self._banks.manifest.files.items() for key in tensors]
        with ThreadPoolExecutor(threads or default_threads()) as pool:
            return [finding for finding in pool.map(one, items) if finding is not None]

    def _of(self, bank: str, key: str) -> _Progressive:
        with self._lock:
            if (bank, key) not in self._digests:
                stated = self._banks.manifest.files[bank + SUFFIX][key]
                self._digests[bank, key] = _Progressive(
                    self._banks.open(bank).raw(key), stated, f"{bank + SUFFIX}: {key}"
                )
            return self._digests[bank, key]


def check_banks(banks: Banks, threads: int | None = None) -> list[Finding]:
    """A finding for every stored tensor and every file beside them whose bytes are not those that were written: reads
    every file."""
    return [*BankCheck(banks).findings(threads), *check_beside(banks)]


def check_beside(banks: Banks) -> list[Finding]:
    """A finding for every file beside the weights (config, index, side files, headers) that is not the one that was
    written: by checksum, or by size in banks whose manifest has no checksums of them."""
    manifest, findings = banks.manifest, []
    for name in manifest.beside_files:
        if name in manifest.beside:
            stated = manifest.beside[name]
            damage = _damage(name, of_file(banks.path / name, stated), stated)
            findings += [] if damage is None else [damage]
        elif name.startswith(f"{SOURCE}/"):
            size = manifest.source["files"][name.removeprefix(f"{SOURCE}/")]["size"]
            found = (banks.path / name).stat().st_size
            if found != size:
                findings.append(Finding(name, f"{found} bytes", f"{size}", ALTERED))
    return findings


def _damage(what: str, found: Checksums, expected: Checksums) -> Finding | None:
    pair = unlike(found, expected)
    return None if pair is None else Finding(what, f"checksum {pair[0]}", pair[1], ALTERED)
