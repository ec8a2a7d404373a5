"""The checkpoints `io.py` measures: released shapes of random bits, as plain tensors, FP8 blocks and packed int4."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype as safetensors names it, and shape."""

SHARD_BYTES = 1 << 30
SIZES = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}
BLOCK = 128
GROUP = 32
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}


def dense_config(layers: int) -> dict[str, Any]:
    """Qwen3-0.6B's, with its vocabulary cut so that layers are most of it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def routed_config(layers: int, experts: int) -> dict[str, Any]:
    """Qwen3-MoE's, narrower: `experts` experts of 0.8 MB a matrix in each layer."""
    return dense_config(layers) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 384,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def int4_config(layers: int) -> dict[str, Any]:
    """Qwen3-MoE's, its experts as Kimi K2.5's are: 7.3 MB of packed codes a matrix, 0.9 MB of scales."""
    return routed_config(layers, 24) | {
        "vocab_size": 8192,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "quantization_config": INT4,
    }


def tensors_of(config: dict[str, Any]) -> Tensors:
    """The tensors a release of `config` holds, by name, stored as its `quantization_config` says."""
    record = config.get("quantization_config", {})
    found: Tensors = {}
    for name, shape in _shapes(config).items():
        projection = name.endswith("proj.weight")
        if record.get("quant_method") == "fp8" and projection:
            found[name] = ("F8_E4M3", shape)
            found[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
        elif record.get("quant_method") == "compressed-tensors" and projection and ".experts." in name:
            found[f"{name}_packed"] = ("I32", (shape[0], shape[1] // 8))
            found[f"{name}_scale"] = ("BF16", (shape[0], shape[1] // GROUP))
            found[f"{name}_shape"] = ("I32", (2,))
        else:
            found[name] = ("BF16", shape)
    return found


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (width,)
        shapes[at + "self_attn.q_proj.weight"] = (heads * head, width)
        shapes[at + "self_attn.k_proj.weight"] = (groups * head, width)
        shapes[at + "self_attn.v_proj.weight"] = (groups * head, width)
        shapes[at + "self_attn.o_proj.weight"] = (width, heads * head)
        shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head,)
        shapes[at + "post_attention_layernorm.weight"] = (width,)
        if "num_experts" not in config:
            shapes |= _mlp(at + "mlp.", width, config["intermediate_size"])
            continue
        shapes[at + "mlp.gate.weight"] = (config["num_experts"], width)
        for expert in range(config["num_experts"]):
            shapes |= _mlp(f"{at}mlp.experts.{expert}.", width, config["moe_intermediate_size"])
    shapes["model.norm.weight"] = (width,)
    return shapes


def _mlp(at: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    names = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{at}{name}.weight": shape for name, shape in names.items()}


def write_checkpoint(directory: Path, config: dict[str, Any], sparse: bool = False) -> Path:
    """A checkpoint of random bits, or of a hole, in shards of at most 1 GB with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = tensors_of(config)
    groups: list[Tensors] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if groups[-1] and held + bytes_of(tensor) > SHARD_BYTES:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += bytes_of(tensor)
    weight_map: dict[str, str] = {}
    pool = np.random.default_rng(0).integers(0, 1 << 16, 24_000_001, np.uint16)
    for number, group in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(group, shard)
        table, position = {}, 0
        for name, (dtype, shape) in group.items():
            end = position + bytes_of((dtype, shape))
            table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (directory / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for left in range(position if not sparse else 0, 0, -pool.nbytes):
                file.write(pool.data.cast("B")[: min(left, pool.nbytes)])
            file.truncate(8 + len(text) + position)
            for name in group:
                if name.endswith(".weight_shape"):
                    rows, columns = tensors[name.replace("_shape", "_packed")][1]
                    file.seek(8 + len(text) + table[name]["data_offsets"][0])
                    file.write(np.array([rows, columns * 8], np.int32).tobytes())
            file.flush()
            os.fsync(file.fileno())
    index = {"metadata": {"total_size": sum(map(bytes_of, tensors.values()))}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def bytes_of(tensor: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = tensor
    return SIZES[dtype] * prod(shape)


def fitting(make: Callable[[int], dict[str, Any]], megabytes: int) -> dict[str, Any]:
    """The config of the number of layers whose checkpoint comes nearest to `megabytes`."""

    def size(layers: int) -> float:
        return sum(map(bytes_of, tensors_of(make(layers)).values())) / 1e6

    one, two = size(1), size(2)
    return make(max(1, round(1 + (megabytes - one) / (two - one))))
