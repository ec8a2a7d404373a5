import json
import subprocess
import sys

import pytest

from dewconv.families import ConversionError, families
from dewconv.parity import matrix, read_card, render_matrix, status, write_card
from dewconv.parity.results import CheckResult, Report


def report(passed=True, trip=True):
    checks = (
        CheckResult("logits", "float32", passed, {}, 1e-4, 2e-5 if passed else 2e-3),
        CheckResult("gradients", "bfloat16", None, note="float32 only"),
        CheckResult("round_trip", "stored", trip),
    )
    return Report("x", "qwen3", "a", {}, checks, {}, {"jax": "0"}, {"rows": 1})


def write(directory, **changes):
    given = {
        "configs": {"r": []},
        "names": {"r": []},
        "reports": {"a": report(), "b": report()},
        "variants": ("a", "b"),
        "faults": {"passed": True, "caught": 3},
        "real": ({"name": "n", "passed": True},),
    }
    return write_card("qwen3", **{**given, **changes}, directory=directory)


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({}, 5),
        ({"real": ()}, 4),
        ({"faults": None}, 3),
        ({"reports": {"a": report(), "b": report(trip=False)}}, 2),
        ({"reports": {"a": report(), "b": report(passed=False)}}, 1),
        ({"reports": {"a": report()}}, 1),
        ({"reports": {}}, 1),
        ({"names": {"r": ["a finding"]}}, 0),
        ({"names": {}}, 0),
        ({"configs": {"r": ["a finding"]}}, None),
    ],
)
def test_the_status_is_the_highest_gate_with_all_below_it(tmp_path, changes, gate):
    write(tmp_path, **changes)
    assert status("qwen3", tmp_path) == gate


def test_a_card_tells_its_figures(tmp_path):
    card = json.loads(write(tmp_path).read_text())
    assert card == read_card("qwen3", tmp_path)
    assert card["variants"]["a"]["checks"]["logits float32"] == {
        "passed": True, "error": 2e-5, "bound": 1e-4, "ratio": 0.2,
    }  # fmt: skip
    assert card["gates"]["G2"]["largest_ratio"]["ratio"] == 0.2
    assert card["faults"]["caught"] == 3


def test_no_card_and_a_damaged_one(tmp_path):
    assert status("qwen3", tmp_path) is None
    (tmp_path / "qwen3.json").write_text("{")
    with pytest.raises(ConversionError, match="measure the family again"):
        read_card("qwen3", tmp_path)


def test_the_matrix_has_an_entry_per_variant():
    entries = matrix()
    assert len(entries) == sum(len(family.variants) for family in families())
    line = render_matrix(entries, "github")
    assert "\n" not in line
    assert json.loads(line)["include"][0] == {"family": entries[0]["family"], "variant": entries[0]["variant"]}
    assert json.loads(render_matrix(entries, "json")) == entries
    with pytest.raises(ConversionError, match="github or json"):
        render_matrix(entries, "yaml")


def test_cards_and_the_matrix_import_neither_torch_nor_jax():
    code = (
        "import sys, dewconv.parity as p; p.status('qwen3'); p.render_matrix(p.matrix(['qwen3']), 'json');"
        "sys.exit(' '.join({'torch', 'jax', 'flax', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
