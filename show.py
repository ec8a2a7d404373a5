"""What `inspect`, `verify` and `diff` print for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from .console import printable, say
from .families.errors import short_list
from .parity.render_text import figure, small, summary, times, verdict

if TYPE_CHECKING:
    from .converters.banks import Banks
    from .converters.differences import Difference
    from .converters.inspection import Inspection
    from .parity.results import CheckResult, Report


def show_inspection(found: Inspection) -> None:
    """An inspection as sections of lines."""
    source = found.source
    at = f" at {source.commit}" if source.commit else ""
    pairs = {
        "checkpoint": f"{source.repo or source.label}{at}",
        "family": f"{found.family.name} (model_type {found.model_type})",
        "tensors": f"{len(source.tensors)} in {len(source.headers)} file(s), {console.size(source.weight_bytes)}"
        if source.has_weights
        else "none here: config.json alone",
    }
    if found.fields is not None:
        pairs["parameters"] = f"{found.parameters:,}"
        stored, wide = console.size(found.parameter_bytes), console.size(found.float32_bytes)
        pairs["memory"] = f"{stored} as stored, {wide} in float32"
    if found.largest is not None:
        pairs["largest"] = f"{found.largest[0]}, {console.size(found.largest[1])}"
    if source.side_files:
        pairs["side files"] = ", ".join(item.path for item in source.side_files)
    _pairs(pairs)
    if found.fields is not None:
        _section("decoder fields (the others have their defaults)")
        _pairs(found.fields.to_json())
        _section("layer runs")
        _pairs({run.bank: f"{run.layers} x {run.layer_type}" for run in found.runs})
        _section("rules")
        for line in found.rules:
            say(f"  {printable(line)}")
    _listed("aliases", [f"{alias.name} = {alias.of}: {alias.why}" for alias in found.aliases])
    _listed("carried for export", [f"{name}: {why}" for name, why in _alike((c.name, c.why) for c in found.carried)])
    _listed("unmapped", [name for name, _ in _alike((name, "") for name in found.unmapped)])
    _listed("left behind", [f"{item.path}: {item.why}" for item in source.skipped])
    _listed("notes", found.notices)
    _listed("problems", short_list(found.problems))


def show_banks(banks: Banks, as_json: bool) -> None:
    """A bank directory: what it came from, its decoder, its files."""
    manifest = banks.manifest
    files = {name: {"tensors": len(h.entries), "bytes": h.data_bytes} for name, h in banks.headers.items()}
    if as_json:
        console.document(
            {
                "banks": str(banks.path),
                "family": manifest.family,
                "model_type": manifest.model_type,
                "decoder": manifest.fields.to_json(),
                "source": {key: manifest.source[key] for key in ("name", "repo", "revision")},
                "files": files,
                "dtype": manifest.dtype,
                "exact": not manifest.inexact,
                "inexact": list(manifest.inexact),
                "aliases": dict(manifest.aliases),
                "carried": dict(manifest.carried),
                "side_files": list(manifest.side_files),
            }
        )
        return
    at = f" at {manifest.source['revision']}" if manifest.source["revision"] else ""
    _pairs(
        {
            "banks": banks.path,
            "family": f"{manifest.family} (model_type {manifest.model_type})",
            "source": f"{manifest.source['name']}{at}",
            "export": "byte-exact" if not manifest.inexact else f"not byte-exact: {'; '.join(manifest.inexact)}",
            "side files": ", ".join(manifest.side_files) or "none",
        }
    )
    _section("decoder fields (the others have their defaults)")
    _pairs(manifest.fields.to_json())
    _section("files")
    rows = [(name, str(item["tensors"]), console.size(item["bytes"])) for name, item in files.items()]
    console.table(("file", "tensors", "bytes"), rows, ("tensors", "bytes"))
    _listed("aliases", [f"{name} = {of}" for name, of in manifest.aliases.items()])
    _listed("carried for export", [f"{name}: {why}" for name, why in _alike(manifest.carried.items())])


STYLES = {True: "green", False: "bold red", None: "dim"}


def show_report(report: Report, written: Path | None) -> None:
    """A verification as a row per check, and its verdict."""
    name = report.target if report.variant is None else f"{report.family} {report.variant}"
    versions = ", ".join(
        f"{name} {report.versions[name]}" for name in ("torch", "transformers", "jax") if name in report.versions
    )
    say(f"{printable(name)} ({printable(report.family)}; {versions})")
    columns = ("check", "dtype", "result", "error", "bound", "error/bound", "where or why")
    rows = [
        (
            check.name,
            check.dtype,
            (verdict(check), STYLES[check.passed]),
            small(check.error),
            small(check.bound),
            times(check.ratio),
            check.note or _worst(check),
        )
        for check in report.checks
    ]
    console.table(columns, rows, ("error", "bound", "error/bound"))
    says = summary(report)
    tail = f"; report in {written}" if written is not None else ""
    say(f"{says.word}: {printable(says.sentence)} {report.seconds:.1f} s{printable(tail)}")
    if says.lead:
        say(printable(says.lead))
    for line in report.notices:
        console.note(f"note: {printable(line)}")


def _worst(check: CheckResult) -> str:
    return ", ".join(
        f"{key} {value if isinstance(value, int) else figure(value)}" for key, value in (check.worst or {}).items()
    )


def write_report(report: Report, directory: Path) -> None:
    """`report.json`, `report.md` and `report.html` in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(report.to_json())
    (directory / "report.md").write_text(report.to_markdown())
    (directory / "report.html").write_text(report.to_html())


def show_differences(found: Sequence[Difference], show_all: bool) -> None:
    """A row per tensor that differs, and a line that counts."""
    rows = [
        (
            item.name,
            item.kind,
            item.a or "-",
            item.b or "-",
            f"{item.differing:,}" if item.differing else "",
            "" if item.max_error is None else console.figure(item.max_error),
            "" if item.at is None else str(list(item.at)),
        )
        for item in found
        if show_all or item.kind != "equal"
    ]
    if rows:
        columns = ("tensor", "kind", "A", "B", "differing", "max error", "at")
        console.table(columns, rows, ("differing", "max error"))
    counts: dict[str, int] = {}
    for item in found:
        counts[item.kind] = counts.get(item.kind, 0) + 1
    say(f"{len(found)} tensors: " + ", ".join(f"{count} {_told(kind)}" for kind, count in counts.items()))
    believed = sum(item.kind == "equal" and not item.read for item in found)
    if believed:
        say(f"{believed} equal by recorded checksums and not read; --read-all reads every byte")


def _told(kind: str) -> str:
    return {"values": "of other values", "dtype": "of another dtype", "shape": "of another shape"}.get(kind, kind)


def _section(title: str) -> None:
    say()
    say(title)


def _pairs(pairs: Mapping[str, Any]) -> None:
    width = max(map(len, pairs), default=0)
    for key, value in pairs.items():
        say(f"  {printable(key).ljust(width)}  {printable(value)}")


def _listed(title: str, lines: Sequence[str]) -> None:
    if lines:
        _section(title)
        for line in lines:
            say(f"  {printable(line)}")


def _alike(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names that differ in numbers only as one line, with their count."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, why in items:
        groups.setdefault((re.sub(r"\d+", "#", name), why), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors)", why)
        for (pattern, why), names in groups.items()
    ]
