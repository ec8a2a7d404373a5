"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; transformers 5.24 `DeepseekV3Attention`).

One normed latent a token is what keys and values are expanded from, and what is cached. Many queries attend expanded
keys and values; few attend the latents themselves, with the expansion folded into the query and the output, which
is the same product in another order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    ATTENTION_IMPLS,
    AttentionMetadata,
    attended,
    grouped_scores,
    grouped_values,
    in_query_blocks,
    probabilities,
    real_tokens,
    refuse_call,
    rotated,
    token_positions,
)
from .dense import Dense, compute_dtype, kernel_init, product
from .indexer import LightningIndexer
from .kv_cache import DecodeCache, refuse_unbuildable_cache
from .layers import DEFAULT_KIND
from .norms import RMSNorm
from .records import Indexer, KVCache, RopeScaling, YarnScaling
from .rope import yarn_softmax_correction


class ExpansionKernel(nn.Module):
    """`kv_b_proj`'s kernel [rank, heads * (nope + value)], a head's key features before its value's."""

    rank: int
    features: int
    init_std: float | None = None

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", kernel_init(self.init_std), (self.rank, self.features), jnp.float32)


class LatentAttention(nn.Module):
    """x [B, S, features] -> [B, S, features].

    The sizes are `records.MLA`'s, the other fields `CausalSelfAttention`'s, with these differences. The rotation
    turns each head's last qk_rope_head_dim query features and the one rotary key that all heads share.
    rope_interleaved pairs neighbouring features (`rope_interleave` of the releases), else halves are pairs.
    attention_scale None is (qk_nope_head_dim + qk_rope_head_dim)^-0.5 times YaRN's second correction
    (`yarn_softmax_correction`). attention_bias biases q_a_proj, kv_a_proj_with_mqa and o_proj, and nothing else.

    The cache holds kv_lora_rank + qk_rope_head_dim numbers a token, and index_head_dim more with an indexer.
    attention_impl "auto" attends it as it lies when
    that takes fewer multiplications than expanding it (`absorbs`: a decode step does), "reference" and "xla" always
    expand keys and values.

    indexer narrows what a query sees to the keys it chooses (`LightningIndexer`), on every path alike. A layer with
    kv_shared has none of its own and repeats the choice of the last layer before it that has one and is of the same
    layer_type (transformers 5.24 `GlmMoeDsaAttention`): owning layers leave theirs [B, S, T] in `kv_store` under
    layer_type.

    Raises ValueError, naming the field, for values it cannot build.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6
    indexer: Indexer | None = None
    kv_shared: bool = False
    layer_type: str = DEFAULT_KIND
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
    scale_offset: bool = False
    scale_after_cast: bool = False
    attention_bias: bool = False
    o_proj_bias: bool | None = None
    attention_scale: float | None = None
    attn_logit_softcap: float | None = None
    force_fp32_for_softmax: bool = True
    attention_impl: str = "auto"
    kv_cache: KVCache = KVCache()
    init_std: float | None = None
    output_init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def refuse_unbuildable(self) -> None:
        """Raise ValueError, naming the field, for what this attention cannot be."""
        if self.attention_impl not in ATTENTION_IMPLS:
            raise ValueError(f"attention_impl is {self.attention_impl!r}; it is one of {', '.join(ATTENTION_IMPLS)}")
        if self.attention_impl == "xla" and (self.attn_logit_softcap is not None or not self.force_fp32_for_softmax):
            raise ValueError("attention_impl 'xla' has no attn_logit_softcap and softmaxes in fp32; use 'reference'")
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
        kv_store: dict[str, jax.Array] | None = None,
        attention_metadata: AttentionMetadata | None = None,
        selected: jax.Array | None = None,
    ) -> jax.Array:
        """The call is `CausalSelfAttention`'s, and so are its errors.

        kv_store: the choices of earlier layers by layer type. selected [B, S, T] bool: a recorded choice of keys (of
        the cache's slots when decoding) to repeat in place of the indexer's own.
        """
        self.refuse_unbuildable()
        refuse_call(None if self.indexer is not None else kv_store, decode, segment_ids, self.causal)
        metadata = AttentionMetadata() if attention_metadata is None else attention_metadata
        batch, length, features = x.shape
        query_latent = self._query_latent(x)
        query = self._query(query_latent)
        latent, rope_key = self._key_latent(x)
        indexer = None
        if self.indexer is not None and not self.kv_shared:
            indexer = LightningIndexer(self.indexer, self.init_std, self.dtype, self.precision, name="indexer")

        valid = real_tokens(metadata, decode, batch, length)
        cache = None
        if decode:
            leaves = {"cached_latent": (1, self.kv_lora_rank), "cached_rope_key": (1, self.qk_rope_head_dim)}
            if indexer is not None:
                leaves["cached_index_key"] = (1, indexer.record.index_head_dim)
            cache = DecodeCache(self, self.kv_cache, batch, self.max_seq_len, leaves, latent.dtype)
            if not cache.allocated:
                cache = None
        if positions is None:
            positions = token_positions(valid, length, cache)

        nope, rope = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
        rope, rope_key = rotated(self, self.qk_rope_head_dim, positions, rope, rope_key[:, :, None])
        new = {"cached_latent": latent[:, None], "cached_rope_key": rope_key.transpose(0, 2, 1, 3)}
        index = None
        if indexer is not None:
            index = indexer(x, query_latent)
            pairs, width = indexer.record.indexer_rope_interleave, self.qk_rope_head_dim
            turned, index_key = rotated(self, width, positions, index.query, index.key, interleaved=pairs)
            index = index._replace(query=turned)
            new["cached_index_key"] = index_key.transpose(0, 2, 1, 3)
        (latent, rope_key, *index_keys), seen = attended(self, new, cache, valid, positions, segment_ids, metadata)
        if indexer is not None and index is not None:
            own = indexer.select(index.query, index.weights, index_keys[0], seen)
            seen = own if selected is None else seen & selected
            if kv_store is not None:
                kv_store[self.layer_type] = seen
        elif self.kv_shared:
            seen = seen & self._provided(kv_store)
        width = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        kernel = ExpansionKernel(self.kv_lora_rank, width, self.init_std, name="kv_b_proj")()
        attend = self._absorbed if self._absorbs(length, latent.shape[2]) else self._expanded
        context = attend(nope, rope, latent, rope_key, kernel, seen).reshape(batch, length, -1)
        context = checkpoint_name(context, "context")
        bias = self.attention_bias if self.o_proj_bias is None else self.o_proj_bias
        o_proj = Dense(features, bias, self.output_init_std, self.dtype, self.precision, name="o_proj")
        return checkpoint_name(o_proj(context), "o_proj")

    @nn.nowrap
    def _provided(self, kv_store: dict[str, jax.Array] | None) -> jax.Array:
        if kv_store is None or self.layer_type not in kv_store:
            raise ValueError(
                f"kv_store holds no choice of keys of a {self.layer_type} layer, which this layer shares: run it after "
                "one that has an indexer, with the same store"
            )
        return kv_store[self.layer_type]

    def _dense(self, name: str, width: int, bias: bool) -> Dense:
        return Dense(width, bias, self.init_std, self.dtype, self.precision, name=name)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.latent_norm_eps, self.scale_offset, self.scale_after_cast, self.dtype, name=name)

    def _query_latent(self, x: jax.Array) -> jax.Array:
        """What queries are made of: the normed latent [B, S, q_lora_rank], or x itself without one."""
        if self.q_lora_rank is None:
            return x
        return self._norm("q_a_layernorm")(self._dense("q_a_proj", self.q_lora_rank, self.attention_bias)(x))

    def _query(self, latent: jax.Array) -> jax.Array:
        """Queries [B, S, heads, nope + rope], not yet rotated."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        name = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        query = checkpoint_name(self._dense(name, self.num_heads * width, False)(latent), "q_proj")
        return query.reshape(*query.shape[:2], self.num_heads, width)

    def _key_latent(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed latent [B, S, kv_lora_rank] and the shared rotary key [B, S, rope], which no norm touches."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        both = self._dense("kv_a_proj_with_mqa", width, self.attention_bias)(x)
        latent, rope_key = jnp.split(both, [self.kv_lora_rank], axis=-1)
        return self._norm("kv_a_layernorm")(latent), rope_key

    @nn.nowrap
    def _scale(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        return width**-0.5 * yarn_softmax_correction(self.yarn)

    @nn.nowrap
    def _absorbs(self, queries: int, keys: int) -> bool:
        sizes = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return self.attention_impl == "auto" and absorbs(queries, keys, *sizes)

    @nn.nowrap
    def _weights(self, scores: jax.Array, seen: jax.Array, dtype: Any) -> jax.Array:
        softmax_dtype = None if self.force_fp32_for_softmax else dtype
        weights = probabilities(scores, seen, self._scale(), self.attn_logit_softcap, None, softmax_dtype)
        return weights.astype(dtype)

    def _expanded(
        self,
        nope: jax.Array,
        rope: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        kernel: jax.Array,
        seen: jax.Array,
    ) -> jax.Array:
        """Attention over keys and values of every head.

        nope [B, S, heads, nope] and rope [B, S, heads, rope] over latent [B, 1, T, rank] and rope_key
        [B, 1, T, rope] where seen [B, S, T]: [B, S, heads, value].
        """
        dtype = compute_dtype(self.dtype, latent, kernel)
        heads, (batch, _, keys, _) = self.num_heads, latent.shape
        both = checkpoint_name(product(latent[:, 0], kernel, None, dtype, self.precision), "kv_proj")
        both = both.reshape(batch, keys, heads, -1).transpose(0, 2, 1, 3)
        nope_key, value = jnp.split(both, [self.qk_nope_head_dim], axis=-1)
        shared = jnp.broadcast_to(rope_key, (batch, heads, *rope_key.shape[2:])).astype(dtype)
        key = jnp.concatenate([nope_key, shared], axis=-1)
        query = jnp.concatenate([nope, rope], axis=-1)
        if self.attention_impl == "xla":
            # Its key and value heads are of one width: the narrower is filled with zeros, which add nothing.
            width = max(key.shape[-1], value.shape[-1])
            query, key, value = (
                jnp.pad(part, (*((0, 0),) * 3, (0, width - part.shape[-1])))
                for part in (query, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3))
            )
            out = jax.nn.dot_product_attention(
                query, key, value, mask=seen[:, None], scale=self._scale(), implementation="xla"
            )
            return out[..., : self.v_head_dim]

        def attend(query: jax.Array, seen: jax.Array) -> jax.Array:
            weights = self._weights(grouped_scores(query, key, self.precision), seen, dtype)
            return grouped_values(weights, value, self.precision)

        return attend(query, seen) if self.attention_impl == "reference" else in_query_blocks(attend, query, seen)

    def _absorbed(
        self,
        nope: jax.Array,
        rope: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        kernel: jax.Array,
        seen: jax.Array,
    ) -> jax.Array:
        """`_expanded`'s result without its keys and values.

        A score is q^T (W_k c) = (W_k^T q)^T c, and a head's output sum_t p_t (W_v c_t) = W_v (sum_t p_t c_t), so every
        head attends the latents as one key and value head of kv_lora_rank features.
        """
        dtype = compute_dtype(self.dtype, latent, kernel)
        rank = self.kv_lora_rank
        by_head = kernel.astype(dtype).reshape(rank, self.num_heads, -1)
        to_key, to_value = jnp.split(by_head, [self.qk_nope_head_dim], axis=-1)

        def folded(subscripts: str, states: jax.Array, weights: jax.Array) -> jax.Array:
            wide = jnp.promote_types(dtype, jnp.float32)
            out = jnp.einsum(subscripts, states, weights, precision=self.precision, preferred_element_type=wide)
            return out.astype(dtype)

        query = jnp.concatenate([folded("bshn,rhn->bshr", nope, to_key), rope], axis=-1)

        def attend(query: jax.Array, seen: jax.Array) -> jax.Array:
            scores = grouped_scores(query[..., :rank], latent, self.precision)
            scores = scores + grouped_scores(query[..., rank:], rope_key, self.precision)
            return grouped_values(self._weights(scores, seen, dtype), latent, self.precision)

        return folded("bshr,rhv->bshv", in_query_blocks(attend, query, seen), to_value)


def absorbs(queries: int, keys: int, rank: int, nope: int, rope: int, value: int) -> bool:
    """Whether attending latents takes fewer multiplications a head than expanding `keys` of them for `queries`."""
    expanding = keys * rank * (nope + value) + queries * keys * (nope + rope + value)
    absorbing = queries * rank * (nope + value) + queries * keys * (2 * rank + rope)
    return absorbing < expanding
