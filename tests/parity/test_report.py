"""A report in its three forms: what it says, that it stands alone, and that nothing in it can break out."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from dewconv.parity.render_chart import chart
from dewconv.parity.results import CheckResult, LayerError, Report

HOSTILE = "<script>alert(1)</script>|`x`\n# heading \u202e[l](http://x.invalid)"
KINDS = ("sliding_attention", "sliding_attention", "full_attention")


def layers(unit: float, departs: int | None = None) -> tuple[LayerError, ...]:
    rows = [LayerError(-1, "", 0.0, 0.0, 1.0, unit)]
    for index, kind in enumerate(KINDS):
        error = unit * (0.3 if departs is None or index < departs else 700.0)
        rows.append(LayerError(index, kind, error, error / 5, 3.0, unit * (index + 2)))
    return tuple(rows)


def report(**changes) -> Report:
    checks = (
        CheckResult("logits", "float32", True, {"top1": 1.0}, 3e-6, 1e-6, {"row": 1, "position": 47, "token": 9}),
        CheckResult("greedy", "float32", True, {"tokens": 16}),
        CheckResult("logits:unrolled", "bfloat16", True, {}, 0.09, 0.03),
        CheckResult("round_trip", "bfloat16", None, note="nothing was imported"),
    )
    value = Report(
        target="some/checkpoint",
        family="gemma3",
        variant="linear",
        model={"num_parameters": 268098176, "num_layers": 3, "layer_types": list(KINDS), "runs": ["layers_0_1"]},
        checks=checks,
        layers={"float32": layers(2e-7), "bfloat16": layers(8e-3)},
        versions={"torch": "2.13.0"},
        probe={"rows": 4, "lengths": [48, 21]},
        notices=("a known difference",),
        seconds=1.5,
    )
    return replace(value, **changes)


def departed(**changes) -> Report:
    value = report()
    failed = replace(value.checks[0], passed=False, error=2e-4, **changes)
    return replace(value, checks=(failed, *value.checks[1:]), layers={"float32": layers(2e-7, departs=1)})


class Page(HTMLParser):
    """The tags, the links and the text of a page; void and unclosed elements are noticed."""

    VOID = ("meta", "link", "br", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"[ \n]+", " ", " ".join(self.texts))


def test_json_reads_back_and_holds_numbers_that_json_has_not_as_strings():
    value = report()
    assert Report.from_dict(json.loads(value.to_json())).to_json() == value.to_json()
    broken = departed(figures={"mean": math.nan, "most": -math.inf})
    read = json.loads(broken.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["checks"][0]["figures"] == {"mean": "nan", "most": "-inf"}
    assert read["passed"] is False


def test_the_verdict_comes_first_and_names_the_first_layer_that_departs():
    good, bad = report().to_markdown().splitlines(), departed().to_markdown().splitlines()
    assert good[0] == "## ✅ Equal: `some/checkpoint`"
    assert "3 of 3" in good[2]
    assert bad[0].startswith("## ❌ Different")
    assert "layer 1 (sliding\\_attention), 233 times its bound" in bad[4]
    page = Page(departed().to_html()).text
    assert page.index("Different") < page.index("layer 1 (sliding_attention)") < page.index("Checks")


def test_a_report_in_which_nothing_ran_is_not_a_pass():
    value = report(checks=(CheckResult("logits", "float32", None, note="no reference"),), layers={})
    assert "Not compared" in value.to_markdown().splitlines()[0]
    assert "Not compared" in value.to_html()
    assert '<svg class="chart' not in value.to_html()


def test_an_embedding_that_departs_is_called_so():
    rows = (LayerError(-1, "", 0.5, 0.1, 1.0, 1e-6), *layers(2e-7)[1:])
    value = replace(departed(), layers={"float32": rows})
    assert "the embeddings" in value.to_markdown()
    assert "embedding table" in Page(value.to_html()).text


def test_the_page_stands_alone():
    text = report().to_html()
    page = Page(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "img" not in page.tags
    assert not [item for item in page.attributes if item[1] in ("src", "href", "action", "onload", "onerror")]
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_every_check_layer_and_fact_is_on_the_page():
    page = Page(report().to_html()).text
    for said in (
        "Logits (unrolled)",
        "Round trip",
        "nothing was imported",
        "position 47",
        "0.33",
        "a known difference",
    ):
        assert said in page
    for said in ("268\u202f098\u202f176", "sliding_attention × 2, full_attention", "layers_0_1", "48, 21", "2.13.0"):
        assert said in page


@pytest.mark.parametrize(
    "where", ["target", "family", "variant", "notice", "token", "kind", "note", "model", "version"]
)
def test_text_from_outside_stays_text(where):
    value = report()
    check = value.checks[0]
    kind = replace(value.layers["float32"][1], kind=HOSTILE)
    value = {
        "target": lambda: replace(value, target=HOSTILE),
        "family": lambda: replace(value, family=HOSTILE),
        "variant": lambda: replace(value, variant=HOSTILE),
        "notice": lambda: replace(value, notices=(HOSTILE,)),
        "token": lambda: replace(value, checks=(replace(check, worst={"token": HOSTILE}),)),
        "kind": lambda: replace(value, layers={"float32": (kind,)}),
        "note": lambda: replace(value, checks=(replace(check, note=HOSTILE),)),
        "model": lambda: replace(value, model={HOSTILE: [HOSTILE]}),
        "version": lambda: replace(value, versions={"torch": HOSTILE}),
    }[where]()
    page = Page(value.to_html())
    assert "script" not in page.tags
    assert "alert(1)" in page.text or "alert(1)" in str(page.attributes)
    assert "\u202e" not in value.to_html()
    markdown = value.to_markdown()
    assert "alert(1)" in markdown
    assert not re.search(r"^# heading", markdown, re.MULTILINE)
    for line in markdown.splitlines():
        prose = re.sub(r"(`+)(?:(?!\1).)+?\1(?!`)", "", line)
        assert "<script" not in prose
        assert "[l](" not in prose.replace("\\[", "")
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = {len(re.sub(r"\\\|", "", line).split("|")) for line in tables}
    assert widths <= {len(row.split("|")) for row in ("| | |", "|a|b|c|d|e|f|", "|a|b|c|d|e|", "|a|b|c|d|e|f|g|h|")}


def test_marks_lie_under_their_bound_exactly_when_the_layer_is_within_it():
    for value in (report(), departed()):
        drawn = chart(value, 1000, 340)
        assert drawn is not None
        for series in drawn.series:
            rows = value.layers[series.dtype]
            levels = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", series.bound)]
            tops = levels[0::2]
            for row, mark, top in zip(rows, series.marks, tops, strict=True):
                assert mark.beyond == (row.max_error > row.bound)
                assert drawn.left <= mark.x <= drawn.right
                assert drawn.top <= mark.y <= drawn.bottom
                if not mark.edge:
                    assert (mark.y < top) == mark.beyond


def test_the_chart_holds_errors_that_a_log_axis_has_no_place_for():
    rows = [
        LayerError(0, "full_attention", 0.0, 0.0, 1.0, 1e-6),
        LayerError(1, "full_attention", math.nan, math.nan, 1.0, 1e-6),
        LayerError(2, "full_attention", math.inf, math.inf, 1.0, 1e-6),
    ]
    value = replace(departed(), layers={"float32": tuple(rows)})
    drawn = chart(value, 358, 320)
    assert drawn is not None
    assert [(mark.edge, mark.beyond) for mark in drawn.series[0].marks] == [
        ("zero", False),
        ("infinite", True),
        ("infinite", True),
    ]
    Page(value.to_html())


@pytest.mark.parametrize("count", [1, 61, 126])
def test_the_chart_fits_any_depth(count):
    rows = tuple(LayerError(i, "full_attention", 1e-7, 1e-8, 1.0, 1e-6 * (i + 1)) for i in range(count))
    drawn = chart(report(layers={"float32": rows}), 358, 320)
    assert drawn is not None
    ticks = [x for x, _ in drawn.columns]
    assert all(after - before >= 20 for before, after in pairwise(ticks))
    assert len(drawn.series[0].marks) == count


def test_without_jinja2_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from dewconv.parity.results import Report\n"
        "report = Report('t', 'f', None, {}, (), {}, {}, {})\n"
        "report.to_json(), report.to_markdown()\n"
        "try:\n    report.to_html()\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dewconv[report]" in done.stdout
