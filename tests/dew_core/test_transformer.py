"""The decoder: its fields, its two ends, what it refuses, and the same weights in transformers."""

from __future__ import annotations

from dataclasses import MISSING, fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from dewconv.dew_core.fields import DecoderFields
from dewconv.dew_core.head import head_logits
from dewconv.dew_core.records import (
    AltUp,
    AttentionResiduals,
    HyperConnections,
    KVCache,
    LayerKind,
    MixerBase,
    RopeScaling,
    YarnScaling,
)
from dewconv.dew_core.refusals import UNBUILT
from dewconv.dew_core.transformer import CausalTransformer

SIZES = {
    "vocab_size": 61,
    "emb_features": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_features": 24,
    "max_seq_len": 16,
}
TOKENS = np.random.default_rng(5).integers(1, 61, (2, 9)).astype(np.int32)


def decoder(**changes):
    return CausalTransformer(**{**SIZES, **changes})


def drawn(model, seed=0):
    """Variables with nothing neutral in them: norms away from 0 and 1, biases away from 0."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    rng = np.random.default_rng(seed)

    def leaf(shape):
        values = rng.standard_normal(shape.shape).astype(np.float32) * 0.3
        return jnp.asarray(values + 0.8 if len(shape.shape) == 1 else values)

    return jax.tree.map(leaf, shapes)


def run(model, variables, tokens=TOKENS, **call):
    return jax.jit(lambda variables: model.apply(variables, tokens, **call))(variables)


def refused(match, **changes):
    model = decoder(**changes)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))


# Fields.


def test_the_decoders_fields_are_the_records():
    def default(field):
        return field.default_factory() if field.default_factory is not MISSING else field.default

    own = [(f.name, default(f)) for f in fields(CausalTransformer) if f.name not in ("parent", "name")]
    assert own == [(f.name, default(f)) for f in fields(DecoderFields)]
    assert CausalTransformer(**DecoderFields(**SIZES).kwargs()) == decoder()


def test_the_tree_is_the_published_layout():
    model = decoder(num_layers=1, tie_embeddings=False, attention_bias=True, sandwich_norms=True)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))["params"]
    shapes = {"/".join(path): leaf.shape for path, leaf in flatten_dict(tree).items()}
    layer = {
        "input_layernorm/scale": (16,),
        "attention_output_norm/scale": (16,),
        "post_attention_layernorm/scale": (16,),
        "mlp_output_norm/scale": (16,),
        "self_attn/q_proj/kernel": (16, 16),
        "self_attn/q_proj/bias": (16,),
        "self_attn/k_proj/kernel": (16, 8),
        "self_attn/k_proj/bias": (8,),
        "self_attn/v_proj/kernel": (16, 8),
        "self_attn/v_proj/bias": (8,),
        "self_attn/o_proj/kernel": (16, 16),
        "self_attn/o_proj/bias": (16,),
        "self_attn/q_norm/scale": (4,),
        "self_attn/k_norm/scale": (4,),
        "mlp/gate_proj/kernel": (16, 24),
        "mlp/up_proj/kernel": (16, 24),
        "mlp/down_proj/kernel": (24, 16),
    }
    assert shapes == {
        "embed_tokens/embedding": (61, 16),
        "norm/scale": (16,),
        "lm_head/kernel": (16, 61),
        **{f"layers_0/{name}": shape for name, shape in layer.items()},
    }


def test_a_deep_tree_is_quick_to_shape():
    model = decoder(num_layers=64)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    assert sum(name.startswith("layers_") for name in tree["params"]) == 64


def test_a_zero_width_is_a_layer_without_a_feedforward():
    tree = jax.eval_shape(lambda: decoder(mlp_features=(24, 0)).init(jax.random.key(0), TOKENS))["params"]
    assert "mlp" in tree["layers_0"]
    assert "mlp" not in tree["layers_1"]
    assert "post_attention_layernorm" not in tree["layers_1"]


# The same weights in transformers.


def published(state, model):
    """A torch state dict of the plain published layout as the decoder's variables."""
    norms = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    if model.sandwich_norms:
        norms = {
            "input_layernorm": "input_layernorm",
            "attention_output_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }
    read = {name: value.float().numpy() for name, value in state.items()}
    params = {
        "embed_tokens": {"embedding": read["model.embed_tokens.weight"]},
        "norm": {"scale": read["model.norm.weight"]},
    }
    if not model.tie_embeddings:
        params["lm_head"] = {"kernel": read["lm_head.weight"].T}
    for index in range(model.num_layers):
        at = f"model.layers.{index}."
        attention = {}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            attention[name] = {"kernel": read[f"{at}self_attn.{name}.weight"].T}
            if f"{at}self_attn.{name}.bias" in read:
                attention[name]["bias"] = read[f"{at}self_attn.{name}.bias"]
        for name in ("q_norm", "k_norm"):
            attention[name] = {"scale": read[f"{at}self_attn.{name}.weight"]}
        params[f"layers_{index}"] = {
            "self_attn": attention,
            "mlp": {n: {"kernel": read[f"{at}mlp.{n}.weight"].T} for n in ("gate_proj", "up_proj", "down_proj")},
            **{ours: {"scale": read[f"{at}{theirs}.weight"]} for ours, theirs in norms.items()},
        }
    return {"params": jax.tree.map(jnp.asarray, params)}


def randomized(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 0.7 if parameter.ndim == 1 else noise)
    return model.eval()


def qwen3(tied):
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        attention_bias=not tied,
    )
    ours = CausalTransformer(
        vocab_size=61,
        emb_features=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_features=24,
        max_seq_len=16,
        rope_theta=1e6,
        norm_eps=1e-6,
        scale_after_cast=True,
        tie_embeddings=tied,
        attention_bias=not tied,
    )
    return randomized(Qwen3ForCausalLM(config)), ours


def gemma3():
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=72,  # sqrt is 8.485, and 8.5 in bf16
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=12,
        sliding_window=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        final_logit_softcapping=5.0,
        tie_word_embeddings=True,
    )
    ours = CausalTransformer(
        vocab_size=61,
        emb_features=72,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp="geglu",
        mlp_features=24,
        max_seq_len=16,
        layer_types=("sliding_attention", "sliding_attention", "full_attention", "sliding_attention"),
        kinds={
            "sliding_attention": LayerKind(window=3, rope_theta=1e4),
            "full_attention": LayerKind(rope_theta=1e6, rope_scaling=RopeScaling("linear", factor=8.0)),
        },
        norm_eps=1e-6,
        scale_offset=True,
        sandwich_norms=True,
        attention_scale=12**-0.5,
        embedding_scale=True,
        final_logit_softcap=5.0,
    )
    return randomized(Gemma3ForCausalLM(config)), ours


CASES = {"qwen3 tied": lambda: qwen3(True), "qwen3 untied": lambda: qwen3(False), "gemma3": gemma3}


@pytest.mark.parametrize("case", CASES)
def test_same_weights_in_fp32(case):
    theirs, ours = CASES[case]()
    variables = published(theirs.state_dict(), ours)
    with torch.no_grad():
        want = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(run(ours, variables), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_same_weights_in_bf16(case):
    theirs, ours = CASES[case]()
    theirs = theirs.to(torch.bfloat16)
    variables = published(theirs.state_dict(), ours)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    with torch.no_grad():
        want = theirs(torch.from_numpy(TOKENS).long()).logits.float().numpy()
        exact = theirs.float()(torch.from_numpy(TOKENS).long()).logits.numpy()
    got = np.asarray(run(ours, low))
    # torch's own distance to fp32 is the yardstick: a convention missed would be several times it.
    assert np.abs(got - want).mean() < 1.5 * np.abs(want - exact).mean()
    stated = run(ours.clone(dtype="bfloat16"), variables)
    np.testing.assert_allclose(stated, got, rtol=0, atol=2 * np.abs(want - exact).max())
    assert got.dtype == np.float32


def test_the_embedding_scale_rounds_with_the_table():
    model = CausalTransformer(vocab_size=3, emb_features=1152, num_heads=4, embedding_scale=True)
    one = jnp.ones((1, 1, 1152), jnp.bfloat16)
    assert model.scaled_embeddings(one)[0, 0, 0] == 34.0
    assert float(model.scaled_embeddings(one.astype(jnp.float32))[0, 0, 0]) == np.float32(1152**0.5)


# Each field moves what it should, by as much as it should.


def states(model, variables, **call):
    return run(model, variables, method=CausalTransformer.hidden_states, **call)


def test_logits_scaling_divides_the_logits():
    variables = drawn(decoder())
    plain = run(decoder(), variables)
    np.testing.assert_allclose(run(decoder(logits_scaling=3.0), variables), plain / 3, rtol=2e-6, atol=1e-6)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    assert states(decoder(logits_scaling=3.0), low).dtype == jnp.float32


def test_the_softcap_bounds_the_logits_once():
    variables = drawn(decoder())
    plain = run(decoder(), variables)
    np.testing.assert_allclose(
        run(decoder(final_logit_softcap=0.5), variables), 0.5 * np.tanh(plain / 0.5), rtol=1e-5, atol=1e-6
    )


def test_the_embedding_multiplier_scales_the_input_alone():
    variables = drawn(decoder(tie_embeddings=False))
    scaled = {"params": {**variables["params"]}}
    scaled["params"]["embed_tokens"] = jax.tree.map(lambda leaf: leaf * 12, variables["params"]["embed_tokens"])
    got = run(decoder(tie_embeddings=False, embedding_multiplier=12.0), variables)
    np.testing.assert_allclose(got, run(decoder(tie_embeddings=False), scaled), rtol=1e-5, atol=1e-5)


def test_the_residual_multiplier_scales_every_sublayer():
    variables = drawn(decoder())
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.25 if path[-2].key in ("o_proj", "down_proj") else leaf, variables
    )
    got = run(decoder(residual_multiplier=0.25), variables)
    np.testing.assert_allclose(got, run(decoder(), scaled), rtol=1e-5, atol=1e-5)


def test_placeholder_ids_read_token_zero():
    variables = drawn(decoder())
    model = decoder(embedding_zero_ids=(7, 9))
    np.testing.assert_array_equal(
        run(model, variables, np.array([[7, 5, 9, 0]], np.int32)),
        run(decoder(), variables, np.array([[0, 5, 0, 0]], np.int32)),
    )


def test_a_tied_head_is_the_table_transposed():
    for model in (decoder(), decoder(tie_embeddings=False)):
        params = drawn(model)["params"]
        last = states(model, {"params": params})
        np.testing.assert_allclose(
            run(model, {"params": params}), last @ model.head_weight(params), rtol=1e-5, atol=1e-5
        )
        table, vocab_major = model.head_table(params)
        assert vocab_major == model.tie_embeddings
        np.testing.assert_allclose(head_logits(last, table, vocab_major), run(model, {"params": params}), atol=1e-5)


def test_the_head_makes_no_copy_of_a_table():
    table = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    compiled = jax.jit(lambda x, t: head_logits(x, t, True)).lower(jax.ShapeDtypeStruct((1, 256), jnp.float32), table)
    assert compiled.compile().memory_analysis().temp_size_in_bytes < 4096 * 256


def test_states_and_logits_at_reads_one_slot_a_row():
    variables = drawn(decoder())
    slots = jnp.array([8, 3])
    want = run(decoder(), variables)
    all_states, at = run(decoder(), variables, slots=slots, method=CausalTransformer.states_and_logits_at)
    np.testing.assert_allclose(at, want[jnp.arange(2), slots], rtol=1e-5, atol=1e-6)
    same, logits = run(decoder(), variables, method=CausalTransformer.states_and_logits)
    np.testing.assert_allclose(same, all_states, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)


def test_input_embeddings_replace_the_scaled_ones():
    model = decoder(embedding_multiplier=3.0)
    variables = drawn(model)
    table = variables["params"]["embed_tokens"]["embedding"]
    at = np.array([[1, 4], [0, 8]])
    other = TOKENS.copy()
    other[np.arange(2)[:, None], at] = 0
    rows = table[TOKENS[np.arange(2)[:, None], at]] * 3.0
    got = run(model, variables, other, input_embeddings=rows, embedding_positions=at)
    np.testing.assert_allclose(got, run(model, variables), rtol=1e-5, atol=1e-6)


def test_the_partial_rotary_is_the_unwindowed_kinds():
    pattern = {"layer_types": ("s", "f"), "kinds": {"s": LayerKind(window=4), "f": LayerKind()}}
    model = decoder(partial_rotary_factor=0.5, **pattern)
    contexts = {name: model.mixer_context(model.kind_of(name), name, False) for name in "sf"}
    assert contexts["s"].partial_rotary_factor is None
    assert contexts["f"].partial_rotary_factor == 0.5
    variables = drawn(model)
    assert np.abs(run(model, variables) - run(decoder(**pattern), variables)).max() > 1e-3


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"qk_norm": False}, {"qk_norm_scope": "projection"}])
def test_attention_fields_reach_the_attention(changes):
    tree = drawn(decoder(**changes))["params"]["layers_1"]["self_attn"]
    assert ("bias" in tree["q_proj"]) == ("attention_bias" in changes)
    assert ("q_norm" in tree) == ("qk_norm" not in changes)
    if "qk_norm_scope" in changes:
        assert tree["q_norm"]["scale"].shape == (16,)


def test_initial_standard_deviations():
    model = decoder(initializer_range=0.1, logits_scaling=4.0, depth_scaled_init=True, tie_embeddings=False)
    assert model.init_stds == (0.05, 0.025)
    wide = model.clone(emb_features=256, mlp_features=256)
    params = wide.init(jax.random.key(0), TOKENS)["params"]
    layer = params["layers_0"]
    for leaf, std in (
        (params["embed_tokens"]["embedding"], 0.1),
        (params["lm_head"]["kernel"], 0.1),
        (layer["self_attn"]["q_proj"]["kernel"], 0.05),
        (layer["mlp"]["up_proj"]["kernel"], 0.05),
        (layer["mlp"]["down_proj"]["kernel"], 0.025),
        (layer["self_attn"]["o_proj"]["kernel"], 0.025),
    ):
        assert float(leaf.std()) == pytest.approx(std, rel=0.1)
    assert decoder().init_stds == (None, None)


# Padding, packing and attending both ways.


def test_padded_rows_are_the_unpadded_rows():
    model = decoder(layer_types=("s", "f"), kinds={"s": LayerKind(window=3), "f": LayerKind()})
    variables = drawn(model)
    want = run(model, variables, TOKENS[:1, :5])
    for left, right in ((4, 0), (0, 4), (2, 2)):
        row = np.pad(TOKENS[:1, :5], ((0, 0), (left, right)))
        mask = np.pad(np.ones((1, 5), bool), ((0, 0), (left, right)))
        got = run(model, variables, row, attention_mask=mask)[:, left : left + 5]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_packed_rows_are_the_unpacked_rows():
    variables = drawn(decoder())
    packed = np.concatenate([TOKENS[:1, :5], TOKENS[1:, :4]], axis=1)
    got = run(
        decoder(),
        variables,
        packed,
        positions=jnp.array([[*range(5), *range(4)]]),
        segment_ids=jnp.array([[1] * 5 + [2] * 4]),
    )
    np.testing.assert_allclose(got[:, :5], run(decoder(), variables, TOKENS[:1, :5]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[:, 5:], run(decoder(), variables, TOKENS[1:, :4]), rtol=1e-5, atol=1e-5)


def test_an_encoder_attends_both_ways_on_the_same_tree():
    model = decoder(causal=False)
    variables = drawn(decoder())
    changed = TOKENS.copy()
    changed[:, -1] = 60 - changed[:, -1]
    assert np.abs(run(model, variables)[:, 0] - run(model, variables, changed)[:, 0]).max() > 1e-4
    with pytest.raises(ValueError, match="decode=True needs causal=True"):
        run(model, variables, decode=True)


# What is refused.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v_norm", True),
        ("attention_k_eq_v", True),
        ("layer_scalar", "frozen"),
        ("use_double_wide_mlp", True),
        ("per_layer_input_dim", 8),
        ("per_layer_input_vocab", 8),
        ("num_nextn_predict_layers", 1),
        ("index_share_for_mtp_iteration", True),
        ("mtp_layer_type", "full_attention"),
        ("mtp_hyper_connections", HyperConnections()),
        ("altup", AltUp()),
        ("laurel_rank", 4),
        ("hyper_connections", HyperConnections()),
        ("attention_residuals", AttentionResiduals()),
        ("activation_sparsity_pattern", (0.9, 0.0)),
        ("mask_token_id", 3),
    ],
)
def test_unbuilt_fields_are_refused_by_name(name, value):
    assert name in UNBUILT
    refused(rf"^{name}=.* not supported yet; leave {name} at ", **{name: value})


@pytest.mark.parametrize("where", ["model", "kind"])
def test_a_mixer_that_is_not_registered_is_refused(where):
    mixer = {"mixer": MixerBase()}
    changes = mixer if where == "model" else {"kinds": {"full_attention": LayerKind(**mixer)}}
    refused("^mixer=.* not supported yet; leave mixer at ", **changes)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("num_heads=4 is not a multiple of num_kv_heads=3", {"num_kv_heads": 3}),
        ("head_dim=5 of kind", {"head_dim": 5}),
        ("emb_features=16 does not divide into num_heads=3", {"num_heads": 3, "num_kv_heads": 1, "head_dim": None}),
        ("window=4 of kind 's' needs causal=True", {"causal": False, "kinds": {"s": LayerKind(window=4)}}),
        ("window=0 of kind 's'", {"kinds": {"s": LayerKind(window=0)}}),
        ("sets a window and a chunk", {"kinds": {"s": LayerKind(window=4, chunk=4)}}),
        ("sets rope_scaling and yarn", {"rope_scaling": RopeScaling(), "yarn": YarnScaling()}),
        ("pre_norms=False needs sandwich_norms=True", {"pre_norms": False}),
        ("layer_types names 3 layers, num_layers is 2", {"layer_types": ("a", "b", "a")}),
        ("kinds describes b", {"layer_types": ("a", "a"), "kinds": {"b": LayerKind()}}),
        ("mlp_features names 3 widths", {"mlp_features": (1, 2, 3)}),
        ("kv_cache.layout is 'paged'", {"kv_cache": KVCache("paged")}),
        ("kv_cache.dtype is 'int8'", {"kv_cache": KVCache(dtype="int8")}),
        ("partial_rotary_factor=1.5", {"partial_rotary_factor": 1.5}),
        ("final_logit_softcap=0.0", {"final_logit_softcap": 0.0}),
        ("embedding_zero_ids names 61", {"embedding_zero_ids": (61,)}),
        ("dropout_rate=1.0", {"dropout_rate": 1.0}),
        ("logits_scaling=0.0", {"logits_scaling": 0.0}),
        ("embedding_multiplier=nan", {"embedding_multiplier": float("nan")}),
        ("initializer_range=-1.0", {"initializer_range": -1.0}),
        ("depth_scaled_init=True needs initializer_range", {"depth_scaled_init": True}),
        ("mlp is 'relu'", {"mlp": "relu"}),
        ("remat is 'everything'", {"remat": "everything"}),
    ],
)
def test_senseless_fields_are_refused(match, changes):
    refused(match, **changes)


@pytest.mark.parametrize("name", ["image_groups", "rotary_positions"])
def test_unbuilt_arguments_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^{name} is not supported"):
        run(decoder(), drawn(decoder()), **{name: jnp.zeros((2, 9))})


def test_half_a_pair_of_arguments_is_refused():
    with pytest.raises(ValueError, match="input_embeddings and embedding_positions go together"):
        run(decoder(), drawn(decoder()), input_embeddings=jnp.zeros((2, 1, 16)))
