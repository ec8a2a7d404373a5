"""Tiny checkpoints written with the safetensors library under hand-kept names, every dimension different."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, HEADS, KV, DIM, INNER, VOCAB = 24, 4, 2, 10, 28, 131

GENERATION = b'{\n  "eos_token_id": [1, 106],\n  "do_sample": true\n}'
SIDE_FILES = {
    "generation_config.json": GENERATION,
    "tokenizer.json": b'{"model": {"vocab": {}}}\n',
    "tokenizer_config.json": b'{"eos_token": "<end>"}',
    "chat_template.jinja": "{{ messages }} é\r\n".encode(),
    "chat_template.json": b'{"chat_template": "other"}',
    "merges.txt": b"a b\n",
    "LICENSE": b"words",
    "assets/notes.txt": b"nested",
}


def qwen3_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    } | changes


def gemma3_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 7,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "sliding_window": 5,
        "query_pre_attn_scalar": 10,
        "torch_dtype": "bfloat16",
    } | changes


def gemma3_wrapper_config(**changes: Any) -> dict[str, Any]:
    text = gemma3_config()
    for key in ("architectures", "torch_dtype"):
        del text[key]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16},
    } | changes


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by name below it: written out by hand, not read from the families."""
    d, q, kv, inner = HIDDEN, HEADS * DIM, KV * DIM, INNER
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "self_attn.q_norm.weight": (DIM,),
        "self_attn.k_norm.weight": (DIM,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (inner, d),
        "mlp.up_proj.weight": (inner, d),
        "mlp.down_proj.weight": (d, inner),
    }
    if str(config["model_type"]).startswith("gemma3"):
        shapes |= {"pre_feedforward_layernorm.weight": (d,), "post_feedforward_layernorm.weight": (d,)}
    return shapes


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Values of any bits: NaNs with payloads, -0, infinities and subnormals among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def weights_of(
    config: Mapping[str, Any],
    body: str = "model.",
    head: str | None = "lm_head.",
    dtype: np.dtype = BF16,
    float32: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Random weights under the hub's names. head: the prefix of a head of its own, None for none. float32: endings
    of the names stored in float32."""
    text = config.get("text_config", config)
    shapes = {f"{body}embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(text["num_hidden_layers"]):
        for name, shape in layer_shapes(text).items():
            shapes[f"{body}layers.{layer}.{name}"] = shape
    shapes[f"{body}norm.weight"] = (HIDDEN,)
    if head is not None:
        shapes[f"{head}weight"] = (VOCAB, HIDDEN)
    return {
        name: random_bits(shape, np.dtype(np.float32) if name.endswith(float32 or ("\0",)) else dtype, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def vision_weights(prefix: str = "") -> dict[str, np.ndarray]:
    return {
        f"{prefix}vision_tower.vision_model.post_layernorm.weight": random_bits((16,), BF16, 901),
        f"{prefix}multi_modal_projector.mm_input_projection_weight": random_bits((16, HIDDEN), BF16, 902),
    }


def write(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    shards: int = 1,
    side_files: Mapping[str, bytes] = SIDE_FILES,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint directory. Tensors are dealt to the shards in turn, so that a layer's lie in several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for name, data in side_files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    told = {"format": "pt"} if metadata is None else dict(metadata)
    if shards == 1:
        save_file(dict(weights), directory / "model.safetensors", told)
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: array for i, (name, array) in enumerate(weights.items()) if i % shards == number}
        save_file(held, directory / file, told)
        weight_map |= dict.fromkeys(held, file)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk, with what it was written from."""

    path: Path
    config: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def tiny(tmp_path: Path) -> SimpleNamespace:
    """The makers of this file; `tiny.qwen3(...)` writes a Qwen3 checkpoint under the test's own directory, config
    changes by keyword."""

    def qwen3(
        name: str = "source",
        shards: int = 1,
        head: str | None = "lm_head.",
        dtype: np.dtype = BF16,
        float32: tuple[str, ...] = (),
        extra: Mapping[str, np.ndarray] | None = None,
        **changes: Any,
    ) -> Tiny:
        config = qwen3_config(**changes)
        weights = weights_of(config, head=head, dtype=dtype, float32=float32) | dict(extra or {})
        return Tiny(write(tmp_path / name, config, weights, shards), config, weights)

    return SimpleNamespace(
        qwen3=qwen3,
        qwen3_config=qwen3_config,
        gemma3_config=gemma3_config,
        gemma3_wrapper_config=gemma3_wrapper_config,
        weights_of=weights_of,
        vision_weights=vision_weights,
        random_bits=random_bits,
        write=write,
        files_of=files_of,
        side_files=SIDE_FILES,
        vocab=VOCAB,
        hidden=HIDDEN,
    )
