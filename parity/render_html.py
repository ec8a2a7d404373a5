"""A report as one HTML page: no network, no scripts, readable at any width, in light and dark."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from . import render_text
from .render_chart import chart
from .results import Report


def page(report: Report) -> str:
    """The page. Raises ModuleNotFoundError naming the extra when jinja2 is not installed."""
    template = _environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        summary=render_text.summary(report),
        closest=render_text.closest(report),
        charts=[drawn for drawn in (chart(report, 1000, 340), chart(report, 358, 320)) if drawn is not None],
        rows=_by_layer(report),
        text=render_text,
    )


@cache
def _environment() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the HTML report needs jinja2; install the extra: pip install 'dewconv[report]'", name="jinja2"
        ) from error

    def load(name: str) -> str:
        return resources.files(str(__package__)).joinpath("templates", name).read_text("utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "small": render_text.small,
        "times": render_text.times,
        "title_of": render_text.title,
        "verdict": render_text.verdict,
        "figure": render_text.figure,
        "printable": render_text.printable,
    }
    return environment


def _by_layer(report: Report) -> list[tuple[int, str, dict[str, Any]]]:
    """Every layer once: its index, its kind, and dtype -> its LayerError."""
    found: dict[int, dict[str, Any]] = {}
    for dtype, rows in report.layers.items():
        for row in rows:
            found.setdefault(row.layer, {})[dtype] = row
    return [(index, next(iter(rows.values())).kind, rows) for index, rows in sorted(found.items())]
