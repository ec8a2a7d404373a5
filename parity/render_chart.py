"""The chart of errors by layer, laid out in numbers for the page's template to draw as SVG.

One log axis carries every compute dtype: an error per layer as a mark whose form is the layer's kind, and the
layer's bound as a stepped line above it. Colours are the page's own (`currentColor` and custom properties), so the
chart follows the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .render_text import layer_name, small, times
from .results import LayerError, Report

FORMS = ("circle", "square", "triangle", "diamond")
"""Marks of the layer kinds, in order of appearance; kinds beyond them share the last."""


@dataclass(frozen=True)
class Mark:
    """One layer's error at (x, y) px; `edge` is "zero" or "infinite" when the log axis has no place for it."""

    x: float
    y: float
    path: str
    beyond: bool
    edge: str
    tip: str


@dataclass(frozen=True)
class Series:
    """One compute dtype: its marks, the line through them, its bound as a stepped path, and where to name both."""

    dtype: str
    css: str
    marks: tuple[Mark, ...]
    line: str
    bound: str
    bound_end: tuple[float, float]
    label_end: tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """Everything the template draws. Lengths in px of the SVG's own `width` x `height`."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    series: tuple[Series, ...]
    rows: tuple[tuple[float, str], ...]
    columns: tuple[tuple[float, str], ...]
    kinds: tuple[tuple[str, str], ...]
    summary: str


def chart(report: Report, width: int, height: int) -> Chart | None:
    """The chart at one size; None when the report has no layers."""
    lines = {dtype: rows for dtype, rows in report.layers.items() if rows}
    if not lines:
        return None
    every = [row for rows in lines.values() for row in rows]
    kinds = tuple(dict.fromkeys(row.kind for row in every if row.layer >= 0 and row.kind))
    forms = {kind: FORMS[min(at, len(FORMS) - 1)] for at, kind in enumerate(kinds)}
    low, high = _decades(every)
    first, last = min(row.layer for row in every), max(row.layer for row in every)
    left, right, top, bottom = 52.0, width - 14.0, 18.0, height - 40.0
    pitch = (right - left) / (last - first + 1)
    radius = max(1.6, min(4.0, pitch * 0.34))

    def x_of(layer: float) -> float:
        return left + (layer - first + 0.5) * pitch

    def y_of(value: float) -> float:
        if math.isnan(value) or value >= 10.0**high:
            return top
        if value <= 10.0**low:
            return bottom
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    series = []
    for at, (dtype, rows) in enumerate(lines.items()):
        marks = tuple(_mark(row, x_of(row.layer), y_of(row.max_error), forms, radius, dtype) for row in rows)
        drawn = [mark for mark in marks if not mark.edge]
        steps = [(x_of(row.layer - 0.5), x_of(row.layer + 0.5), y_of(row.bound)) for row in rows if row.bound > 0]
        series.append(
            Series(
                dtype,
                f"series-{min(at, 2)}",
                marks,
                "M" + "L".join(f"{mark.x:.1f} {mark.y:.1f}" for mark in drawn) if len(drawn) > 1 else "",
                "M" + "L".join(f"{x0:.1f} {y:.1f}L{x1:.1f} {y:.1f}" for x0, x1, y in steps) if steps else "",
                (steps[-1][1], steps[-1][2]) if steps else (right, top),
                (drawn[-1].x, drawn[-1].y) if drawn else (right, bottom),
            )
        )
    every_decade = range(low, high + 1)
    stride = max(1, math.ceil(len(every_decade) * 22 / (bottom - top)))
    legend = tuple((kind, mark_path(forms[kind], 7, 7, 4)) for kind in kinds)
    return Chart(
        width,
        height,
        left,
        right,
        top,
        bottom,
        tuple(series),
        tuple((y_of(10.0**d), str(d).replace("-", "−")) for d in every_decade if (d - low) % stride == 0),
        _columns(first, last, x_of, pitch),
        legend,
        _described(lines),
    )


def _decades(rows: Sequence[LayerError]) -> tuple[int, int]:
    values = [v for row in rows for v in (row.max_error, row.bound) if math.isfinite(v) and v > 0]
    if not values:
        return -8, 0
    low, high = math.floor(math.log10(min(values)) - 0.15), math.ceil(math.log10(max(values)) + 0.15)
    return low, max(high, low + 2)


def _columns(first: int, last: int, x_of, pitch: float) -> tuple[tuple[float, str], ...]:
    every = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if step * pitch >= 24)
    ticks = [(x_of(layer), str(layer)) for layer in range(max(first, 0), last + 1) if layer % every == 0]
    return ((x_of(-1), "emb"), *(tick for tick in ticks if tick[0] - x_of(-1) >= 26)) if first < 0 else tuple(ticks)


def _mark(row: LayerError, x: float, y: float, forms: dict[str, str], radius: float, dtype: str) -> Mark:
    beyond = not row.max_error <= row.bound
    edge = "" if math.isfinite(row.max_error) and row.max_error > 0 else "zero" if row.max_error == 0 else "infinite"
    tip = f"{layer_name(row)}, {dtype}: {small(row.max_error)}, {times(row.ratio)} of the bound {small(row.bound)}"
    return Mark(x, y, mark_path(forms.get(row.kind, "circle"), x, y, radius), beyond, edge, tip)


def mark_path(form: str, x: float, y: float, r: float) -> str:
    """The outline of a mark around (x, y), of like areas whatever its form."""
    if form == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0z"
    if form == "square":
        s = r * 0.95
        return f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z"
    if form == "triangle":
        s = r * 1.2
        return f"M{x:.1f} {y - s:.1f}L{x + s:.1f} {y + s * 0.8:.1f}H{x - s:.1f}z"
    s = r * 1.3
    return f"M{x:.1f} {y - s:.1f}L{x + s:.1f} {y:.1f}L{x:.1f} {y + s:.1f}L{x - s:.1f} {y:.1f}z"


def _described(lines: dict[str, tuple[LayerError, ...]]) -> str:
    parts = []
    for dtype, rows in lines.items():
        worst = max(rows, key=lambda row: row.ratio if not math.isnan(row.ratio) else math.inf)
        parts.append(f"{dtype}: closest to its bound at {layer_name(worst)}, {times(worst.ratio)} of it")
    return "; ".join(parts)
