"""Grouped-query attention: the token mixer of every layer without a mixer of its own.

What a query sees is decided in one place, by positions, validity and segments (`visibility`), so padded rows,
packed rows and cached decoding follow one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from .dense import Dense
from .kv_cache import DecodeCache, refuse_unbuildable_cache
from .norms import RMSNorm
from .records import KVCache, RopeScaling, YarnScaling
from .rope import apply_rotary, rotary_freqs, rotary_tables

ATTENTION_IMPLS = ("auto", "reference", "xla")
QK_NORM_SCOPES = ("head", "projection")

QUERY_BLOCK = 128
"""The queries whose scores are held at once (`in_query_blocks`)."""


@flax.struct.dataclass
class AttentionMetadata:
    """What a call says about its tokens besides their states; None says nothing.

    attention_mask [B, S] bool: the real tokens among the call's. pairwise_mask [B, Q, K] bool: an explicit
    visibility of keys (the cache's slots when decoding) in place of the causal and segment rules; windows and
    chunks still apply. key_positions [B, K] int32: the keys' positions, where they are not the written
    tokens' own.
    """

    attention_mask: jax.Array | None = None
    pairwise_mask: jax.Array | None = None
    key_positions: jax.Array | None = None


def visibility(
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    key_valid: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    pairwise_mask: jax.Array | None = None,
) -> jax.Array:
    """Which keys each query attends: bool [B, Q, K] (or [1, Q, K]) from positions [B, Q] and [B, K].

    Key j is visible to query i when i >= j (causal), i - j < window (so a window of W holds W keys, the
    query's own included: transformers 5.24 `sliding_window_overlay`), i // chunk == j // chunk, the key is a
    real token, and both are of one segment. segment_ids [B, Q] are the queries' and the keys', who are then
    the same tokens.
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    seen = jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), jnp.bool_)
    if pairwise_mask is not None:
        seen = seen & pairwise_mask.astype(jnp.bool_)
    else:
        if causal:
            seen = seen & (key <= query)
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    if key_valid is not None:
        seen = seen & key_valid[:, None, :]
    return seen


def grouped_scores(query: jax.Array, key: jax.Array, precision: Any = None) -> jax.Array:
    """Dot products of query [B, S, heads, D] with key [B, kv_heads, T, D]: fp32 [B, kv_heads, group, S, T].

    Query head h reads key head h // group. Keys are never repeated, and lie as the batched product reads
    them.
    """
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = query.reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * length, dim)
    scores = jax.lax.dot_general(
        rows,
        key,
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=jnp.promote_types(query.dtype, jnp.float32),
    )
    return scores.reshape(batch, kv_heads, group, length, key.shape[2])


def grouped_values(probabilities: jax.Array, value: jax.Array, precision: Any = None) -> jax.Array:
    """probabilities [B, kv_heads, group, S, T] over value [B, kv_heads, T, D]: [B, S, heads, D], value's
    dtype."""
    batch, kv_heads, group, length, keys = probabilities.shape
    out = jax.lax.dot_general(
        probabilities.reshape(batch, kv_heads, group * length, keys),
        value,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=jnp.promote_types(value.dtype, jnp.float32),
    )
    out = out.astype(value.dtype).reshape(batch, kv_heads, group, length, value.shape[-1])
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, value.shape[-1])


def masked_softmax(scores: jax.Array, seen: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Softmax over the last axis of scores [B, kv_heads, group, S, T] with `seen` [B, S, T].

    sinks [heads]: a logit per head that joins the denominator and is dropped (transformers 5.24
    `GptOssAttention`, eager).
    """
    # Finite, so that a row with nothing to see is a uniform row and not NaN, in values and in gradients.
    floor = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
    scores = jnp.where(seen[:, None, None], scores, floor)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(scores.dtype).reshape(1, scores.shape[1], scores.shape[2], 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))


def probabilities(
    scores: jax.Array,
    seen: jax.Array,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Softmax of dot products [B, kv_heads, group, S, T] times `scale`, soft-capped, where seen [B, S, T].

    dtype: what the softmax is taken in, None for the scores' own, fp32.
    """
    scores = scores * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if dtype is not None:
        scores = scores.astype(dtype)
    return masked_softmax(scores, seen, sinks)


def in_query_blocks(attend: Callable[..., jax.Array], *rows: jax.Array, block: int = QUERY_BLOCK) -> jax.Array:
    """attend(*rows) -> [B, S, …] of arrays [B, S, …], a row a query, `block` queries at a time.

    Rows of a softmax are independent, so the values are the same; scores are [.., block, T] and stay in a
    CPU's cache, which halves attention's time over long rows.
    """
    batch, length = rows[0].shape[:2]
    if length <= block:
        return attend(*rows)
    pad = -length % block

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    out = jax.lax.map(lambda part: attend(*part), tuple(map(blocks, rows)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length + pad, *out.shape[3:])[:, :length]


class CausalSelfAttention(nn.Module):
    """Grouped-query attention with rotary positions: x [B, S, features] -> [B, S, features].

    Field by field: window and chunk limit what a query sees (`visibility`). qk_norm norms queries and keys
    before the rotation, per head ("head": Qwen3, Gemma 3) or over the whole projection ("projection": OLMo 2
    and 3). attention_bias biases q, k and v; o_proj_bias biases o_proj and follows attention_bias when None.
    attention_scale multiplies the scores, None is head_dim^-0.5. attn_logit_softcap c makes a score c
    tanh(score / c) (Gemma 2). attention_sinks is gpt-oss's learned logit per head. output_gate doubles
    q_proj: per head its features are query then gate, and sigmoid(gate) multiplies the output before o_proj
    (Qwen3-Next). rope_interleaved pairs neighbouring features (`apply_rotary`). dropout_rate drops
    probabilities. force_fp32_for_softmax=False softmaxes in the compute dtype. attention_impl: "reference"
    is the grouped product here, "auto" the same by blocks of queries (`in_query_blocks`), "xla"
    `jax.nn.dot_product_attention`. causal=False attends both ways and has no cache.

    Raises ValueError, naming the field, for values and combinations it cannot build.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    yarn: YarnScaling | None = None
    partial_rotary_factor: float | None = None
    partial_rotary_type: str = "proportional"
    rope_interleaved: bool = False
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    qk_norm: bool = True
    qk_norm_scope: str = "head"
    norm_eps: float = 1e-5
    scale_offset: bool = False
    scale_after_cast: bool = False
    attention_bias: bool = False
    o_proj_bias: bool | None = None
    attention_scale: float | None = None
    attention_sinks: bool = False
    attn_logit_softcap: float | None = None
    output_gate: bool = False
    dropout_rate: float = 0.0
    force_fp32_for_softmax: bool = True
    attention_impl: str = "auto"
    kv_cache: KVCache = KVCache()
    init_std: float | None = None
    output_init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def refuse_unbuildable(self) -> None:
        """Raise ValueError, naming the field, for what this attention cannot be."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.qk_norm_scope not in QK_NORM_SCOPES:
            raise ValueError(f"qk_norm_scope is {self.qk_norm_scope!r}; it is one of {', '.join(QK_NORM_SCOPES)}")
        if self.window is not None and self.chunk is not None:
            raise ValueError("window and chunk are both set; attention has one or neither")
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it holds at least one key")
            if value is not None and not self.causal:
                raise ValueError(f"{name} is {value} with causal=False, which attends the whole sequence")
        if self.attention_impl not in ATTENTION_IMPLS:
            raise ValueError(f"attention_impl is {self.attention_impl!r}; it is one of {', '.join(ATTENTION_IMPLS)}")
        if self.attention_impl == "xla":
            for name in ("attn_logit_softcap", "attention_sinks", "dropout_rate"):
                if getattr(self, name):
                    raise ValueError(f"attention_impl 'xla' has no {name}; use 'reference'")
            if not self.force_fp32_for_softmax:
                raise ValueError("attention_impl 'xla' softmaxes in fp32; use 'reference'")
        refuse_unbuildable_cache(self.kv_cache)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool = False,
        decode: bool = False,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        kv_store: Any = None,
        attention_metadata: AttentionMetadata | None = None,
    ) -> jax.Array:
        """x [B, S, features] -> [B, S, features].

        positions [B, S] int32 default to counting each row's real tokens, from those its cache holds when
        decoding; packed rows give their own, restarting with each segment of segment_ids [B, S].
        Raises ValueError for a kv_store (cross-layer sharing is not built) and for decoding packed rows or
        without causality.
        """
        self.refuse_unbuildable()
        refuse_call(kv_store, decode, segment_ids, self.causal)
        metadata = AttentionMetadata() if attention_metadata is None else attention_metadata
        batch, length, features = x.shape
        query, key, value, gate = self._projections(x)

        valid = real_tokens(metadata, decode, batch, length)
        cache = None
        if decode:
            shape = (self.num_kv_heads, self.head_dim)
            leaves = {"cached_key": shape, "cached_value": shape}
            cache = DecodeCache(self, self.kv_cache, batch, self.max_seq_len, leaves, key.dtype)
            if not cache.allocated:
                cache = None
        if positions is None:
            positions = token_positions(valid, length, cache)

        query, key = rotated(self, self.head_dim, positions, query, key)
        new = {"cached_key": key.transpose(0, 2, 1, 3), "cached_value": value.transpose(0, 2, 1, 3)}
        (key, value), seen = attended(self, new, cache, valid, positions, segment_ids, metadata)
        context = self._attend(query, key, value, seen, train).reshape(batch, length, -1)
        if gate is not None:
            context = context * jax.nn.sigmoid(gate)
        context = checkpoint_name(context, "context")
        bias = self.attention_bias if self.o_proj_bias is None else self.o_proj_bias
        o_proj = Dense(features, bias, self.output_init_std, self.dtype, self.precision, name="o_proj")
        return checkpoint_name(o_proj(context), "o_proj")

    def _projections(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Query [B, S, heads, D], key and value [B, S, kv_heads, D], normed and not yet rotated, and the
        output gate [B, S, heads * D]."""

        def project(name: str, heads: int, width: int) -> jax.Array:
            dense = Dense(heads * width, self.attention_bias, self.init_std, self.dtype, self.precision, name=name)
            return checkpoint_name(dense(x), name).reshape(*x.shape[:2], heads, width)

        def norm(name: str, states: jax.Array) -> jax.Array:
            rms = RMSNorm(self.norm_eps, self.scale_offset, self.scale_after_cast, self.dtype, name=name)
            if self.qk_norm_scope == "head":
                return rms(states)
            return rms(states.reshape(*x.shape[:2], -1)).reshape(states.shape)

        gate = None
        if self.output_gate:
            both = project("q_proj", self.num_heads, 2 * self.head_dim)
            query, gate = jnp.split(both, 2, axis=-1)
            gate = gate.reshape(*x.shape[:2], -1)
        else:
            query = project("q_proj", self.num_heads, self.head_dim)
        key = project("k_proj", self.num_kv_heads, self.head_dim)
        value = project("v_proj", self.num_kv_heads, self.head_dim)
        if self.qk_norm:
            query, key = norm("q_norm", query), norm("k_norm", key)
        return query, key, value, gate

    @nn.nowrap
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, train: bool) -> jax.Array:
        """query [B, S, heads, D] over key and value [B, kv_heads, T, D] where seen [B, S, T]: [B, S, heads,
        D]."""
        sinks = None
        if self.attention_sinks:
            sinks = self.param("sinks", nn.initializers.zeros_init(), (self.num_heads,), jnp.float32)
        if self.attention_impl == "xla":
            return jax.nn.dot_product_attention(
                query,
                key.transpose(0, 2, 1, 3),
                value.transpose(0, 2, 1, 3),
                mask=seen[:, None],
                scale=self._scale(),
                implementation="xla",
            )
        dropout = nn.Dropout(self.dropout_rate, deterministic=False) if self.dropout_rate and train else None

        def attend(query: jax.Array, seen: jax.Array) -> jax.Array:
            scores = grouped_scores(query, key, self.precision)
            softmax_dtype = None if self.force_fp32_for_softmax else query.dtype
            weights = probabilities(scores, seen, self._scale(), self.attn_logit_softcap, sinks, softmax_dtype)
            if dropout is not None:
                weights = dropout(weights)
            return grouped_values(weights.astype(value.dtype), value, self.precision)

        if self.attention_impl == "reference" or dropout is not None:
            return attend(query, seen)
        return in_query_blocks(attend, query, seen)


def refuse_call(kv_store: Any, decode: bool, segment_ids: jax.Array | None, causal: bool) -> None:
    """Raise ValueError for a call that attention with a decode cache cannot answer."""
    if kv_store:
        raise ValueError("kv_store: sharing keys and values across layers is not built")
    if decode and segment_ids is not None:
        raise ValueError("segment_ids: packed rows have no decode cache; decode one document a row")
    if decode and not causal:
        raise ValueError("decode: causal=False attends the whole sequence and has no cache")


def real_tokens(metadata: AttentionMetadata, decode: bool, batch: int, length: int) -> jax.Array | None:
    """Which of the call's tokens are real [B, S] bool; None for all, spelled out when decoding."""
    if metadata.attention_mask is not None:
        return metadata.attention_mask.astype(jnp.bool_)
    return jnp.ones((batch, length), jnp.bool_) if decode else None


def token_positions(valid: jax.Array | None, length: int, cache: DecodeCache | None) -> jax.Array:
    """Positions [B, S] (or [1, S]) of a call that states none: its real tokens counted from those cached."""
    positions = row_positions(valid, length)
    if cache is None:
        return positions
    return positions + cache.valid.value.sum(axis=1, dtype=jnp.int32)[:, None]


def rotated(
    mixer: Any, width: int, positions: jax.Array, *states: jax.Array, interleaved: bool | None = None
) -> list[jax.Array]:
    """The first `width` features of each of `states` [B, S, heads, D] turned to `positions` as the rotary fields of
    `mixer` say; `interleaved` is theirs when None."""
    inverse, amplitude = rotary_freqs(
        width,
        mixer.rope_theta,
        rope_scaling=mixer.rope_scaling,
        yarn=mixer.yarn,
        partial_rotary_factor=mixer.partial_rotary_factor,
        partial_rotary_type=mixer.partial_rotary_type,
    )
    cos, sin = rotary_tables(positions, inverse, amplitude, states[0].dtype)
    pairs = mixer.rope_interleaved if interleaved is None else interleaved
    return [apply_rotary(x, cos, sin, interleaved=pairs) for x in states]


def attended(
    mixer: Any,
    new: Mapping[str, jax.Array],
    cache: DecodeCache | None,
    valid: jax.Array | None,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    metadata: AttentionMetadata,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """What the call's queries attend, and where [B, S, T]: the `new` arrays [B, heads, S, features] alone, or all that
    `cache` holds once they are appended. `mixer` states causal, window and chunk."""
    held, key_positions = tuple(new.values()), positions
    if cache is not None:
        assert valid is not None
        cache.append(new, valid, jnp.broadcast_to(positions, valid.shape))
        held, valid, key_positions = cache.read(), cache.valid.value, cache.positions.value
    seen = visibility(
        positions,
        key_positions if metadata.key_positions is None else metadata.key_positions,
        causal=mixer.causal,
        window=mixer.window,
        chunk=mixer.chunk,
        key_valid=valid,
        segment_ids=segment_ids,
        pairwise_mask=metadata.pairwise_mask,
    )
    return held, seen


def row_positions(valid: jax.Array | None, length: int) -> jax.Array:
    """Positions [B, S] int32 that count each row's real tokens from 0 (`GenerationMixin`'s for a padded
    batch); [1, S] when every token is real. A padded token before the first real one is at 0."""
    if valid is None:
        return jnp.arange(length, dtype=jnp.int32)[None]
    return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
