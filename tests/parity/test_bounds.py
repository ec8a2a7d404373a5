"""The bound, and what widens it: the reference's own rounding, never the candidate's."""

import numpy as np
import pytest

from dewconv.families import find
from dewconv.parity import write_checkpoint
from dewconv.parity.bounds import AMPLIFIED, CONSTANT, EPS, amplified_bound, rounding_bound
from dewconv.parity.candidate import reference_run
from dewconv.parity.checks import judged


def test_the_bound_is_linear_in_what_it_counts():
    assert rounding_bound("float32", 0, 1.0) == CONSTANT * EPS["float32"]
    assert rounding_bound("bfloat16", 3, 2.0, passes=2) == CONSTANT * EPS["bfloat16"] * 4 * 2.0 * 2


def test_the_references_rounding_widens_and_never_narrows():
    assert amplified_bound(1.0, 0.1) == 1.0
    assert amplified_bound(1.0, 2.0) == AMPLIFIED * 2.0
    assert judged(1.0, 0.1) == (1.0, "")
    bound, note = judged(1.0, 2.0)
    assert bound == AMPLIFIED * 2.0
    assert "2.00e+00" in note


@pytest.mark.parametrize("name", ["window", "yarn_factor"])
def test_one_precision_up_is_the_same_model(name, tmp_path):
    owner = find("qwen3")
    run = reference_run(write_checkpoint(tmp_path / name, owner.variants[name], owner))
    wide = run.torch.widened().forward(run.probe.tokens, streams=True)
    own = np.abs(wide.logits - run.forward.logits).max()
    assert 0 < own < run.logits_bound
    assert run.torch.model.dtype.itemsize == 4
