"""Views are numpy's own views; rules read both ways; what does not close is found."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dewconv.families.rules import (
    Alias,
    Rule,
    View,
    Zeros,
    assign_leaves,
    assign_sources,
    leaf_findings,
    leaf_shapes,
    placements,
    source_findings,
    tiles,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def steps(draw):
    """A shape and a chain of operations that numpy can do as views."""
    shape = draw(SHAPES)
    array = np.arange(math.prod(shape)).reshape(shape)
    view, expected = View.of(*shape), array
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "slice", "index", "split", "merge"]))
        axes = len(expected.shape)
        if kind == "transpose":
            order = draw(st.permutations(range(axes)))
            view, expected = view.transpose(*order), expected.transpose(order)
        elif kind == "slice" and axes:
            axis = draw(st.integers(0, axes - 1))
            start = draw(st.integers(0, expected.shape[axis] - 1))
            stop = draw(st.integers(start + 1, expected.shape[axis]))
            item = (slice(None),) * axis + (slice(start, stop, draw(st.integers(1, 2))), Ellipsis)
            view, expected = view[item], expected[item]
        elif kind == "index" and axes:
            axis = draw(st.integers(0, axes - 1))
            item = (slice(None),) * axis + (draw(st.integers(0, expected.shape[axis] - 1)),)
            view, expected = view[item], expected[item]
        elif kind == "split" and axes:
            axis = draw(st.integers(0, axes - 1))
            length = expected.shape[axis]
            part = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
            shape = (*expected.shape[:axis], part, length // part, *expected.shape[axis + 1 :])
            view, expected = view.reshape(*shape), expected.reshape(shape)
        elif kind == "merge":
            flat = expected.reshape(-1)
            if np.shares_memory(flat, array):
                view, expected = view.reshape(-1), flat
    return array, view, expected


@settings(max_examples=300, deadline=None)
@given(steps())
def test_a_view_is_numpys(case):
    array, view, expected = case
    got = view.apply(array)
    np.testing.assert_array_equal(got, expected)
    assert np.shares_memory(got, array)


def test_a_view_that_needs_a_copy_is_refused():
    with pytest.raises(ValueError, match="no strided view"):
        View.of(4, 6).T.reshape(24)
    with pytest.raises(ValueError, match="cannot view"):
        View.of(4, 6).reshape(5, 5)
    with pytest.raises(ValueError, match="contiguous"):
        View.of(4, 6).apply(np.zeros((6, 4)).T)
    with pytest.raises(IndexError):
        View.of(3)[5]
    with pytest.raises(IndexError, match="forwards"):
        View.of(3)[::-1]


def test_whole_is_a_plain_copy():
    assert View.of(4, 6).whole
    assert View.of(4, 6).reshape(2, 2, 6).whole
    assert not View.of(4, 6).T.whole
    assert not View.of(4, 6)[:3].whole
    assert View.of().whole


def test_fused_halves_tile_and_a_gap_is_counted():
    fused = View.of(5, 14, 3)
    gate, up = fused[:, :7], fused[:, 7:]
    assert tiles([gate, up]) is None
    assert tiles([gate]) == "105 of 210 elements taken by no rule"
    assert "more than once" in (tiles([gate, up, fused[0]]) or "")
    assert "more than once" in (tiles([fused[:, :8], fused[:, 7:]]) or "")


def test_interleaved_rows_tile():
    packed = View.of(12, 4).reshape(4, 3, 4)
    assert tiles([packed[:, i] for i in range(3)]) is None
    assert tiles([packed[:, 0], packed[:, 0], packed[:, 2]]) is not None
    pairs = View.of(6, 8).reshape(6, 4, 2).transpose(0, 2, 1)
    assert tiles([pairs]) is None


@settings(max_examples=200, deadline=None)
@given(steps())
def test_tiling_counts_every_element(case):
    array, view, expected = case
    assert (tiles([view]) is None) == (expected.size == array.size)


def test_experts_stack_in_the_order_of_the_index():
    rule = Rule(
        "m.{l}.experts.{e}.up.weight",
        View.of(3, 2).T,
        "layers_{l}/experts/up/kernel",
        View.of(2, 3),
        {"l": (0, 10), "e": range(4)},
    )
    places = list(rule.placements())
    assert rule.stacked == ("e",)
    assert leaf_shapes(places) == {f"layers_{n}/experts/up/kernel": (4, 2, 3) for n in (0, 10)}
    tensors = {
        f"m.{n}.experts.{e}.up.weight": np.full((3, 2), 10 * n + e) + np.arange(6).reshape(3, 2) / 10
        for n in (0, 10)
        for e in range(4)
    }
    leaves = assign_leaves(places, tensors)
    np.testing.assert_array_equal(
        leaves["layers_10/experts/up/kernel"], np.stack([tensors[f"m.10.experts.{e}.up.weight"].T for e in range(4)])
    )
    back = assign_sources(places, leaves)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    assert not leaf_findings(places)
    assert not source_findings(places)


def test_a_missing_and_a_doubled_part_are_found():
    fused = View.of(14, 3)
    places = [
        *Rule("w", fused[:7].T, "gate", View.of(3, 7)).placements(),
        *Rule("w", fused[6:13].T, "up", View.of(3, 7)).placements(),
    ]
    assert "taken more than once" in str(source_findings(places)[0])
    twice = [
        *Rule("a", View.of(4), "x", View.of(4)).placements(),
        *Rule("b", View.of(4), "x", View.of(4)).placements(),
    ]
    assert [finding.what for finding in leaf_findings(twice)] == ["parameter x"]


def test_declared_zeros_complete_a_tensor():
    padded = View.of(10, 4)
    rule = Rule("w", padded[:8], "leaf", View.of(8, 4))
    assert source_findings(list(rule.placements()))
    assert not source_findings(list(rule.placements()), [Zeros("w", padded[8:])])


def test_rules_that_cannot_be_are_refused_where_they_are_written():
    with pytest.raises(ValueError, match="shape"):
        Rule("w", View.of(3, 2), "leaf", View.of(2, 3))
    with pytest.raises(ValueError, match="indices"):
        Rule("w.{l}", View.of(2), "leaf", View.of(2))
    with pytest.raises(ValueError, match="indices"):
        Rule("w", View.of(2), "leaf_{l}", View.of(2))
    with pytest.raises(ValueError, match=r"disagree|shape"):
        leaf_shapes(
            [
                *Rule("a", View.of(2), "x", View.of(2)).placements(),
                *Rule("b", View.of(3), "x", View.of(3)).placements(),
            ]
        )


def test_scalars_and_empty_tensors_move():
    places = [
        *Rule("s", View.of(), "s", View.of()).placements(),
        *Rule("e", View.of(0, 8).T, "e", View.of(8, 0)).placements(),
    ]
    leaves = assign_leaves(places, {"s": np.array(3.5), "e": np.zeros((0, 8))})
    assert leaves["s"].shape == ()
    assert leaves["s"] == 3.5
    assert leaves["e"].shape == (8, 0)


def test_an_alias_is_not_a_placement():
    assert placements([Alias("b", "a", {}, "why"), Rule("a", View.of(2), "x", View.of(2))])[0].source == "a"
