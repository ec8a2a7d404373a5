"""The lightning indexer: which keys a query of latent attention attends (DeepSeek-V3.2-Exp's sparse attention;
transformers 5.24 `DeepseekV32Indexer`, `GlmMoeDsaIndexer`).

Every token has one index key and a few index queries with a weight each. A key's score is the weighted sum of the
heads' positive products; the best keys are attended, and the others are as if they were not there. The choice has no
gradient: neither have the indexer's weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import grouped_scores, in_query_blocks
from .dense import Dense, kernel_init, product
from .norms import LayerNorm
from .records import Indexer

INDEXER_COLLECTION = "indexer"
"""The collection an indexer sows its choices into when the caller makes it mutable."""


class IndexStates(NamedTuple):
    """What an indexer makes of a call's tokens: query [B, S, heads, D] and key [B, S, 1, D], not yet rotated, and the
    heads' weights [B, S, heads] in fp32."""

    query: jax.Array
    key: jax.Array
    weights: jax.Array


class WeightKernel(nn.Module):
    """`weights_proj`'s kernel [features, heads]."""

    heads: int
    init_std: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", kernel_init(self.init_std), (x.shape[-1], self.heads), jnp.float32)
        # In fp32 whatever the dtypes: the releases keep these weights in a higher precision than the others'.
        return product(x, kernel, None, jnp.dtype(jnp.float32), jax.lax.Precision.HIGHEST)


class LightningIndexer(nn.Module):
    """Index queries from the query latent, keys and head weights from the states, and the choice among the keys.

    record: the sizes. wq_b and wk are bias-free; k_norm is a layer norm with a bias (`Indexer.index_norm_eps`).

    Sows into collection "indexer", when mutable: selected [B, S, T] bool, the keys this indexer chooses among those
    seen, whether or not a record was repeated in their place, and scores [B, S, T] fp32.
    """

    record: Indexer
    init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def setup(self) -> None:
        heads, width = self.record.index_n_heads, self.record.index_head_dim
        self.wq_b = Dense(heads * width, False, self.init_std, self.dtype, self.precision)
        self.wk = Dense(width, False, self.init_std, self.dtype, self.precision)
        self.k_norm = LayerNorm(self.record.index_norm_eps)
        self.weights_proj = WeightKernel(heads, self.init_std)

    def __call__(self, x: jax.Array, latent: jax.Array) -> IndexStates:
        """The index states of x [B, S, features], whose queries come from latent [B, S, rank]."""
        x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
        heads, width = self.record.index_n_heads, self.record.index_head_dim
        query = self.wq_b(latent).reshape(*x.shape[:2], heads, width)
        key = self.k_norm(self.wk(x))[:, :, None]
        states = IndexStates(query, key, self.weights_proj(x) * heads**-0.5)
        return jax.lax.stop_gradient(states)

    def select(self, query: jax.Array, weights: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        """Which keys are attended [B, S, T] bool: the `index_topk` best of those seen [B, S, T], all where those are
        fewer.

        query [B, S, heads, D], rotated, weights [B, S, heads] over keys [B, 1, T, D], rotated.
        """

        def score(query: jax.Array, weights: jax.Array) -> jax.Array:
            return index_scores(query, weights, keys, self.precision)

        scores = jax.lax.stop_gradient(in_query_blocks(score, query, weights))
        selected = best_keys(scores, seen, self.record.index_topk)
        if self.is_mutable_collection(INDEXER_COLLECTION) and not self.is_initializing():
            for name, value in {"selected": selected, "scores": scores}.items():
                self.sow(INDEXER_COLLECTION, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return selected


def index_scores(query: jax.Array, weights: jax.Array, keys: jax.Array, precision: Any = None) -> jax.Array:
    """sum_h w_h relu(q_h k / sqrt(D)) in fp32: query [B, S, heads, D], weights [B, S, heads], keys [B, 1, T, D] ->
    [B, S, T]."""
    products = grouped_scores(query, keys, precision)[:, 0] * query.shape[-1] ** -0.5
    return jnp.einsum("bhst,bsh->bst", jax.nn.relu(products), weights, precision=jax.lax.Precision.HIGHEST)


def best_keys(scores: jax.Array, seen: jax.Array, count: int) -> jax.Array:
    """The `count` best of the keys seen, [B, S, T] bool of scores and seen [B, S, T].

    Equal scores go to the earlier key (`jax.lax.top_k`). They are no accident: a key whose products are all negative
    scores exactly 0. transformers leaves them to `torch.topk`, which promises no order.
    """
    seen = jnp.broadcast_to(seen, scores.shape)
    if count >= scores.shape[-1]:
        return seen
    _, taken = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), count)
    chosen = jnp.put_along_axis(jnp.zeros(scores.shape, jnp.bool_), taken, True, axis=-1, inplace=False)
    # Where fewer are seen than are chosen, some of the chosen are not seen.
    return chosen & seen
