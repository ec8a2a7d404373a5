"""The lightning indexer against loops, transformers' two modules and itself: cached, padded, packed, shared."""

from __future__ import annotations

import math
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from dewconv.dew_core.fields import DecoderFields
from dewconv.dew_core.generate import generate
from dewconv.dew_core.indexer import INDEXER_COLLECTION, LightningIndexer, best_keys, index_scores
from dewconv.dew_core.layers import kv_sharing, layer_plan
from dewconv.dew_core.mla import LatentAttention
from dewconv.dew_core.records import MLA, Indexer, LayerKind
from dewconv.dew_core.refusals import refuse_unbuildable_fields
from dewconv.dew_core.rope import apply_rotary, rotary_freqs, rotary_tables
from dewconv.dew_core.transformer import CausalTransformer
from dewconv.parity.replay import choosing
from dewconv.parity.selection import Selected, margins, same_keys

FEATURES, RANK, LENGTH = 24, 20, 17
INDEXER = Indexer(index_n_heads=7, index_head_dim=10, index_topk=5)
MIXER = MLA(q_lora_rank=RANK, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=12, indexer=INDEXER)


def attention(**fields):
    sizes = {"num_heads": 4, "max_seq_len": 32, "rope_interleaved": True, "indexer": INDEXER}
    parts = {name: getattr(MIXER, name) for name in vars(MIXER) if name not in ("indexer", "latent_norm_eps")}
    return LatentAttention(**{**parts, **sizes, **fields})


def drawn(module, *args, seed=3):
    """Variables with nothing neutral."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if leaf.ndim == 1:
            return jnp.asarray(rng.choice([0.6, 1.4], leaf.shape) + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, jnp.float32)

    return jax.tree.map(draw, shapes)


def states(rows, length, features=FEATURES, seed=8):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, features)), jnp.float32)


def decoder(**changes):
    given = {
        "vocab_size": 61,
        "emb_features": FEATURES,
        "num_layers": 5,
        "num_heads": 4,
        "mlp_features": 28,
        "max_seq_len": 32,
        "qk_norm": False,
        "tie_embeddings": False,
        "rope_interleave": True,
        "mixer": MIXER,
    }
    return CausalTransformer(**{**given, **changes})


SHARED = {"kv_shared_layers": (2, 3)}


def tokens(rows, length, seed=4):
    return jnp.asarray(np.random.default_rng(seed).integers(1, 61, (rows, length)), jnp.int32)


# The choice


def test_the_formula():
    """sum_h w_h relu(q_h k / sqrt(D)), in float64 loops."""
    rng = np.random.default_rng(0)
    query, keys, weights = (rng.standard_normal(shape) for shape in ((1, 4, 3, 10), (1, 1, 6, 10), (1, 4, 3)))
    expected = np.zeros((1, 4, 6))
    for s in range(4):
        for t in range(6):
            for h in range(3):
                product = sum(query[0, s, h, i] * keys[0, 0, t, i] for i in range(10)) / math.sqrt(10)
                expected[0, s, t] += weights[0, s, h] * max(product, 0.0)
    found = index_scores(*(jnp.asarray(x, jnp.float32) for x in (query, weights, keys)))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_query_attends_as_many_keys_as_are_chosen_or_all_it_sees():
    seen = jnp.tril(jnp.ones((2, LENGTH, LENGTH), bool))
    scores = jnp.asarray(np.random.default_rng(1).standard_normal((2, LENGTH, LENGTH)), jnp.float32)
    for count in (1, 5, LENGTH - 1, LENGTH, 99):
        chosen = np.asarray(best_keys(scores, seen, count))
        assert (chosen.sum(-1) == np.minimum(np.arange(LENGTH) + 1, count)).all()
        assert not (chosen & ~np.asarray(seen)).any()
        least = np.where(chosen, scores, np.inf).min(-1)
        left = np.where(~chosen & np.asarray(seen), scores, -np.inf).max(-1)
        assert (least > left).all()


def test_equal_scores_go_to_the_earlier_key_and_none_to_a_key_that_is_not_seen():
    scores = jnp.zeros((1, 1, 6)).at[0, 0, 4].set(-1.0)
    seen = jnp.asarray([[[False, True, True, True, True, False]]])
    assert np.flatnonzero(best_keys(scores, seen, 2)).tolist() == [1, 2]
    assert np.flatnonzero(best_keys(scores, seen, 4)).tolist() == [1, 2, 3, 4]
    assert np.flatnonzero(best_keys(scores, seen, 5)).tolist() == [1, 2, 3, 4]
    # torch.topk finds the same scores, whichever of the equal keys it takes.
    best = torch.topk(torch.tensor([0.0, 0.0, 0.0, -1.0]), 2)
    assert best.values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("kind", "interleaved"), [(DeepseekV32Indexer, False), (GlmMoeDsaIndexer, True)])
def test_against_transformers(kind, interleaved):
    """Scores and choice of both classes, given the same weights, states and query latents. Where the last key taken
    and the first left behind both score exactly 0, each side takes its own: GLM's row has such a query."""
    config_class = GlmMoeDsaConfig if interleaved else DeepseekV32Config
    config = config_class(
        hidden_size=FEATURES,
        q_lora_rank=RANK,
        qk_rope_head_dim=6,
        index_n_heads=7,
        index_head_dim=10,
        index_topk=5,
        num_hidden_layers=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    record = replace(INDEXER, indexer_rope_interleave=interleaved)
    module = LightningIndexer(record)
    x, latent = states(2, LENGTH), states(2, LENGTH, RANK, seed=9)
    variables = drawn(module, x, latent)
    reference = kind(config, 0)
    leaves = {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(variables["params"]).items()}
    reference.load_state_dict(
        {
            "wq_b.weight": torch.tensor(leaves["wq_b/kernel"].T),
            "wk.weight": torch.tensor(leaves["wk/kernel"].T),
            "k_norm.weight": torch.tensor(leaves["k_norm/scale"]),
            "k_norm.bias": torch.tensor(leaves["k_norm/bias"]),
            "weights_proj.weight": torch.tensor(leaves["weights_proj/kernel"].T),
        }
    )
    positions = torch.arange(LENGTH)[None]
    rotary = DeepseekV32RotaryEmbedding(DeepseekV32Config(**config.to_diff_dict() | {"model_type": "deepseek_v32"}))
    tables = rotary(torch.tensor(np.asarray(x)), positions)
    mask = torch.tril(torch.ones(2, LENGTH, LENGTH, dtype=torch.bool))
    with choosing({0: reference}, None) as calls:
        reference(torch.tensor(np.asarray(x)), torch.tensor(np.asarray(latent)), tables, mask, positions)
    (theirs,) = calls[0]

    def ours(variables, x, latent):
        def call(module):
            index = module(x, latent)
            cos, sin = rotary_tables(jnp.arange(LENGTH)[None], *rotary_freqs(6, 10000.0), x.dtype)
            turn = [apply_rotary(one, cos, sin, interleaved=interleaved) for one in (index.query, index.key)]
            seen = jnp.tril(jnp.ones((2, LENGTH, LENGTH), bool))
            return module.select(turn[0], index.weights, turn[1].transpose(0, 2, 1, 3), seen)

        return nn.apply(call, module, mutable=[INDEXER_COLLECTION])(variables)

    chosen, sown = ours(variables, x, latent)
    scores = np.where(mask.numpy(), sown[INDEXER_COLLECTION]["scores"], 0)
    np.testing.assert_allclose(scores, np.where(mask.numpy(), theirs.scores, 0), atol=2e-6)
    clear = margins(theirs)
    assert np.isfinite(clear).sum() == 2 * (LENGTH - 5)
    equal = same_keys(Selected(np.asarray(chosen), scores), theirs)
    assert equal[clear > 1e-5].all()
    assert ((clear == 0) | (clear > 1e-5)).all()
    assert bool(equal.all()) is not interleaved
    odd = ~equal & (clear == 0)
    assert (scores[odd][np.asarray(chosen)[odd] != theirs.keys[odd]] == 0).all()


# The attention


def test_the_indexer_narrows_what_is_attended_on_every_path(monkeypatch):
    mixer, x = attention(), states(2, LENGTH)
    variables = drawn(mixer, x)
    wide = attention(indexer=None)
    plain = {"params": {k: v for k, v in variables["params"].items() if k != "indexer"}}
    out, sown = mixer.apply(variables, x, mutable=[INDEXER_COLLECTION])
    selected = sown[INDEXER_COLLECTION]["indexer"]["selected"]
    np.testing.assert_array_equal(
        np.asarray(selected).sum(-1), np.broadcast_to(np.minimum(np.arange(LENGTH) + 1, 5), (2, LENGTH))
    )
    dense = wide.apply(plain, x)
    np.testing.assert_allclose(out[:, :5], dense[:, :5], atol=2e-6)
    assert np.abs(np.asarray(out - dense)[:, 5:]).max() > 0.05
    for changes in ({"attention_impl": "reference"}, {"attention_impl": "xla"}):
        np.testing.assert_allclose(attention(**changes).apply(variables, x), out, atol=5e-6)
    monkeypatch.setattr("dewconv.dew_core.mla.absorbs", lambda *sizes: True)
    np.testing.assert_allclose(mixer.apply(variables, x), out, atol=5e-6)


def test_more_keys_than_there_are_is_dense_attention():
    mixer, x = attention(indexer=replace(INDEXER, index_topk=LENGTH)), states(2, LENGTH)
    variables = drawn(mixer, x)
    plain = {"params": {k: v for k, v in variables["params"].items() if k != "indexer"}}
    np.testing.assert_array_equal(mixer.apply(variables, x), attention(indexer=None).apply(plain, x))


def test_long_rows_score_in_blocks(monkeypatch):
    mixer, x = attention(), states(1, LENGTH)
    variables = drawn(mixer, x)
    whole = mixer.apply(variables, x)
    monkeypatch.setattr("dewconv.dew_core.attention.in_query_blocks.__kwdefaults__", {"block": 4})
    np.testing.assert_allclose(mixer.apply(variables, x), whole, atol=5e-6)


def test_a_recorded_choice_is_repeated_and_its_own_is_told():
    mixer, x = attention(), states(2, LENGTH)
    variables = drawn(mixer, x)
    _, sown = mixer.apply(variables, x, mutable=[INDEXER_COLLECTION])
    own = sown[INDEXER_COLLECTION]["indexer"]["selected"]
    newest = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & ~jnp.tril(jnp.ones((LENGTH, LENGTH), bool), -5)
    newest = jnp.broadcast_to(newest, own.shape)
    out, sown = mixer.apply(variables, x, selected=newest, mutable=[INDEXER_COLLECTION])
    np.testing.assert_array_equal(sown[INDEXER_COLLECTION]["indexer"]["selected"], own)
    plain = {"params": {k: v for k, v in variables["params"].items() if k != "indexer"}}
    np.testing.assert_allclose(out, attention(indexer=None, window=5).apply(plain, x), atol=5e-6)


# The decoder


@pytest.mark.parametrize("changes", [{}, SHARED, {**SHARED, "scan_layers": True}], ids=["own", "shared", "scanned"])
@pytest.mark.parametrize("prompt", [1, 9])
def test_steps_past_the_number_of_keys_are_the_full_forward(changes, prompt):
    model, ids = decoder(**changes), tokens(2, 16)
    variables = drawn(decoder(**{**changes, "scan_layers": False}), ids)
    full = jax.jit(model.apply)(variables, ids)
    cache = model.apply(variables, 2, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"]
    step = jax.jit(lambda c, t: model.apply({**variables, "cache": c}, t, decode=True, mutable=["cache"]))
    parts = []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, 16))]:
        logits, out = step(cache, ids[:, start:stop])
        cache = out["cache"]
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)
    kept = {"/".join(path) for path in flatten_dict(cache) if path[-1] == "cached_index_key"}
    if not changes:
        assert kept == {f"layers_{layer}/self_attn/cached_index_key" for layer in range(5)}
    elif "scan_layers" not in changes:
        assert kept == {f"layers_{layer}/self_attn/cached_index_key" for layer in (0, 1, 4)}


def test_a_sharing_layer_repeats_the_last_choice_before_it():
    """By giving every layer the record of what its provider chose, a decoder with own indexers is the sharing one."""
    model, ids = decoder(**SHARED), tokens(2, 16)
    variables = drawn(model, ids)
    assert model.kv_sharing == {2: 1, 3: 1}
    assert [spec.provider for spec in model.plan.specs] == [None, 1, None, None, None]
    assert model.plan.groups == ((0, 1), (1, 1), (2, 2), (4, 1))
    assert "indexer" not in variables["params"]["layers_2"]["self_attn"]
    shared, sown = model.apply(variables, ids, mutable=[INDEXER_COLLECTION])
    chosen = {
        layer: sown[INDEXER_COLLECTION][f"layers_{layer}"]["self_attn"]["indexer"]["selected"] for layer in (0, 1, 4)
    }
    assert not any(f"layers_{layer}" in sown[INDEXER_COLLECTION] for layer in (2, 3))
    own = decoder()
    every = drawn(own, ids)
    every["params"] = {
        name: {**part, "self_attn": {**every["params"][name]["self_attn"], **part["self_attn"]}}
        if name.startswith("layers_")
        else part
        for name, part in variables["params"].items()
    }
    record = jnp.stack([chosen[layer] for layer in (0, 1, 1, 1, 4)], axis=2)
    np.testing.assert_allclose(own.apply(every, ids, selected_keys=record), shared, atol=2e-5)
    other = jnp.stack([chosen[layer] for layer in (0, 1, 0, 0, 4)], axis=2)
    assert np.abs(np.asarray(own.apply(every, ids, selected_keys=other) - shared)).max() > 0.01


def test_a_layer_of_another_type_is_passed_over():
    types = ("a", "b", "a", "b", "a")
    kinds = {"a": LayerKind(), "b": LayerKind()}
    fields = DecoderFields(vocab_size=3, num_layers=5, layer_types=types, kinds=kinds, kv_shared_layers=(2, 3))
    assert kv_sharing(fields) == {2: 0, 3: 1}
    assert kv_sharing(DecoderFields(vocab_size=3, num_layers=5, num_kv_shared_layers=2)) == {3: 2, 4: 2}


@pytest.mark.parametrize("changes", [{"remat": "full"}, {"scan_layers": True}, {"scan_layers": True, "remat": "full"}])
def test_loops_and_recomputation_agree_and_the_choice_has_no_gradient(changes):
    ids = tokens(2, 16)
    plain = decoder(**SHARED)
    variables = drawn(plain, ids)

    def loss(model):
        return jax.jit(jax.value_and_grad(lambda v: jnp.mean(jnp.square(model.apply(v, ids, train=True)))))(variables)

    value, gradients = loss(plain)
    again, others = loss(decoder(**SHARED, **changes))
    np.testing.assert_allclose(again, value, rtol=1e-6)
    for path, leaf in flatten_dict(gradients).items():
        other = flatten_dict(others)[path]
        np.testing.assert_allclose(other, leaf, atol=1e-6 + 1e-5 * float(np.abs(leaf).max()))
        assert np.isfinite(leaf).all()
        assert bool((np.asarray(leaf) == 0).all()) is ("indexer" in path), path


def test_packed_rows_are_the_unpacked_rows_and_padding_is_never_chosen():
    model, ids = decoder(**SHARED), tokens(2, 9)
    variables = drawn(model, ids)
    alone = model.apply(variables, ids)
    packed = jnp.concatenate([ids[:1], ids[1:]], axis=1)
    segments = jnp.asarray([[0] * 9 + [1] * 9])
    positions = jnp.asarray([[*range(9), *range(9)]])
    together = model.apply(variables, packed, segment_ids=segments, positions=positions)
    np.testing.assert_allclose(together[0, :9], alone[0], atol=2e-5)
    np.testing.assert_allclose(together[0, 9:], alone[1], atol=2e-5)
    for side in ("left", "right"):
        pad = ((0, 0), (4, 0) if side == "left" else (0, 4))
        mask = jnp.pad(jnp.ones((2, 9), bool), pad)
        out = model.apply(variables, jnp.pad(ids, pad), attention_mask=mask)
        np.testing.assert_allclose(out[:, 4:] if side == "left" else out[:, :9], alone, atol=2e-5)


def test_generation_goes_past_the_number_of_keys():
    model, ids = decoder(**SHARED), tokens(2, 7)
    variables = drawn(model, ids)
    new = generate(model, variables, ids, max_new_tokens=8)
    whole = jnp.concatenate([ids, jnp.asarray(new)], axis=1)
    np.testing.assert_array_equal(model.apply(variables, whole)[:, 6:-1].argmax(-1), new)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("index_topk", {"mixer": replace(MIXER, indexer=replace(INDEXER, index_topk=0))}),
        ("index_n_heads", {"mixer": replace(MIXER, indexer=replace(INDEXER, index_n_heads=0))}),
        ("index_head_dim", {"mixer": replace(MIXER, indexer=replace(INDEXER, index_head_dim=5))}),
        ("index_norm_eps", {"mixer": replace(MIXER, indexer=replace(INDEXER, index_norm_eps=-1.0))}),
        ("kv_shared_layers", {"mixer": replace(MIXER, indexer=None), "kv_shared_layers": (1,)}),
        ("kv_shared_layers", {"mixer": None, "kv_shared_layers": (1,)}),
        ("num_kv_shared_layers", {"mixer": None, "num_kv_shared_layers": 1}),
        ("layer 0 shares", {"kv_shared_layers": (0, 1)}),
        ("each once", {"kv_shared_layers": (1, 1)}),
        ("each once", {"kv_shared_layers": (5,)}),
        ("both set", {"kv_shared_layers": (1,), "num_kv_shared_layers": 1}),
        ("left to share", {"num_kv_shared_layers": 5}),
    ],
)
def test_senseless_fields_are_refused(match, changes):
    given = {"vocab_size": 9, "num_layers": 5, "num_heads": 4, "qk_norm": False, "mixer": MIXER}
    fields = DecoderFields(**{**given, **changes})
    with pytest.raises(ValueError, match=match):
        refuse_unbuildable_fields(fields, layer_plan(fields).kinds)


def test_calls_it_cannot_answer_are_refused():
    x = states(1, 4)
    mixer = attention(kv_shared=True)
    with pytest.raises(ValueError, match="kv_store holds no choice"):
        mixer.init(jax.random.key(0), x, kv_store={})
    model, ids = decoder(), tokens(2, 6)
    variables = jax.eval_shape(model.init, jax.random.key(0), ids)
    for shape in ((2, 6, 4, 6), (2, 5, 5, 6), (2, 6, 5)):
        with pytest.raises(ValueError, match="selected_keys"):
            jax.eval_shape(lambda v, s=shape: model.apply(v, ids, selected_keys=np.ones(s, bool)), variables)
    dense = decoder(mixer=replace(MIXER, indexer=None))
    with pytest.raises(ValueError, match="selected_keys needs an indexer"):
        jax.eval_shape(lambda k: dense.init(k, ids, selected_keys=np.ones((2, 6, 5, 6), bool)), jax.random.key(0))


def test_the_record_survives_json():
    fields = DecoderFields(vocab_size=9, mixer=MIXER, kv_shared_layers=(2,))
    assert DecoderFields.from_json(fields.to_json()) == fields
