"""GLM-5, 5.1, 5.2 and 5.3 (transformers 5.24 `GlmMoeDsaForCausalLM`, `GlmMoeDsaConfig`).

DeepSeek V3.2's attention and experts at GLM's sizes, without YaRN. The indexer's rotary pairs are neighbours, as the
attention's are. From 5.2 on most layers have no indexer and attend the keys that the last one before them chose
(`indexer_types`, or a schedule). Prediction-depth layers are carried, an indexer of their own included.
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
from .fields import Config, Unreadable, fixed, flag, inert, layer_count, same, value_of, via
from .indexers import indexed_latent_sizes, indexers
from .mixtures import FIRST_DENSE, MLP_TYPES, carried_depths, prediction_depths, sigmoid_experts
from .rope import rope
from .rules import Statement

TYPES = "indexer_types"
PATTERN, EVERY, OFFSET = "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
LETTERS = {"F": "full", "S": "shared"}


def _scheduled(config: Config, layers: int) -> tuple[str, ...] | None:
    """The types that the pattern or the schedule says, None where neither is stated. A pattern goes before a schedule,
    which has an indexer in every `index_topk_freq`-th layer from `index_skip_topk_offset` - 1 on, and in all before."""
    pattern = config.get(PATTERN)
    if isinstance(pattern, str):
        pattern = [LETTERS.get(letter, letter) for letter in pattern]
    if pattern is not None:
        return _types(PATTERN, pattern, layers)
    if EVERY not in config and OFFSET not in config:
        return None
    step = max(value_of(config, EVERY, whole_number, 1), 1)
    offset = value_of(config, OFFSET, whole_number, 2)
    return tuple("shared" if max(layer - offset + 1, 0) % step else "full" for layer in range(layers))


def whole_number(key: str, value: Any) -> int:
    """A whole number of any sign. Raises Unreadable."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unreadable(key, value, "a whole number")
    return value


def _types(key: str, value: Any, layers: int) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) != layers:
        found = len(value) if isinstance(value, list | tuple) else value
        raise Unreadable(key, found, f"{layers} entries, one per layer of num_hidden_layers")
    for name in value:
        if name not in ("full", "shared"):
            raise Unreadable(key, name, "full or shared", "not supported")
    if value[0] == "shared":
        raise Unreadable(key, "shared for layer 0", "full: no layer before it has chosen keys")
    return tuple(value)


def read_shared(config: Config) -> Mapping[str, Any]:
    """Which layers have no indexer. `indexer_types` goes before what a pattern or a schedule says, which is refused
    where it says otherwise."""
    layers = value_of(config, "num_hidden_layers", layer_count, 78)
    scheduled = _scheduled(config, layers)
    types = _types(TYPES, config[TYPES], layers) if config.get(TYPES) is not None else scheduled
    if types is None:
        return {}
    if scheduled is not None and scheduled != types:
        key = PATTERN if config.get(PATTERN) is not None else EVERY
        raise Unreadable(key, config.get(key), f"what {TYPES} says of every layer", "state one of the two")
    return {"kv_shared_layers": tuple(i for i, name in enumerate(types) if name == "shared") or None}


def write_shared(d: DecoderFields) -> Mapping[str, Any]:
    shared = d.kv_shared_layers or ()
    return {TYPES: ["shared" if layer in shared else "full" for layer in range(d.num_layers)]}


FIELDS = (
    *bookkeeping(),
    *sizes(vocab=154880, hidden=6144, intermediate=12288, layers=78, longest=202752, eps=1e-5),
    *indexed_latent_sizes(
        heads=64,
        q_lora=2048,
        kv_lora=512,
        nope=192,
        rope=64,
        value=256,
        index_heads=32,
        index_dim=128,
        chosen=2048,
        interleaved=True,
    ),
    via((TYPES, PATTERN, EVERY, OFFSET), read_shared, write_shared, "layers that attend the keys another one chose"),
    activation("hidden_act", "silu"),
    tied(default=False),
    same("attention_bias", "attention_bias", flag, False),
    rope(),
    fixed("indexer_rope_interleave", True, "GlmMoeDsaIndexer turns neighbouring features and reads no such key"),
    fixed("rope_interleave", True, "GlmMoeDsaAttention turns neighbouring features and reads no such key"),
    sigmoid_experts(
        experts=256,
        chosen=8,
        groups=1,
        kept=1,
        first_dense=3,
        width=2048,
        shared=1,
        normalised=True,
        scaling=2.5,
        layers=78,
        said_by=(MLP_TYPES, FIRST_DENSE),
    ),
    fixed("moe_layer_freq", 1, "GlmMoeDsaDecoderLayer routes every layer past the dense ones"),
    fixed("scoring_func", "sigmoid", "GlmMoeDsaTopkRouter scores by a sigmoid"),
    fixed("topk_method", "noaux_tc", "GlmMoeDsaTopkRouter chooses by the sum of a group's two best biased scores"),
    fixed("moe_router_dtype", "float32", "GlmMoeDsaTopkRouter computes in float32"),
    prediction_depths(),
    inert("index_share_for_mtp_iteration", why="prediction depths are carried and not computed"),
    inert("output_router_logits", "router_aux_loss_coef", why="the training loss, and what the reference returns"),
    inert("ep_size", "pretraining_tp", why="how the model is spread over devices"),
    via(
        (),
        lambda config: {"scale_after_cast": True, "rope_interleave": True},
        lambda d: {},
        "GlmMoeDsaRMSNorm casts, then scales; GlmMoeDsaAttention turns neighbouring features",
    ),
)


def weights(d: DecoderFields) -> Iterator[Statement]:
    yield from trunk(d)
    yield from layer_norms(d, PRE_NORMS)
    yield from latent_attention(d)
    yield from indexers(d)
    yield from gated_mlp(d)
    yield from experts(d)


def _tiny(**changes: Any) -> dict[str, Any]:
    """A released GLM-5 config at a size where every dimension differs, fewer keys chosen than a quarter of the probe
    has, and its epsilon large enough for another one to show far above rounding."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": [126, 127],
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 40,
        "index_head_dim": 26,
        "index_n_heads": 12,
        "index_topk": 6,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": 28,
        "kv_lora_rank": 30,
        "max_position_embeddings": 256,
        "model_type": "glm_moe_dsa",
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
        "pad_token_id": 126,
        "pretraining_tp": 1,
        "q_lora_rank": 36,
        "qk_head_dim": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-04,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.2.dev0",
        "use_cache": True,
        "v_head_dim": 20,
        "vocab_size": 131,
        **changes,
    }


def _without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _tiny(**changes).items() if key not in keys}


def _types_of(pattern: str) -> list[str]:
    return [LETTERS[letter] for letter in pattern]


GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
BFLOAT16 = {"storage": "bfloat16", "float32": ("e_score_correction_bias", "weights_proj.weight")}

VARIANTS = {
    "untied": Variant(_tiny(), "GLM-5: an indexer in every layer, 6 of up to 48 keys chosen"),
    "shared": Variant(
        _tiny(
            num_hidden_layers=6,
            indexer_types=_types_of("FFSSFS"),
            mlp_layer_types=["dense"] * 2 + ["sparse"] * 4,
            first_k_dense_replace=2,
            head_dim=32,
            index_share_for_mtp_iteration=True,
            index_topk_pattern=None,
            moe_router_dtype="float32",
        ),
        "GLM-5.2: layers without an indexer, which read the last one's choice, in runs of two and of one",
    ),
    "schedule": Variant(
        _tiny(num_hidden_layers=4, index_topk_freq=2, index_topk=4),
        "the sharing layers by their schedule alone (dsa 48)",
    ),
    "pattern": Variant(
        _tiny(num_hidden_layers=4, index_topk_pattern="FSFS", index_topk_freq=4, index_skip_topk_offset=3),
        "the sharing layers by a pattern, which goes before a schedule",
    ),
    "most_seen": Variant(
        _tiny(index_topk=40, indexer_types=_types_of("FSF")),
        "most keys chosen: dense attention until the last queries",
    ),
    "types": Variant(
        _without(
            "first_k_dense_replace",
            "num_nextn_predict_layers",
            layer_types=["indexed_attention"] * 3,
            mlp_layer_types=["sparse", "dense", "sparse"],
            mlp_bias=False,
            output_router_logits=False,
            bos_token_id=0,
            indexer_types=_types_of("FFF"),
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
        _tiny(mlp_layer_types=["dense"] * 3, dtype="bfloat16", indexer_types=_types_of("FSF")),
        "no sparse layer, in a bfloat16 file with float32 latent norms and index weights: no choice of experts hides "
        "what rounding does",
        storage="bfloat16",
        float32=("kv_a_layernorm.weight", "weights_proj.weight"),
    ),
    "bias_seven": Variant(
        _tiny(dtype="bfloat16"),
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
            qk_head_dim=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            kv_lora_rank=16,
            q_lora_rank=16,
            index_head_dim=16,
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
            qk_head_dim=16,
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
            first_k_dense_replace=3,
            dtype="bfloat16",
            index_topk_freq=4,
            index_skip_topk_offset=3,
            rope_parameters={"rope_theta": 8000000, "rope_type": "default"},
            **GROUPS,
        ),
        "three dense layers, then ten sparse ones, sharing by GLM-5.2's schedule, in a bfloat16 file",
        **BFLOAT16,
    ),
}

FAMILY = Family(
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    architecture="GlmMoeDsaForCausalLM",
    fields=FIELDS,
    weights=weights,
    reference="transformers:GlmMoeDsaForCausalLM",
    variants=VARIANTS,
    carried=carried_depths(78),
)
