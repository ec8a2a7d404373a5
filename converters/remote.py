"""Shards read from the hub by range requests: headers first, then the bytes of each tensor, straight into its bank.

A tensor's array is anonymous memory that is empty until `prefetch.fetch` asks for what is about to be read; just that
is transferred, and let go of with the array. Nothing of a shard is ever stored.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ..families.errors import ConversionError
from .dtypes import numpy_dtype
from .hub import said_of, told
from .prefetch import Awaited
from .safetensors_files import LENGTH_BYTES, Header, TensorEntry, header_length, parse_header

TRIES = 6
"""How often in a row a request may bring nothing before it is given up."""
WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a second try, doubled each time, up to the longest."""
TIMEOUT = 30.0
"""Seconds that the hub may stay silent."""
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers after which it is tried again."""
READERS = 8
"""Requests at a time: each waits for the network most of its time, and holds a tensor while it does."""


@dataclass(frozen=True)
class RemoteRecord:
    """What the hub says of a file: its size in bytes and its etag."""

    size: int
    etag: str | None


class RemoteShards:
    """The weight files of a hub repository at one commit. The token goes to the hub's endpoint and nowhere else."""

    threads = READERS

    def __init__(self, repo: str, commit: str, token: str | None = None) -> None:
        self.repo, self.commit = repo, commit
        self._token = token
        self._records: dict[str, RemoteRecord | None] = {}
        self._lock = Lock()
        self.transferred = 0
        """Bytes of shards that were received."""

    def stands(self, name: str) -> bool:
        return self._record(name) is not None

    def fault(self, name: str) -> str | None:
        return None if self.stands(name) else "not in the repository"

    def headers(self, names: Iterable[str]) -> dict[str, Header]:
        names = list(names)
        with ThreadPoolExecutor(READERS) as pool:
            return dict(zip(names, pool.map(self._header, names), strict=True))

    def open(self, name: str, header: Header, private: bool = False) -> RemoteFile:
        return RemoteFile(self, name, header)

    def size(self, name: str) -> int:
        record = self._record(name)
        return 0 if record is None else record.size

    def etag(self, name: str) -> str | None:
        record = self._record(name)
        return None if record is None else record.etag

    def read_into(self, memory: memoryview, name: str, start: int) -> None:
        """Fills `memory` with the bytes of a shard from `start` on, going on from where a transfer broke off.

        Raises ConversionError when the hub refuses, answers with something else, or keeps failing.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session

        url = hf_hub_url(self.repo, name, revision=self.commit)
        session = get_session()
        broken = (OSError, sys.modules[type(session).__module__.partition(".")[0]].TransportError)
        done, tries, wait = 0, 0, WAIT
        while done < len(memory):
            wanted = f"bytes={start + done}-{start + len(memory) - 1}"
            headers = build_hf_headers(token=self._token) | {"Range": wanted, "Accept-Encoding": "identity"}
            why = "the transfer broke off"
            try:
                with session.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as answer:
                    if answer.status_code in BUSY:
                        why = f"the hub answered with status {answer.status_code}"
                        wait = max(wait, _asked(answer.headers.get("Retry-After")))
                    else:
                        self._refuse(name, answer, start + done)
                        for chunk in answer.iter_raw():
                            if done + len(chunk) > len(memory):
                                raise ConversionError(f"{self.repo}: {name} came with more bytes than were asked for")
                            memory[done : done + len(chunk)] = chunk
                            done += len(chunk)
                            tries, wait = 0, WAIT
                            with self._lock:
                                self.transferred += len(chunk)
            except broken as error:
                why = f"the transfer broke off ({type(error).__name__})"
            if done < len(memory):
                tries += 1
                if tries >= TRIES:
                    raise ConversionError(
                        f"{self.repo}: {name} could not be read, {why}, {TRIES} times in a row; try again later, with "
                        "--resume where it was given before"
                    )
                time.sleep(min(wait, LONGEST_WAIT))
                wait *= 2

    def _refuse(self, name: str, answer: Any, start: int) -> None:
        if answer.status_code == 200:
            raise ConversionError(f"{self.repo}: the hub sends {name} whole and no ranges of it; go without --stream")
        if answer.status_code != 206:
            raise ConversionError(said_of(f"{self.repo}: {name}", answer.status_code))
        stated = answer.headers.get("Content-Range", "")
        if not stated.startswith(f"bytes {start}-"):
            raise ConversionError(f"{self.repo}: {name} came from another place ({stated!r}) than was asked for")

    def _record(self, name: str) -> RemoteRecord | None:
        """What the hub says of a file, asked once; None when there is none."""
        with self._lock:
            if name in self._records:
                return self._records[name]
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

        with told(self.repo):
            try:
                found = get_hf_file_metadata(hf_hub_url(self.repo, name, revision=self.commit), token=self._token)
                record = RemoteRecord(found.size or 0, found.etag)
            except errors.EntryNotFoundError:
                record = None
        with self._lock:
            return self._records.setdefault(name, record)

    def _header(self, name: str) -> Header:
        size = self.size(name)
        prefix = bytearray(min(LENGTH_BYTES, size))
        self.read_into(memoryview(prefix), name, 0)
        text = bytearray(header_length(bytes(prefix), size, name))
        self.read_into(memoryview(text), name, LENGTH_BYTES)
        return parse_header(bytes(text), size, name)


def _asked(after: str | None) -> float:
    """The seconds that a Retry-After header asks for; 0 for a date, which the waits here outlast."""
    return float(after) if after is not None and after.isdecimal() else 0.0


@dataclass(frozen=True)
class RemoteFile:
    """A remote shard: `shards.ShardFile`."""

    shards: RemoteShards
    name: str
    header: Header

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], transferred."""
        entry = self.header.entries[name]
        return self._read(self._array(np.dtype(np.uint8), entry.nbytes, entry))

    def view(self, name: str) -> np.ndarray:
        """The tensor as an array of its dtype and shape, transferred."""
        return self._read(self.unread(name))

    def unread(self, name: str) -> np.ndarray:
        """The tensor as an array of its dtype and shape, of which nothing is there before it is fetched."""
        entry = self.header.entries[name]
        return self._array(numpy_dtype(entry.dtype), math.prod(entry.shape), entry).reshape(entry.shape)

    def _array(self, dtype: np.dtype, count: int, entry: TensorEntry) -> np.ndarray:
        if entry.nbytes == 0:
            return np.empty(count, dtype)
        memory = _Tensor(entry.nbytes)
        memory.stand_for(self, entry)
        array = np.frombuffer(memory, dtype, count)
        array.flags.writeable = False
        return array

    def _read(self, array: np.ndarray) -> np.ndarray:
        from .prefetch import fetch

        fetch(array, self.name)
        return array


class _Tensor(Awaited):
    """A tensor's bytes, each transferred when it is first asked for."""

    def stand_for(self, file: RemoteFile, entry: TensorEntry) -> None:
        self._file, self._entry = file, entry
        self._held: list[tuple[int, int]] = []
        self._filling = Lock()

    def fill(self, start: int, stop: int) -> None:
        """Has the bytes [start, stop) there."""
        with self._filling:
            at, missing = start, []
            for low, high in self._held:
                if high <= at or low >= stop:
                    continue
                if low > at:
                    missing.append((at, low))
                at = max(at, high)
            if at < stop:
                missing.append((at, stop))
            offset = self._file.header.data_start + self._entry.begin
            for low, high in missing:
                self._file.shards.read_into(memoryview(self)[low:high], self._file.name, offset + low)
            if missing:
                self._held = _joined([*self._held, *missing])


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined
