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


AMPLIFIED = 4.0
"""How many times the reference's own measured rounding two sides may lie apart: sqrt(2) for the roundings of two sides,
times 2.8 for the largest of one draw against the largest of another."""


def amplified_bound(bound: float, own: float, ours: float | None = None) -> float:
    """The bound where weights amplify rounding: `bound`, or `AMPLIFIED` times what a side itself moves by when it
    computes one precision up (docs/parity.md), whichever is larger.

    own: the largest difference between the reference and itself one precision up, in what is compared. ours: the
    same of the JAX side with its head alone one precision up, which counts for as much: the root mean square of both.
    None where it is not measured and taken for the reference's.
    """
    return max(bound, AMPLIFIED * math.hypot(own, own if ours is None else ours) / math.sqrt(2))
