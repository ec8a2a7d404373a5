"""Writing safetensors files from parts: each file laid out first, its tensors then filled by a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import numpy as np
import xxhash

from ..families.rules import View
from .copying import Part, blocks, run_parallel
from .dtypes import PACKED_BITS, numpy_dtype
from .safetensors_files import FileWriter, Header, TensorEntry, TensorSpec

FLUSH_BYTES = 48 << 20
"""What is written to a file before the disk is told to take it while copying goes on: what the fsync at the end then
finds undone is all that is waited for."""
FLUSHING_THREADS = 2

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
) -> dict[str, dict[str, str]]:
    """Writes the files of `jobs` into `directory`, made durable; returns file -> tensor -> xxh3 of its bytes.

    The memory taken is a scratch buffer a thread, whatever the files' size. Whatever is raised while reading or
    writing stops the others and is raised; what was written by then is of no use.
    """
    total = sum(job.header.data_bytes for job in jobs)
    done = 0
    lock = Lock()
    sums: dict[str, dict[str, str]] = {job.name: {} for job in jobs}
    left = {job.name: len(job.header.entries) for job in jobs}
    writers: dict[str, FileWriter] = {}
    unflushed = {job.name: 0 for job in jobs}
    flushes: dict[str, list[Future[None]]] = {job.name: [] for job in jobs}

    def advance(name: str, size: int) -> None:
        nonlocal done
        with lock:
            done += size
            unflushed[name] += size
            if unflushed[name] >= FLUSH_BYTES and all(flush.done() for flush in flushes[name]):
                unflushed[name] = 0
                flushes[name].append(flusher.submit(writers[name].flush))
            if progress is not None:
                progress(name, done, total)

    def fill(item: tuple[FileJob, TensorEntry], stop: Event) -> None:
        job, entry = item
        writer = writers[job.name]
        digest = xxhash.xxh3_64()
        position = 0
        for block in _blocks(entry, job.parts(entry)):
            if stop.is_set():
                return
            writer.write_at(entry.name, position, block)
            digest.update(block.data)
            position += block.nbytes
            advance(job.name, block.nbytes)
        if position != entry.nbytes:
            raise ValueError(f"{entry.name}: {position} bytes written of {entry.nbytes}")
        with lock:
            sums[job.name][entry.name] = digest.hexdigest()
            left[job.name] -= 1
            finished = left[job.name] == 0
        if finished:
            settle(job.name)

    def settle(name: str) -> None:
        # A fault of the disk is told once to each opened file: to the flush that met it.
        for flush in flushes[name]:
            flush.result()
        writers[name].close()

    flusher = ThreadPoolExecutor(FLUSHING_THREADS, "dewconv-flush")
    try:
        for job in jobs:
            writers[job.name] = FileWriter(directory / job.name, job.header)
        items = [(job, entry) for job in jobs for entry in job.header.entries.values()]
        items.sort(key=lambda item: item[0].rank(item[1]))
        run_parallel(fill, items, lambda item: item[1].nbytes, threads)
        for job in jobs:
            settle(job.name)
    finally:
        flusher.shutdown(cancel_futures=True)
        for writer in writers.values():
            writer.close(sync=False)
    order = {job.name: job.header.entries for job in jobs}
    return {name: {key: sums[name][key] for key in order[name]} for name in sums}


def _blocks(entry: TensorEntry, parts: Sequence[Part]) -> Iterator[np.ndarray]:
    if entry.dtype in PACKED_BITS:
        return blocks((entry.nbytes,), np.dtype(np.uint8), parts, entry.name)
    return blocks(entry.shape, numpy_dtype(entry.dtype), parts, entry.name)


def raw_part(spec: TensorSpec | TensorEntry, read: Callable[[], np.ndarray]) -> Part:
    """A part that copies a whole tensor byte for byte; `read` gives its bytes, uint8 [nbytes]."""
    if spec.dtype in PACKED_BITS:
        return Part(View.of(spec.nbytes), read)
    dtype = numpy_dtype(spec.dtype)
    return Part(View.of(*spec.shape), lambda: read().view(dtype).reshape(spec.shape))
