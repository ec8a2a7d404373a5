"""Drawing the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kept_logits(
    logits: jax.Array, temperature: jax.Array | float, top_k: int | None, top_p: jax.Array | float | None
) -> jax.Array:
    """logits [B, V] divided by `temperature`, with -inf for every token top-k and then top-p leave out.

    The order and the meaning are transformers 5.24's (`TemperatureLogitsWarper`, `TopKLogitsWarper`,
    `TopPLogitsWarper`): top-k keeps the tokens at or above the k-th logit, top-p the smallest set of likeliest
    tokens of what top-k left whose probability reaches `top_p`, the likeliest always among them. Tokens of equal
    logit stay or go together.
    """
    logits = logits.astype(jnp.float32) / temperature
    if top_k is None and top_p is None:
        return logits
    ranked = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))[0]
    least = ranked[:, -1:]
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = (before < top_p).at[:, 0].set(True)
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def draw(
    logits: jax.Array,
    key: jax.Array | None,
    temperature: jax.Array | float,
    top_k: int | None,
    top_p: jax.Array | float | None,
) -> jax.Array:
    """One token a row [B] int32 of logits [B, V]: the likeliest when `key` is None, otherwise a draw from
    softmax(kept_logits)."""
    if key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, kept_logits(logits, temperature, top_k, top_p)).astype(jnp.int32)
