"""The dense decode cache.

One attention layer's variables in the collection `cache`, batch on axis 0 of every leaf:

    cached_key, cached_value   [B, kv_heads, max_seq_len, head_dim]: grouped-query attention
    cached_latent              [B, 1, max_seq_len, kv_lora_rank]: latent attention, in place of keys and values
    cached_rope_key            [B, 1, max_seq_len, qk_rope_head_dim]: beside it, rotated
    cached_index_key           [B, 1, max_seq_len, index_head_dim]: beside them where the layer has an indexer, rotated
    cached_valid               [B, max_seq_len] bool: a real token was written here
    cached_positions           [B, max_seq_len] int32
    cursor                     [B] int32: the slot each row writes next

Heads come before slots, so that both contractions of a decode step are batched matrix products over the cache
as it lies; with slots first XLA copies the whole cache to a transposed one on every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .records import KVCache


def refuse_unbuildable_cache(cache: KVCache) -> None:
    """Raise ValueError, naming the field, for a cache layout or element type this release does not build."""
    if cache.layout != "dense":
        raise ValueError(f"kv_cache.layout is {cache.layout!r}; the dense layout alone is built")
    if cache.dtype is not None:
        try:
            floating = jnp.issubdtype(jnp.dtype(cache.dtype), jnp.floating) and jnp.dtype(cache.dtype).itemsize >= 2
        except TypeError:
            floating = False
        if not floating:
            raise ValueError(
                f"kv_cache.dtype is {cache.dtype!r}; quantised caches are not built: use a floating dtype of two "
                "bytes or more, or None for the compute dtype"
            )


class DecodeCache:
    """A layer's cache variables in an attention module's scope: `append` writes, `read` gives them as they lie.

    leaves: what the mixer caches of a token, name -> (heads, features), in `dtype` unless the cache states one.
    `allocated` is whether the variables existed when the call began. The first decode-mode call allocates
    them and writes nothing (`CausalTransformer.init_cache`).
    """

    def __init__(
        self,
        module: nn.Module,
        cache: KVCache,
        batch: int,
        slots: int,
        leaves: Mapping[str, tuple[int, int]],
        dtype: Any,
    ):
        self.slots = slots
        self.dtype = jnp.dtype(dtype)
        self.allocated = all(module.has_variable("cache", name) for name in leaves)

        def leaf(name: str, dims: tuple[int, ...], kind: Any) -> nn.Variable:
            return module.variable("cache", name, jnp.zeros, dims, kind)

        stored = jnp.dtype(dtype if cache.dtype is None else cache.dtype)
        self.leaves = {
            name: leaf(name, (batch, heads, slots, features), stored) for name, (heads, features) in leaves.items()
        }
        self.valid = leaf("cached_valid", (batch, slots), jnp.bool_)
        self.positions = leaf("cached_positions", (batch, slots), jnp.int32)
        self.cursor = leaf("cursor", (batch,), jnp.int32)

    def append(self, new: Mapping[str, jax.Array], valid: jax.Array, positions: jax.Array) -> None:
        """Write S tokens a row at its cursor and advance it. Each array of `new` is [B, heads, S, features],
        valid and positions [B, S].

        Raises ValueError when S tokens can never fit. A cursor that passes the end is the caller's to avoid: under
        jit it cannot be refused, and what is then cached is not the sequence.
        """
        length = valid.shape[1]
        if length > self.slots:
            raise ValueError(f"{length} tokens do not fit a decode cache of max_seq_len {self.slots}")
        start = self.cursor.value
        for name, leaf in self.leaves.items():
            leaf.value = _write(leaf.value, new[name].astype(leaf.value.dtype), start, axis=1)
        self.valid.value = _write(self.valid.value, valid, start, axis=0)
        self.positions.value = _write(self.positions.value, positions.astype(jnp.int32), start, axis=0)
        self.cursor.value = start + length

    def read(self) -> tuple[jax.Array, ...]:
        """The leaves [B, heads, slots, features] in the compute dtype, in their order."""
        return tuple(leaf.value.astype(self.dtype) for leaf in self.leaves.values())


def _write(stored: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Each row of `new` over `stored`'s at the row's own start along `axis` (of a row), in place under jit."""
    if stored.shape[0] == 1:
        # The conditional keeps XLA's CPU fusion from writing one row twice, once for the caller and once for the
        # reader, which copies the whole cache on every step.
        return jax.lax.cond(
            start[0] < stored.shape[axis + 1],
            lambda s: jax.lax.dynamic_update_slice_in_dim(s, new, start[0], axis + 1),
            lambda s: s,
            stored,
        )
    return jax.vmap(lambda s, n, at: jax.lax.dynamic_update_slice_in_dim(s, n, at, axis))(stored, new, start)


def gather_cache_rows(cache: Any, rows: Any) -> Any:
    """A decode cache reindexed on its batch axis: `rows` is any index array, repeats duplicate a row's
    state."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, jnp.asarray(rows), axis=0), cache)
