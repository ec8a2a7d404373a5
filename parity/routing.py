"""Which experts each side chose, and how clearly the reference chose its own.

A margin is the least distance by which a token's choice would have come out otherwise, in bounds: what rounding can
move one score by. Two sides whose scores each lie within a bound of the truth agree on every choice whose margin is
above `CLEAR`.
"""

from __future__ import annotations

import numpy as np

from ..dew_core.records import Mixture
from .bounds import amplified_bound, rounding_bound
from .references import Routed

CLEAR = 2.0
"""Bounds between the last expert taken and the first left behind past which both sides must choose alike: either
score may move by one."""


def same_choice(one: Routed, other: Routed) -> np.ndarray:
    """[B, S] bool: whether both took the same experts, in whatever order and of the same number."""
    if one.experts.shape != other.experts.shape:
        return np.zeros(other.experts.shape[:2], bool)
    return (np.sort(one.experts, -1) == np.sort(other.experts, -1)).all(-1)


def score_bound(mixture: Mixture, reference: Routed, dtype: str, layers: int) -> float:
    """The bound of one score of a choice after `layers` layers: of a logit, or of a sigmoid (slope at most 1/4) and
    the bias added to it."""
    assert reference.logits is not None
    largest = float(np.abs(reference.logits).max())
    if mixture.score_function == "softmax":
        return rounding_bound(dtype, layers, largest)
    return rounding_bound(dtype, layers, max(largest / 4, float(np.abs(_scores(mixture, reference)).max())))


def tie_bound(mixture: Mixture, reference: Routed, wide: Routed, dtype: str, layers: int) -> float:
    """The bound of one score where it has been measured what rounding does to it: `wide` is the reference one
    precision up, given the same choices. Never more than `score_bound`, which in bfloat16 is a good part of the
    scores themselves (of a correction bias of 7, more than what the biases differ by)."""
    moved = float(np.abs(_scores(mixture, reference) - _scores(mixture, wide)).max())
    return min(score_bound(mixture, reference, dtype, layers), amplified_bound(0.0, moved, dtype))


def margins(mixture: Mixture, reference: Routed) -> np.ndarray:
    """[B, S]: how far the scores are from another choice, in their own unit (logits under softmax, which orders them
    alike). With groups also how far the groups' scores are, halved, since each is a sum of two."""
    scores = _scores(mixture, reference)
    found = np.full(scores.shape[:-1], np.inf)
    if mixture.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], mixture.groups, -1)
        members = 2 if mixture.group_score == "top2" else 1
        best = np.sort(grouped, -1)[..., -members:].sum(-1)
        if mixture.groups_per_token < mixture.groups:
            found = _gap(best, mixture.groups_per_token) / members
        kept = np.argsort(-best, -1, kind="stable")[..., : mixture.groups_per_token]
        mask = (kept[..., None] == np.arange(mixture.groups)).any(-2)
        scores = np.where(mask[..., None], grouped, -np.inf).reshape(scores.shape)
    if mixture.top_k < mixture.experts:
        found = np.minimum(found, _gap(scores, mixture.top_k))
    return found


def _scores(mixture: Mixture, reference: Routed) -> np.ndarray:
    assert reference.logits is not None
    scores = reference.logits.astype(np.float64)
    if mixture.score_function == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    return scores if reference.bias is None else scores + reference.bias.astype(np.float64)


def _gap(scores: np.ndarray, taken: int) -> np.ndarray:
    ordered = -np.sort(-scores, -1)
    return ordered[..., taken - 1] - ordered[..., taken]
