"""What may be replaced: a directory of which every file is known to be of the kind that replaces it."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..families.errors import ConversionError
from .manifest import MANIFEST, read_manifest
from .resuming import JOURNAL
from .source import CONFIG, INDEX, open_source

SHOWN = 4
"""The most files that a refusal names."""
CHECKPOINT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "hf_quant_config.json",
    "configuration.json",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    ".gitattributes",
)
"""Patterns of what the repositories of checkpoints hold beside config and weights, whoever wrote it."""


@dataclass(frozen=True)
class Replaceable:
    """Which directories a run may replace: those of its kind that hold nothing else.

    kind: "bank directory". names: the files of a directory that are of that kind, as paths in it; raises
    ConversionError when the directory is none. also: whether a file (the directory, its path there) is known all
    the same.
    """

    kind: str
    names: Callable[[Path], Collection[str]]
    also: Callable[[Path, str], bool] = lambda directory, name: False

    def refuse_losses(self, directory: Path, called: Path) -> None:
        """Raises ConversionError naming what would be lost with `directory`: every file and link that is not known, and
        every directory that holds no file. called: what the user calls it."""
        fault = ""
        known: Collection[str] = ()
        try:
            known = set(self.names(directory))
        except ConversionError as error:
            # What is no such directory may hold a user's own config.json: nothing of it is known.
            text = str(error).partition("\n")[0]
            fault = text.removeprefix(f"{directory.absolute()}").removeprefix(f"{directory}").lstrip(":/ ")
            fault = fault.removeprefix(f"is not a {self.kind}, ")

        def is_known(name: str) -> bool:
            path = directory / name
            # No run writes links: one is a user's, wherever it leads.
            if fault or path.is_symlink() or not path.is_file():
                return False
            return name in known or self.also(directory, name)

        lost = [name for name in _contents(directory, called) if not is_known(name)]
        if not lost:
            return
        named = f"{', '.join(lost[:SHOWN])}{f' and {len(lost) - SHOWN} more' if len(lost) > SHOWN else ''}"
        why = f" (it cannot be read as a {self.kind}: {fault})" if fault else ""
        raise ConversionError(
            f"{called}: replacing it would lose {named}{why}; name another OUT, or move what is yours away"
        )


def _contents(directory: Path, called: Path) -> Iterator[str]:
    """Every file, link and empty directory (with a slash) below `directory`, as paths in it."""

    def unreadable(error: OSError) -> None:
        raise ConversionError(f"{called}: cannot be replaced, what it holds cannot be read ({error})")

    for here, below, files in os.walk(directory, onerror=unreadable):
        at = Path(here)
        links = [name for name in below if (at / name).is_symlink()]
        for name in sorted((*files, *links)):
            yield (at / name).relative_to(directory).as_posix()
        if not below and not files and at != directory:
            yield at.relative_to(directory).as_posix() + "/"


def _bank_files(directory: Path) -> list[str]:
    manifest = read_manifest(directory)
    return [MANIFEST, JOURNAL, *manifest.files, *manifest.beside_files]


BANKS = Replaceable("bank directory", _bank_files)


def _checkpoint_files(directory: Path) -> list[str]:
    source = open_source(directory.absolute())
    if not isinstance(source.config.get("model_type"), str):
        raise ConversionError(f"{directory}: its {CONFIG} has no model_type")
    if not source.has_weights:
        raise ConversionError(f"{directory}: has no weights as safetensors")
    return [CONFIG, *([INDEX] if source.index_text is not None else []), *source.headers]


def checkpoints(written: Mapping[str, Path]) -> Replaceable:
    """Checkpoints that hold nothing beside `CHECKPOINT_FILES` but equal copies of what is about to be `written`: name
    -> the file it is a copy of."""
    equal: set[tuple[int, ...]] = set()

    def known(directory: Path, name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in CHECKPOINT_FILES):
            return True
        if name not in written:
            return False
        stat = (directory / name).stat()
        # Looked at more than once, under other names of the directory; a file may be another model's gigabytes.
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in equal and filecmp.cmp(directory / name, written[name], shallow=False):
            equal.add(key)
        return key in equal

    return Replaceable("checkpoint", _checkpoint_files, known)
