"""The process's standard streams: there even when the caller closed them, with faults that are told apart."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TextIO

PLAIN = {
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "÷": "/",
    "·": "-",
    "∞": "inf",
    "…": "...",
    "\u202f": ",",
    "\u2011": "-",
}
"""What the command itself prints beyond ASCII, and how it is written where the encoding has it not."""
ERRORS = "dewconv.plain"
"""The error handler of text streams that writes so."""


class OutputError(OSError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Standard output: a fault of it is an OutputError, a reader that left stays a BrokenPipeError."""

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


class _Notes(io.FileIO):
    """Standard error: what cannot be written there is dropped, and the work goes on."""

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_streams() -> None:
    """Makes the three standard descriptors and `sys`'s streams stand, whatever the caller closed.

    A closed descriptor would be given to the next file that is opened, and what is printed would go there. In its
    place comes the null device; standard output gets it for reading, so that an answer nobody can see is a fault
    (gnulib's `stdopen` does the same). Text that a stream's encoding has not is written in ASCII.
    """
    for descriptor, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    sys.stdout = _text(_Output(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Notes(2, "w", closefd=False), sys.stderr)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  it stays open as long as the process


def _text(raw: io.FileIO, was: TextIO | None) -> io.TextIOWrapper:
    encoding = getattr(was, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors=ERRORS, line_buffering=raw.isatty(), write_through=True
    )


def drop_output() -> None:
    """Points standard output at the null device: what it still holds would fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def plain(text: str, encoding: str | None) -> str:
    """`text` as it is written in an encoding."""
    return text.encode(encoding or "utf-8", ERRORS).decode(encoding or "utf-8")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(x, x.encode("ascii", "backslashreplace").decode()) for x in letters), error.end


codecs.register_error(ERRORS, _in_ascii)
