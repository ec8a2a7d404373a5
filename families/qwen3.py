"""Qwen3, the dense releases: Qwen3-0.6B to 32B (transformers 5.24 `Qwen3ForCausalLM`, `Qwen3Config`).

Pre-norm blocks, q/k norm per head before rope, no biases unless `attention_bias`. A window applies to the layers
from `max_window_layers` on, and only when `use_sliding_window` is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import LayerKind
from .blocks import (
    PRE_NORMS,
    activation,
    attention,
    bookkeeping,
    gated_mlp,
    layer_norms,
    layer_pattern,
    tied,
    trunk,
    widths,
)
from .family import Family, Variant
from .fields import Config, Unreadable, count, flag, layer_count, optional, same, value_of, via
from .rope import rope
from .rules import Statement

FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(config: Config) -> Mapping[str, Any]:
    """layer_types and kinds (`Qwen3Config.__post_init__`): `sliding_window` counts only under
    `use_sliding_window`; without stated `layer_types`, layers from `max_window_layers` on slide."""
    layers = value_of(config, "num_hidden_layers", layer_count, 32)
    used = value_of(config, "use_sliding_window", flag, False)
    window = value_of(config, "sliding_window", optional(count), 4096) if used else None
    first = value_of(config, "max_window_layers", _whole, 28)
    pattern = layer_pattern(config, layers, (FULL, SLIDING))
    if pattern is None:
        pattern = tuple(SLIDING if window is not None and i >= first else FULL for i in range(layers))
    if SLIDING in pattern and window is None:
        raise Unreadable(
            "layer_types", SLIDING, "use_sliding_window true and a sliding_window", "correct one of the keys"
        )
    if SLIDING not in pattern:
        return {"layer_types": None, "kinds": None}
    return {"layer_types": pattern, "kinds": {SLIDING: LayerKind(window=window)}}


def write_window(d: DecoderFields) -> Mapping[str, Any]:
    pattern = d.layer_types or (FULL,) * d.num_layers
    slides = SLIDING in pattern
    return {
        "layer_types": list(pattern),
        "use_sliding_window": slides,
        "sliding_window": d.kinds[SLIDING].window if slides and d.kinds else None,
        "max_window_layers": pattern.index(SLIDING) if slides else d.num_layers,
    }


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unreadable(key, value, "a whole number")
    return value


FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=151936,
        hidden=4096,
        intermediate=22016,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        longest=32768,
        eps=1e-6,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    rope(),
    via(
        ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
        read_window,
        write_window,
    ),
    via((), lambda config: {"scale_after_cast": True}, lambda d: {}, "Qwen3RMSNorm casts, then scales"),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released Qwen3 config at a size where every dimension differs."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "max_window_layers": 3,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


_NEW = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS = {
    "untied": Variant(_tiny(), "grouped queries, head_dim unequal to hidden/heads, an own head"),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "tied_copy": Variant(
        _tiny(tie_word_embeddings=True), "a tied head with an equal copy on disk (Qwen3-0.6B)", head="equal"
    ),
    "tied_different": Variant(
        _tiny(tie_word_embeddings=True), "a config that says tied over a head that differs", head="different"
    ),
    "biases": Variant(_tiny(attention_bias=True), "biases on q, k, v and o"),
    "mqa": Variant(_tiny(num_key_value_heads=1), "one key/value head"),
    "mha": Variant(_tiny(num_key_value_heads=None), "as many key/value heads as queries, by null"),
    "square": Variant(
        _tiny(hidden_size=32, head_dim=8, num_key_value_heads=4, intermediate_size=32),
        "every matrix square, so that a missed transpose shows in values only",
    ),
    "window": Variant(
        _tiny(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=4),
        "a window on the layers from max_window_layers on",
    ),
    "window_unused": Variant(
        _tiny(use_sliding_window=False, sliding_window=5, max_window_layers=1), "a window that is not used"
    ),
    "window_types": Variant(
        _tiny(
            use_sliding_window=True,
            sliding_window=6,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING],
            num_hidden_layers=4,
        ),
        "a pattern stated layer by layer",
    ),
    "linear": Variant(_tiny(rope_scaling={"type": "linear", "factor": 3.0}), "linear rope, old spelling with type"),
    "yarn": Variant(
        _tiny(rope_scaling={**_NEW, "original_max_position_embeddings": 64}, rope_theta=100.0, head_dim=16),
        "YaRN, old spelling with rope_type; a base at which the ramp spans several frequencies",
    ),
    "yarn_new": Variant(
        _without(
            "rope_theta",
            "rope_scaling",
            rope_parameters={
                **_NEW,
                "original_max_position_embeddings": 64,
                "rope_theta": 100.0,
                "beta_fast": 4.0,
                "beta_slow": 0.75,
                "truncate": False,
            },
            head_dim=16,
        ),
        "YaRN in rope_parameters, betas stated, correction range not rounded",
    ),
    "yarn_no_original": Variant(
        _tiny(rope_scaling={"type": "yarn", "factor": 4.0}, rope_theta=10000.0, max_position_embeddings=16),
        "YaRN whose original length is max_position_embeddings",
        length=60,
    ),
    "yarn_factor": Variant(
        _tiny(rope_scaling={**_NEW, "attention_factor": 1.3}, rope_theta=10000.0),
        "YaRN with a stated attention factor",
        length=60,
    ),
    "yarn_mscale": Variant(
        _tiny(rope_scaling={**_NEW, "mscale": 1.0, "mscale_all_dim": 0.5}, rope_theta=10000.0),
        "YaRN with the ratio of two scales as its amplitude",
        length=60,
    ),
    "llama3": Variant(
        _tiny(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            rope_theta=100.0,
            head_dim=16,
        ),
        "the llama3 ramp, at a base at which it spans several frequencies",
        length=60,
    ),
    "eps": Variant(_tiny(rms_norm_eps=0.01, num_hidden_layers=2), "an epsilon that is not the class's"),
    "gelu": Variant(_tiny(hidden_act="gelu"), "the erf form of gelu in the gated MLP"),
    "deep": Variant(
        _tiny(num_hidden_layers=12, tie_word_embeddings=True, torch_dtype="bfloat16"),
        "12 layers, so that 10 sorts after 2, in a bfloat16 file",
        head="absent",
        storage="bfloat16",
    ),
    "mixed": Variant(
        _tiny(torch_dtype="bfloat16", num_hidden_layers=4),
        "float32 leaves inside a bfloat16 file, one of them in a single layer",
        storage="bfloat16",
        float32=("k_norm.weight", "layers.2.input_layernorm.weight", "model.norm.weight"),
    ),
}

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Qwen3ForCausalLM",
    variants=VARIANTS,
)
