"""The two ends of a decoder: the embedding table it reads tokens with and the head it scores them with."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class TokenTable(nn.Module):
    """An embedding table [vocab, D]: ids [B, S] -> rows [B, S, D] in `dtype`, or in the table's own dtype.

    The rows are gathered first and cast after, so that no cast copy of the table is made.
    """

    rows: int
    features: int
    init_std: float | None = None
    dtype: Any = None

    def setup(self) -> None:
        init = (
            nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
            if self.init_std is None
            else nn.initializers.normal(self.init_std)
        )
        self.embedding = self.param("embedding", init, (self.rows, self.features), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = jnp.take(self.embedding, ids, axis=0)
        return rows if self.dtype is None else rows.astype(jnp.dtype(self.dtype))


class HeadKernel(nn.Module):
    """An untied head's kernel [D, vocab]."""

    features: int
    vocab: int
    init_std: float | None = None

    def setup(self) -> None:
        init = nn.initializers.lecun_normal() if self.init_std is None else nn.initializers.normal(self.init_std)
        self.kernel = self.param("kernel", init, (self.features, self.vocab), jnp.float32)

    def __call__(self) -> jax.Array:
        return self.kernel


def head_logits(states: jax.Array, table: jax.Array, vocab_major: bool, precision: Any = None) -> jax.Array:
    """states [..., D] against a head table -> logits [..., vocab] in fp32, or in a wider dtype of theirs.

    The stored operand is contracted as it lies, accumulating in fp32: `vocab_major` is a [vocab, D] embedding
    table, otherwise a [D, vocab] kernel. transformers rounds a bf16 head's logits to bf16; these stay fp32.
    """
    dtype = jnp.promote_types(states.dtype, table.dtype)
    contracted = (((states.ndim - 1,), (1 if vocab_major else 0,)), ((), ()))
    return lax.dot_general(
        states.astype(dtype),
        table.astype(dtype),
        contracted,
        precision=precision,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
