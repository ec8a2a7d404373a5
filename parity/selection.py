"""Which keys each side's indexers chose, and how clearly the reference chose its own: `routing`, of keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .bounds import amplified_bound, rounding_bound

UNSEEN = -1e30
"""Scores below are no scores: masks add a dtype's lowest value."""


@dataclass(frozen=True)
class Selected:
    """What one layer's indexer chose by itself: keys [B, S, T] bool, none of them unseen, and the scores [B, S, T],
    float32, of the reference below `UNSEEN` where a query does not see the key."""

    keys: np.ndarray
    scores: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """[B, S, T] bool: the keys a query sees, of the reference's."""
        return self.scores > UNSEEN


def same_keys(one: Selected, other: Selected) -> np.ndarray:
    """[B, S] bool: whether both chose the same keys."""
    if one.keys.shape != other.keys.shape:
        return np.zeros(other.keys.shape[:2], bool)
    return (one.keys == other.keys).all(-1)


def score_bound(reference: Selected, dtype: str, layers: int) -> float:
    """The bound of one score after `layers` layers."""
    return rounding_bound(dtype, layers, float(np.abs(reference.scores[reference.seen]).max(initial=0.0)))


def tie_bound(reference: Selected, wide: Selected, dtype: str, layers: int) -> float:
    """The bound of one score where it has been measured what rounding does to it: `wide` is the reference one precision
    up, given the same choices. Never more than `score_bound`."""
    seen = reference.seen
    moved = float(np.abs(reference.scores[seen] - wide.scores[seen]).max(initial=0.0))
    return min(score_bound(reference, dtype, layers), amplified_bound(0.0, moved, dtype))


def margins(reference: Selected) -> np.ndarray:
    """[B, S]: from the least score chosen to the best left behind, inf where all that is seen is chosen. Two keys whose
    products are all negative score 0 both: their margin is 0 and the choice between them is nobody's."""
    scores, seen = reference.scores.astype(np.float64), reference.seen
    least = np.where(reference.keys, scores, np.inf).min(-1)
    best = np.where(seen & ~reference.keys, scores, -np.inf).max(-1)
    return np.where(np.isfinite(best), least - best, np.inf)
