"""Gemma 3: the text-only releases (270m, 1b) and the text half of the multimodal ones (4b, 12b, 27b)
(transformers 5.24 `Gemma3ForCausalLM`, `Gemma3ForConditionalGeneration`).

Sandwich norms with (1 + w), embeddings times sqrt(hidden), q/k norm per head, five sliding layers to one full,
each kind with its own rope. The vision tower and projector of the wrappers are carried, not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import LayerKind
from .blocks import (
    SANDWICH_NORMS,
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
from .family import Family, Spelling, Variant, Wrapper
from .fields import Config, Unreadable, count, fixed, flag, inert, layer_count, optional, positive, same, value_of, via
from .rope import KEY as ROPE
from .rope import rope_of_kind, write_rope_of_kind
from .rules import Carried, Statement
from .spelling import KindRope

FULL, SLIDING = "full_attention", "sliding_attention"
THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
"""`Gemma3TextConfig.default_theta`, global and local."""


def read_kinds(config: Config) -> Mapping[str, Any]:
    """The pattern, the window and a rope for each kind (`Gemma3TextConfig`): stated `layer_types` win, else every
    `sliding_window_pattern`-th layer (6 when unset) is full."""
    layers = value_of(config, "num_hidden_layers", layer_count, 26)
    every = value_of(config, "sliding_window_pattern", count, 6)
    pattern = layer_pattern(config, layers, (FULL, SLIDING))
    if pattern is None:
        recorded = value_of(config, "_sliding_window_pattern", count, every)
        if recorded != every:
            # The reference class writes this key beside layer_types and does not read it.
            raise Unreadable("_sliding_window_pattern", recorded, "layer_types beside it", "state layer_types")
        pattern = tuple(SLIDING if (i + 1) % every else FULL for i in range(layers))
    window = value_of(config, "sliding_window", optional(count), 4096)
    if SLIDING in pattern and window is None:
        raise Unreadable("sliding_window", window, "a number: some layers are sliding_attention")
    kinds = {}
    for name in dict.fromkeys(pattern):
        rope = rope_of_kind(name, config, THETA[name])
        kinds[name] = LayerKind(window=window if name == SLIDING else None, **rope)
    return {"layer_types": pattern, "kinds": kinds}


def write_kinds(d: DecoderFields) -> Mapping[str, Any]:
    kinds = d.kinds or {}
    pattern = d.layer_types or (FULL,) * d.num_layers
    written: dict[str, Any] = {"layer_types": list(pattern)}
    if SLIDING in kinds:
        written["sliding_window"] = kinds[SLIDING].window
    written[ROPE] = {name: write_rope_of_kind(d, name) for name in kinds}
    return written


def read_scale(config: Config) -> Mapping[str, Any]:
    return {"attention_scale": value_of(config, "query_pre_attn_scalar", positive, 256) ** -0.5}


def write_scale(d: DecoderFields) -> Mapping[str, Any]:
    scalar = d.head_features if d.attention_scale is None else d.attention_scale**-2
    whole = round(scalar)
    return {"query_pre_attn_scalar": whole if abs(scalar - whole) < 1e-9 * scalar else scalar}


def read_attention_softcap(config: Config) -> Mapping[str, Any]:
    value_of(config, "attn_logit_softcapping", optional(positive), None)
    return {}


def notice_attention_softcap(config: Config) -> str | None:
    cap = config.get("attn_logit_softcapping")
    if cap is None:
        return None
    return f"attn_logit_softcapping is {cap}: Gemma3Attention does not apply it, and neither does the decoder"


FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=262208,
        hidden=2304,
        intermediate=9216,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        longest=131072,
        eps=1e-6,
    ),
    activation("hidden_activation", "gelu_pytorch_tanh"),
    tied(default=True),
    same("attention_bias", "attention_bias", flag, False),
    via(
        ("layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", ROPE),
        read_kinds,
        write_kinds,
    ),
    via(("query_pre_attn_scalar",), read_scale, write_scale),
    same("final_logit_softcapping", "final_logit_softcap", optional(positive), None),
    via(
        ("attn_logit_softcapping",),
        read_attention_softcap,
        lambda d: {},
        "stored by Gemma3Attention and never passed to attention",
        notice_attention_softcap,
    ),
    fixed(
        "use_bidirectional_attention",
        False,
        "only a causal Gemma 3 is a decoder; the embedding models are not supported",
    ),
    via(
        (),
        lambda config: {"scale_offset": True, "sandwich_norms": True, "embedding_scale": True},
        lambda d: {},
        "Gemma3RMSNorm scales by 1 + w; Gemma3DecoderLayer norms inputs and outputs",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, SANDWICH_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)


TOWER = "the vision tower is not part of the decoder"
PROJECTOR = "the image projector is not part of the decoder"

WRAPPER = Wrapper(
    model_types=("gemma3",),
    architecture="Gemma3ForConditionalGeneration",
    fields=(
        *bookkeeping(),
        inert("vision_config", "mm_tokens_per_image", why="image input, carried and not computed"),
        inert("boi_token_index", "eoi_token_index", "image_token_index", why="image placeholders"),
        inert("boi_token_id", "eoi_token_id", "image_token_id", why="image placeholders, newer spelling"),
    ),
    shared=("tie_word_embeddings",),
    carried=(
        Carried("vision_tower.", TOWER),
        Carried("model.vision_tower.", TOWER),
        Carried("multi_modal_projector.", PROJECTOR),
        Carried("model.multi_modal_projector.", PROJECTOR),
    ),
    parts={"vision_config": ("vision_tower.", "model.vision_tower.")},
)

HUB = Spelling("language_model.model.", "language_model.lm_head.")
"""The original 4b, 12b and 27b releases."""
SAVED = Spelling("model.language_model.", "lm_head.")
"""What transformers 4.52 and later save and hold in memory."""


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released Gemma 3 text config at a size where every dimension differs."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 10,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 10,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 5,
        "torch_dtype": "float32",
        "transformers_version": "4.50.0",
        "use_cache": True,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


def _wrapped(**text: Any) -> dict[str, Any]:
    """A released wrapper config, whose text config relies on omission, at a tiny size."""
    inner = _tiny(rope_scaling={"factor": 8.0, "rope_type": "linear"}, vocab_size=136, **text)
    for key in ("architectures", "torch_dtype", "transformers_version", "rope_theta", "rope_local_base_freq"):
        del inner[key]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 132,
        "eoi_token_index": 133,
        "eos_token_id": [1, 106],
        "image_token_index": 134,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": inner,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0",
        "vision_config": {
            "hidden_size": 16,
            "image_size": 28,
            "intermediate_size": 20,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 7,
            "vision_use_head": False,
        },
    }


VARIANTS = {
    "text": Variant(_tiny(), "no pattern and no tie flag in the config: six to one, tied", head="absent"),
    "pattern": Variant(_tiny(sliding_window_pattern=3), "the pattern as a number", head="absent"),
    "types": Variant(
        _without(
            "rope_theta",
            "rope_local_base_freq",
            "rope_scaling",
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL, FULL, SLIDING],
            _sliding_window_pattern=6,
            rope_parameters={
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
            },
        ),
        "the pattern layer by layer and rope_parameters by layer type",
        head="absent",
    ),
    "linear": Variant(
        _tiny(rope_scaling={"rope_type": "linear", "factor": 8.0}, num_hidden_layers=6, head_dim=16),
        "linear factor 8 on the full layers only",
        head="absent",
        length=80,
    ),
    "yarn": Variant(
        _tiny(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            rope_theta=100.0,
            head_dim=16,
            num_hidden_layers=6,
        ),
        "YaRN on the full layers only, at a base at which its ramp spans several frequencies",
        head="absent",
    ),
    "eps": Variant(_tiny(rms_norm_eps=0.01, num_hidden_layers=2), "an epsilon that is not the class's", head="absent"),
    "scalar": Variant(_tiny(query_pre_attn_scalar=168), "an attention scale that is not head_dim (27b)", head="absent"),
    "final_softcap": Variant(_tiny(final_logit_softcapping=5.0, num_hidden_layers=3), "capped logits", head="absent"),
    "attention_softcap": Variant(
        _tiny(attn_logit_softcapping=2.0, num_hidden_layers=3),
        "a cap that the reference stores and does not apply",
        head="absent",
    ),
    "untied": Variant(_tiny(tie_word_embeddings=False, num_hidden_layers=3), "an own head"),
    "tied_copy": Variant(_tiny(num_hidden_layers=3), "a tied head with an equal copy on disk", head="equal"),
    "tied_different": Variant(
        _tiny(num_hidden_layers=3), "a config that ties by default over a head that differs", head="different"
    ),
    "biases": Variant(_tiny(attention_bias=True, num_hidden_layers=3), "biases on q, k, v and o", head="absent"),
    "mqa": Variant(_tiny(num_key_value_heads=1, num_hidden_layers=3), "one key/value head (270m, 1b)", head="absent"),
    "mha": Variant(_tiny(num_key_value_heads=4, num_hidden_layers=3), "a key/value head a query", head="absent"),
    "erf": Variant(_tiny(hidden_activation="gelu", num_hidden_layers=3), "the erf form of gelu", head="absent"),
    "square": Variant(
        _tiny(hidden_size=32, head_dim=8, num_key_value_heads=4, intermediate_size=32, num_hidden_layers=6),
        "every matrix square, so that a missed transpose shows in values only",
        head="absent",
    ),
    "embedding_scale": Variant(
        _tiny(hidden_size=72, torch_dtype="bfloat16", num_hidden_layers=6),
        "sqrt(72) = 8.485, which bfloat16 rounds to 8.5",
        head="absent",
        storage="bfloat16",
    ),
    "deep": Variant(
        _tiny(num_hidden_layers=13, torch_dtype="bfloat16"),
        "13 layers, so that 10 sorts after 2, in a bfloat16 file with float32 leaves",
        head="absent",
        storage="bfloat16",
        float32=("q_norm.weight", "layers.3.post_feedforward_layernorm.weight"),
    ),
    "wrapper_hub": Variant(
        _wrapped(),
        "the releases' prefix, with a vision tower",
        HUB,
        head="absent",
        storage="bfloat16",
        length=80,
    ),
    "wrapper_saved": Variant(
        _wrapped(), "the prefix transformers saves", SAVED, head="absent", storage="bfloat16", length=80
    ),
}

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Gemma3ForCausalLM",
    variants=VARIANTS,
    spellings=(Spelling(), HUB, SAVED),
    wrapper=WRAPPER,
    kind_rope=KindRope(),
)
