"""How fast codes become bfloat16, beside a plain copy of the same output bytes in the same run.

    python benchmarks/decode_codes.py [--rows 7168] [--columns 7168] [--threads 1 2] [--repeats 7]

Each line is the best of the repeats, in GB of bfloat16 a second, and as a share of the copy. "as stored": codes lie
as the parameter does, as in a bank. "transposed": as a Hugging Face checkpoint stores a Linear's weight. Rows are
divided among the threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ml_dtypes
import numpy as np

from dewconv.converters.decoding import FP8, INT4, Blocked, Coded

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = 256
"""Rows a thread decodes at a time, as an import does."""


def fp8(rows: int, columns: int, grain: tuple[int, int], turned: bool) -> Coded:
    generator = np.random.default_rng(0)
    shape = (columns, rows) if turned else (rows, columns)
    codes = generator.integers(0, 256, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    grid = (-(-rows // grain[0]), -(-columns // grain[1]))
    scales = generator.uniform(1e-4, 1, grid).astype(np.float32)
    blocks = Blocked.whole(codes.T if turned else codes, (1, 1)), Blocked.whole(scales, grain)
    return Coded(FP8, (rows, columns), BF16, *blocks, name="fp8")


def int4(rows: int, columns: int, turned: bool) -> Coded:
    generator = np.random.default_rng(1)
    shape = (columns, rows // 8) if turned else (rows // 8, columns)
    words = generator.integers(-(2**31), 2**31, shape).astype(np.int32)
    scales = generator.uniform(1e-4, 1, (rows // 32, columns)).astype(BF16)
    blocks = Blocked.whole(words.T if turned else words, (8, 1)), Blocked.whole(scales, (32, 1))
    return Coded(INT4, (rows, columns), BF16, *blocks, name="int4")


def best(works: Sequence[Callable[[int], None]], rows: int, threads: int, repeats: int) -> list[float]:
    """Seconds of the fastest repeat of each `work(first row)` over all rows, the works taking turns."""
    seconds: list[list[float]] = [[] for _ in works]
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            for work, taken in zip(works, seconds, strict=True):
                start = time.perf_counter()
                list(pool.map(work, range(0, rows, ROWS)))
                taken.append(time.perf_counter() - start)
    return [min(taken) for taken in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=7168)
    parser.add_argument("--columns", type=int, default=7168)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rows, columns = options.rows - options.rows % 32, options.columns
    cases = {
        "fp8, 128x128 blocks, as stored": lambda: fp8(rows, columns, (128, 128), False),
        "fp8, 128x128 blocks, transposed": lambda: fp8(rows, columns, (128, 128), True),
        "fp8, a scale a channel, transposed": lambda: fp8(rows, columns, (rows, 1), True),
        "fp8, a scale a tensor, transposed": lambda: fp8(rows, columns, (rows, columns), True),
        "int4, groups of 32, as stored": lambda: int4(rows, columns, False),
        "int4, groups of 32, transposed": lambda: int4(rows, columns, True),
    }
    out, source = np.zeros((rows, columns), BF16), np.ones((rows, columns), BF16)
    print(f"{rows} x {columns}, {out.nbytes / 1e6:.0f} MB of bfloat16")

    def copy(row: int) -> None:
        np.copyto(out[row : row + ROWS].view(np.uint16), source[row : row + ROWS].view(np.uint16))

    def decode(coded: Coded, row: int) -> None:
        part = coded[row : row + ROWS]
        part.write(out[row : row + len(part)])

    for threads in options.threads:
        for name, make in cases.items():
            works = (partial(decode, make()), copy)
            seconds, copied = best(works, rows, threads, options.repeats)
            rate, plain = out.nbytes / seconds / 1e9, out.nbytes / copied / 1e9
            line = f"{threads} thread(s)  {name:36}{rate:6.2f} GB/s   copy {plain:6.2f} GB/s   {rate / plain:5.0%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
