"""The bound, and what widens it: the reference's own rounding, and of the candidate's the head's sum alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import find
from dewconv.families.rules import assign_leaves
from dewconv.parity import write_checkpoint
from dewconv.parity.bounds import (
    CONSTANT,
    EPS,
    LARGEST,
    PRODUCTS,
    amplified_bound,
    likeness_bound,
    relative,
    rounding_bound,
)
from dewconv.parity.candidate import build_candidate, reference_run, source_tensors
from dewconv.parity.checks import Comparison, judged
from dewconv.parity.decoders import from_leaves


def test_the_bound_is_linear_in_what_it_counts():
    assert rounding_bound("float32", 0, 1.0) == CONSTANT * EPS["float32"]
    assert rounding_bound("bfloat16", 3, 2.0, passes=2) == CONSTANT * EPS["bfloat16"] * 4 * 2.0 * 2


def test_the_references_rounding_widens_and_never_narrows():
    assert amplified_bound(1.0, 0.1, "bfloat16") == 1.0
    assert amplified_bound(1.0, 2.0, "bfloat16") == pytest.approx(math.sqrt(2) * LARGEST * 2.0)
    assert amplified_bound(1.0, 2.0, "float32") == pytest.approx(LARGEST * 2.0 * np.hypot(1, PRODUCTS["float32"]))
    assert judged(1.0, "bfloat16", 0.1) == (1.0, "")
    bound, note = judged(1.0, "bfloat16", 2.0)
    assert bound == pytest.approx(math.sqrt(2) * LARGEST * 2.0)
    assert "2.00e+00" in note


def test_two_roundings_of_one_model_lie_within_twice_ones_own():
    """Independent roundings lie sqrt(2) of one apart; 1.7 times as large on one side they lie 2 apart."""
    draw = np.random.default_rng(0)
    one, other = draw.standard_normal((2, 100_000))
    own = float(np.sqrt((one**2).mean()))
    apart = float(np.sqrt(((one - other) ** 2).mean()))
    assert apart == pytest.approx(math.sqrt(2) * own, rel=0.01)
    assert apart < likeness_bound(own) < 1.01 * float(np.sqrt(((one - 1.75 * other) ** 2).mean()))
    assert (relative(1.0, 2.0), relative(0.0, 0.0), relative(1.0, 0.0)) == (0.5, 0.0, math.inf)


def test_the_heads_rounding_counts_beside_the_references():
    assert amplified_bound(1.0, 2.0, "float32", head=2.0) == amplified_bound(1.0, 2.0, "float32")
    assert amplified_bound(1.0, 0.0, "float32", head=2.0) == LARGEST * 2.0
    assert amplified_bound(1.0, 0.0, "float32", head=0.1) == 1.0


def test_products_round_no_more_than_is_allowed_for():
    """On another processor either library may add up in another order: the ratio is at most what the bound has."""
    draw = np.random.default_rng(0)
    one, other = (draw.standard_normal(shape).astype(np.float32) for shape in ((640, 2048), (2048, 640)))
    exact = one.astype(np.float64) @ other
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jax.jit(jnp.matmul)(one, other)) - exact
    theirs = (torch.from_numpy(one) @ torch.from_numpy(other)).numpy() - exact
    assert ours.std() <= 1.1 * PRODUCTS["float32"] * theirs.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_below_float32_tokens_tie_by_the_references_rounding_and_not_by_the_bound(dtype, tmp_path):
    owner = find("qwen3")
    run = reference_run(write_checkpoint(tmp_path / "mixed", owner.variants["mixed"], owner), dtype=dtype)
    jax_side = build_candidate(run, run.fields, run.statements)
    comparison = Comparison(run.torch, jax_side, run.probe, (), str)
    own = float(np.abs(comparison.reference.logits - comparison.wide_forward.logits).max())
    if dtype == "float32":
        assert comparison.tie(0.0) == comparison.bound
    else:
        assert comparison.tie(0.0) == pytest.approx(math.sqrt(2) * LARGEST * own)
        assert comparison.tie(0.0) < 0.6 * comparison.bound


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_head_is_the_same_model_rounded_less(name, dtype, tmp_path):
    owner = find("qwen3")
    plan = plan_import(open_source(write_checkpoint(tmp_path / name, owner.variants[name], owner)))
    ours = from_leaves(plan.fields, assign_leaves(plan.placements, source_tensors(plan)), dtype)
    tokens = np.random.default_rng(0).integers(3, plan.fields.vocab_size, (2, 16))
    plain, wide = (ours.gradients(tokens, wide_head=one)[1] for one in (False, True))
    moved = {leaf: np.abs(wide[leaf] - plain[leaf]).max() for leaf in plain}
    assert any(moved.values())
    for leaf, by in moved.items():
        assert by <= rounding_bound(dtype, plan.fields.num_layers, np.abs(plain[leaf]).max(), passes=2)


@pytest.mark.parametrize("name", ["window", "yarn_factor"])
def test_one_precision_up_is_the_same_model(name, tmp_path):
    owner = find("qwen3")
    run = reference_run(write_checkpoint(tmp_path / name, owner.variants[name], owner))
    wide = run.torch.widened().forward(run.probe.tokens, streams=True)
    own = np.abs(wide.logits - run.forward.logits).max()
    assert 0 < own < run.logits_bound
    assert run.torch.model.dtype.itemsize == 4
