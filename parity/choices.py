"""What a forward chose of itself and another may be told to repeat: experts, and the keys that queries attend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Place = tuple[int, int, int, int]
"""(row a document was cut from, row it lies in, first column, length)."""


@dataclass(frozen=True)
class Choices:
    """Recorded choices by decoder layer, those of layers that have none unread.

    experts: [B, S, layers, k]. keys: [B, S, layers, T] bool, of the T tokens of the row or slots of a cache. None where
    a decoder chooses for itself.
    """

    experts: np.ndarray | None = None
    keys: np.ndarray | None = None

    @classmethod
    def of(cls, given: Choices | np.ndarray | None) -> Choices:
        """`given`, or the record of experts alone that an array is."""
        return given if isinstance(given, Choices) else cls(given)

    def call(self) -> dict[str, Any]:
        """The decoder's keyword arguments that repeat them."""
        return {"routed_experts": self.experts, "selected_keys": self.keys}

    def columns(self, start: int, stop: int, keys: int | None = None) -> Choices:
        """Those of tokens start to stop, of the first `keys` keys (more are filled up: no choice takes them)."""
        experts = None if self.experts is None else self.experts[:, start:stop]
        chosen = None if self.keys is None else self.keys[:, start:stop]
        if chosen is not None and keys is not None:
            chosen = widened(chosen[..., :keys], keys)
        return Choices(experts, chosen)

    def arranged(self, places: Iterable[Place]) -> Choices:
        """Those of rows' beginnings where they lie now; padding takes the first experts and no key."""
        experts, keys = None, None
        if self.experts is not None:
            first = np.arange(self.experts.shape[-1], dtype=np.int32)
            experts = np.broadcast_to(first, self.experts.shape).copy()
        if self.keys is not None:
            keys = np.zeros_like(self.keys)
        for source, row, start, length in places:
            there = slice(start, start + length)
            if experts is not None and self.experts is not None:
                experts[row, there] = self.experts[source, :length]
            if keys is not None and self.keys is not None:
                keys[row, there, :, there] = self.keys[source, :length, :, :length]
        return Choices(experts, keys)


def widened(keys: np.ndarray, width: int) -> np.ndarray:
    """keys [..., T] bool with no choice of T to width."""
    return np.pad(keys, (*((0, 0),) * (keys.ndim - 1), (0, width - keys.shape[-1])))


def stacked_routes(experts: Mapping[int, np.ndarray], layers: int) -> np.ndarray | None:
    """The choices [B, S, k] of sparse layers as one array [B, S, layers, k]; None for none."""
    if not experts:
        return None
    first = next(iter(experts.values()))
    routes = np.zeros((*first.shape[:2], layers, first.shape[2]), np.int32)
    for layer, chosen in experts.items():
        routes[:, :, layer] = chosen
    return routes


def stacked_keys(steps: Mapping[int, Sequence[np.ndarray]], layers: int) -> np.ndarray | None:
    """The choices of layers with an indexer in successive calls, each [B, s, T] of all T tokens until then, as one
    array [B, S, layers, T]; None for none."""
    if not steps:
        return None
    width = max(part.shape[-1] for parts in steps.values() for part in parts)
    joined = {layer: np.concatenate([widened(part, width) for part in parts], axis=1) for layer, parts in steps.items()}
    first = next(iter(joined.values()))
    keys = np.zeros((*first.shape[:2], layers, width), bool)
    for layer, chosen in joined.items():
        keys[:, :, layer] = chosen
    return keys
