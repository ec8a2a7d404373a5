"""A report's three forms: JSON for machines, Markdown for terminals and issues, one HTML page to read."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from .render_text import (
    closest,
    first_departure,
    layer_name,
    pairs,
    printable,
    small,
    summary,
    times,
    title,
    verdict,
    worst_places,
)
from .results import Report


def to_json(report: Report) -> str:
    """`Report.to_dict` as text. Numbers that JSON has not are the strings "inf", "-inf" and "nan"."""
    return json.dumps(_finite(report.to_dict()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str | int | float) or value is None:
        return value
    return _finite(value.item()) if hasattr(value, "item") else str(value)


def to_html(report: Report) -> str:
    """One self-contained page. Raises ModuleNotFoundError naming the extra when jinja2 is not installed."""
    from .render_html import page

    return page(report)


def to_markdown(report: Report) -> str:
    """Markdown as GitHub renders it. Text from the checkpoint stands in code spans."""
    says = summary(report)
    mark = "✅" if report.passed else "❌"
    lines = [f"## {mark} {says.word}: {code(report.target)}", "", plain(says.sentence)]
    if says.lead:
        lines += ["", plain(says.lead)]
    named = [f"family {code(report.family)}"]
    if report.variant:
        named.append(f"variant {code(report.variant)}")
    near = closest(report)
    if near is not None:
        named.append(f"closest to its bound: {plain(title(near.name).lower())} in {near.dtype}, {times(near.ratio)} ×")
    named.append(f"{report.seconds:.1f} s")
    lines += ["", " · ".join(named), ""]

    lines += ["| check | dtype | error | bound | error ÷ bound | verdict |", "|---|---|--:|--:|--:|---|"]
    for check in report.checks:
        bad = check.passed is False
        word = f"**{verdict(check)}**" if bad else verdict(check)
        lines.append(
            f"| {plain(title(check.name))} | {plain(check.dtype)} | {small(check.error)} | {small(check.bound)} "
            f"| {times(check.ratio)} | {word} |"
        )
    notes = [(check, check.note) for check in report.checks if check.note]
    if notes:
        lines += ["", *(f"- {plain(title(check.name))}, {plain(check.dtype)}: {plain(note)}" for check, note in notes)]
    places = worst_places(report)
    if places:
        lines += ["", "**Where the error is largest**", ""]
        lines += [f"- {plain(title(check.name))}, {plain(check.dtype)}: {code(place)}" for check, place in places]

    if report.layers:
        lines += ["", *_layers(report)]
    for heading, mapping in (("Model", report.model), ("Probe", report.probe), ("Versions", report.versions)):
        rows = pairs(mapping)
        if rows:
            lines += ["", f"**{heading}**", "", "| | |", "|---|---|"]
            lines += [f"| {plain(key)} | {code(value)} |" for key, value in rows]
    if report.notices:
        lines += ["", "**Notices and known differences**", "", *(f"- {plain(notice)}" for notice in report.notices)]
    return "\n".join(lines) + "\n"


def _layers(report: Report) -> list[str]:
    first = first_departure(report)
    state = "every layer is within its bound" if first is None else f"the first to depart is {layer_name(first[1])}"
    lines = [f"<details><summary>Error by layer: {html_text(state)}</summary>", ""]
    dtypes = list(report.layers)
    lines.append("| layer | kind | " + " | ".join(f"{plain(d)} | bound | ÷" for d in dtypes) + " |")
    lines.append("|--:|---|" + "--:|--:|--:|" * len(dtypes))
    by_layer: dict[int, dict[str, Any]] = {}
    for dtype, rows in report.layers.items():
        for row in rows:
            by_layer.setdefault(row.layer, {})[dtype] = row
    for index in sorted(by_layer):
        rows = by_layer[index]
        kind = next(iter(rows.values())).kind
        cells = []
        for dtype in dtypes:
            row = rows.get(dtype)
            if row is None:
                cells += ["–"] * 3
                continue
            beyond = not row.max_error <= row.bound
            ratio = f"**{times(row.ratio)}**" if beyond else times(row.ratio)
            cells += [small(row.max_error), small(row.bound), ratio]
        name = "embeddings" if index < 0 else str(index)
        lines.append(f"| {name} | {code(kind) if kind else ''} | " + " | ".join(cells) + " |")
    return [*lines, "", "</details>"]


def code(text: object) -> str:
    """`text` as a code span that no backtick, pipe or newline in it can leave."""
    body = printable(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", body)), default=0) + 1)
    pad = " " if len(fence) > 1 or body != body.strip() or not body else ""
    return f"{fence}{pad}{body}{pad}{fence}".replace("|", "\\|")


def plain(text: object) -> str:
    """`text` as prose: what Markdown or HTML would read into it is escaped."""
    return re.sub(r"([\\`*_{}\[\]#|~@])", r"\\\1", printable(text).replace("&", "&amp;").replace("<", "&lt;"))


def html_text(text: object) -> str:
    """`text` inside an HTML element of the Markdown."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
