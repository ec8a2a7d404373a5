"""Directories that exist whole or not at all: written under a temporary sibling name, made durable, renamed last."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..families.errors import ConversionError
from .checksums import FAST, READ_BYTES, Digest, of_bytes
from .replacing import Replaceable
from .resuming import JOURNAL, Identity, Journal, reopen_for

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def refuse_output(
    out: Path, overwrite: bool, inputs: tuple[Path, ...] = (), replaceable: Replaceable | None = None
) -> None:
    """Raises ConversionError when `out` may not be written: it exists without `overwrite`, is no directory, is, holds
    or lies in one of the directories that are read, or holds what is not `replaceable` and would be lost."""
    real = out.resolve()
    for path in inputs:
        given = path.resolve()
        if real == given or real.is_relative_to(given) or given.is_relative_to(real):
            raise ConversionError(f"{out}: overlaps {path}, which is read; choose another output directory")
    for above in out.absolute().parents:
        if above.exists() and not above.is_dir():
            raise ConversionError(f"{out}: {above} is not a directory, so nothing can be in it; choose another output")
    if out.is_symlink():
        raise ConversionError(f"{out}: is a symbolic link (to {out.readlink()}); name the directory itself, or another")
    if out.exists():
        if not out.is_dir():
            raise ConversionError(f"{out}: exists and is not a directory; choose another output")
        if not overwrite and any(out.iterdir()):
            raise ConversionError(f"{out}: already exists; remove it, or overwrite it (--overwrite)")
        if replaceable is not None:
            replaceable.refuse_losses(out, out)


def refuse_without_room(out: Path, needed: int) -> None:
    """Raises ConversionError when the file system of `out` has fewer than `needed` bytes free."""
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    usage = shutil.disk_usage(parent)
    # A file system without a size of its own (a boundless tmpfs, /proc) says nothing of its room.
    if usage.total and usage.free < needed:
        raise ConversionError(f"{out}: needs {needed} bytes, {parent} has {usage.free} free")


def output_path(out: str | Path) -> Path:
    """`out` as a path. Raises ConversionError for an empty name, which a path takes for the current directory."""
    if not str(out):
        raise ConversionError("the output directory has an empty name; name one")
    return Path(out)


@dataclass(frozen=True)
class Stage:
    """A directory that is being written, and the journal of how far it is."""

    path: Path
    journal: Journal


@contextmanager
def staged(
    out: Path,
    overwrite: bool = False,
    replaceable: Replaceable | None = None,
    *,
    needed: int = 0,
    identity: Identity | None = None,
    resume: bool = False,
) -> Iterator[Stage]:
    """A new directory beside `out` that becomes `out` when the block ends, and is removed when it raises.

    What stood at `out` stays whole until then. overwrite, replaceable: whether what stands there at the end may be
    replaced, as `refuse_output` has it: what appeared while the block ran never is without `overwrite`. needed: bytes
    that the file system must have room for.

    resume: the directory is the one that an unfinished run of the same identity left, when there is one, holding the
    files of `identity["files"]` that it had begun and nothing else; and it stays when the block raises, which the
    exception's notes then say. Raises ConversionError when the directory cannot be written, and as `reopen_for` does.
    """
    parent = out.absolute().parent
    path = parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    journal: Journal | None = None
    keep = False
    try:
        left = reopen_for(out, identity) if resume and identity is not None else None
        if left is not None:
            path, journal = left
            kept = _clear(path, identity["files"] if identity is not None else ())
            refuse_without_room(out, needed - kept)
        else:
            refuse_without_room(out, needed)
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            journal = Journal(path, identity)
        try:
            yield Stage(path, journal)
        except BaseException as error:
            keep = resume
            if keep and not isinstance(error, OSError):
                error.add_note(_kept(path))
            raise
        _sync_tree(path)
        journal.remove()
        sync_directory(path)
        _place(path, out, overwrite, replaceable)
    except OSError as error:
        told = ConversionError(f"{out}: cannot be written ({error.strerror or error})")
        if keep:
            told.add_note(_kept(path))
        raise told from error
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)
        if journal is not None:
            journal.close()
    sync_directory(parent)


def _kept(path: Path) -> str:
    return f"what was done is in {path}; the same command with --resume goes on from it"


def _clear(path: Path, files: Iterable[str]) -> int:
    """Removes what a run left beside `files` and its journal: small, and written again sooner than compared. Returns
    how many bytes of disk the rest takes."""
    taken = 0
    for item in list(path.iterdir()):
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name in files and not item.is_symlink():
            taken += item.stat().st_blocks * 512
        elif item.name != JOURNAL:
            item.unlink()
    return taken


def _place(stage: Path, out: Path, overwrite: bool, replaceable: Replaceable | None) -> None:
    """Renames `stage` to `out`. A rename replaces nothing but an empty directory, so that of several processes one
    wins. What is replaced is exchanged with `stage` in one step where the file system can, looked through once more
    where nobody else writes to it, and put back when it holds what would be lost."""
    if _renamed(stage, out):
        return
    if not overwrite:
        raise ConversionError(
            f"{out}: appeared while this ran, written by another process; it is left as it is, and nothing else was "
            "written"
        )
    refuse_output(out, overwrite, (), replaceable)
    if _exchanged(stage, out):
        try:
            if replaceable is not None:
                replaceable.refuse_losses(stage, out)
        except BaseException:
            if not _exchanged(stage, out):
                os.rename(stage, stage.with_suffix(".replaced"))
            raise
        return
    old = stage.with_suffix(".replaced")
    os.rename(out, old)
    try:
        if replaceable is not None:
            replaceable.refuse_losses(old, out)
        placed = _renamed(stage, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if not placed:
        raise ConversionError(f"{out}: was replaced by another process at the same moment; that one's is kept")


def _exchanged(stage: Path, out: Path) -> bool:
    """Whether the two could be exchanged (renameat2 with RENAME_EXCHANGE: Linux 3.15, and not every file system)."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(stage), os.fsencode(out.absolute())
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _renamed(stage: Path, out: Path) -> bool:
    """Whether `stage` could be renamed to `out`; not when something stands there."""
    try:
        os.rename(stage, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and (out.is_symlink() or out.exists()):
            return False
        raise
    return True


def write_bytes(path: Path, data: bytes, algorithms: Iterable[str] = (FAST,)) -> dict[str, str]:
    """Writes a new file, makes it durable and returns its checksums."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return of_bytes(data, algorithms)


def copy_file(source: Path, target: Path, algorithms: Iterable[str] = (FAST,)) -> dict[str, str]:
    """Copies a file's bytes (a link's target, not the link), makes the copy durable and returns its checksums."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = Digest(algorithms)
    with target.open("xb") as writer:
        for block in _blocks(source):
            digest.update(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.values()


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes. Raises ConversionError when they cannot be read."""
    try:
        with path.open("rb") as reader:
            while block := reader.read(READ_BYTES):
                yield block
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from error


def sync_directory(path: Path) -> None:
    """Makes a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(path: Path) -> None:
    for here, _, _ in os.walk(path):
        sync_directory(Path(here))
