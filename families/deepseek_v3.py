"""DeepSeek V3, R1 and V3.1, Kimi K2, and the text half of Kimi K2.5 (transformers 5.24 `DeepseekV3ForCausalLM`,
`DeepseekV3Config`, `Kimi_K25ForConditionalGeneration`).

Latent attention with neighbouring rotary pairs and YaRN's two corrections, dense first layers, then experts chosen by
a sigmoid with a float32 correction bias within the best groups, beside shared ones. `kimi_k2` is the same model under
another name and other sizes, which transformers 5.24 has no class of; `kimi_k25` wraps it beside a vision tower and
a projector, which are carried, not computed. Prediction-depth layers follow the last layer on disk; transformers
ignores them, and they are carried.
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
from .family import Family, Spelling, Variant, Wrapper
from .fields import fixed, flag, inert, same, via
from .generation_keys import generation_keys
from .mixtures import carried_depths, prediction_depths, sigmoid_experts
from .rope import rope
from .rules import Carried, Statement

FIELDS = (
    *bookkeeping(),
    *sizes(vocab=129280, hidden=7168, intermediate=18432, layers=61, longest=4096, eps=1e-6),
    *latent_sizes(heads=128, q_lora=1536, kv_lora=512, nope=128, rope=64, value=128),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    rope(),
    same("rope_interleave", "rope_interleave", flag, True),
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
    ),
    fixed("moe_layer_freq", 1, "DeepseekV3DecoderLayer routes every layer past the dense ones"),
    fixed("scoring_func", "sigmoid", "DeepseekV3TopkRouter scores by a sigmoid"),
    fixed("topk_method", "noaux_tc", "DeepseekV3TopkRouter chooses by the sum of a group's two best biased scores"),
    prediction_depths(),
    inert(
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        why="the training loss, and what the reference returns",
    ),
    inert("ep_size", "pretraining_tp", why="how the model is spread over devices"),
    *generation_keys(),
    via((), lambda config: {"scale_after_cast": True}, lambda d: {}, "DeepseekV3RMSNorm casts, then scales"),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from latent_attention(d)
    yield from gated_mlp(d)
    yield from experts(d)


TOWER = "the vision tower is not part of the decoder"
PROJECTOR = "the image projector is not part of the decoder"

WRAPPER = Wrapper(
    model_types=("kimi_k25",),
    architecture="Kimi_K25ForConditionalGeneration",
    fields=(
        *bookkeeping(),
        inert("vision_config", "projection_hidden_size", "projection_layer_norm_eps", why="image input, carried"),
        inert("media_placeholder_token_id", "image_token_id", "video_token_id", why="image and video placeholders"),
        inert("vision_start_token_id", "vision_end_token_id", "video_placeholder", why="marks of images and videos"),
        inert("use_unified_vision_chunk", why="how images are cut"),
        inert("ignore_index", why="the training loss"),
    ),
    shared=("tie_word_embeddings",),
    carried=(Carried("vision_tower.", TOWER), Carried("mm_projector.", PROJECTOR)),
    parts={"vision_config": ("vision_tower.",)},
)

KIMI_K25 = Spelling("language_model.model.", "language_model.lm_head.")
"""Kimi K2.5 and later. What transformers 5.24 saves of one is no layout: its renaming of the tower's `blocks` reaches
the decoder's layers."""


def _yarn(mscale: float, mscale_all_dim: float, **changes: Any) -> Mapping[str, Any]:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 32,
        "type": "yarn",
        **changes,
    }


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released DeepSeek V3 config at a size where every dimension differs, its rope unscaled, and its epsilon large
    enough for another one to show far above rounding."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 40,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "kv_lora_rank": 30,
        "max_position_embeddings": 256,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 18,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 6,
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
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 20,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


def _kimi(**changes: Any) -> dict[str, Any]:
    """Kimi K2's config: its model type, odd expert count and what it adds."""
    return _tiny(
        model_type="kimi_k2",
        aux_loss_alpha=0.001,
        seq_aux=True,
        pretraining_tp=1,
        n_routed_experts=7,
        rope_theta=50000.0,
        routed_scaling_factor=2.827,
        **changes,
    )


def _wrapped(**text: Any) -> dict[str, Any]:
    """Kimi K2.5's config at a tiny size: the text half states its defaults. The tower's sizes are under the keys of
    `Kimi_K25VisionConfig`, which does not know the release's."""
    yarn = _yarn(1.0, 1.0, factor=64.0, beta_fast=32.0, beta_slow=1.0)
    inner = _kimi(rope_scaling=yarn, **text)
    del inner["torch_dtype"]
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "ignore_index": -100,
        "media_placeholder_token_id": 140,
        "model_type": "kimi_k25",
        "pad_token_id": 2,
        "projection_hidden_size": 16,
        "text_config": {
            **inner,
            "add_cross_attention": False,
            "chunk_size_feed_forward": 0,
            "cross_attention_hidden_size": None,
            "do_sample": False,
            "dtype": "bfloat16",
            "is_decoder": False,
            "max_length": 20,
            "output_attentions": False,
            "pruned_heads": {},
            "return_dict": True,
            "temperature": 1.0,
            "tie_encoder_decoder": False,
            "top_k": 50,
        },
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 20,
            "merge_kernel_size": [2, 2],
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 7,
            "pos_emb_height": 4,
            "pos_emb_time": 2,
            "pos_emb_width": 4,
        },
    }


PROJECTIONS = r"\.(self_attn\.\w+_proj(_with_mqa)?|mlp(\.experts\.\d+|\.shared_experts)?\.(gate|up|down)_proj)\.weight$"
"""What DeepSeek's releases store in FP8: every matrix of a layer but the router's."""
ROUTED = r"\.mlp\.experts\.\d+\.\w+\.weight$"
"""What Kimi K2.5 stores packed."""
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
PARTIAL_BLOCKS = {
    "hidden_size": 136,
    "q_lora_rank": 200,
    "intermediate_size": 144,
    "moe_intermediate_size": 132,
    "torch_dtype": "bfloat16",
}
"""Sizes that are no multiples of a block's: every matrix has blocks that are cut."""

GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
BFLOAT16 = {"storage": "bfloat16", "float32": ("e_score_correction_bias",)}

VARIANTS = {
    "untied": Variant(_tiny(), "query latents, one dense layer, neighbouring rotary pairs, an unscaled rope"),
    "yarn_1_1": Variant(
        _tiny(rope_scaling=_yarn(1.0, 1.0)), "YaRN as released: the softmax corrected, cos and sin not amplified"
    ),
    "yarn_707": Variant(_tiny(rope_scaling=_yarn(0.707, 0.707)), "the same with the factors of DeepSeek V2"),
    "yarn_1_half": Variant(_tiny(rope_scaling=_yarn(1.0, 0.5)), "both corrections, and they differ"),
    "yarn_1_0": Variant(_tiny(rope_scaling=_yarn(1.0, 0)), "cos and sin amplified, the softmax not corrected"),
    "kimi_k2": Variant(
        _kimi(
            rope_scaling=_yarn(1.0, 1.0, factor=32.0, beta_fast=1.0, beta_slow=1.0, original_max_position_embeddings=40)
        ),
        "Kimi K2's model type, ramp and odd expert count",
    ),
    "rope_parameters": Variant(
        _without(
            "rope_theta",
            "rope_scaling",
            "num_nextn_predict_layers",
            rope_parameters={key: value for key, value in _yarn(1.0, 0.5).items() if key != "type"}
            | {"rope_type": "yarn", "rope_theta": 10000.0},
            head_dim=16,
            qk_head_dim=48,
            num_mtp_layers=0,
            rope_interleave=True,
            output_router_logits=False,
            pad_token_id=None,
        ),
        "the keys that transformers 5 writes",
    ),
    "no_q_lora": Variant(_tiny(q_lora_rank=None), "queries straight from the states (V2-Lite, Kimi's small models)"),
    "half_split": Variant(
        _tiny(rope_interleave=False, rope_scaling=_yarn(1.0, 0.5)), "rotary pairs are halves, as re-saved models have"
    ),
    "biases": Variant(_tiny(attention_bias=True), "biases on both projections down and on the output"),
    "groups": Variant(
        _tiny(**GROUPS),
        "group limits under negative biased scores",
        correction_bias=(-2.0, 0.2),
    ),
    "all_dense": Variant(
        _tiny(first_k_dense_replace=3, torch_dtype="bfloat16", rope_scaling=_yarn(1.0, 0.5)),
        "no sparse layer, in a bfloat16 file with float32 latent norms: no choice of experts hides what rounding does",
        storage="bfloat16",
        float32=("kv_a_layernorm.weight",),
    ),
    "bias_seven": Variant(
        _tiny(torch_dtype="bfloat16"),
        "correction biases near 7 that differ by less than bfloat16 resolves, in float32 in a bfloat16 file",
        correction_bias=(7.0, 0.2),
        **BFLOAT16,
    ),
    "unnormalised": Variant(_tiny(norm_topk_prob=False), "weights as the sigmoid leaves them, scaled"),
    "shared_two": Variant(_tiny(n_shared_experts=2), "two shared experts, one dense branch of twice the width"),
    "all_sparse": Variant(_tiny(first_k_dense_replace=0), "no dense layer"),
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
        ),
        "every matrix of a layer square but the router and kv_b_proj",
    ),
    "tied": Variant(_tiny(tie_word_embeddings=True), "a tied head, absent from the file", head="absent"),
    "depths": Variant(
        _tiny(num_nextn_predict_layers=3), "three prediction-depth layers past the last layer, carried", depths=3
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
    "fp8": Variant(
        _tiny(quantization_config=FP8, rope_scaling=_yarn(1.0, 1.0), **PARTIAL_BLOCKS),
        "matrices in block-scaled FP8, none of whole blocks, scales in another file than their codes",
        coded=PROJECTIONS,
        **BFLOAT16,
    ),
    "fp8_depths": Variant(
        _tiny(
            num_nextn_predict_layers=3,
            quantization_config={
                **FP8,
                "scale_fmt": "ue8m0",
                "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.o_proj"],
            },
            **PARTIAL_BLOCKS,
        ),
        "three prediction depths in FP8 in the head's file, and one matrix of one layer that is not converted",
        depths=3,
        coded=rf"^(?!model\.layers\.1\.self_attn\.o_proj\.).*{PROJECTIONS}",
        **BFLOAT16,
    ),
    "kimi_k25": Variant(
        _wrapped(),
        "Kimi K2.5's prefix and ramp, and a vision tower beside the decoder",
        KIMI_K25,
        **BFLOAT16,
    ),
    "kimi_k25_int4": Variant(
        _wrapped(hidden_size=64, moe_intermediate_size=32, quantization_config=INT4),
        "the same with packed 4-bit experts, their quantisation record in the text half",
        KIMI_K25,
        coded=ROUTED,
        **BFLOAT16,
    ),
}

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    architecture="DeepseekV3ForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:DeepseekV3ForCausalLM",
    variants=VARIANTS,
    spellings=(Spelling(), KIMI_K25),
    wrapper=WRAPPER,
    carried=carried_depths(61),
)
