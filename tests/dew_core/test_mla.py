"""Latent attention against its paper, transformers' module and itself: expanded, absorbed, cached, padded, packed."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from dewconv.dew_core.attention import AttentionMetadata
from dewconv.dew_core.fields import DecoderFields
from dewconv.dew_core.layers import layer_plan
from dewconv.dew_core.mixers import MIXERS
from dewconv.dew_core.mla import LatentAttention, absorbs
from dewconv.dew_core.records import MLA, RECORDS, KVCache, LayerKind, MixerBase, RopeScaling, YarnScaling
from dewconv.dew_core.refusals import refuse_unbuildable_fields
from dewconv.dew_core.transformer import CausalTransformer

FEATURES, SLOTS = 24, 24
SIZES = {
    "num_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
YARN = YarnScaling(factor=40.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5)


def module(**fields):
    return LatentAttention(**{**SIZES, "max_seq_len": SLOTS, "rope_interleaved": True, **fields})


def weights(mixer, seed=7):
    """Variables with nothing neutral: norms away from 1, biases away from 0."""
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if leaf.ndim == 1:
            return jnp.asarray(rng.choice([0.6, 1.4], leaf.shape) + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def states(rows, length, seed=8):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, FEATURES)), jnp.float32)


def run(mixer, variables, x, **call):
    return jax.jit(lambda v, x: mixer.apply(v, x, **call))(variables, x)


def close(a, b, atol=5e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol)


# The paper's equations (37) to (47) with DeepSeek's rotation and YaRN, in float64 loops that share no code with ours.


def normed(x, scale, eps=1e-6):
    return x / math.sqrt(float(np.mean(x * x)) + eps) * scale


def turned(x, position, inverse, amplitude, interleaved):
    """The rotation of one vector, a pair of features at a time."""
    out = np.empty_like(x)
    half = len(x) // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        cos, sin = (amplitude * f(position * inverse[i]) for f in (math.cos, math.sin))
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return out


def yarn_by_hand(dim, theta, yarn):
    """(inverse frequencies, amplitude, softmax correction) of DeepSeek's YaRN."""
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return plain, 1.0, 1.0

    def place(turns):
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def m(scale):
        return 0.1 * scale * math.log(yarn.factor) + 1

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), dim - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(dim // 2)]
    blended = [f * (1 - r) + f / yarn.factor * r for f, r in zip(plain, ramp, strict=True)]
    if not yarn.mscale_all_dim:
        return blended, m(1), 1.0
    return blended, m(yarn.mscale) / m(yarn.mscale_all_dim), m(yarn.mscale_all_dim) ** 2


def by_hand(params, x, sizes, yarn=None, interleaved=True, theta=10000.0):
    """Output [S, features] of one row x [S, features], every head, query and key in turn."""
    p = {path: np.asarray(leaf, np.float64) for path, leaf in flat(params).items()}
    x = np.asarray(x, np.float64)
    heads, nope, rope, value = (
        sizes[name] for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    rank = sizes["kv_lora_rank"]
    inverse, amplitude, correction = yarn_by_hand(rope, theta, yarn)
    queries, keys, values = [], [], []
    for position, row in enumerate(x):
        latent = row
        if sizes["q_lora_rank"] is not None:
            latent = normed(row @ p["q_a_proj/kernel"] + p.get("q_a_proj/bias", 0), p["q_a_layernorm/scale"])
            query = latent @ p["q_b_proj/kernel"]
        else:
            query = latent @ p["q_proj/kernel"]
        both = row @ p["kv_a_proj_with_mqa/kernel"] + p.get("kv_a_proj_with_mqa/bias", 0)
        shared = turned(both[rank:], position, inverse, amplitude, interleaved)
        expanded = normed(both[:rank], p["kv_a_layernorm/scale"]) @ p["kv_b_proj/kernel"]
        for h in range(heads):
            q = query[h * (nope + rope) : (h + 1) * (nope + rope)]
            kv = expanded[h * (nope + value) : (h + 1) * (nope + value)]
            queries.append(np.concatenate([q[:nope], turned(q[nope:], position, inverse, amplitude, interleaved)]))
            keys.append(np.concatenate([kv[:nope], shared]))
            values.append(kv[nope:])
    scale = (nope + rope) ** -0.5 * correction
    out = np.zeros((len(x), heads * value))
    for i in range(len(x)):
        for h in range(heads):
            scores = np.array([scale * (queries[i * heads + h] @ keys[j * heads + h]) for j in range(i + 1)])
            share = np.exp(scores - scores.max())
            share /= share.sum()
            out[i, h * value : (h + 1) * value] = sum(share[j] * values[j * heads + h] for j in range(i + 1))
    return out @ p["o_proj/kernel"] + p.get("o_proj/bias", 0)


def flat(tree, prefix=""):
    found = {}
    for name, leaf in tree.items():
        found |= flat(leaf, f"{prefix}{name}/") if isinstance(leaf, dict) else {prefix + name: leaf}
    return found


CASES = {
    "plain": {},
    "half_split": {"rope_interleaved": False},
    "no_q_lora": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "yarn_1_1": {"yarn": replace(YARN, mscale_all_dim=1.0)},
    "yarn_707": {"yarn": replace(YARN, mscale=0.707, mscale_all_dim=0.707)},
    "yarn_1_half": {"yarn": YARN},
    "yarn_1_0": {"yarn": replace(YARN, mscale_all_dim=0.0)},
    "equal_widths": {"qk_nope_head_dim": 6, "v_head_dim": 6, "kv_lora_rank": 6},
}


@pytest.mark.parametrize("impl", ["auto", "reference", "xla", "absorbed"])
@pytest.mark.parametrize("name", CASES)
def test_the_papers_equations(name, impl, monkeypatch):
    fields = CASES[name]
    if impl == "absorbed":
        monkeypatch.setattr("dewconv.dew_core.mla.absorbs", lambda *sizes: True)
    mixer = module(attention_impl="auto" if impl == "absorbed" else impl, **fields)
    variables, x = weights(mixer), states(2, 20)
    sizes = {**SIZES, **{key: value for key, value in fields.items() if key in SIZES}}
    expected = [
        by_hand(variables["params"], row, sizes, fields.get("yarn"), fields.get("rope_interleaved", True)) for row in x
    ]
    close(run(mixer, variables, x), np.stack(expected), atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plain", {"rope_interleaved": False}),
        ("yarn_1_1", {"attention_scale": 14**-0.5}),
        ("yarn_1_half", {"yarn": replace(YARN, attention_factor=1.0)}),
        ("yarn_1_0", {"yarn": replace(YARN, mscale_all_dim=1.0)}),
        ("plain", {"latent_norm_eps": 1e-2}),
        ("plain", {"window": 5}),
        ("plain", {"attn_logit_softcap": 0.5}),
    ],
)
def test_each_convention_moves_the_output(name, changes):
    mixer = module(**CASES[name])
    variables, x = weights(mixer), states(1, 20)
    out, other = (run(m, variables, x) for m in (mixer, mixer.clone(**changes)))
    assert float(jnp.abs(out - other).max()) > 1e-3 * float(jnp.abs(out).max())


# transformers' own module with the same weights.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "equal_widths"])
def test_against_transformers(name, dtype):
    fields = CASES[name]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if (yarn := fields.get("yarn")) is not None:
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": yarn.factor}
        rope |= {"original_max_position_embeddings": 16, "mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    config = DeepseekV3Config(
        hidden_size=FEATURES,
        num_attention_heads=4,
        num_key_value_heads=4,
        **{**{key: value for key, value in SIZES.items() if key != "num_heads"}, **_sizes(fields)},
        attention_bias=fields.get("attention_bias", False),
        rope_interleave=fields.get("rope_interleaved", True),
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    theirs = modeling_deepseek_v3.DeepseekV3Attention(config, 0).eval().to(getattr(torch, dtype))
    mixer = module(scale_after_cast=True, **fields)
    variables = jax.tree.map(lambda leaf: leaf.astype(dtype), weights(mixer))
    named = flat(variables["params"])
    for path, parameter in theirs.named_parameters():
        owner, _, kind = path.rpartition(".")
        leaf = f"{owner}/{'scale' if 'layernorm' in owner else 'kernel' if kind == 'weight' else 'bias'}"
        value = np.asarray(named.pop(leaf), np.float32)
        parameter.data.copy_(torch.tensor(value.T if value.ndim == 2 else value))
    assert named == {}
    x = torch.tensor(np.asarray(states(2, 20))).to(getattr(torch, dtype))
    positions = torch.arange(20)[None]
    tables = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)(x, positions)
    mask = torch.full((20, 20), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, position_embeddings=tables, attention_mask=mask)[0].float().numpy()
    got = np.asarray(run(mixer, variables, jnp.asarray(x.float().numpy()).astype(dtype)), np.float32)
    bound = 3e-6 if dtype == "float32" else 3 * 2**-8
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


def _sizes(fields):
    return {key: value for key, value in fields.items() if key in SIZES}


# The cache, and the two paths over it.


class Decoder:
    """A mixer, its weights and the cache it has written so far."""

    def __init__(self, mixer, variables, rows):
        self.variables = variables
        self.step = jax.jit(lambda v, x, **call: mixer.apply(v, x, decode=True, mutable=["cache"], **call))
        self.cache = self.step(variables, states(rows, 1))[1]["cache"]

    def __call__(self, x, **call):
        out, written = self.step({**self.variables, "cache": self.cache}, x, **call)
        self.cache = written["cache"]
        return out


def test_the_cache_holds_a_latent_and_a_rotary_key_a_token():
    mixer = module()
    cache = Decoder(mixer, weights(mixer), 3).cache
    assert jax.tree.map(jnp.shape, cache) == {
        "cached_latent": (3, 1, SLOTS, 10),
        "cached_rope_key": (3, 1, SLOTS, 6),
        "cached_valid": (3, SLOTS),
        "cached_positions": (3, SLOTS),
        "cursor": (3,),
    }
    assert all(not leaf.any() for leaf in jax.tree.leaves(cache))
    numbers = sum(cache[name].size for name in ("cached_latent", "cached_rope_key"))
    assert numbers == 3 * SLOTS * (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])


@pytest.mark.parametrize("fields", [CASES["plain"], CASES["yarn_1_half"], {"window": 3}, {"chunk": 4}], ids=str)
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("prompt", [1, 7])
def test_steps_are_the_full_forward(fields, impl, prompt):
    mixer = module(attention_impl=impl, **fields)
    variables, x = weights(mixer), states(2, 15)
    decode = Decoder(mixer, variables, 2)
    outs = [decode(x[:, :prompt])] + [decode(x[:, i : i + 1]) for i in range(prompt, 15)]
    close(jnp.concatenate(outs, axis=1), run(mixer.clone(attention_impl="reference"), variables, x))
    np.testing.assert_array_equal(decode.cache["cursor"], [15, 15])


def test_a_decode_step_expands_no_keys_and_values():
    """What the step of "auto" multiplies has no array of a key or a value for every slot and head."""
    mixer = module(max_seq_len=513)
    variables = weights(mixer)

    def arrays(impl):
        chosen = mixer.clone(attention_impl=impl)
        cache = Decoder(chosen, variables, 1).cache
        step = jax.make_jaxpr(lambda v, x: chosen.apply(v, x, decode=True, mutable=["cache"]))
        return {
            tuple(variable.aval.shape)
            for equation in step({**variables, "cache": cache}, states(1, 1)).eqns
            for variable in equation.outvars
        }

    width = SIZES["qk_nope_head_dim"] + SIZES["v_head_dim"]
    assert (1, 513, 4 * width) in arrays("reference")
    largest = max(math.prod(shape) for shape in arrays("auto"))
    assert largest <= 513 * max(SIZES["kv_lora_rank"], SIZES["num_heads"])


@pytest.mark.parametrize("sizes", [(512, 128, 64, 128), (512, 192, 64, 256), (10, 8, 6, 12)])
def test_few_queries_absorb_and_many_expand(sizes):
    assert absorbs(1, 2048, *sizes)
    assert absorbs(1, 16384, *sizes)
    assert not absorbs(16384, 16384, *sizes)
    assert not absorbs(512, 512, *sizes)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_continue_as_unpadded_ones(side):
    mixer = module(**CASES["yarn_1_half"])
    variables = weights(mixer)
    short, long, junk = states(1, 7), states(1, 10, seed=9), 50 * states(1, 3, seed=10)
    prompt = jnp.concatenate([junk, short[:, :3]] if side == "left" else [short[:, :3], junk], axis=1)
    mask = jnp.asarray([[0] * 3 + [1] * 3 if side == "left" else [1] * 3 + [0] * 3, [1] * 6], bool)
    decode = Decoder(mixer, variables, 2)
    first = decode(jnp.concatenate([prompt, long[:, :6]]), attention_metadata=AttentionMetadata(attention_mask=mask))
    rest = [decode(jnp.concatenate([short[:, 3 + i : 4 + i], long[:, 6 + i : 7 + i]])) for i in range(4)]
    rest = jnp.concatenate(rest, axis=1)
    close(rest[:1], run(mixer, variables, short)[:, 3:])
    close(jnp.concatenate([first[1:], rest[1:]], axis=1), run(mixer, variables, long))


def test_packed_rows_are_the_unpacked_rows():
    mixer = module(**CASES["yarn_1_half"])
    variables = weights(mixer)
    one, two = states(1, 6), states(1, 9, seed=9)
    packed = mixer.apply(
        variables,
        jnp.concatenate([one, two], axis=1),
        positions=jnp.array([[*range(6), *range(9)]]),
        segment_ids=jnp.array([[1] * 6 + [2] * 9]),
    )
    close(packed[:, :6], run(mixer, variables, one))
    close(packed[:, 6:], run(mixer, variables, two))


def test_stored_dtype():
    mixer = module(kv_cache=KVCache(dtype="bfloat16"))
    variables, x = weights(mixer), states(1, 6)
    decode = Decoder(mixer, variables, 1)
    assert {decode.cache[name].dtype for name in ("cached_latent", "cached_rope_key")} == {jnp.dtype(jnp.bfloat16)}
    decode(x[:, :5])
    difference = jnp.abs(decode(x[:, 5:]) - run(mixer, variables, x)[:, 5:]).max()
    assert 1e-5 < float(difference) < 0.1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"kv_store": {"0": 1}}, "kv_store"),
        ({"decode": True, "segment_ids": jnp.ones((1, 2), jnp.int32)}, "segment_ids: packed rows"),
    ],
)
def test_calls_it_cannot_answer_are_refused(call, match):
    mixer = module()
    with pytest.raises(ValueError, match=match):
        mixer.apply(weights(mixer), states(1, 2), mutable=["cache"], **call)


# In the decoder.

RECORD = MLA(**{name: value for name, value in SIZES.items() if name != "num_heads"})
DECODER = {
    "vocab_size": 61,
    "emb_features": FEATURES,
    "num_layers": 3,
    "num_heads": 4,
    "mlp_features": 28,
    "max_seq_len": 32,
    "qk_norm": False,
    "rope_interleave": True,
    "mixer": RECORD,
}
TOKENS = np.random.default_rng(5).integers(1, 61, (2, 12)).astype(np.int32)


def drawn(model):
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3 + (0.8 if leaf.ndim == 1 else 0), jnp.float32),
        shapes,
    )


def test_every_mixer_record_has_a_module():
    records = {record.name: record for record in RECORDS.values() if issubclass(record, MixerBase)}
    assert set(MIXERS) == {"attention", *records}
    assert records["mla"] is MLA
    assert DecoderFields.from_json(DecoderFields(**DECODER).to_json()) == DecoderFields(**DECODER)


def test_a_decoder_of_latent_attention_scans_decodes_and_generates():
    model = CausalTransformer(**DECODER)
    variables = drawn(model)
    assert set(variables["params"]["layers_1"]["self_attn"]) == {
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    }  # fmt: skip
    full = jax.jit(model.apply)(variables, TOKENS)
    scanned = model.clone(scan_layers=True)
    close(jax.jit(scanned.apply)(variables, TOKENS), full, atol=2e-5)
    remat = model.clone(remat="save_qkv_proj")
    gradients = [jax.jit(jax.grad(lambda v, m=m: m.apply(v, TOKENS).sum()))(variables) for m in (model, remat)]
    jax.tree.map(lambda a, b: close(a, b, atol=1e-5 * float(jnp.abs(a).max() + 1)), *gradients)
    for one in (model, scanned):
        cache = one.apply(variables, 2, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"]
        step = jax.jit(lambda v, t, m=one: m.apply(v, t, decode=True, mutable=["cache"]))
        parts = []
        for start, stop in ((0, 5), *((i, i + 1) for i in range(5, 12))):
            logits, written = step({**variables, "cache": cache}, TOKENS[:, start:stop])
            cache = written["cache"]
            parts.append(logits)
        close(jnp.concatenate(parts, axis=1), full, atol=2e-5)


def test_the_geometry_follows_the_record():
    fields = DecoderFields(**DECODER)
    kind = layer_plan(fields).kinds["full_attention"]
    assert (kind.head_dim, kind.num_kv_heads, fields.head_features) == (14, 4, 14)
    assert kind.mixer == RECORD
    refuse_unbuildable_fields(fields, layer_plan(fields).kinds)
    other = fields.replace(mixer=None, head_dim=6, kinds={"a": LayerKind(mixer=RECORD, head_dim=14)})
    assert layer_plan(other).kinds["a"].mixer == RECORD


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("head_dim=12 of kind", {"head_dim": 12}),
        ("num_kv_heads=2 of kind", {"num_kv_heads": 2}),
        ("qk_norm=True with the MLA", {"qk_norm": True}),
        ("attention_sinks=True with the MLA", {"attention_sinks": True}),
        ("output_gate=True with the MLA", {"output_gate": True}),
        ("qk_rope_head_dim=5 of kind", {"mixer": replace(RECORD, qk_rope_head_dim=5)}),
        ("kv_lora_rank=0 of kind", {"mixer": replace(RECORD, kv_lora_rank=0)}),
        ("q_lora_rank=0 of kind", {"mixer": replace(RECORD, q_lora_rank=0)}),
        ("latent_norm_eps=-1.0 of kind", {"mixer": replace(RECORD, latent_norm_eps=-1.0)}),
        ("sets rope_scaling and yarn", {"rope_scaling": RopeScaling(), "yarn": YarnScaling()}),
    ],
)
def test_senseless_fields_are_refused(match, changes):
    fields = DecoderFields(**{**DECODER, **changes})
    with pytest.raises(ValueError, match=match):
        refuse_unbuildable_fields(fields, layer_plan(fields).kinds)
