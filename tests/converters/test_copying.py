"""Blocks are the tensor's elements in order, whatever views fill it, however small the buffer."""

import json
import subprocess
import sys
from threading import Event

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dewconv.converters import copying
from dewconv.converters.copying import Part, aligned_empty, blocks, gather, run_parallel
from dewconv.families.errors import ConversionError
from dewconv.families.rules import View

BF16 = np.dtype(ml_dtypes.bfloat16)


def view_of(*shape):
    return View.of(*shape)


TILINGS = {
    "whole": ((7, 5), [view_of(7, 5)]),
    "transposed": ((7, 5), [View(base=(7, 5), shape=(5, 7), strides=(1, 5))]),
    "rows interleaved": ((8, 5), [view_of(8, 5)[0::2], view_of(8, 5)[1::2]]),
    "columns interleaved": ((7, 6), [view_of(7, 6)[:, 0::2].T, view_of(7, 6)[:, 1::2]]),
    "halves": ((3, 8, 5), [view_of(3, 8, 5)[:, :4].transpose(0, 2, 1), view_of(3, 8, 5)[:, 4:]]),
    "stacked out of order": ((3, 4, 5), [view_of(4, 5).T.prepend(row, 3) for row in (2, 0, 1)]),
    "a hole": ((3, 4, 5), [view_of(4, 5).prepend(row, 3) for row in (2, 0)]),
    "axes moved": ((24,), [view_of(24).reshape(2, 3, 4).transpose(2, 0, 1)]),
    "scalar": ((), [view_of()]),
    "empty": ((0, 8), [view_of(0, 8)]),
    "ones": ((1, 1), [view_of(1, 1)]),
}


@pytest.mark.parametrize("tiling", TILINGS)
@settings(max_examples=25, deadline=None)
@given(scratch=st.integers(1, 80), order=st.randoms(use_true_random=False), dtype=st.sampled_from([BF16, np.uint16]))
def test_any_tiling_gathers_bit_for_bit(tiling, scratch, order, dtype):
    shape, views = TILINGS[tiling]
    expected = np.zeros(shape, np.uint16)
    parts = []
    for view in views:
        source = np.arange(1, view.size + 1, dtype=np.uint16).reshape(view.shape) * 257
        axes = list(range(source.ndim))
        order.shuffle(axes)
        shuffled = np.array(source.transpose(axes), order="C").transpose(np.argsort(axes)) if axes else source
        view.apply(expected)[...] = source
        parts.append(Part(view, lambda array=shuffled: array.view(dtype)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "SCRATCH_BYTES", scratch)
        patch.setattr(copying, "MIN_PANEL_ROWS", 1)
        got = gather(shape, np.dtype(dtype), parts, "tensor")
    assert got.dtype == dtype
    assert np.array_equal(got.view(np.uint16), expected)


def test_a_contiguous_source_is_handed_on_without_a_copy():
    source = np.arange(4000, dtype=np.float32)
    (block,) = blocks((40, 100), source.dtype, [Part(view_of(40, 100), lambda: source.reshape(40, 100))], "tensor")
    assert np.shares_memory(block, source)


@pytest.mark.parametrize("array", ["negative", "broadcast", "transposed"])
def test_arrays_that_lie_any_way_in_memory_are_read(array):
    source = {
        "negative": np.arange(35, dtype=np.float32).reshape(7, 5)[::-1, ::-1],
        "broadcast": np.broadcast_to(np.arange(5, dtype=np.float32), (7, 5)),
        "transposed": np.arange(35, dtype=np.float32).reshape(5, 7).T,
    }[array]
    assert np.array_equal(gather((7, 5), source.dtype, [Part(view_of(7, 5), lambda: source)], "t"), source)


def test_casts_round_and_keep_the_ends_of_the_range():
    source = np.array([3e38, 1e-40, -0.0, 1.00390625], np.float32)
    low = gather((4,), BF16, [Part(view_of(4), lambda: source)], "t")
    assert np.array_equal(low.view(np.uint16), source.astype(BF16).view(np.uint16))
    back = gather((4,), np.dtype(np.float32), [Part(view_of(4), lambda: low)], "t")
    assert np.array_equal(back, low.astype(np.float32))


def test_float16_that_would_overflow_is_refused_by_name():
    source = np.array([1.0, 7e4], np.float32)
    with pytest.raises(ConversionError, match=r"the\.tensor.*float16"):
        gather((2,), np.dtype(np.float16), [Part(view_of(2), lambda: source)], "the.tensor")
    infinite = np.array([1.0, np.inf], np.float32)
    assert np.isinf(gather((2,), np.dtype(np.float16), [Part(view_of(2), lambda: infinite)], "t")[1])


def test_memory_for_a_backend_is_aligned():
    for size in (1, 3, 1000):
        assert aligned_empty((size,), BF16).ctypes.data % 64 == 0


def test_the_first_failure_stops_the_rest_and_is_raised():
    done = []

    def work(item: int, stop: Event) -> None:
        if item == 100:
            raise RuntimeError("the largest")
        stop.wait(5)
        done.append(item)

    with pytest.raises(RuntimeError, match="the largest"):
        run_parallel(work, range(101), lambda item: item, threads=2)
    assert len(done) <= 2


OPENED = """
import sys
from collections import Counter
from dewconv.converters.source import open_source
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.exporting import export_checkpoint

opened = Counter()

def count(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".safetensors"):
        opened[str(arguments[0])] += 1

sys.addaudithook(count)
source, banks, out = sys.argv[1:]
made = import_checkpoint(open_source(source), banks)
read = {name: times for name, times in opened.items() if name.startswith(source)}
opened.clear()
export_checkpoint(made, out)
print([sorted(read.values()), sorted(times for name, times in opened.items() if name.startswith(banks))])
"""


def test_a_file_is_opened_for_its_header_and_for_its_tensors(tiny, tmp_path):
    """However many tensors it holds: opening is what costs on storage that is not a disk."""
    checkpoint = tiny.qwen3(shards=3, num_hidden_layers=12)
    arguments = [str(checkpoint.path), str(tmp_path / "banks"), str(tmp_path / "out")]
    result = subprocess.run([sys.executable, "-c", OPENED, *arguments], check=True, capture_output=True, text=True)
    read, exported = json.loads(result.stdout)
    assert len(read) == 3
    assert max(read) <= 2
    assert len(exported) == 2
    assert max(exported) <= 2
