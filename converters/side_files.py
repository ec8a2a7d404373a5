"""The files of a checkpoint that are neither weights nor config: what is copied byte for byte and what is left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..families.errors import decoded

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
OTHER_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".ot")
CODE = (".py", ".pyc", ".so", ".sh")
HIDDEN_DIRECTORIES = (".git", ".cache", "__pycache__")
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_INDEX_SUFFIX = ".bin.index.json"
NOT_OF_IT = "weights that are not part of this checkpoint"
"""Why a file is skipped that is taken along on request; what is skipped for any other reason never is."""


@dataclass(frozen=True)
class SideFile:
    """A file to be copied as it is: `path` relative to the checkpoint, with forward slashes."""

    path: str
    size: int


@dataclass(frozen=True)
class Skipped:
    """A file that is left behind, and why."""

    path: str
    why: str


def is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether `path`, every link followed, lies under one of the (resolved) `roots`."""
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in roots)


def fault_of_file(path: Path, roots: Sequence[Path]) -> str | None:
    """Why `path` cannot be read as a file of a directory, None when it can: there is none, it is a link to nothing or
    out of the (resolved) `roots`, or it is no regular file. Opening a pipe or a device would wait for ever."""
    if path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return "no such file"
    if not is_inside(path, roots):
        return "a link that leads out of the directory"
    if path.is_dir():
        return "a directory"
    return None if path.is_file() else "a pipe, a socket or a device"


def allowed_roots(directory: Path) -> tuple[Path, ...]:
    """Where files of a checkpoint directory may lie: in itself, and for a snapshot of the hub cache
    (`models--org--name/snapshots/<commit>`) in that repository's own `blobs`."""
    real = directory.resolve()
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--"):
        return real, repository / "blobs"
    return (real,)


def survey(directory: Path, but: Sequence[str]) -> tuple[tuple[SideFile, ...], tuple[Skipped, ...]]:
    """(files to copy, files left) of a checkpoint directory, in name order; `but` names those handled elsewhere."""
    roots = allowed_roots(directory)
    copied: list[SideFile] = []
    skipped: list[Skipped] = []
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        if name in but:
            continue
        # The manifest is UTF-8: it cannot tell such a name.
        foreign = decoded(name) != name
        why = "its name is no text in the encoding of this locale" if foreign else _reason_to_skip(path, roots)
        if why is None:
            copied.append(SideFile(name, path.stat().st_size))
        else:
            skipped.append(Skipped(name, why))
    return tuple(copied), tuple(skipped)


def _files(directory: Path) -> Iterator[Path]:
    for here, names, files in os.walk(directory):
        linked = [name for name in names if (Path(here) / name).is_symlink()]
        names[:] = sorted(name for name in names if name not in HIDDEN_DIRECTORIES and name not in linked)
        for name in sorted([*files, *linked]):
            yield Path(here) / name


def _reason_to_skip(path: Path, roots: Sequence[Path]) -> str | None:
    name = path.name.lower()
    if path.is_symlink() and not is_inside(path, roots):
        return "a link that leads out of the directory"
    if not path.is_file():
        return "not a regular file"
    if name.endswith((*PICKLES, PICKLE_INDEX_SUFFIX)):
        return "may hold a pickle, which is never read"
    if name.endswith(CODE):
        return "code, which is never run or passed on"
    if name.endswith((*OTHER_WEIGHTS, INDEX_SUFFIX)):
        return NOT_OF_IT
    return None
