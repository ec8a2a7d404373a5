"""What an unfinished import or export leaves behind, and how a later one goes on from it.

A directory that is being written has a journal in it, `unfinished.jsonl`: one JSON object a line. The first says what
is being made of what (`Identity`); each other says how far a tensor of a file is written and the checksums of its
bytes from the first to there. The process that writes holds a lock on it (flock), which the system takes away from one
that is killed.

Nothing a journal says is believed: a later run reads the bytes again, and what does not have the checksums stated is
written anew. So neither the journal nor the files need reach the disk in any order.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ..families.errors import ConversionError
from .checksums import Checksums

JOURNAL = "unfinished.jsonl"
FORMAT = "dewconv unfinished 1"
POINT_BYTES = 64 << 20
"""How many bytes of one tensor are written between two lines of the journal."""

Identity = Mapping[str, Mapping[str, Any]]
"""What a run makes of what, as JSON values by kind: "options", "source" (file -> what shows that it is the same) and
"files" (file to be written -> the checksum of its header). Runs of equal identities write equal bytes."""

_SAYS = {"options": "other options", "source": "another source", "files": "another layout"}


@dataclass(frozen=True)
class Point:
    """A tensor's first `size` bytes are written and have these checksums."""

    size: int
    checksums: Checksums


class Journal:
    """The journal of one directory, locked while it is open."""

    def __init__(self, directory: Path, identity: Identity | None) -> None:
        """A new journal. Raises OSError as `open` does. identity: None for work that nothing can go on from."""
        self._points: dict[tuple[str, str], list[Point]] = {}
        self._writing = Lock()
        self.path = directory / JOURNAL
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        _lock(self._fd)
        self._line({"format": FORMAT, "identity": identity})

    @classmethod
    def reopen(cls, directory: Path) -> tuple[Journal, Identity | None] | None:
        """(the journal a run left in `directory`, its identity), or None when it left none that can be read.

        Raises BlockingIOError while the run still writes.
        """
        path = directory / JOURNAL
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            _lock(fd)
            with os.fdopen(os.dup(fd), "rb") as file:
                text = file.read()
            first, *lines = text.split(b"\n")
            head = _object(first)
            if head.get("format") != FORMAT or not lines:
                os.close(fd)
                return None
            journal = cls.__new__(cls)
            journal._points, journal._writing, journal.path, journal._fd = {}, Lock(), path, fd
            if lines[-1]:  # cut off in the middle of a line
                os.write(fd, b"\n")
        except BaseException:
            os.close(fd)
            raise
        for value in map(_object, lines):
            match value:
                case {"file": str(file), "tensor": str(tensor), "bytes": int(size), "checksums": dict(checksums)}:
                    journal._points.setdefault((file, tensor), []).append(Point(size, checksums))
        return journal, head.get("identity")

    def points(self, file: str, tensor: str) -> list[Point]:
        """What an earlier run said of a tensor, by growing size."""
        return sorted(self._points.get((file, tensor), ()), key=lambda point: point.size)

    @property
    def done(self) -> int:
        """About how many bytes an earlier run said were written."""
        return sum(max(point.size for point in points) for points in self._points.values())

    def note(self, file: str, tensor: str, size: int, checksums: Checksums) -> None:
        """States that the first `size` bytes of a tensor are written. Any thread may call it."""
        self._line({"file": file, "tensor": tensor, "bytes": size, "checksums": dict(checksums)})

    def remove(self) -> None:
        """Ends the work: what is in the directory is whole."""
        self.path.unlink()

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._fd)

    def _line(self, value: Any) -> None:
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            while line:
                line = line[os.write(self._fd, line) :]


def differing(left: Identity | None, now: Identity) -> str | None:
    """How what an earlier run was making differs from what is to be made now, in a few words; None when it does not."""
    if not isinstance(left, Mapping):
        return "nothing that can be gone on from"
    for kind, wanted in now.items():
        was = left.get(kind)
        if was == wanted:
            continue
        names = [name for name in {**dict(was or {}), **wanted} if (was or {}).get(name) != wanted.get(name)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{_SAYS[kind]}: {', '.join(names[:3])}{more} changed"
    return None


def leftovers(out: Path) -> list[Path]:
    """The directories that unfinished runs left beside `out`, by name; not those that are still being written, nor
    those without a journal: another process is about to begin or to place one."""
    return [path for path in _partial(out) if _is_left(path)]


def reopen_for(out: Path, identity: Identity) -> tuple[Path, Journal] | None:
    """The directory beside `out`, and its journal, that a run of this identity left the most done in; None when no
    unfinished run left any.

    Raises ConversionError when one is still being written, and when there are some and all are of other work.
    """
    found: list[tuple[Path, Journal]] = []
    refusals: list[str] = []
    for path in _partial(out):
        try:
            held = Journal.reopen(path)
        except BlockingIOError:
            _close(found)
            raise ConversionError(f"{out}: another process is writing it, in {path.name}; wait for that one") from None
        if held is None:
            continue
        why = differing(held[1], identity)
        if why is None:
            found.append((path, held[0]))
        else:
            held[0].close()
            refusals.append(f"{out}: {path} was left by an import or export of {why}; remove it and start again")
    if not found:
        if refusals:
            raise ConversionError(refusals[0])
        return None
    best = max(found, key=lambda item: item[1].done)
    _close([item for item in found if item is not best])
    return best


def _close(found: list[tuple[Path, Journal]]) -> None:
    for _, journal in found:
        journal.close()


def _partial(out: Path) -> list[Path]:
    name = re.compile(re.escape(f".{out.name}.") + r"[0-9a-f]{8}\.partial")
    try:
        found = [path for path in out.absolute().parent.iterdir() if name.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _is_left(path: Path) -> bool:
    try:
        held = Journal.reopen(path)
    except BlockingIOError:
        return False
    if held is None:
        return False
    held[0].close()
    return True


def _lock(fd: int) -> None:
    """Raises BlockingIOError when another process holds the lock. A file system without locks has none to hold."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
