"""Decoding with latent attention: the latents attended as they are cached, beside keys and values expanded from them.

    python benchmarks/mla_decode.py [--context 2048 16384] [--heads 16] [--layers 2] [--steps 4] [--repeats 3]

Both decode the same tokens with the same weights from the same cache of random latents, at DeepSeek V3's widths of a
head (rank 512, 128 + 64 features, values of 128), and take turns; medians are printed, with the largest difference of
their logits. The cache is one: kv_lora_rank + qk_rope_head_dim numbers a token a layer. Beside its bytes stand those
that caching every head's keys and values would take, heads x (128 + 64 + 128).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dewconv.dew_core.records import MLA
from dewconv.dew_core.transformer import CausalTransformer

PATHS = {"absorbed": "auto", "expanded": "reference"}
"""A name -> the `attention_impl` that takes that path in a decode step."""


def decoder(options: argparse.Namespace, slots: int) -> CausalTransformer:
    return CausalTransformer(
        vocab_size=1024,
        emb_features=options.features,
        num_layers=options.layers,
        num_heads=options.heads,
        mlp_features=2 * options.features,
        max_seq_len=slots,
        qk_norm=False,
        rope_interleave=True,
        dtype=options.dtype,
        mixer=MLA(q_lora_rank=options.features // 2, kv_lora_rank=options.rank),
    )


def drawn(shapes: Any, generator: np.random.Generator, dtype: str) -> Any:
    """Leaves of these shapes: matrices of standard deviation fan_in^-1/2, vectors about 1."""

    def leaf(shape: Any) -> jax.Array:
        scale = shape.shape[0] ** -0.5 if len(shape.shape) > 1 else 0.1
        values = generator.standard_normal(shape.shape, np.float32) * scale
        return jnp.asarray(values + 1 if len(shape.shape) == 1 else values, dtype)

    return jax.tree.map(leaf, shapes)


def filled(model: CausalTransformer, variables: Any, context: int, generator: np.random.Generator) -> Any:
    """A decode cache that holds `context` random tokens."""
    shapes = jax.eval_shape(
        lambda v: model.apply(v, 1, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"], variables
    )
    slots = np.arange(model.max_seq_len)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        match path[-1].key:
            case "cached_valid":
                values: Any = (slots < context)[None]
            case "cached_positions":
                values = np.where(slots < context, slots, 0)[None]
            case "cursor":
                values = np.array([context])
            case _:
                values = generator.standard_normal(shape.shape, np.float32)
        return jnp.asarray(values, shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def decoding_step(model: CausalTransformer) -> Any:
    """One compiled decode step: (variables, cache, token [1, 1]) -> (logits, what it wrote)."""

    def run(variables: Any, cache: Any, token: Any) -> Any:
        return model.apply({**variables, "cache": cache}, token, decode=True, mutable=["cache"])

    return jax.jit(run, donate_argnums=1)


def cache_bytes(cache: Any) -> int:
    """Bytes of what attention reads: latents and rotary keys."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return sum(leaf.nbytes for path, leaf in leaves if path[-1].key in ("cached_latent", "cached_rope_key"))


def compare(options: argparse.Namespace, context: int) -> dict[str, Any]:
    """Seconds a token of each path at one context length, their logits' difference and the cache's bytes."""
    generator = np.random.default_rng(0)
    model = decoder(options, context + options.steps)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    variables = drawn(shapes, generator, options.dtype)
    start = filled(model, variables, context, generator)
    tokens = generator.integers(0, 1024, (options.steps, 1, 1)).astype(np.int32)
    steps = {name: decoding_step(model.clone(attention_impl=impl)) for name, impl in PATHS.items()}
    taken: dict[str, list[float]] = {name: [] for name in PATHS}
    last: dict[str, np.ndarray] = {}
    for turn in range(options.repeats + 1):
        for name, step in steps.items():
            cache = jax.tree.map(jnp.copy, start)
            began = time.perf_counter()
            for token in tokens:
                logits, written = step(variables, cache, token)
                cache = written["cache"]
            last[name] = np.asarray(logits, np.float32)
            if turn:
                taken[name].append((time.perf_counter() - began) / options.steps)
    one, other = last.values()
    return {
        "seconds": {name: statistics.median(values) for name, values in taken.items()},
        "difference": float(np.abs(one - other).max() / np.abs(other).max()),
        "bytes": cache_bytes(start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()

    table = Table(title=f"{options.layers} layers, {options.heads} heads, {options.dtype}, batch 1")
    for column in (
        "context",
        "absorbed tok/s",
        "expanded tok/s",
        "ratio",
        "cache MB",
        "every head's MB",
        "ratio",
        "largest difference",
    ):
        table.add_column(column, justify="right")
    for context in options.context:
        found = compare(options, context)
        absorbed, expanded = (found["seconds"][name] for name in PATHS)
        sizes = MLA(kv_lora_rank=options.rank)
        every = options.heads * (sizes.head_dim + sizes.v_head_dim) / (options.rank + sizes.qk_rope_head_dim)
        table.add_row(
            str(context),
            f"{1 / absorbed:.2f}",
            f"{1 / expanded:.2f}",
            f"{expanded / absorbed:.1f}",
            f"{found['bytes'] / 1e6:.1f}",
            f"{found['bytes'] * every / 1e6:.1f}",
            f"{every:.1f}",
            f"{found['difference']:.1e}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
