"""One Qwen3-0.6B decoder layer, torch (transformers) beside JAX: prefill of 512 and one token over a cache of 600.

Times are the best of several rounds, the two sides interleaved, and the ratio is JAX / torch.

    python benchmarks/decoder_layer.py [--rounds 5] [--dtype float32] [--only prefill|decode]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dewconv.dew_core.attention import CausalSelfAttention
from dewconv.dew_core.block import DecoderBlock
from dewconv.dew_core.mlp import GatedMLP

FEATURES, HEADS, KV, DIM, HIDDEN, PROMPT, CACHED, SLOTS = 1024, 16, 8, 128, 3072, 512, 600, 640
LAYERS = 6  # distinct weights in turn, so that no layer stays in the caches of the CPU between calls


def layers(dtype: str):
    """(torch layers, rotary, block, each layer's variables) with one set of weights."""
    config = Qwen3Config(
        hidden_size=FEATURES,
        intermediate_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=DIM,
        num_hidden_layers=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    modules = [Qwen3DecoderLayer(config, i).eval().to(getattr(torch, dtype)) for i in range(LAYERS)]
    variables = []
    for module in modules:
        params: dict = {}
        for path, leaf in module.named_parameters():
            here = params
            *owners, _ = path.split(".")
            for owner in owners:
                here = here.setdefault(owner, {})
            value = jnp.asarray(leaf.detach().float().numpy()).astype(dtype)
            here["kernel" if leaf.ndim == 2 else "scale"] = jnp.array(value.T) if leaf.ndim == 2 else value
        variables.append({"params": params})
    block = DecoderBlock(
        partial(CausalSelfAttention, HEADS, KV, DIM, max_seq_len=SLOTS, scale_after_cast=True, rope_theta=1e6),
        partial(GatedMLP, FEATURES, HIDDEN),
        scale_after_cast=True,
    )
    return modules, Qwen3RotaryEmbedding(config), block, variables


def measure(sides: dict, rounds: int, repeats: int) -> dict[str, float]:
    """Best milliseconds a layer of each side, interleaved."""
    best = dict.fromkeys(sides, float("inf"))
    for call in sides.values():
        call()
    for _ in range(rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats / LAYERS * 1e3)
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--only", choices=("prefill", "decode"))
    options = parser.parse_args()
    rounds = options.rounds
    for dtype in options.dtype or ("float32", "bfloat16"):
        modules, rotary, block, variables = layers(dtype)
        x = torch.randn(1, PROMPT, FEATURES).to(getattr(torch, dtype))
        tables = rotary(x, torch.arange(PROMPT)[None])

        def torch_prefill(x=x, tables=tables, modules=modules):
            for module in modules:
                x = module(x, position_embeddings=tables, attention_mask=None)
            return x

        @jax.jit
        def prefill(variables, x, block=block):
            for leaves in variables:
                x = block.apply(leaves, x)
            return x

        if options.only != "decode":
            ours = jnp.asarray(x.float().numpy()).astype(dtype)
            theirs = torch_prefill().float().numpy()
            difference = np.abs(np.asarray(prefill(variables, ours), np.float32) - theirs).max() / np.abs(theirs).max()
            sides = {
                "torch": torch_prefill,
                "jax": lambda variables=variables, ours=ours, prefill=prefill: prefill(
                    variables, ours
                ).block_until_ready(),
            }
            report(f"prefill {PROMPT} {dtype}", measure(sides, rounds, 1), difference)
        if options.only == "prefill":
            continue

        past = [torch.randn(1, KV, CACHED, DIM).to(x.dtype) for _ in range(2 * LAYERS)]
        token, at = x[:, :1], rotary(x, torch.tensor([[CACHED]]))
        cache = DynamicCache()
        for i in range(LAYERS):
            cache.update(past[2 * i], past[2 * i + 1], i)

        def torch_step(token=token, at=at, modules=modules, cache=cache):
            x = token
            for module in modules:
                x = module(x, position_embeddings=at, attention_mask=None, cache=cache)
            cache.crop(-1)
            return x

        @partial(jax.jit, donate_argnums=1)
        def step(variables, caches, x, block=block):
            written = []
            for leaves, cache in zip(variables, caches, strict=True):
                cursor = {"self_attn": {**cache["self_attn"], "cursor": jnp.full((1,), CACHED, jnp.int32)}}
                x, after = block.apply(
                    {**leaves, "cache": cursor},
                    x,
                    decode=True,
                    mutable=["cache"],
                    positions=jnp.full((1, 1), CACHED, jnp.int32),
                )
                written.append(after["cache"])
            return x, written

        def filled(i, past=past, dtype=dtype):
            pad = ((0, 0), (0, 0), (0, SLOTS - CACHED), (0, 0))
            key, value = (jnp.asarray(np.pad(p.float().numpy(), pad)).astype(dtype) for p in past[2 * i : 2 * i + 2])
            slots = jnp.arange(SLOTS, dtype=jnp.int32)[None]
            return {
                "self_attn": {
                    "cached_key": key,
                    "cached_value": value,
                    "cached_valid": slots < CACHED,
                    "cached_positions": jnp.array(slots),
                    "cursor": jnp.full((1,), CACHED, jnp.int32),
                }
            }

        state = [filled(i) for i in range(LAYERS)]
        first = jnp.asarray(token.float().numpy()).astype(dtype)

        def jax_step(variables=variables, first=first, step=step):
            nonlocal state
            out, state = step(variables, state, first)
            return out.block_until_ready()

        theirs = torch_step().float().numpy()
        difference = np.abs(np.asarray(jax_step(), np.float32) - theirs).max() / np.abs(theirs).max()
        report(
            f"one token over {CACHED}, {dtype}", measure({"torch": torch_step, "jax": jax_step}, rounds, 10), difference
        )


def report(what: str, best: dict[str, float], difference: float) -> None:
    print(
        f"{what}: torch {best['torch']:.2f} ms a layer, jax {best['jax']:.2f} ms, ratio "
        f"{best['jax'] / best['torch']:.2f}; outputs differ by {difference:.1e} of the largest"
    )


if __name__ == "__main__":
    main()
