"""The decoder that runs the banks, in JAX and Flax Linen. It knows nothing of Hugging Face or of files.

The records and the layer plan (`records`, `fields`, `layers`) import no JAX; everything else is reached on first
use (PEP 562), so `import dewconv.dew_core` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "DecoderFields": "fields",
    "LayerPlan": "layers",
    "LayerSpec": "layers",
    "ResolvedKind": "layers",
    "layer_plan": "layers",
    "scan_groups": "layers",
    "group_name": "layers",
    "group_layers": "layers",
    "BlockWiring": "records",
    "Indexer": "records",
    "KVCache": "records",
    "LayerKind": "records",
    "MLA": "records",
    "MixerBase": "records",
    "Mixture": "records",
    "RopeScaling": "records",
    "YarnScaling": "records",
    "CausalTransformer": "transformer",
    "MIXERS": "mixers",
    "gather_cache_rows": "kv_cache",
    "DecoderBlock": "block",
    "GatedMLP": "mlp",
    "SparseMLP": "moe",
    "Router": "router",
    "Routes": "router",
    "load_balancing_loss": "router",
    "grouped_matmul": "grouped",
    "refuse_unbuildable_mixture": "mixture",
    "LightningIndexer": "indexer",
    "INDEXER_COLLECTION": "indexer",
    "LayerNorm": "norms",
    "RMSNorm": "norms",
    "DecoderBank": "stack",
    "StackView": "stack",
    "run_stack": "stack",
    "INTERMEDIATES": "stack",
    "layer_output": "stack",
    "layer_outputs": "stack",
    "REMAT_POLICIES": "remat",
    "RESIDUALS": "remat",
    "RematPolicy": "remat",
    "remat_policy": "remat",
    "generate": "generate",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
