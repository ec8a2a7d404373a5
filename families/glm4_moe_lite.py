"""GLM-4.7-Flash (transformers 5.24 `Glm4MoeLiteForCausalLM`, `Glm4MoeLiteConfig`).

DeepSeek V3's latent attention and experts at GLM's sizes. Which layers are sparse is said by `mlp_layer_types`: the
class makes the first layer dense where the list is absent, as the release is, and does not read the release's
`first_k_dense_replace`. The prediction-depth layer after the last one is ignored by transformers, and carried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..dew_core.fields import DecoderFields
from .blocks import (
    PRE_NORMS,
    activation,
    bookkeeping,
    experts,
    gated_mlp,
    latent_attention,
    latent_sizes,
    layer_norms,
    sizes,
    tied,
    trunk,
)
from .family import Family, Variant
from .fields import Config, Unreadable, count, fixed, flag, inert, same, value_of, via
from .mixtures import MLP_TYPES, carried_depths, prediction_depths, sigmoid_experts
from .rope import KEY as ROPE
from .rope import PARTIAL, read_rope, write_rope
from .rules import Statement


def read_rotary(config: Config) -> Mapping[str, Any]:
    """The rope of the rotary features, all of which turn: a `partial_rotary_factor`, at the top level or inside, is 1.

    `Glm4MoeLiteConfig.attribute_map` makes `head_dim` another name of `qk_rope_head_dim`, and a stated one wins: it
    is refused when the two differ.
    """
    params = dict(config.get(ROPE) or {})
    for factor in (params.pop(PARTIAL, None), config.get(PARTIAL)):
        if factor is not None and (isinstance(factor, bool) or factor != 1):
            raise Unreadable(PARTIAL, factor, "1: every one of the qk_rope_head_dim features turns")
    width = value_of(config, "qk_rope_head_dim", count, 64)
    if config.get("head_dim", width) != width:
        raise Unreadable("head_dim", config["head_dim"], f"qk_rope_head_dim, {width}: they are one key to the class")
    return read_rope(params, config, 10000.0)


def write_rotary(d: DecoderFields) -> Mapping[str, Any]:
    return {ROPE: write_rope(d.rope_theta, d.rope_scaling, d.yarn)}


FIELDS = (
    *bookkeeping(),
    *sizes(vocab=154880, hidden=2048, intermediate=10240, layers=47, longest=202752, eps=1e-5),
    *latent_sizes(heads=20, q_lora=768, kv_lora=512, nope=192, rope=64, value=256),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    via((ROPE, PARTIAL, "head_dim"), read_rotary, write_rotary),
    same("rope_interleave", "rope_interleave", flag, True),
    sigmoid_experts(
        experts=64,
        chosen=4,
        groups=1,
        kept=1,
        first_dense=1,
        width=1536,
        shared=1,
        normalised=True,
        scaling=1.8,
        layers=47,
        said_by=(MLP_TYPES,),
    ),
    fixed("scoring_func", "sigmoid", "Glm4MoeLiteTopkRouter scores by a sigmoid"),
    fixed("topk_method", "noaux_tc", "Glm4MoeLiteTopkRouter chooses by the sum of a group's two best biased scores"),
    prediction_depths(),
    inert("output_router_logits", "router_aux_loss_coef", why="the training loss, and what the reference returns"),
    inert("pretraining_tp", why="how the model is spread over devices"),
    via((), lambda config: {"scale_after_cast": True}, lambda d: {}, "Glm4MoeLiteRMSNorm casts, then scales"),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from latent_attention(d)
    yield from gated_mlp(d)
    yield from experts(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """The released GLM-4.7-Flash config at a size where every dimension differs, values wider than the plain part of
    a key as there, and its epsilon large enough for another one to show far above rounding."""
    return {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": [2, 3, 5],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 40,
        "intermediate_size": 28,
        "kv_lora_rank": 30,
        "max_position_embeddings": 256,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 18,
        "n_group": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 2,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 36,
        "qk_nope_head_dim": 22,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-04,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.0rc0",
        "v_head_dim": 32,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


DENSE, SPARSE = "dense", "sparse"
BFLOAT16 = {"storage": "bfloat16", "float32": ("e_score_correction_bias",)}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 32,
    "rope_type": "yarn",
}

VARIANTS = {
    "untied": Variant(_tiny(), "no list of sparse layers: the first is dense, the others sparse (the release)"),
    "types": Variant(
        _without("first_k_dense_replace", mlp_layer_types=[SPARSE, DENSE, DENSE, SPARSE, DENSE], num_hidden_layers=5),
        "the sparse layers one by one, in no order that a number can say",
    ),
    "types_over_number": Variant(
        _tiny(mlp_layer_types=[DENSE, DENSE, SPARSE], first_k_dense_replace=1),
        "a list beside a number that says otherwise and is not read",
    ),
    "rope_parameters": Variant(
        _without(
            "rope_theta",
            "rope_scaling",
            "partial_rotary_factor",
            rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
            qk_head_dim=38,
            mlp_layer_types=[DENSE, SPARSE, SPARSE],
            bos_token_id=0,
            pretraining_tp=1,
            rope_interleave=True,
            output_router_logits=False,
        ),
        "the keys that transformers 5 writes, at the class's own rope base",
    ),
    "yarn": Variant(
        _tiny(rope_scaling=YARN, rope_theta=10000), "YaRN's two corrections, which the class takes from DeepSeek V3"
    ),
    "no_q_lora": Variant(_tiny(q_lora_rank=None), "queries straight from the states"),
    "half_split": Variant(_tiny(rope_interleave=False), "rotary pairs are halves, as re-saved models have"),
    "biases": Variant(_tiny(attention_bias=True), "biases on both projections down and on the output"),
    "groups": Variant(
        _tiny(n_routed_experts=8, n_group=4, topk_group=2),
        "group limits under negative biased scores",
        correction_bias=(-2.0, 0.2),
    ),
    "bias_seven": Variant(
        _tiny(dtype="bfloat16"),
        "correction biases near 7 that differ by less than bfloat16 resolves, in float32 in a bfloat16 file",
        correction_bias=(7.0, 0.2),
        **BFLOAT16,
    ),
    "unnormalised": Variant(_tiny(norm_topk_prob=False), "weights as the sigmoid leaves them, scaled"),
    "shared_two": Variant(_tiny(n_shared_experts=2), "two shared experts, one dense branch of twice the width"),
    "all_dense": Variant(
        _tiny(mlp_layer_types=[DENSE] * 3, dtype="bfloat16"),
        "no sparse layer, in a bfloat16 file with float32 latent norms: no choice of experts hides what rounding does",
        storage="bfloat16",
        float32=("kv_a_layernorm.weight",),
    ),
    "all_sparse": Variant(_tiny(mlp_layer_types=[SPARSE] * 3), "no dense layer"),
    "fused": Variant(_tiny(), "experts fused in two tensors a layer", form="fused"),
    "latent_eps": Variant(
        _tiny(rms_norm_eps=0.01),
        "the latents' norms keep their own epsilon, 1e-6, beside a much larger one of the block's",
    ),
    "equal_widths": Variant(
        _tiny(
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            kv_lora_rank=16,
            q_lora_rank=16,
            rope_scaling=YARN,
            rope_theta=10000,
        ),
        "every part of a head as wide as the others, so that a wrong cut has the right shape",
    ),
    "square": Variant(
        _tiny(
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=32,
            kv_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        "every matrix of a layer square but the router and kv_b_proj",
    ),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "depths": Variant(
        _tiny(num_nextn_predict_layers=2), "two prediction-depth layers past the last layer, carried", depths=2
    ),
    "deep": Variant(
        _tiny(num_hidden_layers=13, dtype="bfloat16"),
        "one dense layer, then twelve sparse ones, in bfloat16",
        **BFLOAT16,
    ),
}

FAMILY = Family(
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    architecture="Glm4MoeLiteForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:Glm4MoeLiteForCausalLM",
    variants=VARIANTS,
    carried=carried_depths(47),
)
