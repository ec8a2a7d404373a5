"""GLM-4.5, 4.5-Air, 4.6 and 4.7 (transformers 5.24 `Glm4MoeForCausalLM`, `Glm4MoeConfig`).

Half-split rope over half of a head, q/k norm where `use_qk_norm` says so, dense first layers, then experts chosen by
a sigmoid with a float32 correction bias, beside shared ones. Prediction-depth layers follow the last layer on disk;
transformers ignores them, and they are carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dew_core.fields import DecoderFields
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
from .fields import flag, inert, same, via
from .mixtures import carried_depths, prediction_depths, sigmoid_experts
from .rope import partial_rope
from .rules import Statement

FIELDS = (
    *bookkeeping(),
    *widths(
        vocab=151552,
        hidden=4096,
        intermediate=10944,
        layers=46,
        heads=96,
        kv_heads=8,
        head_dim=None,
        longest=131072,
        eps=1e-5,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    same("use_qk_norm", "qk_norm", flag, False),
    partial_rope(default_factor=0.5),
    sigmoid_experts(
        experts=128,
        chosen=8,
        groups=1,
        kept=1,
        first_dense=1,
        width=1408,
        shared=1,
        normalised=True,
        scaling=1.0,
        layers=46,
    ),
    prediction_depths(),
    inert("output_router_logits", "router_aux_loss_coef", why="the training loss, and what the reference returns"),
    via(
        (),
        lambda config: {"scale_after_cast": True, "o_proj_bias": False},
        lambda d: {},
        "Glm4MoeAttention biases q, k and v alone; Glm4MoeRMSNorm casts, then scales",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from attention(d)
    yield from gated_mlp(d)
    yield from experts(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released GLM-4.5 config at a size where every dimension differs."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3, 5],
        "first_k_dense_replace": 1,
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "max_position_embeddings": 256,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 18,
        "n_group": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "float32",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


VARIANTS = {
    "qk_norm": Variant(_tiny(), "q/k norm, biases, one dense layer, a scaled sigmoid router (4.5 to 4.7)"),
    "air": Variant(_tiny(use_qk_norm=False, routed_scaling_factor=1.0), "no q/k norm, unscaled weights (4.5-Air)"),
    "plain": Variant(_tiny(attention_bias=False), "no biases"),
    "fused": Variant(_tiny(), "experts fused in two tensors a layer", form="fused"),
    "factor_absent": Variant(_without("partial_rotary_factor"), "half a head turns where the key is absent"),
    "factor_third": Variant(_tiny(partial_rotary_factor=1 / 3), "a third of a head turns"),
    "bias_seven": Variant(
        _tiny(torch_dtype="bfloat16"),
        "correction biases near 7 that differ by less than bfloat16 resolves, in float32 in a bfloat16 file",
        storage="bfloat16",
        float32=("e_score_correction_bias",),
        correction_bias=(7.0, 0.2),
    ),
    "groups": Variant(
        _tiny(n_routed_experts=8, n_group=4, topk_group=2),
        "group limits under negative biased scores",
        correction_bias=(-2.0, 0.2),
    ),
    "unnormalised": Variant(_tiny(norm_topk_prob=False), "weights as the sigmoid leaves them, scaled"),
    "shared_two": Variant(_tiny(n_shared_experts=2), "two shared experts, one dense branch of twice the width"),
    "odd_experts": Variant(_tiny(n_routed_experts=7, num_experts_per_tok=3), "an expert count that is no power of two"),
    "wide": Variant(_tiny(moe_intermediate_size=24), "experts as wide as the model"),
    "narrow": Variant(_tiny(moe_intermediate_size=12), "2 x intermediate equals hidden", form="fused"),
    "square": Variant(
        _tiny(hidden_size=32, head_dim=8, num_key_value_heads=4, intermediate_size=32, moe_intermediate_size=32),
        "every matrix of a layer but the router square",
    ),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "depths": Variant(
        _tiny(num_nextn_predict_layers=2), "two prediction-depth layers past the last layer, carried", depths=2
    ),
    "deep": Variant(
        _tiny(num_hidden_layers=13, first_k_dense_replace=2, torch_dtype="bfloat16"),
        "two dense layers, then eleven sparse ones, in a bfloat16 file",
        storage="bfloat16",
        float32=("e_score_correction_bias",),
    ),
}

FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    architecture="Glm4MoeForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Glm4MoeForCausalLM",
    variants=VARIANTS,
    carried=carried_depths(46),
)
