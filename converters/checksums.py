"""Checksums of stored bytes: xxh3 of everything, SHA-256 beside it on request, both in one pass."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

FAST = "xxh3"
"""64 bits of xxh3: taken at the speed of memory, shows what a disk or a copy did to the bytes."""
CRYPTOGRAPHIC = "sha256"
"""SHA-256: shows also what somebody who can choose the bytes did to them."""
READ_BYTES = 1 << 20

Checksums = Mapping[str, str]
"""Algorithm -> checksum, in hexadecimal; FAST always among them."""

_NEW: dict[str, Callable[[], Any]] = {FAST: xxhash.xxh3_64, CRYPTOGRAPHIC: hashlib.sha256}
FORMS = {FAST: re.compile(r"[0-9a-f]{16}"), CRYPTOGRAPHIC: re.compile(r"[0-9a-f]{64}")}
"""Algorithm -> what a checksum of it looks like."""


def wanted(sha256: bool) -> tuple[str, ...]:
    """The algorithms of a run."""
    return (FAST, CRYPTOGRAPHIC) if sha256 else (FAST,)


class Digest:
    """The checksums of bytes that come in order."""

    def __init__(self, algorithms: Iterable[str] = (FAST,)) -> None:
        self._digests = {name: _NEW[name]() for name in algorithms if name in _NEW}

    def update(self, data: Any) -> None:
        """Takes in a contiguous buffer."""
        for digest in self._digests.values():
            digest.update(data)

    def copy(self) -> Digest:
        """The state so far, to go on from on its own."""
        other = Digest(())
        other._digests = {name: digest.copy() for name, digest in self._digests.items()}
        return other

    def values(self) -> dict[str, str]:
        """The checksums of what came so far."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}


def of_bytes(data: bytes | np.ndarray, algorithms: Iterable[str] = (FAST,)) -> dict[str, str]:
    """The checksums of bytes in memory."""
    digest = Digest(algorithms)
    digest.update(data if isinstance(data, bytes) else data.data)
    return digest.values()


def of_file(path: Path, algorithms: Iterable[str] = (FAST,)) -> dict[str, str]:
    """The checksums of a file, read in bounded memory."""
    digest = Digest(algorithms)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.values()


def unlike(found: Checksums, expected: Checksums) -> tuple[str, str] | None:
    """(found, expected) of the first algorithm in which both are stated and differ, the strongest first; else None."""
    for name in (CRYPTOGRAPHIC, FAST):
        if name in found and name in expected and found[name] != expected[name]:
            return found[name], expected[name]
    return None
