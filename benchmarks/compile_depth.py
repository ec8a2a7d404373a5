"""Trace and compile time of the decoder by depth, scanned beside unrolled.

    python benchmarks/compile_depth.py [--layers 4 16 64]

Each line is one fresh trace and one fresh compile of the same forward on abstract parameters (nothing is
allocated). A scanned stack's body compiles once, so its time should not grow with depth; the unrolled one's does.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dewconv.dew_core.transformer import CausalTransformer


def banked(model: CausalTransformer, params: dict) -> dict:
    """The abstract parameters as one bank per run."""
    out = {key: value for key, value in params.items() if not key.startswith("layers_")}
    plan = model.plan
    for name, (first, count) in zip(plan.bank_names, plan.groups, strict=True):
        row = params[f"layers_{first}"]
        out[name] = jax.tree.map(lambda leaf, n=count: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), row)
    return out


def seconds(layers: int, scan: bool, tokens: int) -> tuple[float, float]:
    """Seconds to trace and to compile a forward of [1, tokens]."""
    model = CausalTransformer(
        vocab_size=4096,
        emb_features=256,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        mlp_features=768,
        scan_layers=scan,
    )
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    params = banked(model, shapes) if scan else shapes
    start = time.perf_counter()
    lowered = jax.jit(model.apply).lower({"params": params}, ids)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    seconds(2, True, args.tokens)  # warm the tracer, so that the first row does not pay for imports
    table = Table("layers", "scanned trace s", "scanned compile s", "unrolled trace s", "unrolled compile s", "ratio")
    first = None
    for layers in args.layers:
        scanned, unrolled = seconds(layers, True, args.tokens), seconds(layers, False, args.tokens)
        first = first or sum(scanned)
        cells = [f"{value:.2f}" for value in (*scanned, *unrolled)]
        table.add_row(str(layers), *cells, f"{sum(unrolled) / sum(scanned):.1f}")
        last = sum(scanned)
    Console().print(table)
    print(f"scanned, {args.layers[-1]} layers over {args.layers[0]}: {last / first:.2f}")


if __name__ == "__main__":
    main()
