"""OLMo 3: Olmo-3-7B, Olmo-3.1-32B (transformers 5.24 `Olmo3ForCausalLM`, `Olmo3Config`).

Post-norm blocks, q/k norm over the whole projection, three sliding layers to one full. YaRN belongs to the full
layers; the sliding ones turn by the same base, unscaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import LayerKind
from .blocks import activation, attention, bookkeeping, gated_mlp, layer_norms, layer_pattern, tied, trunk, widths
from .family import Family, Variant
from .fields import Config, Unreadable, count, flag, layer_count, optional, same, value_of, via
from .rope import KEY as ROPE
from .rope import rope_of_kind, write_rope_of_kind
from .rules import Statement
from .spelling import KindRope

FULL, SLIDING = "full_attention", "sliding_attention"
THETA = 500_000.0
"""`Olmo3Config.default_theta`."""

POST_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
"""`Olmo3DecoderLayer` norms what each sublayer returns and not what it reads."""


def read_kinds(config: Config) -> Mapping[str, Any]:
    """The pattern, the window and a rope for each kind: every fourth layer is full where `layer_types` is unset."""
    layers = value_of(config, "num_hidden_layers", layer_count, 32)
    pattern = layer_pattern(config, layers, (FULL, SLIDING))
    if pattern is None:
        pattern = tuple(SLIDING if (i + 1) % 4 else FULL for i in range(layers))
    window = value_of(config, "sliding_window", optional(count), 4096)
    if SLIDING in pattern and window is None:
        raise Unreadable("sliding_window", window, "a number: some layers are sliding_attention")
    kinds = {
        name: LayerKind(window=window if name == SLIDING else None, **rope_of_kind(name, config, THETA))
        for name in dict.fromkeys(pattern)
    }
    return {"layer_types": pattern, "kinds": kinds}


def write_kinds(d: DecoderFields) -> Mapping[str, Any]:
    kinds = d.kinds or {}
    written: dict[str, Any] = {"layer_types": list(d.layer_types or ())}
    if SLIDING in kinds:
        written["sliding_window"] = kinds[SLIDING].window
    return written | {ROPE: {name: write_rope_of_kind(d, name) for name in kinds}}


def notice_yarn(config: Config) -> str | None:
    if rope_of_kind(FULL, config, THETA)["yarn"] is None or rope_of_kind(SLIDING, config, THETA)["yarn"] is not None:
        return None
    return (
        "YaRN turns full_attention layers alone, as OLMo 3 was trained and as transformers 5.24 computes it; "
        "transformers 5.5 to 5.12 put it on the sliding layers too"
    )


FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=50304,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        head_dim=None,
        longest=2048,
        eps=1e-5,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    via(("layer_types", "sliding_window", ROPE), read_kinds, write_kinds, "", notice_yarn),
    via(
        (),
        lambda config: {"pre_norms": False, "sandwich_norms": True, "qk_norm_scope": "projection"},
        lambda d: {},
        "Olmo3DecoderLayer norms outputs; Olmo3Attention norms whole projections",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, POST_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released OLMo 3 config at a size where every dimension differs."""
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "model_type": "olmo3",
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": False,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

_WIDE = {"num_hidden_layers": 4, "hidden_size": 128}
"""Sixteen frequencies a head, so that YaRN's ramp has some between its ends."""

VARIANTS = {
    "pattern": Variant(_tiny(), "no pattern in the config: every fourth layer full; grouped queries"),
    "mha": Variant(_tiny(num_key_value_heads=4), "a key/value head a query (7B)"),
    "yarn": Variant(
        _tiny(rope_scaling=_YARN, **_WIDE),
        "YaRN by the old flat spelling, on the full layers alone",
        length=80,
    ),
    "yarn_factor": Variant(
        _tiny(rope_scaling={**_YARN, "attention_factor": 1.3}, **_WIDE),
        "YaRN with a stated attention factor",
        length=80,
    ),
    "yarn_off": Variant(
        _tiny(rope_scaling={**_YARN, "attention_factor": 1.0}, **_WIDE),
        "YaRN with its amplitude turned off",
        length=80,
    ),
    "types": Variant(
        _without(
            "rope_theta",
            "rope_scaling",
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            rope_parameters={
                FULL: {**_YARN, "rope_theta": 20000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 3000.0},
            },
        ),
        "rope by layer type, the two bases apart",
        length=80,
    ),
    "biases": Variant(_tiny(attention_bias=True), "biases on q, k, v and o"),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "deep": Variant(
        _tiny(num_hidden_layers=12, dtype="bfloat16"),
        "12 layers, so that 10 sorts after 2, in a bfloat16 file with float32 leaves",
        storage="bfloat16",
        float32=("k_norm.weight", "layers.2.post_feedforward_layernorm.weight"),
    ),
    "square": Variant(
        _tiny(hidden_size=32, num_key_value_heads=4, intermediate_size=32),
        "every matrix square, so that a missed transpose shows in values only",
    ),
}

FAMILY = Family(
    name="olmo3",
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Olmo3ForCausalLM",
    variants=VARIANTS,
    kind_rope=KindRope(local_theta="rope_theta"),
)
