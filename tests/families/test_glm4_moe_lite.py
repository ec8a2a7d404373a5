"""GLM-4.7-Flash: what its config says, and what its class reads otherwise than DeepSeek V3's."""

from dataclasses import replace

import pytest

from dewconv.dew_core.records import MLA
from dewconv.families import find
from dewconv.families.errors import FindingsError

FAMILY = find("glm4_moe_lite")
TINY = FAMILY.variants["untied"].config


def read(**changes):
    return FAMILY.read({key: value for key, value in {**TINY, **changes}.items() if value is not ...})[0]


def test_unset_keys_take_the_class_defaults():
    fields, notices = FAMILY.read({"model_type": "glm4_moe_lite"})
    assert fields.mixer == MLA(
        q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256
    )
    assert (fields.num_layers, fields.emb_features, fields.vocab_size, fields.norm_eps) == (47, 2048, 154880, 1e-5)
    assert fields.mixture.layers == tuple(range(1, 47))
    assert (fields.mixture.experts, fields.mixture.top_k, fields.mixture.scaling) == (64, 4, 1.8)
    assert (fields.rope_theta, fields.rope_interleave, fields.tie_embeddings) == (10000.0, True, False)
    assert notices == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"q_lora_rank": None}, lambda d: d.mixer.q_lora_rank is None),
        ({"rope_interleave": False}, lambda d: not d.rope_interleave),
        ({"mlp_layer_types": ["sparse", "dense", "dense"]}, lambda d: d.mixture.layers == (0,)),
        ({"mlp_layer_types": ["sparse"] * 3, "first_k_dense_replace": 2}, lambda d: d.mixture.layers == (0, 1, 2)),
        ({"first_k_dense_replace": ...}, lambda d: d.mixture.layers == (1, 2)),
        ({"num_hidden_layers": 1}, lambda d: d.mixture.layers == ()),
        ({"partial_rotary_factor": ...}, lambda d: d.rope_theta == 1e6),
        ({"rope_theta": ..., "rope_scaling": ...}, lambda d: d.rope_theta == 1e4),
        ({"head_dim": 16}, lambda d: d.mixer.qk_rope_head_dim == 16),
        ({"rms_norm_eps": 1e-5}, lambda d: d.mixer.latent_norm_eps == 1e-6 and d.norm_eps == 1e-5),
    ],
)
def test_switches(changes, found):
    fields = read(**changes)
    assert found(fields)
    assert FAMILY.read(FAMILY.write(fields))[0] == fields


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("first_k_dense_replace", 2),
        ("mlp_layer_types", ["dense", "sparse"]),
        ("mlp_layer_types", ["dense", "sparse", "hash_moe"]),
        ("partial_rotary_factor", 0.5),
        ("head_dim", 38),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("qk_head_dim", 40),
        ("index_topk", 2048),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key(key, value):
    expected = "partial_rotary_factor" if key == "rope_parameters" else key
    with pytest.raises(FindingsError, match=expected):
        read(**{key: value})


def test_a_changed_pattern_is_written_where_the_class_reads_it():
    """A number alone would be ignored."""
    fields = read()
    later = fields.replace(mixture=replace(fields.mixture, layers=(2,)))
    config = FAMILY.rewrite(TINY, later)
    assert config["mlp_layer_types"] == ["dense", "dense", "sparse"]
    assert FAMILY.read(config)[0] == later
