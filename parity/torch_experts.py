"""The experts' tensors as transformers 5 holds them and as the hub stores them.

In memory a layer's experts are two tensors, `experts.gate_up_proj` [E, 2 I, D] with the gate's rows first and
`experts.down_proj` [E, D, I]; releases store `experts.{e}.{gate,up,down}_proj.weight` (transformers 5.24
`conversion_mapping`, "qwen2_moe"). Nothing here reads a family's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

FUSED = re.compile(r"^(?P<stem>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def unfused(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor by the names and shapes of the hub: an expert's each for fused experts, else as it is."""
    match = FUSED.match(name)
    if match is None:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        stem = f"{match['stem']}.{expert}"
        if match["kind"] == "down_proj":
            yield f"{stem}.down_proj.weight", matrix
        else:
            width = len(matrix) // 2
            yield f"{stem}.gate_proj.weight", matrix[:width]
            yield f"{stem}.up_proj.weight", matrix[width:]


def both_forms(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors by their names in memory and by the hub's, where these differ."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        found |= dict(unfused(name, tensor))
    return found


def in_memory(name: str) -> str:
    """The name under which transformers holds a tensor of the hub's."""
    single = re.match(r"^(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight$", name)
    if single is None:
        return name
    return f"{single[1]}.{'down_proj' if single[2] == 'down' else 'gate_up_proj'}"
