"""Qwen3-MoE: Qwen3-30B-A3B, 235B-A22B, Coder-480B (transformers 5.24 `Qwen3MoeForCausalLM`, `Qwen3MoeConfig`).

Qwen3's attention, and experts chosen by a softmax over all of them. A window, where one is used, is every layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.records import LayerKind, Mixture
from .blocks import (
    PRE_NORMS,
    activation,
    attention,
    bookkeeping,
    experts,
    gated_mlp,
    layer_norms,
    tied,
    trunk,
    widths,
)
from .family import Family, Variant
from .fields import Config, Unreadable, count, expert_count, flag, inert, layer_count, optional, same, value_of, via
from .rope import rope
from .rules import Statement

SLIDING = "sliding_attention"
EXPERTS = ("num_experts", "num_local_experts")
"""The releases' key, and what transformers 5 writes (`Qwen3MoeConfig.attribute_map`)."""


def read_window(config: Config) -> Mapping[str, Any]:
    """`Qwen3MoeModel` masks every layer alike: by `sliding_window`, when `use_sliding_window` is true."""
    used = value_of(config, "use_sliding_window", flag, False)
    window = value_of(config, "sliding_window", optional(count), 4096) if used else None
    if window is None:
        return {"layer_types": None, "kinds": None}
    layers = value_of(config, "num_hidden_layers", layer_count, 24)
    return {"layer_types": (SLIDING,) * layers, "kinds": {SLIDING: LayerKind(window=window)}}


def write_window(d: DecoderFields) -> Mapping[str, Any]:
    window = d.kinds[SLIDING].window if d.kinds else None
    return {"use_sliding_window": window is not None, "sliding_window": window}


def read_mixture(config: Config) -> Mapping[str, Any]:
    """The experts and the layers that have them: layer i is sparse when (i + 1) is a multiple of
    `decoder_sparse_step` and `mlp_only_layers` does not list it (`Qwen3MoeDecoderLayer`)."""
    stated = {key: expert_count(key, config[key]) for key in EXPERTS if key in config}
    if len(set(stated.values())) > 1:
        raise Unreadable(EXPERTS[1], stated[EXPERTS[1]], f"{stated[EXPERTS[0]]}, as in {EXPERTS[0]}")
    total = next(iter(stated.values()), 128)
    chosen = value_of(config, "num_experts_per_tok", count, 8)
    if chosen > total:
        raise Unreadable("num_experts_per_tok", chosen, f"at most the number of experts, {total}")
    layers = value_of(config, "num_hidden_layers", layer_count, 24)
    step = value_of(config, "decoder_sparse_step", count, 1)
    dense = value_of(config, "mlp_only_layers", _indices, ())
    outside = [index for index in dense if index >= layers]
    if outside:
        raise Unreadable("mlp_only_layers", outside[0], f"layers below {layers}")
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    mixture = Mixture(
        experts=total,
        top_k=chosen,
        layers=sparse,
        norm_topk_prob=value_of(config, "norm_topk_prob", flag, False),
        expert_features=value_of(config, "moe_intermediate_size", count, 768),
    )
    return {"mixture": mixture}


def write_mixture(d: DecoderFields) -> Mapping[str, Any]:
    mixture = d.mixture
    if mixture is None:
        return {}
    sparse = range(d.num_layers) if mixture.layers is None else mixture.layers
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": mixture.expert_features,
        "norm_topk_prob": mixture.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(d.num_layers) if i not in sparse],
    }


def _indices(key: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    fits = isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
    if not fits:
        raise Unreadable(key, value, "a list of layer indices")
    return tuple(value)


FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=151936,
        hidden=2048,
        intermediate=6144,
        layers=24,
        heads=32,
        kv_heads=4,
        head_dim=None,
        longest=32768,
        eps=1e-6,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    rope(),
    via(("use_sliding_window", "sliding_window"), read_window, write_window),
    inert("max_window_layers", why="Qwen3MoeModel does not read it"),
    via(
        (
            *EXPERTS,
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        ),
        read_mixture,
        write_mixture,
    ),
    inert("router_aux_loss_coef", "output_router_logits", why="the training loss, and what the reference returns"),
    via((), lambda config: {"scale_after_cast": True}, lambda d: {}, "Qwen3MoeRMSNorm casts, then scales"),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)
    yield from experts(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released Qwen3-MoE config at a size where every dimension differs, its epsilon large enough for another one to
    show far above rounding."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "max_window_layers": 3,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 18,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-04,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
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


VARIANTS = {
    "experts": Variant(_tiny(), "six experts, two a token, their weights normalised"),
    "fused": Variant(_tiny(), "experts fused in two tensors a layer", form="fused"),
    "unnormalised": Variant(_tiny(norm_topk_prob=False), "weights as the softmax over all experts leaves them"),
    "norm_absent": Variant(_without("norm_topk_prob"), "the class default: not normalised"),
    "local_experts": Variant(
        _without("num_experts", num_local_experts=6), "the expert count by the key transformers 5 writes"
    ),
    "sparse_step": Variant(
        _tiny(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=6), "every other layer sparse, one excepted"
    ),
    "window": Variant(
        _tiny(use_sliding_window=True, sliding_window=5, max_window_layers=2), "a window, on every layer"
    ),
    "odd_experts": Variant(_tiny(num_experts=7, num_experts_per_tok=3), "an expert count that is no power of two"),
    "one_of_many": Variant(_tiny(num_experts=5, num_experts_per_tok=1), "one expert a token"),
    "wide": Variant(_tiny(moe_intermediate_size=24), "experts as wide as the model"),
    "narrow": Variant(
        _tiny(moe_intermediate_size=12), "2 x intermediate equals hidden, fused and square", form="fused"
    ),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "biases": Variant(_tiny(attention_bias=True), "biases on q, k, v and o"),
    "square": Variant(
        _tiny(hidden_size=32, head_dim=8, num_key_value_heads=4, moe_intermediate_size=32),
        "every matrix of a layer but the router square",
    ),
    "deep": Variant(
        _tiny(num_hidden_layers=13, mlp_only_layers=[0, 1], torch_dtype="bfloat16"),
        "two dense layers, then eleven sparse ones, in a bfloat16 file with float32 routers",
        storage="bfloat16",
        float32=("mlp.gate.weight",),
    ),
}

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Qwen3MoeForCausalLM",
    variants=VARIANTS,
)
