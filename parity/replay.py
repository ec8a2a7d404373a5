"""Recorded choices of experts that a reference's routers repeat, each by its own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..families.errors import ConversionError

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
