"""What is said when something cannot be done: plain lines for a user, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_LINE = 1000
"""The most characters of one line of a message; the middle of a longer one is left out."""
MOST_LINES = 40
"""The most lines of findings of one message."""
_INDEX = re.compile(r"(?<=[._/@])\d+(?=[._/@:])")
"""The number of a layer, an expert or a bank in the name of a tensor, a parameter or a file."""


class ConversionError(Exception):
    """Something that cannot be done, in one or two plain lines: what, where, what to do.

    What a stranger's file says is quoted in messages: lines are cut to `LONGEST_LINE`, and what no terminal can show
    is escaped.
    """

    def __init__(self, text: str) -> None:
        super().__init__("\n".join(map(_plain, text.split("\n"))))


def decoded(text: str) -> str:
    """`text` with the bytes that the encoding of file names did not know (PEP 383) read as UTF-8."""

    def read(run: re.Match[str]) -> str:
        return run[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    return re.sub("[\udc80-\udcff]+", read, text)


def _plain(line: str) -> str:
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in decoded(line))
    if len(shown) <= LONGEST_LINE:
        return shown
    return f"{shown[: LONGEST_LINE * 2 // 3]} … {shown[-LONGEST_LINE // 4 :]}"


@dataclass(frozen=True)
class Finding:
    """One thing that does not close: the thing by name, what was found, what was needed, what to do."""

    what: str
    found: str
    needed: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: found {self.found}, needed {self.needed}; {self.fix}"


class FindingsError(ConversionError):
    """Every finding of one look at a checkpoint, reported together: alike ones as one line (`short_list`).

    findings: every finding, in the order they were met.
    """

    def __init__(self, where: str, findings: Iterable[Finding]) -> None:
        self.where = where
        self.findings = tuple(findings)
        count = len(self.findings)
        head = f"{where}: {count} finding{'' if count == 1 else 's'}"
        lines = short_list(map(str, self.findings))
        super().__init__("\n".join([head, *(f"  {line}" for line in lines)]))


def short_list(lines: Iterable[str]) -> list[str]:
    """Findings as lines for people: those that differ only in the number of a layer, an expert or a bank are one line
    with their count, and past `MOST_LINES` the rest is counted."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(_INDEX.sub("#", line), []).append(line)
    told = []
    for alike in groups.values():
        what, found, rest = alike[0].partition(": found ")
        told.append(f"{what} and {len(alike) - 1} alike{found}{rest}" if len(alike) > 1 and found else alike[0])
    if len(told) > MOST_LINES:
        more = sum(map(len, list(groups.values())[MOST_LINES:]))
        told[MOST_LINES:] = [f"and {more} more findings; --json lists every one"]
    return told


def within(where: str, error: ConversionError) -> ConversionError:
    """`error` of something that lies in `where`, said with that in front where it does not begin so already."""
    if str(error).startswith((f"{where}:", f"{where}/")):
        return error
    if isinstance(error, FindingsError):
        return FindingsError(f"{where}: {error.where}", error.findings)
    return ConversionError(f"{where}: {error}")
