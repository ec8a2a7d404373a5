"""What is said when something cannot be done: plain lines for a user, never a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_LINE = 1000
"""The most characters of one line of a message; the middle of a longer one is left out."""


class ConversionError(Exception):
    """Something that cannot be done, in one or two plain lines: what, where, what to do.

    What a stranger's file says is quoted in messages: lines are cut to `LONGEST_LINE`, and what no terminal can show
    is escaped.
    """

    def __init__(self, text: str) -> None:
        super().__init__("\n".join(map(_plain, text.split("\n"))))


def _plain(line: str) -> str:
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
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
    """Every finding of one look at a checkpoint, reported together.

    findings: the findings, in the order they were met.
    """

    def __init__(self, where: str, findings: Iterable[Finding]) -> None:
        self.where = where
        self.findings = tuple(findings)
        count = len(self.findings)
        head = f"{where}: {count} finding{'' if count == 1 else 's'}"
        super().__init__("\n".join([head, *(f"  {finding}" for finding in self.findings)]))
