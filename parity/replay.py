"""Choices of a reference's routers and indexers: recorded ones that they repeat, each by its own code, and what an
indexer scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..families.errors import ConversionError
from .selection import UNSEEN, Selected

TOPK = (torch.topk, torch.Tensor.topk)


class _Repeated(TorchFunctionMode):
    """The `topk` of scores [tokens, experts] gives recorded experts [tokens, k]. Groups' scores have fewer columns or
    a third axis, and are left alone. repeated: how often that happened."""

    def __init__(self, experts: int, taken: torch.Tensor) -> None:
        super().__init__()
        self.shape = (len(taken), experts)
        self.taken = taken
        self.repeated = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        scores: Any = args[0] if args else (kwargs or {}).get("input")
        if func in TOPK and tuple(scores.shape) == self.shape:
            self.repeated += 1
            return torch.return_types.topk((scores.gather(-1, self.taken), self.taken))
        return func(*args, **(kwargs or {}))


@contextmanager
def repeating(routers: Mapping[int, Any], routes: np.ndarray | None) -> Iterator[None]:
    """Inside, the router of layer l takes the experts routes[:, :, l] (routes [B, S, layers, k]) for rows [B * S] of
    tokens, whatever its scores say; None leaves every router to itself.

    What a router makes of its choice (its weights, normalised and scaled) stays its own code's. Raises
    ConversionError for a router that does not choose by one `topk` over the scores of all experts.
    """
    if routes is None:
        yield
        return

    def wrap(router: Any, layer: int) -> Any:
        own = router.forward
        taken = torch.from_numpy(routes[:, :, layer].reshape(-1, routes.shape[-1]).astype(np.int64))

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Repeated(len(router.weight), taken) as mode:
                out = own(*args, **kwargs)
            if mode.repeated != 1:
                raise ConversionError(
                    f"{type(router).__name__} of layer {layer} does not choose by one topk over all experts; "
                    "its choice cannot be repeated"
                )
            return out

        return forward

    for layer, router in routers.items():
        router.forward = wrap(router, layer)
    try:
        yield
    finally:
        for router in routers.values():
            del router.forward


class _Chosen(TorchFunctionMode):
    """The one `topk` of an indexer: its scores [B, S, T] and what it takes are kept; with recorded keys [B, S, T] it
    gives those. calls: how often it happened."""

    def __init__(self, keys: torch.Tensor | None) -> None:
        super().__init__()
        self.keys = keys
        self.calls: list[Selected] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return out
        scores: Any = args[0] if args else (kwargs or {})["input"]
        own = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, out[1], True) & (scores > UNSEEN)
        self.calls.append(Selected(own.numpy(), scores.float().numpy()))
        if self.keys is None:
            return out
        # Where fewer are seen than are taken, the rest is any that is not seen: all that is seen is recorded.
        order = torch.argsort((~self.keys).to(torch.int8), dim=-1, stable=True)
        taken = order[..., : out[1].shape[-1]]
        return torch.return_types.topk((scores.gather(-1, taken), taken))


@contextmanager
def choosing(indexers: Mapping[int, Any], keys: np.ndarray | None) -> Iterator[dict[int, list[Selected]]]:
    """What each layer's indexer chooses by itself in every forward inside. With keys [B, S, layers, T] bool (at least
    the T tokens until then) layer l attends keys[:, :, l], whatever its scores say.

    Raises ConversionError for an indexer that does not choose by one `topk` over the scores of all keys.
    """
    found: dict[int, list[Selected]] = {layer: [] for layer in indexers}

    def wrap(indexer: Any, layer: int) -> Any:
        own = indexer.forward
        taken = None if keys is None else torch.from_numpy(np.ascontiguousarray(keys[:, :, layer]))

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Chosen(taken) as mode:
                out = own(*args, **kwargs)
            if len(mode.calls) != 1:
                raise ConversionError(
                    f"{type(indexer).__name__} of layer {layer} does not choose by one topk over all keys; "
                    "its choice cannot be compared"
                )
            found[layer] += mode.calls
            return out

        return forward

    for layer, indexer in indexers.items():
        indexer.forward = wrap(indexer, layer)
    try:
        yield found
    finally:
        for indexer in indexers.values():
            del indexer.forward
