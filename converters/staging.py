"""Directories that exist whole or not at all: written under a temporary sibling name, made durable, renamed last."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ..families.errors import ConversionError


def refuse_output(out: Path, overwrite: bool, inputs: tuple[Path, ...] = (), mark: str = "") -> None:
    """Raises ConversionError when `out` may not be written: it exists without `overwrite`, is no directory, is, holds
    or lies in one of the directories that are read, or holds files and no `mark`, the file that says it is of the kind
    that would replace it."""
    real = out.resolve()
    for path in inputs:
        given = path.resolve()
        if real == given or real.is_relative_to(given) or given.is_relative_to(real):
            raise ConversionError(f"{out}: overlaps {path}, which is read; choose another output directory")
    if out.is_symlink() or out.exists():
        if out.is_symlink() or not out.is_dir():
            raise ConversionError(f"{out}: exists and is not a directory; choose another output")
        if not overwrite and any(out.iterdir()):
            raise ConversionError(f"{out}: already exists; remove it, or overwrite it (--overwrite)")
        if mark and any(out.iterdir()) and not (out / mark).is_file():
            raise ConversionError(f"{out}: holds files and no {mark}, so it is not overwritten; choose another output")


def refuse_without_room(out: Path, needed: int) -> None:
    """Raises ConversionError when the file system of `out` has fewer than `needed` bytes free."""
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConversionError(f"{out}: needs {needed} bytes, {parent} has {free} free")


def output_path(out: str | Path) -> Path:
    """`out` as a path. Raises ConversionError for an empty name, which a path takes for the current directory."""
    if not str(out):
        raise ConversionError("the output directory has an empty name; name one")
    return Path(out)


@contextmanager
def staged(out: Path, overwrite: bool = False, mark: str = "") -> Iterator[Path]:
    """A new directory beside `out` that becomes `out` when the block ends, and is removed when it raises.

    What stood at `out` stays whole until then. overwrite, mark: whether what stands there at the end may be replaced,
    as `refuse_output` has it: what appeared while the block ran never is without `overwrite`. Raises ConversionError
    when the directory cannot be written.
    """
    parent = out.absolute().parent
    stage = parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        yield stage
        _sync_tree(stage)
        _place(stage, out, overwrite, mark)
    except OSError as error:
        raise ConversionError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    sync_directory(parent)


def _place(stage: Path, out: Path, overwrite: bool, mark: str) -> None:
    """Renames `stage` to `out`. A rename replaces nothing but an empty directory, so that of several processes one
    wins."""
    if _renamed(stage, out):
        return
    if not overwrite:
        raise ConversionError(
            f"{out}: appeared while this ran, written by another process; it is left as it is, and nothing else was "
            "written"
        )
    refuse_output(out, overwrite, (), mark)
    old = stage.with_suffix(".replaced")
    os.rename(out, old)
    try:
        placed = _renamed(stage, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if not placed:
        raise ConversionError(f"{out}: was replaced by another process at the same moment; that one's is kept")


def _renamed(stage: Path, out: Path) -> bool:
    """Whether `stage` could be renamed to `out`; not when something stands there."""
    try:
        os.rename(stage, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and (out.is_symlink() or out.exists()):
            return False
        raise
    return True


def write_bytes(path: Path, data: bytes) -> str:
    """Writes a new file, makes it durable and returns its xxh3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return xxhash.xxh3_64_hexdigest(data)


def copy_file(source: Path, target: Path) -> str:
    """Copies a file's bytes (a link's target, not the link), makes the copy durable and returns its xxh3."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_64()
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(1 << 20):
            digest.update(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


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
