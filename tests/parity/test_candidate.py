from dataclasses import replace

import numpy as np
import pytest

from dewconv.dew_core.records import LayerKind
from dewconv.families import find
from dewconv.families.rules import Rule
from dewconv.parity import evaluate_candidate, reference_run, write_checkpoint


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    owner = find("qwen3")
    path = write_checkpoint(tmp_path_factory.mktemp("window"), owner.variants["window"], owner)
    return reference_run(path, shortest=owner.variants["window"].length)


def renamed(statements, names):
    return [replace(s, source=names.get(s.source, s.source)) if isinstance(s, Rule) else s for s in statements]


def test_the_honest_candidate_is_within_the_bound(reference):
    result = evaluate_candidate(reference, reference.fields, reference.statements)
    assert not result.caught
    assert 0 < result.ratio < 0.5
    assert result.bound == pytest.approx(8 * 2.0**-23 * 5 * np.abs(reference.forward.logits).max())


def test_swapped_projections_move_the_logits(reference):
    gate, up = (f"model.layers.{{l}}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    result = evaluate_candidate(reference, reference.fields, renamed(reference.statements, {gate: up, up: gate}))
    assert result.refused is None
    assert result.ratio > 100


def test_a_window_off_by_one_moves_the_logits(reference):
    kinds = {"sliding_attention": LayerKind(window=6)}
    result = evaluate_candidate(reference, reference.fields.replace(kinds=kinds), reference.statements)
    assert result.refused is None
    assert result.ratio > 100


def test_a_deleted_rule_is_refused(reference):
    kept = [s for s in reference.statements if "q_norm" not in getattr(s, "source", "")]
    result = evaluate_candidate(reference, reference.fields, kept)
    assert result.caught
    assert result.error is None


def test_leaves_the_decoder_has_not_are_refused(reference):
    result = evaluate_candidate(reference, reference.fields.replace(qk_norm=False), reference.statements)
    assert "q_norm" in (result.refused or "")
