"""Attention against transformers' own modules with the same weights, and what a query sees."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    Olmo3Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

from dewconv.dew_core.attention import AttentionMetadata, CausalSelfAttention, visibility
from dewconv.dew_core.records import KVCache, RopeScaling, YarnScaling

FEATURES, HEADS, KV, DIM = 24, 4, 2, 16
WIDTHS = {
    "hidden_size": FEATURES,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
THETA = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass
class Case:
    """A transformers attention module and the fields of ours that should compute it."""

    attention: Any
    rotary: Any
    config: Any
    ours: dict = field(default_factory=dict)
    layer: int = 0
    layer_type: str | None = None
    window: int | None = None


CASES = {
    "qwen3_bias_window": lambda: Case(
        modeling_qwen3.Qwen3Attention,
        modeling_qwen3.Qwen3RotaryEmbedding,
        Qwen3Config(**WIDTHS, **SLIDING, use_sliding_window=True, attention_bias=True, rope_parameters=THETA),
        {"attention_bias": True, "scale_after_cast": True},
        window=4,
    ),
    "qwen3_yarn": lambda: Case(
        modeling_qwen3.Qwen3Attention,
        modeling_qwen3.Qwen3RotaryEmbedding,
        Qwen3Config(**WIDTHS, rope_parameters=YARN),
        {
            "scale_after_cast": True,
            "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "gemma3_sliding": lambda: gemma3(0, "sliding_attention", window=4),
    "gemma3_full": lambda: gemma3(1, "full_attention", rope_scaling=RopeScaling("linear", factor=8.0)),
    "gemma2_softcap": lambda: Case(
        modeling_gemma2.Gemma2Attention,
        modeling_gemma2.Gemma2RotaryEmbedding,
        Gemma2Config(**WIDTHS, **SLIDING, query_pre_attn_scalar=20, attn_logit_softcapping=1.5, rope_parameters=THETA),
        {"qk_norm": False, "attention_scale": 20**-0.5, "attn_logit_softcap": 1.5},
        layer=1,
    ),
    "olmo3": lambda: Case(
        modeling_olmo3.Olmo3Attention,
        modeling_olmo3.Olmo3RotaryEmbedding,
        Olmo3Config(
            **WIDTHS,
            **SLIDING,
            rope_parameters={"sliding_attention": THETA, "full_attention": YARN},
        ),
        {
            "qk_norm_scope": "projection",
            "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=16),
        },
        layer=1,
        layer_type="full_attention",
    ),
    "gpt_oss_sinks": lambda: Case(
        modeling_gpt_oss.GptOssAttention,
        modeling_gpt_oss.GptOssRotaryEmbedding,
        GptOssConfig(**WIDTHS, **SLIDING, attention_bias=True, rope_parameters=THETA),
        {"qk_norm": False, "attention_bias": True, "attention_sinks": True},
        window=4,
    ),
    "qwen3_next_gate": lambda: Case(
        modeling_qwen3_next.Qwen3NextAttention,
        modeling_qwen3_next.Qwen3NextRotaryEmbedding,
        Qwen3NextConfig(**WIDTHS, rope_parameters={**THETA, "partial_rotary_factor": 0.5}),
        {
            "output_gate": True,
            "scale_offset": True,
            "partial_rotary_factor": 0.5,
            "partial_rotary_type": "prefix",
        },
    ),
    "glm4_interleaved": lambda: Case(
        modeling_glm4.Glm4Attention,
        modeling_glm4.Glm4RotaryEmbedding,
        Glm4Config(**WIDTHS, attention_bias=True, rope_parameters={**THETA, "partial_rotary_factor": 0.5}),
        {
            "qk_norm": False,
            "attention_bias": True,
            "o_proj_bias": False,
            "rope_interleaved": True,
            "partial_rotary_factor": 0.5,
            "partial_rotary_type": "prefix",
        },
    ),
}


def gemma3(layer, layer_type, window=None, **ours):
    rope = {
        "sliding_attention": THETA,
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    }
    return Case(
        modeling_gemma3.Gemma3Attention,
        modeling_gemma3.Gemma3RotaryEmbedding,
        Gemma3TextConfig(**WIDTHS, **SLIDING, query_pre_attn_scalar=20, rope_parameters=rope),
        {"scale_offset": True, "attention_scale": 20**-0.5, **ours},
        layer=layer,
        layer_type=layer_type,
        window=window,
    )


def build(case, dtype):
    """(torch module, torch rotary, our module, our variables) with one set of weights, none of them neutral."""
    case.config._attn_implementation = "eager"
    reference = case.attention(case.config, case.layer).eval().to(getattr(torch, dtype))
    rotary = case.rotary(case.config)
    rng = np.random.default_rng(5)
    params: dict = {}
    offset = case.ours.get("scale_offset", False)
    for name, leaf in reference.named_parameters():
        value = rng.standard_normal(tuple(leaf.shape)).astype(np.float32) * 0.4
        owner, _, kind = name.rpartition(".")
        if owner.endswith("norm") and not offset:
            value = 1 + value
        if leaf.ndim == 2:
            value *= 2 * leaf.shape[1] ** -0.5
        leaf.data.copy_(torch.tensor(value))
        ours = jnp.asarray(value).astype(dtype)
        if not owner:
            params[name] = ours
        elif owner.endswith("norm"):
            params.setdefault(owner, {})["scale"] = ours
        else:
            params.setdefault(owner, {})["kernel" if kind == "weight" else kind] = ours.T
    mixer = CausalSelfAttention(
        HEADS, KV, DIM, max_seq_len=32, norm_eps=case.config.rms_norm_eps, window=case.window, **case.ours
    )
    return reference, rotary, mixer, {"params": params}


def torch_attention(case, reference, rotary, x, positions, seen):
    """The torch module's output under an explicit boolean mask [B, Q, K]."""
    where = (case.layer_type,) if case.layer_type else ()
    tables = rotary(x, torch.tensor(positions), *where)
    mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~torch.tensor(seen), torch.finfo(x.dtype).min)
    out, _ = reference(x, position_embeddings=tables, attention_mask=mask[:, None])
    return out.detach().float().numpy()


def rule(length, window=None, chunk=None, valid=None, segments=None):
    """What each query of each row sees, spelled out a pair at a time."""
    rows = len(valid if valid is not None else segments if segments is not None else [0])
    seen = np.zeros((rows, length, length), bool)
    for row in range(rows):
        for i in range(length):
            for j in range(i + 1):
                seen[row, i, j] = (
                    (window is None or j > i - window)
                    and (chunk is None or i // chunk == j // chunk)
                    and (valid is None or bool(valid[row][j]))
                    and (segments is None or segments[row][i] == segments[row][j])
                )
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_against_transformers(name, dtype):
    case = CASES[name]()
    reference, rotary, mixer, variables = build(case, dtype)
    length = 24
    x = np.random.default_rng(6).standard_normal((2, length, FEATURES)).astype(np.float32)
    x = torch.tensor(x).to(getattr(torch, dtype))
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
    seen = np.repeat(rule(length, window=case.window), 2, axis=0)
    theirs = torch_attention(case, reference, rotary, x, positions, seen)
    mine = jax.jit(mixer.apply)(variables, jnp.asarray(x.float().numpy()).astype(dtype))
    assert mine.dtype == jnp.dtype(dtype)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(mixer.init, jax.random.key(0), jnp.asarray(x.float().numpy())))
    assert shapes["params"] == jax.tree.map(jnp.shape, variables["params"])
    scale = np.abs(theirs).max()
    bound = 3e-6 if dtype == "float32" else 3 * 2**-8
    assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= bound * scale


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_bias_window", {"window": 5}),
        ("qwen3_bias_window", {"window": None}),
        ("gemma3_full", {"rope_scaling": None}),
        ("gemma3_full", {"attention_scale": None}),
        ("gemma2_softcap", {"attn_logit_softcap": None}),
        ("olmo3", {"yarn": None}),
        ("qwen3_next_gate", {"partial_rotary_type": "proportional"}),
        ("glm4_interleaved", {"rope_interleaved": False}),
    ],
)
def test_each_field_moves_the_output(name, change):
    case = CASES[name]()
    _, _, mixer, variables = build(case, "float32")
    x = jnp.asarray(np.random.default_rng(6).standard_normal((1, 24, FEATURES)), jnp.float32)
    out = run(mixer, variables, x)
    other = run(mixer.clone(**change), variables, x)
    assert float(jnp.abs(out - other).max()) > 1e-3 * float(jnp.abs(out).max())


def plain(**fields):
    """A qwen3-like mixer with random weights, not neutral."""
    mixer = CausalSelfAttention(HEADS, KV, DIM, max_seq_len=32, attention_bias=True, **fields)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        value = 0.3 * rng.standard_normal(leaf.shape) + (jax.tree_util.keystr(path).endswith("['scale']"))
        return jnp.asarray(value, jnp.float32)

    return mixer, jax.tree_util.tree_map_with_path(draw, shapes)


@partial(jax.jit, static_argnums=0, static_argnames="train")
def run(mixer, variables, x, **call):
    return mixer.apply(variables, x, **call)


def states(rows, length, seed=8):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, FEATURES)), jnp.float32)


def close(a, b, atol=3e-6):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def test_window_counts_the_query_itself():
    mixer, variables = plain(window=3)
    x, i = states(1, 8), 6
    out = run(mixer, variables, x)[0, i]
    moved = {back: run(mixer, variables, x.at[0, i - back].add(1.0))[0, i] for back in (2, 3)}
    np.testing.assert_array_equal(out, moved[3])
    assert float(jnp.abs(out - moved[2]).max()) > 1e-3


def test_chunks():
    mixer, variables = plain(chunk=3)
    x = states(1, 8)
    out = run(mixer, variables, x)
    np.testing.assert_array_equal(out[0, 6], run(mixer, variables, x.at[0, 5].add(1.0))[0, 6])
    assert float(jnp.abs(out[0, 5] - run(mixer, variables, x.at[0, 3].add(1.0))[0, 5]).max()) > 1e-3
    # A chunk alone is its own sequence: rotary positions are relative.
    close(out[:, 3:6], run(mixer.clone(chunk=None), variables, x[:, 3:6]))


@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"chunk": 3}], ids=str)
def test_visibility_is_the_rule(fields):
    valid = np.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    seen = visibility(jnp.asarray(positions), jnp.asarray(positions), key_valid=jnp.asarray(valid, bool), **fields)
    np.testing.assert_array_equal(np.asarray(seen), rule(8, valid=valid, **fields))


@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"chunk": 3}, {"attention_sinks": True}], ids=str)
def test_packed_rows_are_unpacked_rows(fields):
    mixer, variables = plain(**fields)
    first, second = states(1, 5), states(1, 7, seed=9)
    packed = jnp.concatenate([first, second], axis=1)
    segments = jnp.asarray([[1] * 5 + [2] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]], jnp.int32)
    out = run(mixer, variables, packed, positions=positions, segment_ids=segments)
    close(out[:, :5], run(mixer, variables, first))
    close(out[:, 5:], run(mixer, variables, second))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"chunk": 3}], ids=str)
def test_padded_rows_are_unpadded_rows(fields, side):
    mixer, variables = plain(**fields)
    short, long = states(1, 4), states(1, 9, seed=9)
    junk = 50 * states(1, 5, seed=10)
    row = jnp.concatenate([junk, short] if side == "left" else [short, junk], axis=1)
    mask = jnp.asarray([[0] * 5 + [1] * 4 if side == "left" else [1] * 4 + [0] * 5, [1] * 9], bool)
    real = slice(5, 9) if side == "left" else slice(0, 4)
    metadata = AttentionMetadata(attention_mask=mask)
    out = run(mixer, variables, jnp.concatenate([row, long]), attention_metadata=metadata)
    close(out[:1, real], run(mixer, variables, short))
    close(out[1:], run(mixer, variables, long))


def test_bidirectional():
    mixer, variables = plain(causal=False)
    x = states(1, 6)
    out = run(mixer, variables, x)
    assert float(jnp.abs(out[0, 0] - run(mixer, variables, x.at[0, 5].add(1.0))[0, 0]).max()) > 1e-3


def test_pairwise_mask_replaces_the_causal_rule():
    mixer, variables = plain()
    x = states(2, 6)
    causal = jnp.asarray(np.repeat(rule(6), 2, axis=0))
    close(
        run(mixer, variables, x, attention_metadata=AttentionMetadata(pairwise_mask=causal)),
        run(mixer, variables, x),
    )
    everything = AttentionMetadata(pairwise_mask=jnp.ones((2, 6, 6), bool))
    close(
        run(mixer, variables, x, attention_metadata=everything),
        run(mixer.clone(causal=False), variables, x),
    )


def test_window_applies_to_stated_key_positions():
    mixer, variables = plain(window=3)
    x = states(1, 6)
    far = AttentionMetadata(
        pairwise_mask=jnp.asarray(rule(6)), key_positions=jnp.asarray([[-9, 1, 2, 3, 4, 5]], jnp.int32)
    )
    out = run(mixer, variables, x, attention_metadata=far)
    np.testing.assert_array_equal(out[0, 2], run(mixer, variables, x.at[0, 0].add(1.0), attention_metadata=far)[0, 2])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_padding_is_finite(dtype, sinks):
    mixer, variables = plain(attention_sinks=sinks, dtype=jnp.dtype(dtype))
    x = states(2, 5)
    mask = jnp.asarray([[0] * 5, [1] * 5], bool)

    def loss(variables, x):
        out = run(mixer, variables, x, attention_metadata=AttentionMetadata(attention_mask=mask))
        return jnp.square(out[1].astype(jnp.float32)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((out, grads)))
    assert float(jnp.abs(grads[1][0]).max()) == 0
    alone = jax.grad(lambda v: jnp.square(mixer.apply(v, x[1:]).astype(jnp.float32)).sum())(variables)
    if dtype == "float32":
        jax.tree.map(lambda a, b: close(a, b, 1e-4), grads[0], alone)


@pytest.mark.parametrize("name", ["qwen3_bias_window", "gemma3_full", "olmo3", "qwen3_next_gate"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_implementation(name, dtype):
    _, _, mixer, variables = build(CASES[name](), dtype)
    x = states(2, 9).astype(dtype)
    out = run(mixer, variables, x).astype(jnp.float32)
    other = run(mixer.clone(attention_impl="xla"), variables, x).astype(jnp.float32)
    close(out, other, (3e-6 if dtype == "float32" else 2**-6) * float(jnp.abs(out).max()))


def test_softmax_dtype():
    mixer, variables = plain(dtype=jnp.bfloat16)
    x = states(2, 30)
    out = run(mixer, variables, x).astype(jnp.float32)
    narrow = run(mixer.clone(force_fp32_for_softmax=False), variables, x).astype(jnp.float32)
    assert 0 < float(jnp.abs(out - narrow).max()) < 0.1 * float(jnp.abs(out).max())


def test_dropout_drops_probabilities_in_training_only():
    mixer, variables = plain(dropout_rate=0.5)
    x, rngs = states(1, 6), {"dropout": jax.random.key(1)}
    out = run(mixer, variables, x)
    close(out, run(mixer, variables, x, train=False, rngs=rngs))
    assert float(jnp.abs(out - run(mixer, variables, x, train=True, rngs=rngs)).max()) > 1e-3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_impl": "cudnn"}, "attention_impl is 'cudnn'"),
        ({"attention_impl": "xla", "attention_sinks": True}, "'xla' has no attention_sinks"),
        ({"attention_impl": "xla", "attn_logit_softcap": 5.0}, "'xla' has no attn_logit_softcap"),
        ({"window": 3, "chunk": 3}, "window and chunk"),
        ({"window": 0}, "window is 0"),
        ({"window": 3, "causal": False}, "window is 3 with causal=False"),
        ({"qk_norm_scope": "layer"}, "qk_norm_scope is 'layer'"),
        ({"num_kv_heads": 3}, "num_kv_heads 3"),
        ({"kv_cache": KVCache(layout="paged")}, "layout is 'paged'"),
        ({"kv_cache": KVCache(dtype="int8")}, "dtype is 'int8'"),
    ],
    ids=str,
)
def test_refusals(fields, named):
    mixer = CausalSelfAttention(HEADS, KV, DIM).clone(**fields)
    with pytest.raises(ValueError, match=named):
        mixer.init(jax.random.key(0), states(1, 2))


def test_call_refusals():
    mixer, variables = plain()
    x = states(1, 2)
    with pytest.raises(ValueError, match="kv_store"):
        mixer.apply(variables, x, kv_store={"0": x})
    with pytest.raises(ValueError, match="segment_ids"):
        mixer.apply(variables, x, decode=True, segment_ids=jnp.ones((1, 2)), mutable=["cache"])
    with pytest.raises(ValueError, match="causal=False"):
        mixer.clone(causal=False).apply(variables, x, decode=True, mutable=["cache"])


def test_blocks_of_queries_are_the_whole_product():
    """ "auto" attends 128 queries at a time, 300 of them in three blocks, the last one partly padding."""
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": 100, "attention_sinks": True}
    blocked, whole = CausalSelfAttention(**fields), CausalSelfAttention(**fields, attention_impl="reference")
    x = jax.random.normal(jax.random.key(0), (2, 300, 16))
    mask = jnp.arange(300)[None, :] >= jnp.array([[0], [40]])
    metadata = AttentionMetadata(attention_mask=mask)
    variables = jax.jit(blocked.init)(jax.random.key(1), x)

    def values(module):
        def loss(variables):
            out = module.apply(variables, x, attention_metadata=metadata)
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    (gradient, out), (wanted, want) = values(blocked), values(whole)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, wanted)
