"""One sparse layer's forward by the number of experts, beside transformers' eager experts and a dense masked loop.

    python benchmarks/moe.py [--experts 8 32 128] [--top-k 8] [--tokens 512] [--dtype float32] [--repeats 9]

The routing work a token asks for is fixed by top-k, so a sparse layer's time should not follow the number of
experts; the dense loop, every expert on every token, shows what does. The three run in turn within each repeat, on
the same weights, and the medians are printed, so that a machine busy with something else slows them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dewconv.dew_core.mlp import gated_product
from dewconv.dew_core.moe import SparseMLP
from dewconv.dew_core.records import Mixture
from dewconv.dew_core.router import Router


def reference(experts: int, top_k: int, features: int, width: int, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    """transformers' block with random weights, its experts run by the eager loop."""
    config = Qwen3MoeConfig(
        hidden_size=features, moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


def parameters(block: Qwen3MoeSparseMoeBlock, dtype: str) -> dict:
    """The block's weights as SparseMLP's."""
    width = block.experts.down_proj.shape[-1]

    def read(tensor: torch.Tensor) -> jax.Array:
        return jnp.asarray(np.ascontiguousarray(tensor.detach().float().numpy()), dtype)

    fused = block.experts.gate_up_proj
    return {
        "gate": {"kernel": read(block.gate.weight.T)},
        "experts": {
            "gate_proj": {"kernel": read(fused[:, :width].transpose(1, 2))},
            "up_proj": {"kernel": read(fused[:, width:].transpose(1, 2))},
            "down_proj": {"kernel": read(block.experts.down_proj.transpose(1, 2))},
        },
    }


def dense_masked(params: dict, x: jax.Array, mixture: Mixture) -> jax.Array:
    """Every expert on every token, times the weight the router gave it or zero."""
    ids, weights = Router(mixture.experts, mixture.top_k).apply({"params": params["gate"]}, x)

    def add(total: jax.Array, expert: tuple) -> tuple:
        index, gate, up, down = expert
        share = jnp.sum(jnp.where(ids == index, weights, 0), axis=-1, keepdims=True)
        return total + (gated_product("swiglu", x @ gate, x @ up) @ down * share).astype(x.dtype), None

    kernels = [params["experts"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")]
    return jax.lax.scan(add, jnp.zeros_like(x), (jnp.arange(mixture.experts), *kernels))[0]


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Each run's median seconds, the runs taking turns; one turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--top-k", type=int, nargs="+", default=[8], help="each with every count of experts")
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--without-dense", action="store_true", help="leave the dense loop out")
    options = parser.parse_args()

    table = Table(title=f"{options.tokens} tokens, {options.dtype}, ms")
    for column in (
        "experts",
        "top-k",
        "dewconv",
        "transformers eager",
        "dense loop",
        "dewconv / eager",
        "dewconv / dense",
    ):
        table.add_column(column, justify="right")
    torch.manual_seed(0)
    for experts, top_k in product(options.experts, options.top_k):
        block = reference(experts, top_k, options.features, options.width, getattr(torch, options.dtype))
        mixture = Mixture(experts, top_k, expert_features=options.width)
        params = parameters(block, options.dtype)
        rows = torch.randn(1, options.tokens, options.features).to(getattr(torch, options.dtype))
        x = jnp.asarray(rows.float().numpy(), options.dtype)
        sparse = jax.jit(SparseMLP(options.features, options.width, mixture).apply)
        dense = jax.jit(dense_masked, static_argnums=2)

        def eager(block: Qwen3MoeSparseMoeBlock = block, rows: torch.Tensor = rows) -> torch.Tensor:
            with torch.inference_mode():
                return block(rows)

        runs: dict[str, Callable[[], object]] = {
            "ours": lambda run=sparse, p=params, x=x: run({"params": p}, x).block_until_ready(),
            "eager": eager,
        }
        if not options.without_dense:
            runs["dense"] = lambda run=dense, p=params, x=x, m=mixture: run(p, x, m).block_until_ready()
        seconds = medians(runs, options.repeats)
        cells = [f"{seconds[name] * 1e3:.1f}" if name in seconds else "" for name in ("ours", "eager", "dense")]
        ratios = [f"{seconds['ours'] / seconds[name]:.2f}" if name in seconds else "" for name in ("eager", "dense")]
        table.add_row(str(experts), str(top_k), *cells, *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
