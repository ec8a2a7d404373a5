"""GLM-4-0414, the dense releases: GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1 (transformers 5.24 `Glm4ForCausalLM`).

Sandwich norms under names of its own, neighbouring rotary pairs over half of a head, gate and up fused on disk,
biases on q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dew_core.fields import DecoderFields
from .blocks import activation, attention, bookkeeping, dense_layers, layer_norms, linear, tied, trunk, widths
from .family import Family, Variant
from .fields import flag, same, via
from .rope import partial_rope
from .rules import Rule, Statement, View

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "attention_output_norm",
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "mlp_output_norm",
}
"""`Glm4DecoderLayer`: `post_attention_layernorm` norms the feed-forward's input here."""

FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=151552,
        hidden=4096,
        intermediate=13696,
        layers=40,
        heads=32,
        kv_heads=2,
        head_dim=128,
        longest=131072,
        eps=0.00000015625,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, True),
    partial_rope(default_factor=0.5),
    via(
        (),
        lambda config: {
            "scale_after_cast": True,
            "sandwich_norms": True,
            "qk_norm": False,
            "o_proj_bias": False,
            "rope_interleave": True,
        },
        lambda d: {},
        "Glm4Attention biases q, k and v alone and pairs neighbouring features",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, NORMS)
    yield from attention(d)
    for width, members in dense_layers(d).items():
        over = {"l": members}
        both, kernel = View.of(2 * width, d.emb_features), View.of(d.emb_features, width)
        source, leaf = "model.layers.{l}.mlp.", "layers_{l}/mlp/"
        yield Rule(f"{source}gate_up_proj.weight", both[:width].T, f"{leaf}gate_proj/kernel", kernel, over)
        yield Rule(f"{source}gate_up_proj.weight", both[width:].T, f"{leaf}up_proj/kernel", kernel, over)
        yield linear(f"{source}down_proj.weight", f"{leaf}down_proj/kernel", width, d.emb_features, over)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released GLM-4 config at a size where every dimension differs."""
    return {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3, 5],
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "model_type": "glm4",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.52.0.dev0",
        "use_cache": True,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


VARIANTS = {
    "biases": Variant(_tiny(), "biases on q, k and v; neighbouring pairs over half a head (9B)"),
    "plain": Variant(_tiny(attention_bias=False), "no biases (32B)"),
    "factor_absent": Variant(_without("partial_rotary_factor"), "half a head turns where the key is absent"),
    "factor_third": Variant(_tiny(partial_rotary_factor=1 / 3), "a third of a head turns"),
    "factor_inside": Variant(
        _without(
            "partial_rotary_factor",
            "rope_theta",
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        ),
        "rope_parameters with the factor inside",
    ),
    "mha": Variant(_tiny(num_key_value_heads=4), "a key/value head a query"),
    "mqa": Variant(_tiny(num_key_value_heads=1), "one key/value head"),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "square": Variant(
        _tiny(hidden_size=32, head_dim=8, num_key_value_heads=4, intermediate_size=16),
        "2 x intermediate equals hidden, and every attention matrix square",
    ),
    "deep": Variant(
        _tiny(num_hidden_layers=12, torch_dtype="bfloat16"),
        "12 layers, so that 10 sorts after 2, in a bfloat16 file with float32 leaves",
        storage="bfloat16",
        float32=("k_proj.bias", "layers.2.post_mlp_layernorm.weight"),
    ),
}

FAMILY = Family(
    name="glm4",
    model_types=("glm4",),
    architecture="Glm4ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Glm4ForCausalLM",
    variants=VARIANTS,
)
