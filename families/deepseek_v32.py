"""DeepSeek V3.2 and V3.2-Exp (transformers 5.24 `DeepseekV32ForCausalLM`, `DeepseekV32Config`).

DeepSeek V3 with a lightning indexer in every layer, which chooses the keys a query attends. The indexer's rotary pairs
are halves of its heads' first features, beside the attention's own, which are neighbours: no key of the config says
so, the class does. Prediction-depth layers are carried, an indexer of their own included.
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
    layer_norms,
    sizes,
    tied,
    trunk,
)
from .family import Family, Variant
from .fields import fixed, flag, inert, same, via
from .indexers import indexed_latent_sizes, indexers
from .mixtures import FIRST_DENSE, MLP_TYPES, carried_depths, prediction_depths, sigmoid_experts
from .rope import rope
from .rules import Statement

FIELDS = (
    *bookkeeping(),
    *sizes(vocab=129280, hidden=7168, intermediate=18432, layers=61, longest=163840, eps=1e-6),
    *indexed_latent_sizes(
        heads=128,
        q_lora=1536,
        kv_lora=512,
        nope=128,
        rope=64,
        value=128,
        index_heads=64,
        index_dim=128,
        chosen=2048,
        interleaved=False,
    ),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    rope(),
    fixed("rope_interleave", True, "DeepseekV32Attention turns neighbouring features and reads no such key"),
    sigmoid_experts(
        experts=256,
        chosen=8,
        groups=8,
        kept=4,
        first_dense=3,
        width=2048,
        shared=1,
        normalised=True,
        scaling=2.5,
        layers=61,
        said_by=(MLP_TYPES, FIRST_DENSE),
    ),
    fixed("moe_layer_freq", 1, "DeepseekV32DecoderLayer routes every layer past the dense ones"),
    fixed("scoring_func", "sigmoid", "DeepseekV32TopkRouter scores by a sigmoid"),
    fixed("topk_method", "noaux_tc", "DeepseekV32TopkRouter chooses by the sum of a group's two best biased scores"),
    prediction_depths(),
    inert("output_router_logits", "router_aux_loss_coef", why="the training loss, and what the reference returns"),
    inert("ep_size", "pretraining_tp", why="how the model is spread over devices"),
    via(
        (),
        lambda config: {"scale_after_cast": True, "rope_interleave": True},
        lambda d: {},
        "DeepseekV32RMSNorm casts, then scales; DeepseekV32Attention turns neighbouring features",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from latent_attention(d)
    yield from indexers(d)
    yield from gated_mlp(d)
    yield from experts(d)


def _yarn(mscale: float, mscale_all_dim: float) -> Mapping[str, Any]:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    }


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released DeepSeek V3.2 config at a size where every dimension differs, its rope unscaled, fewer keys chosen
    than a quarter of the probe has, and its epsilon large enough for another one to show far above rounding."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 40,
        "index_head_dim": 26,
        "index_n_heads": 12,
        "index_topk": 6,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "kv_lora_rank": 30,
        "max_position_embeddings": 256,
        "model_type": "deepseek_v32",
        "moe_intermediate_size": 18,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 7,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 36,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-04,
        "rope_scaling": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
        "transformers_version": "4.44.2",
        "use_cache": True,
        "v_head_dim": 20,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
BFLOAT16 = {"storage": "bfloat16", "float32": ("e_score_correction_bias", "weights_proj.weight")}

VARIANTS = {
    "untied": Variant(_tiny(), "6 of up to 48 keys chosen, one dense layer, an unscaled rope"),
    "most_seen": Variant(_tiny(index_topk=40), "most keys chosen: dense attention until the last queries"),
    "two_keys": Variant(_tiny(index_topk=2), "two keys a query"),
    # Ten keys: of six, under the corrected softmax, one position's own rounding in torch is the whole bound.
    "yarn_1_1": Variant(
        _tiny(rope_scaling=_yarn(1.0, 1.0), index_topk=10),
        "YaRN as released: the softmax corrected, cos and sin not amplified",
    ),
    "yarn_1_half": Variant(
        _tiny(rope_scaling=_yarn(1.0, 0.5)), "both corrections, and they differ: the indexer's rope is amplified too"
    ),
    "rope_parameters": Variant(
        _without(
            "rope_theta",
            "rope_scaling",
            "num_nextn_predict_layers",
            "first_k_dense_replace",
            rope_parameters={key: value for key, value in _yarn(1.0, 0.5).items() if key != "type"}
            | {"rope_type": "yarn", "rope_theta": 10000.0},
            head_dim=16,
            qk_head_dim=48,
            layer_types=["indexed_attention"] * 3,
            mlp_layer_types=["sparse", "dense", "sparse"],
            mlp_bias=False,
            output_router_logits=False,
            pad_token_id=None,
        ),
        "the keys that transformers 5 writes",
    ),
    "biases": Variant(_tiny(attention_bias=True), "biases on both projections down and on the output"),
    "groups": Variant(
        _tiny(**GROUPS),
        "group limits under negative biased scores",
        correction_bias=(-2.0, 0.2),
    ),
    "all_dense": Variant(
        _tiny(first_k_dense_replace=3, torch_dtype="bfloat16", rope_scaling=_yarn(1.0, 0.5)),
        "no sparse layer, in a bfloat16 file with float32 latent norms and index weights: no choice of experts hides "
        "what rounding does",
        storage="bfloat16",
        float32=("kv_a_layernorm.weight", "weights_proj.weight"),
    ),
    "bias_seven": Variant(
        _tiny(torch_dtype="bfloat16"),
        "correction biases near 7 that differ by less than bfloat16 resolves, in float32 in a bfloat16 file",
        correction_bias=(7.0, 0.2),
        **BFLOAT16,
    ),
    "unnormalised": Variant(
        _tiny(norm_topk_prob=False, n_routed_experts=6),
        "weights as the sigmoid leaves them, scaled, of an even number of experts",
    ),
    "shared_two": Variant(_tiny(n_shared_experts=2), "two shared experts, one dense branch of twice the width"),
    "all_sparse": Variant(_tiny(first_k_dense_replace=0), "no dense layer"),
    "fused": Variant(_tiny(), "experts fused in two tensors a layer", form="fused"),
    "latent_eps": Variant(
        _tiny(rms_norm_eps=0.05),
        "the latents' norms and the indexer's keep their own epsilon, 1e-6, beside a much larger one of the block's",
    ),
    "equal_widths": Variant(
        _tiny(
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            kv_lora_rank=16,
            q_lora_rank=16,
            index_head_dim=16,
            rope_scaling=_yarn(1.0, 1.0),
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
            index_head_dim=32,
            index_n_heads=32,
        ),
        "every matrix of a layer square but the router, kv_b_proj and the indexer's queries",
    ),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "depths": Variant(
        _tiny(num_nextn_predict_layers=2), "two prediction-depth layers past the last layer, carried", depths=2
    ),
    "deep": Variant(
        _tiny(
            num_hidden_layers=13,
            first_k_dense_replace=2,
            torch_dtype="bfloat16",
            rope_scaling=_yarn(1.0, 1.0),
            **GROUPS,
        ),
        "two dense layers, then eleven sparse ones, in a bfloat16 file",
        **BFLOAT16,
    ),
}

FAMILY = Family(
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    architecture="DeepseekV32ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:DeepseekV32ForCausalLM",
    variants=VARIANTS,
    carried=carried_depths(61),
)
