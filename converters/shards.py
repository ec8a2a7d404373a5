"""Where the shards of a checkpoint are: files of a directory, or files of a hub repository that are read by ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .safetensors_files import Header, MappedFile, read_header
from .side_files import allowed_roots, fault_of_file


class ShardFile(Protocol):
    """An opened shard: its tensors as arrays, none of them writable.

    `raw` gives a tensor's bytes, `view` its elements. `unread` is `view` for who has `prefetch.fetch` read what it
    touches before it touches it: of a remote file nothing else is transferred.
    """

    @property
    def header(self) -> Header: ...
    def raw(self, name: str, /) -> np.ndarray: ...
    def view(self, name: str, /) -> np.ndarray: ...
    def unread(self, name: str, /) -> np.ndarray: ...


class Shards(Protocol):
    """A checkpoint's weight files by name. threads: how many are of use in reading them, None for a few."""

    @property
    def threads(self) -> int | None: ...

    def stands(self, name: str, /) -> bool:
        """Whether anything is called so, a dangling link included."""
        ...

    def fault(self, name: str, /) -> str | None:
        """What is wrong with a shard, None when it can be read."""
        ...

    def headers(self, names: Iterable[str], /) -> dict[str, Header]:
        """The headers of some shards. Raises ConversionError as `read_header` does."""
        ...

    def open(self, name: str, header: Header, private: bool = False, /) -> ShardFile:
        """An opened shard. Raises OSError when it cannot be read any more, ConversionError when it has changed."""
        ...

    def size(self, name: str, /) -> int:
        """Its size in bytes."""
        ...

    def etag(self, name: str, /) -> str | None:
        """The hub's etag of it, where it is known."""
        ...


@dataclass(frozen=True)
class LocalShards:
    """The shards of a directory, read through maps."""

    root: Path
    threads: int | None = None

    @property
    def _roots(self) -> Sequence[Path]:
        return allowed_roots(self.root)

    def stands(self, name: str) -> bool:
        path = self.root / name
        return path.is_symlink() or path.exists()

    def fault(self, name: str) -> str | None:
        return fault_of_file(self.root / name, self._roots)

    def headers(self, names: Iterable[str]) -> dict[str, Header]:
        return {name: read_header(self.root / name) for name in names}

    def open(self, name: str, header: Header, private: bool = False) -> MappedFile:
        return MappedFile(self.root / name, header, private)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def etag(self, name: str) -> str | None:
        """The name of its blob, when the file is a link into a hub cache's blobs."""
        path = self.root / name
        target = path.resolve()
        return target.name if path.is_symlink() and target.parent.name == "blobs" else None
