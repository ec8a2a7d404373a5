"""Writing safetensors files from parts: each file laid out first, its tensors then filled by a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import numpy as np

from ..families.rules import View
from .checksums import FAST, Digest
from .copying import SCRATCH_BYTES, Part, blocks, run_parallel
from .dtypes import PACKED_BITS, numpy_dtype
from .resuming import POINT_BYTES, Journal
from .safetensors_files import FileWriter, Header, TensorEntry, TensorSpec

FLUSH_BYTES = 48 << 20
"""What is written to a file before the disk is told to take it while copying goes on: what the fsync at the end then
finds undone is all that is waited for."""
FLUSHING_THREADS = 2
OPEN_FILES = 256
"""The most files that are open for writing at a time."""

Progress = Callable[[str, int, int], None]
"""Called as progress(file, bytes done, bytes in all) while copying, by one thread at a time."""


@dataclass(frozen=True)
class FileJob:
    """A file to be written: its header, and what fills each of its tensors.

    A tensor whose dtype packs elements is filled by one part of its bytes, uint8. rank: which of several tensors of
    one size is filled first.
    """

    name: str
    header: Header
    parts: Callable[[TensorEntry], Sequence[Part]]
    rank: Callable[[TensorEntry], int] = lambda entry: 0


def write_files(
    directory: Path,
    jobs: Sequence[FileJob],
    progress: Progress | None = None,
    threads: int | None = None,
    *,
    algorithms: Sequence[str] = (FAST,),
    journal: Journal | None = None,
) -> dict[str, dict[str, dict[str, str]]]:
    """Writes the files of `jobs` into `directory`, made durable; returns file -> tensor -> checksums of its bytes.

    The memory taken is a scratch buffer a thread, whatever the files' size. Whatever is raised while reading or
    writing stops the others and is raised. journal: where what is written is noted, and what an earlier run noted is
    looked at: bytes of a file there is that have the checksums noted are not written again.
    """
    work = _Work(directory, jobs, progress, algorithms, journal)
    try:
        for start in range(0, len(jobs), OPEN_FILES):
            work.write(jobs[start : start + OPEN_FILES], threads)
    finally:
        work.close()
    return {job.name: {key: work.sums[job.name][key] for key in job.header.entries} for job in jobs}


class _Work:
    """The writing of some files: what is open, and how far it is."""

    def __init__(
        self,
        directory: Path,
        jobs: Sequence[FileJob],
        progress: Progress | None,
        algorithms: Sequence[str],
        journal: Journal | None,
    ) -> None:
        self.directory, self.progress, self.algorithms, self.journal = directory, progress, algorithms, journal
        self.sums: dict[str, dict[str, dict[str, str]]] = {job.name: {} for job in jobs}
        self._total = sum(job.header.data_bytes for job in jobs)
        self._done = 0
        self._lock = Lock()
        self._left = {job.name: len(job.header.entries) for job in jobs}
        self._writers: dict[str, FileWriter] = {}
        self._unflushed = {job.name: 0 for job in jobs}
        self._flushes: dict[str, list[Future[None]]] = {job.name: [] for job in jobs}
        self._flusher = ThreadPoolExecutor(FLUSHING_THREADS, "dewconv-flush")

    def write(self, jobs: Sequence[FileJob], threads: int | None) -> None:
        """Writes `jobs`, largest tensors first."""
        for job in jobs:
            self._writers[job.name] = FileWriter(self.directory / job.name, job.header, self.journal is not None)
        items = [(job, entry) for job in jobs for entry in job.header.entries.values()]
        items.sort(key=lambda item: item[0].rank(item[1]))
        run_parallel(self._fill, items, lambda item: item[1].nbytes, threads)
        for job in jobs:
            self._settle(job.name)

    def close(self) -> None:
        """Lets go of what is open; what is not settled is not made durable."""
        self._flusher.shutdown(cancel_futures=True)
        for writer in self._writers.values():
            writer.close(sync=False)

    def _fill(self, item: tuple[FileJob, TensorEntry], stop: Event) -> None:
        job, entry = item
        writer = self._writers[job.name]
        position, digest = self._vouched(writer, job, entry, stop)
        self._advance(job.name, position)
        noted = position
        if position < entry.nbytes:
            for block in _blocks(entry, job.parts(entry), position):
                if stop.is_set():
                    return
                writer.write_at(entry.name, position, block)
                digest.update(block.data)
                position += block.nbytes
                self._advance(job.name, block.nbytes)
                if self.journal is not None and (position - noted >= POINT_BYTES or position == entry.nbytes):
                    self.journal.note(job.name, entry.name, position, digest.values())
                    noted = position
        if position != entry.nbytes:
            raise ValueError(f"{entry.name}: {position} bytes written of {entry.nbytes}")
        with self._lock:
            self.sums[job.name][entry.name] = digest.values()
            self._left[job.name] -= 1
            finished = self._left[job.name] == 0
        if finished:
            self._settle(job.name)

    def _vouched(self, writer: FileWriter, job: FileJob, entry: TensorEntry, stop: Event) -> tuple[int, Digest]:
        """(bytes of the tensor that an earlier run wrote and whose checksums are those it noted, their digest)."""
        digest = Digest(self.algorithms)
        position, whole = 0, digest.copy()
        if self.journal is None or not writer.existed:
            return position, whole
        for point in self.journal.points(job.name, entry.name):
            at = position
            while at < min(point.size, entry.nbytes) and not stop.is_set():
                block = writer.read_at(entry.name, at, min(SCRATCH_BYTES, point.size - at))
                if not block:
                    break
                digest.update(block)
                at += len(block)
            if at != point.size or digest.values() != point.checksums:
                break
            position, whole = at, digest.copy()
        return position, whole

    def _advance(self, name: str, size: int) -> None:
        with self._lock:
            self._done += size
            self._unflushed[name] += size
            if self._unflushed[name] >= FLUSH_BYTES and all(flush.done() for flush in self._flushes[name]):
                self._unflushed[name] = 0
                self._flushes[name].append(self._flusher.submit(self._writers[name].flush))
            if self.progress is not None:
                self.progress(name, self._done, self._total)

    def _settle(self, name: str) -> None:
        # A fault of the disk is told once to each opened file: to the flush that met it.
        for flush in self._flushes[name]:
            flush.result()
        self._writers[name].close()


def _blocks(entry: TensorEntry, parts: Sequence[Part], start: int = 0) -> Iterator[np.ndarray]:
    """The bytes of a tensor from byte `start` on, which lies between two elements."""
    if entry.dtype in PACKED_BITS:
        return blocks((entry.nbytes,), np.dtype(np.uint8), parts, entry.name, start)
    dtype = numpy_dtype(entry.dtype)
    return blocks(entry.shape, dtype, parts, entry.name, start // dtype.itemsize)


def raw_part(spec: TensorSpec | TensorEntry, read: Callable[[], np.ndarray]) -> Part:
    """A part that copies a whole tensor byte for byte; `read` gives its bytes, uint8 [nbytes]."""
    if spec.dtype in PACKED_BITS:
        return Part(View.of(spec.nbytes), read)
    dtype = numpy_dtype(spec.dtype)
    return Part(View.of(*spec.shape), lambda: read().view(dtype).reshape(spec.shape))
