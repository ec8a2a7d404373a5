"""Forward speed beside transformers: prefill and greedy decode of Qwen3-0.6B's shape, random weights, batch 1.

    python benchmarks/forward.py [--prompt 512] [--new 32] [--repeats 3] [--layers 28]

Both sides hold the same weights, run in one process on the same threads, and take turns; medians are printed with
ratios (dewconv over transformers, above 1 is faster). transformers runs in eager attention, as parity does. Decoding
runs in fp32 on both sides: from bfloat16 banks, `generate` on a CPU decodes in fp32 by itself
(`decoding_variables`). The programs compiled for the first prompt serve the others: their number is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from dewconv.converters.trees import nested
from dewconv.dew_core import generate as generation
from dewconv.dew_core.transformer import CausalTransformer
from dewconv.families import find
from dewconv.families.rules import assign_leaves, placements


def reference(layers: int) -> Qwen3ForCausalLM:
    """The torch model in fp32, in eager attention."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def decoder(torch_model: Qwen3ForCausalLM) -> tuple[CausalTransformer, dict[str, Any]]:
    """The same weights in the decoder, through the family's rules, one subtree a layer."""
    family = find("qwen3")
    config = json.loads(torch_model.config.to_json_string())
    fields, _ = family.read({**config, "model_type": "qwen3"})
    tensors = {name: tensor.numpy() for name, tensor in torch_model.state_dict().items()}
    leaves = assign_leaves(placements(family.weights(fields)), tensors)
    params = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    return CausalTransformer(**fields.kwargs()), {"params": nested(params)}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(theirs: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of each, taking turns, after one untimed turn of both."""
    theirs()
    ours()
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    args = parser.parse_args()

    torch_model = reference(args.layers)
    model, variables = decoder(torch_model)
    ids = np.random.default_rng(0).integers(0, 151936, (1, args.prompt))
    torch_ids, jax_ids = torch.tensor(ids), jnp.asarray(ids, jnp.int32)
    last = jnp.asarray([args.prompt - 1])
    table = Table("measured", "transformers", "dewconv", "ratio", "bar")

    @jax.jit
    def prefill(variables: Any, ids: jax.Array) -> jax.Array:
        return model.apply(variables, ids, last, method=CausalTransformer.states_and_logits_at)[1]

    @torch.no_grad()
    def torch_prefill() -> Any:
        return torch_model(torch_ids, logits_to_keep=1).logits

    def row(name: str, theirs: float, ours: float, unit: str, bar: float) -> None:
        faster = theirs / ours if unit == "s" else ours / theirs
        table.add_row(name, f"{theirs:.2f} {unit}", f"{ours:.2f} {unit}", f"{faster:.2f}", f"{bar:.2f}")

    difference = np.abs(np.asarray(prefill(variables, jax_ids))[0] - torch_prefill()[0, -1].numpy()).max()
    times = alternate(torch_prefill, lambda: prefill(variables, jax_ids).block_until_ready(), args.repeats)
    row(f"fp32 prefill of {args.prompt}", *times, "s", 1.0)

    fast, held = generation.decoding_variables(model, variables)

    @torch.no_grad()
    def torch_generate(new: int) -> Any:
        return torch_model.generate(torch_ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

    def our_generate(new: int) -> Any:
        return generation.generate(fast, held, jax_ids, max_new_tokens=new)

    # Decode alone: the time of many tokens less the time of one, which holds the prefill.
    one = alternate(lambda: torch_generate(1), lambda: our_generate(1), args.repeats)
    many = alternate(lambda: torch_generate(args.new), lambda: our_generate(args.new), args.repeats)
    rates = [(args.new - 1) / (m - o) for m, o in zip(many, one, strict=True)]
    row(f"greedy decode of {args.new}", rates[0], rates[1], "tok/s", 1.2)
    same = torch_generate(args.new)[0, args.prompt :].numpy()
    agreed = int((same == our_generate(args.new)[0]).sum())
    programs = {name: getattr(generation, name)._cache_size() for name in ("_prefill", "_decode")}

    torch_model = torch_model.to(torch.bfloat16)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    times = alternate(torch_prefill, lambda: prefill(half, jax_ids).block_until_ready(), args.repeats)
    row(f"bf16 prefill of {args.prompt}", *times, "s", 0.75)

    Console().print(table)
    print(f"last position's largest fp32 logit difference: {difference:.1e}")
    print(f"greedy tokens equal: {agreed} of {args.new}")
    print(f"programs compiled by generate: {programs}")


if __name__ == "__main__":
    main()
