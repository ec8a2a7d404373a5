"""safetensors files: reading and checking headers, mapping data, laying out and writing new files.

The format (safetensors README): 8 bytes little-endian header length N, N bytes of JSON mapping each tensor's name
to its dtype, shape and data_offsets relative to byte 8 + N, then the data without holes.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..families.errors import ConversionError
from .dtypes import NUMPY, is_known, nbytes, numpy_dtype

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit (safetensors 0.8, MAX_HEADER_SIZE)."""
METADATA_KEY = "__metadata__"
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
PAGE = 4096
"""Where a written file's data start: a mapped page."""
ALIGNMENT = 64
"""What a written tensor's offset is a multiple of, so that a CPU backend aliases the map (jax 0.10 asks for 64)."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header: its bytes are `[begin, end)` counted from the start of the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A parsed header. `entries` keep the header's own order; `text` is its JSON as stored, padding included."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] | None
    text: bytes = field(repr=False)

    @property
    def data_start(self) -> int:
        """Where in the file the data start."""
        return LENGTH_BYTES + len(self.text)

    @property
    def data_bytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=0)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes

    @property
    def by_offset(self) -> list[TensorEntry]:
        """The entries in the order of their data."""
        return sorted(self.entries.values(), key=lambda entry: (entry.begin, entry.end))


def read_header(path: Path) -> Header:
    """The header of a safetensors file, checked. Raises ConversionError naming the file and the key at fault."""
    size = path.stat().st_size
    with path.open("rb") as file:
        text = file.read(header_length(file.read(LENGTH_BYTES), size, path.name))
    return parse_header(text, size, path.name)


def header_length(prefix: bytes, size: int, where: str) -> int:
    """How long the header's JSON is that follows `prefix`, the first `LENGTH_BYTES` bytes of a file of `size` bytes.
    Raises ConversionError."""
    if len(prefix) < LENGTH_BYTES:
        raise ConversionError(f"{where}: {size} bytes is too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > size - LENGTH_BYTES:
        raise ConversionError(
            f"{where}: the header says it is {length} bytes long, the file has {size}; "
            "it is truncated or not a safetensors file"
        )
    if length > MAX_HEADER_BYTES:
        raise ConversionError(f"{where}: a header of {length} bytes is beyond the format's limit of {MAX_HEADER_BYTES}")
    return length


def parse_header(text: bytes, file_size: int, where: str) -> Header:
    """The header whose JSON is `text`, in a file of `file_size` bytes called `where` in messages.

    Raises ConversionError for anything but UTF-8 JSON of distinct tensors with known dtypes whose bytes follow
    each other without gap or overlap and fill the file.
    """
    table = _json_table(text, where)
    metadata = _metadata(table.pop(METADATA_KEY, None), where)
    header = Header({name: _entry(name, value, where) for name, value in table.items()}, metadata, text)
    position = 0
    for entry in header.by_offset:
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise ConversionError(
                f"{where}: tensor {entry.name!r} starts at byte {entry.begin} of the data, expected {position}: "
                f"it {fault}"
            )
        position = entry.end
    if header.file_bytes != file_size:
        fault = "it is truncated" if header.file_bytes > file_size else "it has bytes no tensor owns"
        raise ConversionError(
            f"{where}: the header describes {header.file_bytes} bytes, the file has {file_size}: {fault}"
        )
    return header


def _json_table(text: bytes, where: str) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ConversionError(f"{where}: the header names {twice!r} twice")
        return table

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=distinct)
    except UnicodeDecodeError:
        raise ConversionError(f"{where}: the header is not UTF-8; not a safetensors file") from None
    except (ValueError, RecursionError):
        raise ConversionError(f"{where}: the header is not JSON; not a safetensors file") from None
    if not isinstance(table, dict):
        raise ConversionError(f"{where}: the header is not a JSON object; not a safetensors file")
    if not is_unicode(text, table):
        raise ConversionError(
            f"{where}: the header has half a surrogate pair, which is no Unicode; fetch the file again"
        )
    return table


def is_unicode(text: bytes, value: Any) -> bool:
    """Whether `value`, read from the JSON `text`, can be written again: JSON's escapes can spell half a surrogate
    pair, which Python's json reads (and the safetensors library does not)."""
    if b"\\ud" not in text.lower():
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _metadata(value: Any, where: str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConversionError(f"{where}: {METADATA_KEY} must map names to strings")
    return value


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)  # JSON's true is a bool, and an int


def _entry(name: str, value: Any, where: str) -> TensorEntry:
    at = f"{where}: tensor {name!r}"
    if not isinstance(value, dict) or value.keys() != ENTRY_KEYS:
        raise ConversionError(f"{at} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not is_known(dtype):
        raise ConversionError(f"{at} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not _are_counts(shape):
        raise ConversionError(f"{at} has the shape {shape!r}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise ConversionError(f"{at} has the data_offsets {offsets!r}, not [begin, end]")
    begin, end = offsets
    needed = nbytes(dtype, shape)
    if needed is None:
        raise ConversionError(f"{at}: {dtype} elements of shape {shape} do not fill whole bytes")
    if end - begin != needed:
        raise ConversionError(f"{at}: {dtype} of shape {shape} takes {needed} bytes, its offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


class MappedFile:
    """A safetensors file mapped read-only. Arrays it gives alias the map and keep it alive; none is writable.

    private: the memory itself is writable (of this process alone; the file never is), for a library that is given the
    arrays' memory to use again.
    """

    def __init__(self, path: Path, header: Header | None = None, private: bool = False) -> None:
        self.path = path
        self.header = read_header(path) if header is None else header
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != self.header.file_bytes:
                raise ConversionError(f"{path.name}: the file has changed since its header was read")
            try:
                if private:
                    flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                    self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)
                else:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise ConversionError(
                    f"{path.name}: cannot be mapped ({error.strerror}): its {self.header.file_bytes} bytes are more "
                    "than this process may address; raise its limit (ulimit -v)"
                ) from error

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes]."""
        entry = self.header.entries[name]
        return self._array(np.dtype(np.uint8), entry.nbytes, entry)

    def view(self, name: str) -> np.ndarray:
        """The tensor as an array of its dtype and shape, wherever in the file it lies (it may be misaligned)."""
        entry = self.header.entries[name]
        dtype = numpy_dtype(entry.dtype)
        return self._array(dtype, math.prod(entry.shape), entry).reshape(entry.shape)

    def unread(self, name: str) -> np.ndarray:
        """`view`: of a map nothing is read before it is touched."""
        return self.view(name)

    def _array(self, dtype: np.dtype, count: int, entry: TensorEntry) -> np.ndarray:
        array = np.frombuffer(self._map, dtype, count, self.header.data_start + entry.begin)
        array.flags.writeable = False
        return array


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = nbytes(self.dtype, self.shape)
        if size is None:
            raise ConversionError(f"tensor {self.name!r}: {self.dtype} of shape {self.shape} is not whole bytes")
        return size


def lay_out(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> Header:
    """The header of a new file whose tensors can be mapped and used where they lie.

    The format allows no holes, so alignment comes from order: tensors whose size is a multiple of 64 first (each
    then starts at one), the others by falling power of two, which keeps every tensor at a multiple of its own
    element size. The JSON is padded with spaces so that the data start at a multiple of 4096.
    """

    def alignment(spec: TensorSpec) -> int:
        size = spec.nbytes
        return min(ALIGNMENT, size & -size) if size else ALIGNMENT

    return _header(sorted(specs, key=lambda spec: -alignment(spec)), metadata, PAGE)


def lay_out_in_order(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> Header:
    """The header of a new file in the usual layout: the tensors in the order given, data at a multiple of 8."""
    return _header(list(specs), metadata, LENGTH_BYTES)


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None, boundary: int) -> Header:
    entries: dict[str, TensorEntry] = {}
    position = 0
    for spec in specs:
        if spec.name in entries or spec.name == METADATA_KEY:
            raise ConversionError(f"tensor name {spec.name!r} cannot be written twice or is reserved")
        entries[spec.name] = TensorEntry(spec.name, spec.dtype, spec.shape, position, position + spec.nbytes)
        position += spec.nbytes
    table: dict[str, Any] = {} if metadata is None else {METADATA_KEY: dict(metadata)}
    for entry in entries.values():
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % boundary)
    return Header(entries, metadata, text)


class FileWriter:
    """Writes a file whose header is known: any thread may write any region, in any order.

    `write_at` takes a contiguous array or buffer. `close` makes the file durable; a file that was not closed is
    of its full size and must not be trusted. existing: a file of that name may stand there, and keeps the bytes it
    has (`existed` says whether it did); else it is an error.
    """

    def __init__(self, path: Path, header: Header, existing: bool = False) -> None:
        self.path = path
        self.header = header
        self.existed = existing and path.exists()
        flags = os.O_RDWR | os.O_NOFOLLOW if self.existed else os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, flags, 0o644)
        try:
            os.truncate(self._fd, header.file_bytes)
            self._write(len(header.text).to_bytes(LENGTH_BYTES, "little") + header.text, 0)
        except BaseException:
            os.close(self._fd)
            raise

    def read_at(self, name: str, offset: int, size: int) -> bytes:
        """Up to `size` of the bytes that stand at byte `offset` of tensor `name`. Raises OSError as the disk does."""
        entry = self.header.entries[name]
        return os.pread(self._fd, min(size, entry.nbytes - offset), self.header.data_start + entry.begin + offset)

    def write_at(self, name: str, offset: int, data: np.ndarray | bytes | memoryview) -> None:
        """Writes `data` at byte `offset` of tensor `name`. Raises ConversionError when it would pass its end."""
        entry = self.header.entries[name]
        size = data.nbytes if isinstance(data, np.ndarray | memoryview) else len(data)
        if offset < 0 or offset + size > entry.nbytes:
            raise ConversionError(f"{self.path.name}: {size} bytes at {offset} pass the end of {name!r}")
        self._write(data, self.header.data_start + entry.begin + offset)

    def _write(self, data: np.ndarray | bytes | memoryview, position: int) -> None:
        if isinstance(data, np.ndarray):
            if not data.flags.c_contiguous:
                raise ValueError("only contiguous arrays can be written")
            data = data.reshape(-1).view(np.uint8).data
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._fd, view, position)
            view, position = view[done:], position + done

    def flush(self) -> None:
        """Has the disk take what was written so far, and waits for it. Raises OSError as the disk does."""
        os.fsync(self._fd)

    def close(self, sync: bool = True) -> None:
        """Closes the file, first making it durable unless `sync` is False."""
        if self._fd >= 0:
            try:
                if sync:
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1


def is_whole_elements(entry: TensorEntry) -> bool:
    """Whether the tensor can be viewed as an array (packed dtypes can only be carried as bytes)."""
    return entry.dtype in NUMPY
