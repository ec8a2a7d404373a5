"""Directories that exist whole or not at all: written under a temporary sibling name, made durable, renamed last."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that becomes `out` when the block ends, and is removed when it raises.

    What stood at `out` stays whole until then. Raises ConversionError when the directory cannot be written.
    """
    parent = out.absolute().parent
    stage = parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        yield stage
        _sync_tree(stage)
        _swap(stage, out)
    except OSError as error:
        raise ConversionError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    sync_directory(parent)


def _swap(stage: Path, out: Path) -> None:
    if not out.exists():
        os.rename(stage, out)
        return
    old = stage.with_suffix(".replaced")
    os.rename(out, old)
    try:
        os.rename(stage, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a new file and makes it durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copies a file's bytes (a link's target, not the link) and makes the copy durable."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


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
