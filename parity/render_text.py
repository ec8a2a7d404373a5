"""What a report says in words and figures, shared by its Markdown and HTML forms."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .results import CheckResult, LayerError, Report

CHECKS = {
    "logits": "Logits",
    "rounding": "Rounding",
    "layers": "Layers",
    "routing": "Routing",
    "selection": "Selection",
    "decode": "Cached decoding",
    "padding": "Padding and packing",
    "greedy": "Greedy tokens",
    "gradients": "Gradients",
    "round_trip": "Round trip",
}
"""A check's name -> its title."""

LABELS = {
    "num_layers": "layers",
    "num_parameters": "parameters",
    "layer_types": "layer kinds",
    "dtypes": "stored dtypes",
    "max_error": "max error",
    "mean_error": "mean error",
    "rms_error": "RMS error",
    "reference_rms": "the reference's own RMS",
    "reference_largest": "the reference's own largest",
    "top1": "top-1 agreement",
    "top1_agreement": "top-1 agreement",
}
"""Keys of figures whose title is not the key with spaces."""

_INTEGER_SEPARATOR = "\u202f"  # a narrow no-break space (ISO 80000-1)


def title(name: str) -> str:
    """A check's title: "logits:unrolled" is "Logits (unrolled)"."""
    base, _, layout = name.partition(":")
    text = CHECKS.get(base, base.replace("_", " "))
    return f"{text} ({layout})" if layout else text


def label(key: str) -> str:
    """The title of a figure's key."""
    return LABELS.get(key, key.replace("_", " "))


def printable(value: object) -> str:
    """`value` as text on one line: control and format characters (newlines, direction overrides) are escaped."""
    return "".join(
        char if unicodedata.category(char)[0] != "C" else char.encode("unicode_escape", "backslashreplace").decode()
        for char in str(value)
    )


def small(value: float | None) -> str:
    """An error or a bound with three digits; a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 10000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def times(ratio: float | None) -> str:
    """A ratio to a bound: "0.031 ×"."""
    if ratio is None:
        return "–"
    if not math.isfinite(ratio):
        return "NaN" if math.isnan(ratio) else "∞"
    if ratio == 0:
        return "0"
    return f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 10 else whole(round(ratio))


def whole(value: int) -> str:
    """An integer with its thousands set apart."""
    return f"{value:,}".replace(",", _INTEGER_SEPARATOR) if abs(value) >= 10000 else str(value)


def figure(value: Any) -> str:
    """Any value of a summary as one line of text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e6 else small(value)
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(key)} {figure(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_counted(figure(item) for item in value))
    return printable(value)


def _counted(items: Iterable[str]) -> list[str]:
    """Consecutive equal items as "item × n"."""
    runs: list[tuple[str, int]] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return [item if count == 1 else f"{item} × {count}" for item, count in runs]


def verdict(check: CheckResult) -> str:
    """ "equal", "different", or "not run" for a check that does not apply."""
    return {True: "equal", False: "different", None: "not run"}[check.passed]


@dataclass(frozen=True)
class Summary:
    """The verdict of a report in words: one word, one sentence, and what to look at first when it is bad."""

    word: str
    sentence: str
    lead: str = ""


def summary(report: Report) -> Summary:
    """What the report comes to."""
    ran = [check for check in report.checks if check.passed is not None]
    if not ran:
        return Summary("Not compared", "No check ran, so nothing is known about this checkpoint.")
    dtypes = " and ".join(dict.fromkeys(check.dtype for check in ran))
    if report.passed:
        return Summary("Equal", f"Every check that applies is within its bound: {len(ran)} of {len(ran)}, in {dtypes}.")
    failed = report.failures
    names = ", ".join(dict.fromkeys(f"{title(check.name).lower()} in {check.dtype}" for check in failed))
    sentence = f"{len(failed)} of {len(ran)} checks {'is' if len(failed) == 1 else 'are'} beyond the bound: {names}."
    first = first_departure(report)
    if first is None:
        return Summary("Different", sentence)
    dtype, row = first
    lead = (
        f"The first to depart in {dtype}: {layer_name(row)}, {times(row.ratio)} times its bound. "
        f"{'Look at the embedding table and its scale.' if row.layer < 0 else _advice(row)}"
    )
    return Summary("Different", sentence, lead)


def _advice(row: LayerError) -> str:
    return f"What comes before it agrees: look at layer {row.layer}'s weights and at what its kind does."


def first_departure(report: Report) -> tuple[str, LayerError] | None:
    """The dtype and the first layer beyond its bound, in the first dtype that has one."""
    for dtype, rows in report.layers.items():
        for row in rows:
            if not row.max_error <= row.bound:
                return dtype, row
    return None


def layer_name(row: LayerError) -> str:
    """ "the embeddings", or "layer 5 (full_attention)"."""
    return "the embeddings" if row.layer < 0 else f"layer {row.layer} ({printable(row.kind)})"


def closest(report: Report) -> CheckResult | None:
    """The check whose error is the largest part of its bound."""
    measured = [check for check in report.checks if check.ratio is not None]
    return max(measured, key=lambda check: _order(check.ratio), default=None)


def _order(ratio: float | None) -> float:
    return math.inf if ratio is None or math.isnan(ratio) else ratio


def worst_places(report: Report) -> list[tuple[CheckResult, str]]:
    """Every check that names where its error is largest, with the place in words."""
    return [(check, figure(check.worst)) for check in report.checks if check.worst]


def pairs(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A mapping as titles and one-line values, without what is empty."""
    return [(label(printable(key)), figure(value)) for key, value in mapping.items() if value not in (None, "", (), [])]
