"""Hostile headers, indexes, configs and manifests, drawn from bytes, and what each is given to.

A fuzzer hands over bytes, whatever finds them: hypothesis in the tests, a coverage-guided one in `benchmarks/fuzz.py`.
`Choices` reads them as decisions, a document is damaged by those, and a target reads what came of it. It must be taken,
or refused by a ConversionError of plain lines; anything else is a finding.
"""

from __future__ import annotations

import copy
import json
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from dewconv.converters.banks import open_banks
from dewconv.converters.inspection import inspect_source
from dewconv.converters.plan import plan_import
from dewconv.converters.safetensors_files import read_header
from dewconv.converters.source import open_source
from dewconv.families.errors import LONGEST_LINE, ConversionError, FindingsError

Item = TypeVar("Item")

SECONDS = 5
"""The longest that one input may take."""
MEGABYTES = 400
"""The most memory that all inputs of a target may add to the process."""
SCALARS: Sequence[Any] = (
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    3,
    2**31,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "x" * 5000,
    "\0",
    "\ud800",
    "../evil.safetensors",
    "/etc/passwd",
    "a\\b.safetensors",
    "model.safetensors",
    "bfloat16",
    "F32",
    "F4",
    "BF16",
    "sliding_attention",
    "yarn",
)
"""Values that stand where they should not."""


class Choices:
    """Decisions read off bytes; past their end every decision is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit` - 1."""
        width = 1 if limit <= 256 else 4
        taken = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(taken, "little") % limit if limit > 1 else 0

    def one(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


def hostile(choices: Choices) -> Any:
    """A value that nobody expects."""
    kind = choices.below(12)
    if kind < 9:
        return choices.one(SCALARS)
    if kind == 9:
        return [choices.one(SCALARS) for _ in range(choices.below(4))]
    if kind == 10:
        return {str(choices.one(SCALARS)): choices.one(SCALARS)}
    value: Any = choices.one(SCALARS)
    for _ in range(choices.one((1, 50, 200))):
        value = [value]
    return value


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything below a document."""
    pending = [document]
    while pending:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                pending.append(container[key])


def damage(document: Any, choices: Choices) -> Any:
    """A copy of a JSON document with one to four things changed: taken away, exchanged, put in another's place."""
    document = copy.deepcopy(document)
    for _ in range(1 + choices.below(4)):
        found = list(places(document))
        if not found:
            return hostile(choices)
        container, key = choices.one(found)
        other, other_key = choices.one(found)
        match choices.below(8):
            case 0:
                del container[key]
            case 1:
                container[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(container[key])
            case 2 if isinstance(container, dict):
                container[str(choices.one(SCALARS))] = container.pop(key)
            case 3 if isinstance(container, dict):
                container[f"{key}{choices.one(('s', '_', '.0', ' '))}"] = hostile(choices)
            case 4 if isinstance(container, list):
                container.extend([container[key]] * choices.one((1, 2, 200)))
            case 5 if isinstance(container[key], int) and not isinstance(container[key], bool):
                container[key] += choices.one((1, -1, 2, 64, -64, 2**31, 2**63))
            case _:
                container[key] = hostile(choices)
    return document


def as_text(document: Any, choices: Choices) -> bytes:
    """A document as JSON bytes, which one time in four are themselves damaged."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=choices.below(2) == 0)
    data = text.encode("utf-8", "surrogatepass")
    if choices.below(4):
        return data
    at = choices.below(len(data) + 1)
    match choices.below(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([choices.below(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + b"\xff\xfe" + data[at:]
        case 3:
            return b"[" * 100_000 + data
        case 4 if data.startswith(b'{"'):
            first = data[1 : data.index(b",") if b"," in data else -1]
            return b"{" + first + b"," + data[1:]
        case _:
            return data[:at] + data[at // 2 :]


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Raises TimeoutError when what is inside takes longer, wherever it is."""

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def resident() -> int:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def taken(read: Callable[[], Any], *named: str) -> bool:
    """Whether `read` took its input; it may refuse it by a ConversionError which names one of `named`.

    Raises AssertionError for a message that is no plain text, and whatever else `read` raises.
    """
    refusal = None
    with limited():
        try:
            read()
        except ConversionError as error:
            refusal = error
    if refusal is None:
        return True
    text = str(refusal)
    text.encode("utf-8")
    lines = text.splitlines()
    assert text.strip(), repr(refusal)
    assert "Traceback" not in text, text
    assert len(lines) <= (1 + len(refusal.findings) if isinstance(refusal, FindingsError) else 2), text
    assert max(map(len, lines)) <= LONGEST_LINE, text[:LONGEST_LINE]
    assert any(name in text for name in named), text
    return False


def write_safetensors(path: Path, text: bytes, length: int, data: int) -> None:
    """A file of a header's text, the length it claims, and so many bytes of data, which are holes."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + text)
        file.truncate(8 + len(text) + data)


HEADER: Mapping[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    "empty": {"dtype": "F16", "shape": [0, 4], "data_offsets": [34, 34]},
    "scalar": {"dtype": "U8", "shape": [], "data_offsets": [34, 35]},
    "codes": {"dtype": "F8_E4M3", "shape": [3, 7], "data_offsets": [35, 56]},
}
DATA = 56


def fuzz_header(data: bytes, directory: Path) -> bool:
    """A safetensors file with a damaged header. What is taken, the safetensors library takes too."""
    choices = Choices(data)
    text = as_text(damage(HEADER, choices), choices)
    length = choices.one(
        (len(text),) * 12 + (len(text) + 1, abs(len(text) - 1), 0, 7, 10**8 + 1, 2**32, 2**63, 2**64 - 1)
    )
    path = directory / "hostile.safetensors"
    write_safetensors(path, text, length, choices.one((DATA,) * 6 + (0, DATA - 1, DATA + 1, 2**32)))
    good = taken(lambda: read_header(path), path.name)
    if good:
        try:
            with safe_open(path, "numpy") as library:
                names = set(library.keys())
        except SafetensorError as error:
            raise AssertionError(f"taken, and refused by the safetensors library: {error}") from None
        assert names == set(read_header(path).entries)
    return good


def fuzz_checkpoint(data: bytes, checkpoint: Path, file: str) -> bool:
    """A checkpoint whose config.json, or index, is damaged: `dewconv inspect` and the plan of an import.

    The file is put back as it was.
    """
    path = checkpoint / file
    kept = path.read_bytes()
    choices = Choices(data)
    path.write_bytes(as_text(damage(json.loads(kept), choices), choices))

    def read() -> None:
        inspect_source(open_source(checkpoint))
        plan_import(open_source(checkpoint))

    try:
        return taken(read, path.name, checkpoint.name, str(checkpoint))
    finally:
        path.write_bytes(kept)


def fuzz_manifest(data: bytes, banks: Path) -> bool:
    """A bank directory whose manifest is damaged: opened, loaded and planned for an export."""
    from dewconv.converters.exporting import plan_export
    from dewconv.converters.loading import load

    path = banks / "dewconv.json"
    kept = path.read_bytes()
    choices = Choices(data)
    path.write_bytes(as_text(damage(json.loads(kept), choices), choices))

    def read() -> None:
        opened = open_banks(banks)
        load(banks)
        plan_export(opened)

    try:
        return taken(read, path.name, banks.name)
    finally:
        path.write_bytes(kept)
