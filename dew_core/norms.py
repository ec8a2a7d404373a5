"""RMS normalisation in the two roundings and the two scale conventions open decoders use, and layer normalisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned scale, over the last axis. Statistics are fp32.

    scale_offset: the stored scale is an offset from one, 1 + scale added in fp32 (transformers 5.24
    `Gemma3RMSNorm`, `Qwen3NextRMSNorm`).
    scale_after_cast: the normalised values are rounded to the input's dtype and then multiplied there
    (`LlamaRMSNorm`, `Qwen3RMSNorm`); otherwise they are multiplied in fp32 and rounded once (`Gemma3RMSNorm`,
    `Olmo3RMSNorm`, `GptOssRMSNorm`). The two differ under bf16 alone.
    dtype: the output's dtype, None the input's.
    """

    eps: float = 1e-5
    scale_offset: bool = False
    scale_after_cast: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initial = nn.initializers.zeros_init() if self.scale_offset else nn.initializers.ones_init()
        scale = self.param("scale", initial, (x.shape[-1],), jnp.float32)
        dtype = x.dtype if self.dtype is None else jnp.dtype(self.dtype)
        values = x.astype(jnp.float32)
        values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + self.eps)
        if self.scale_offset:
            scale = 1.0 + scale.astype(jnp.float32)
        if self.scale_after_cast:
            return scale.astype(dtype) * values.astype(dtype)
        return (values * scale.astype(jnp.float32)).astype(dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) times a learned scale plus a learned bias, over the last axis. Statistics and the
    sum are fp32, rounded once to x's dtype (torch `LayerNorm`)."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],), jnp.float32)
        values = x.astype(jnp.float32)
        values = values - jnp.mean(values, axis=-1, keepdims=True)
        values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + self.eps)
        return (values * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
