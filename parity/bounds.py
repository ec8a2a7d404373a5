"""How far two correct evaluations of one decoder may lie apart: the bound, derived in docs/parity.md."""

from __future__ import annotations

import math

ROUNDINGS = 40
"""Roundings in series through one layer: two norms before and two after the sublayers (4 each), a projection, q/k
norm (4), rotation (3), score and scale (2), softmax (4), values, o_proj, residual (3), gate, activation (3), product,
down_proj, residual (4)."""

CONSTANT = 8.0
"""eps a layer, per unit of the largest reference value. sqrt(2 * ROUNDINGS) / 2 = 4.5 for two sides whose roundings
are independent and at most eps / 2, times 1.8 for the largest of up to a million values (5 standard deviations)
whose largest is at least 2.8 times their standard deviation. One value for every family, dtype and check."""

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The spacing of a dtype at 1."""


def rounding_bound(dtype: str, layers: int, largest: float, passes: int = 1) -> float:
    """The largest error that rounding explains: CONSTANT * eps * passes * (layers + 1) * largest.

    layers: decoder layers in the path; the one more is the embedding and the head. largest: the largest reference
    value of what is compared. passes: how often the path is walked, 2 for gradients.
    """
    return CONSTANT * EPS[dtype] * passes * (layers + 1) * largest


LARGEST = 2.8
"""The largest of one draw of roundings against the largest of another."""

PRODUCTS = {"float32": 3.2}
"""What JAX's rounding is to torch's, by dtype; 1 for the others, whose roundings are of the stored dtype. XLA's float32
product on a CPU adds up in longer chains than torch's: of 2048 terms its error is 3.2 times as large
(`tests/parity/test_bounds.py` measures it)."""


def amplified_bound(bound: float, own: float, dtype: str, head: float = 0.0) -> float:
    """The bound where weights amplify rounding: `bound`, or `LARGEST` times the roundings of both sides
    (docs/parity.md), whichever is larger.

    own: the largest difference between the reference and itself one precision up, in what is compared; JAX's is
    `PRODUCTS` times that. head: the same of JAX with its head alone one precision up, where it is measured.
    """
    return max(bound, LARGEST * math.hypot(own, max(PRODUCTS.get(dtype, 1.0) * own, head)))


LIKENESS = 2.0
"""The root mean square difference of two low-precision evaluations of one model, per unit of one's own difference from
the model computed one precision up: sqrt(2) when both round as much and independently, less where they share roundings,
times sqrt(2) for the order and number of roundings that fusion changes."""


def likeness_bound(own: float) -> float:
    """The largest root mean square difference between two sides that round alike: `LIKENESS * own` (docs/parity.md).

    own: the root mean square difference between the reference and itself one precision up.
    """
    return LIKENESS * own


def relative(error: float, bound: float) -> float:
    """error / bound; of a bound of 0, 0 without an error and inf with one."""
    return error / bound if bound else (0.0 if error == 0 else float("inf"))
