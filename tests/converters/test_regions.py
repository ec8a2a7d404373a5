"""Regions of parameters: what a device holds of one, cut from files, from codes and from parts of others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dewconv.converters.copying import Part, gather
from dewconv.converters.decoding import Blocked, Coded
from dewconv.converters.regions import (
    assembled_parameter,
    cut_part,
    region_shape,
    settled,
    stacked_parameter,
    stored_parameter,
)
from dewconv.families.rules import View


def regions(shape):
    def one(size):
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: slice(min(ends), max(ends)))

    return st.tuples(*map(one, shape))


@st.composite
def tilings(draw):
    """(shape, parts, the array they make): the tensors of a stack, each transposed or cut in two."""
    rows, inner, outer = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    shape = (rows, inner, outer)
    made = np.arange(rows * inner * outer, dtype=np.int32).reshape(shape)
    parts = []
    for row in range(rows):
        leaf = View.of(inner, outer)
        kind = draw(st.sampled_from(["whole", "turned", "halves", "interleaved"]))
        if kind == "halves":
            at = draw(st.integers(0, outer))
            views = [leaf[:, :at], leaf[:, at:]]
        elif kind == "interleaved":
            views = [leaf[:, 0::2], leaf[:, 1::2]]
        else:
            views = [leaf if kind == "whole" else leaf.T]
        for view in views:
            array = np.array(view.apply(made[row].copy()))
            parts.append(Part(view.prepend(row, rows), lambda array=array: array))
    return shape, parts, made


@given(tilings(), st.data())
def test_a_region_of_parts_is_the_region_of_the_whole(tiling, data):
    shape, parts, made = tiling
    region = data.draw(regions(shape))
    assert (gather(shape, made.dtype, parts, "x") == made).all()
    cut = [cut_part(part, region) for part in parts]
    assert None not in cut
    found = assembled_parameter(shape, made.dtype, lambda: parts, "x").read(region)
    assert found.shape == region_shape(region)
    assert (found == made[region]).all()


def test_parts_outside_a_region_are_not_read():
    def refuse():
        raise AssertionError("read")

    parts = [
        Part(View.of(3, 4).T.prepend(row, 5), (lambda: np.ones((4, 3), np.int8)) if row == 2 else refuse)
        for row in range(5)
    ]
    assert assembled_parameter((5, 3, 4), np.dtype(np.int8), lambda: parts, "x").read(
        (slice(2, 3), slice(0, 3), slice(1, 3))
    ).shape == (1, 3, 2)


def test_a_view_that_no_axis_of_the_array_runs_along_is_read_whole():
    made = np.arange(24).reshape(4, 6)
    part = Part(View.of(4, 6).reshape(4, 2, 3).transpose(1, 0, 2), lambda: made.reshape(4, 2, 3).transpose(1, 0, 2))
    region = (slice(1, 3), slice(2, 5))
    assert cut_part(part, region) is None
    found = assembled_parameter((4, 6), made.dtype, lambda: [part], "x").read(region)
    assert (found == made[region]).all()


@given(st.data())
def test_a_region_of_codes_is_the_region_of_their_values(data):
    shape = (3, 7, 10)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, shape, np.uint8)
    scales = rng.normal(size=(3, 3, 3)).astype(np.float32)
    import ml_dtypes

    grains = ((1, 1, 1), (1, 3, 4))
    coded = Coded(
        "fp8",
        shape,
        np.dtype(np.float32),
        Blocked.whole(codes.view(ml_dtypes.float8_e4m3fn), grains[0]),
        Blocked.whole(scales, grains[1]),
        "coded",
    )
    whole = np.empty(shape, np.float32)
    coded.write(whole)
    region = data.draw(regions(shape))
    assert (stored_parameter(coded).read(region) == whole[region]).all()
    rows = [coded[row] for row in range(3)]
    assert (stacked_parameter(rows).read(region) == whole[region]).all()


def test_a_region_that_lies_together_is_not_copied():
    array = np.arange(24).reshape(4, 6)
    parameter = stored_parameter(array)
    assert np.shares_memory(parameter.read((slice(1, 3), slice(0, 6))), array)
    assert not np.shares_memory(parameter.read((slice(1, 3), slice(0, 5))), array)
    assert np.shares_memory(parameter.row(2).whole(), array)
    assert (parameter.row(2).read((slice(1, 4),)) == array[2, 1:4]).all()
    assert settled((slice(None), slice(2, None)), (4, 6)) == (slice(0, 4), slice(2, 6))
