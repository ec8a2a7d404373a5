"""What is said when something cannot be done: plain lines for a user, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

LONGEST_LINE = 1000
"""The most characters of one line of a message; the middle of a longer one is left out."""
MOST_LINES = 40
"""The most lines of findings of one message."""
MOST_RANGES = 8
"""The most ranges of indices in one name."""
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
    (`_together`), and past `MOST_LINES` the rest is counted."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(_INDEX.sub("#", line), []).append(line)
    told = []
    for alike in groups.values():
        _, found, rest = alike[0].partition(": found ")
        told.append(f"{_together([line.partition(found)[0] for line in alike])}{found}{rest}" if found else alike[0])
    if len(told) > MOST_LINES:
        more = sum(map(len, list(groups.values())[MOST_LINES:]))
        told[MOST_LINES:] = [f"and {more} more findings; --json lists every one"]
    return told


def _together(names: list[str]) -> str:
    """Names that differ in indices as one, `layers.{0-2, 5}.experts.{0-7}`, where they are every combination of those;
    else the first and how many are like it."""
    if len(set(names)) == 1:
        return names[0]
    indices = [sorted(set(column)) for column in zip(*(map(int, _INDEX.findall(name)) for name in names), strict=True)]
    if prod(map(len, indices)) != len(set(names)):
        return f"{names[0]} and {len(names) - 1} alike"
    spread = iter(indices)
    return _INDEX.sub(lambda match: _ranges(found) if len(found := next(spread)) > 1 else match[0], names[0])


def _ranges(numbers: list[int]) -> str:
    """{0-2, 5}; of more than `MOST_RANGES` ranges the first and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    told = ["-".join(map(str, run)) for run in runs]
    if len(told) > MOST_RANGES:
        told[MOST_RANGES - 1 : -1] = ["…"]
    return f"{{{', '.join(told)}}}"


def within(where: str, error: ConversionError) -> ConversionError:
    """`error` of something that lies in `where`, said with that in front where it does not begin so already."""
    if str(error).startswith((f"{where}:", f"{where}/")):
        return error
    if isinstance(error, FindingsError):
        return FindingsError(f"{where}: {error.where}", error.findings)
    return ConversionError(f"{where}: {error}")
