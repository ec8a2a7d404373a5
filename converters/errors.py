"""What a user is told when a conversion cannot be done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class ConversionError(Exception):
    """Something could not be converted. The message is one or two plain lines: what, where, what to do."""


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit: which tensor, key or file (`what`), what was found, what was needed, and what
    the user can do about it."""

    what: str
    found: str
    needed: str
    todo: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: found {self.found}, needed {self.needed}"
        return f"{text}; {self.todo}" if self.todo else text


class FindingsError(ConversionError):
    """Everything found wrong, at once: one line a finding. `findings` holds them as values."""

    def __init__(self, where: str, findings: Iterable[Finding]) -> None:
        self.where = where
        self.findings = tuple(findings)
        lines = "\n".join(f"  {finding}" for finding in self.findings)
        super().__init__(f"{where}: {len(self.findings)} finding(s)\n{lines}")
