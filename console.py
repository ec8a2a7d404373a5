"""What the command prints: tables, progress, JSON. rich on a terminal, plain lines anywhere else."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from time import monotonic
from typing import TYPE_CHECKING, Any

from .parity.render_text import printable as escaped
from .signals import tidied
from .streams import plain

if TYPE_CHECKING:
    from .converters.writing import Progress

NARROW = 70
"""Terminals of fewer columns get no tables that do not fit, and less of a progress display."""
Cell = str | tuple[str, str]
"""A table's cell: its text, or (text, rich style)."""


def size(count: float) -> str:
    """Bytes in decimal units: 987 B, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds(count: float) -> str:
    """A duration: 0.4 s, 2 min 5 s."""
    return f"{count:.1f} s" if count < 60 else f"{int(count // 60)} min {int(count % 60)} s"


def figure(value: float | None) -> str:
    """A measured number, short: 1.2e-07; a dash for none."""
    return "-" if value is None else f"{value:.2g}"


def printable(value: object) -> str:
    """`value` as text on one line: control characters are escaped, bytes that are no text read as UTF-8."""
    return escaped(_decoded(str(value)))


def _decoded(text: str) -> str:
    if text.isascii():
        return text
    from .families.errors import decoded

    return decoded(text)


_unended = False
"""Whether the answer stands in the middle of a line."""


def say(line: str = "", end: str = "\n") -> None:
    """A line of the answer, on stdout."""
    global _unended
    sys.stdout.write(line + end)
    sys.stdout.flush()
    _unended = not (line + end).endswith("\n") if line + end else _unended


def note(line: str) -> None:
    """A line beside the answer, on stderr. The answer's line is ended first: both may go to one terminal."""
    global _unended
    if _unended:
        _unended = False
        sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def document(value: Any) -> None:
    """`value` as the one JSON document on stdout."""
    say(json.dumps(finite(value), indent=2))


def finite(value: Any) -> Any:
    """`value` with what JSON has not as strings: inf, nan, bytes that are no text."""
    if isinstance(value, str):
        return _decoded(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[str] = ()) -> None:
    """A table on stdout; `right` names the columns of figures. Cells are made printable here. A terminal too narrow
    for columns gets an item a row in their place."""
    encoding = sys.stdout.encoding
    texts = [[plain(printable(cell if isinstance(cell, str) else cell[0]), encoding) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in texts), 0) for i, name in enumerate(columns)]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if console.width < min(NARROW, sum(widths) + 2 * len(widths)):
            _items(columns, texts, console.width)
            return
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            grid.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
        for row, words in zip(rows, texts, strict=True):
            styles = ["" if isinstance(cell, str) else cell[1] for cell in row]
            grid.add_row(*(Text(word, style) for word, style in zip(words, styles, strict=True)))
        console.print(grid)
        return
    for row in [list(columns), *texts]:
        cells = [
            word.rjust(width) if name in right else word.ljust(width)
            for word, width, name in zip(row, widths, columns, strict=True)
        ]
        say("  ".join(cells).rstrip())


def _items(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Each row as `first: column value; column value`, without the cells that say nothing."""
    for first, *others in rows:
        told = [f"{name} {cell}" for name, cell in zip(columns[1:], others, strict=True) if cell.strip("-– ")]
        line = f"{first}: {'; '.join(told)}" if told else first
        say(fill(line, width, subsequent_indent="  ", break_on_hyphens=False))


@contextmanager
def progress(verb: str, files: Mapping[str, int], quiet: bool) -> Iterator[Progress | None]:
    """A progress display on stderr while copying: files, bytes, rate, time left. None when stderr is no terminal or
    `quiet`. Its argument order is the converters' `Progress`. Signals end the block once it has tidied up."""
    if quiet or not sys.stderr.isatty():
        with tidied():
            yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[whole]}/{task.fields[files]} files"),
    ]
    if console.width < NARROW:
        columns.append(TextColumn("{task.percentage:>3.0f}%"))
    else:
        columns += [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    left, copied = dict(files), 0
    with tidied(), Progress(*columns, console=console, transient=True) as display:
        task = display.add_task(verb, total=None, whole=0, files=len(files))

        def advance(name: str, done: int, total: int) -> None:
            nonlocal copied
            left[name] -= done - copied
            copied = done
            whole = sum(size <= 0 for size in left.values())
            display.update(task, completed=done, total=total, whole=whole)

        yield advance


@contextmanager
def steps(verb: str, quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """The step under way and the time it takes, on stderr. None when stderr is no terminal or `quiet`. Signals end
    the block once it has tidied up."""
    if quiet or not sys.stderr.isatty():
        with tidied():
            yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
    columns = (spinner, TextColumn("{task.description}"), TimeElapsedColumn())
    with tidied(), Progress(*columns, console=console, transient=True) as display:
        task = display.add_task(verb, total=None)
        yield lambda step: display.update(task, description=f"{verb}  {step}")


@dataclass(frozen=True)
class Copied:
    """What a copy came to: bytes of tensors, files written, seconds taken."""

    bytes: int
    files: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds > 0 else math.inf

    def __str__(self) -> str:
        rate = f", {size(self.rate)}/s" if self.bytes and math.isfinite(self.rate) else ""
        return f"{self.files} files, {size(self.bytes)} of tensors in {seconds(self.seconds)}{rate}"

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "files": self.files,
            "seconds": round(self.seconds, 3),
            "bytes_per_second": round(self.rate) if math.isfinite(self.rate) else None,
        }


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = monotonic()

    @property
    def seconds(self) -> float:
        return monotonic() - self._start


def shown(text: str) -> str:
    """A model's text with control characters but line breaks and tabs escaped."""
    return "".join(letter if letter in "\n\t" else printable(letter) for letter in text)
