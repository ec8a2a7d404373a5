"""The linear projection every sublayer uses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def kernel_init(std: float | None) -> nn.initializers.Initializer:
    """N(0, std^2), or LeCun normal when no std is stated."""
    return nn.initializers.lecun_normal() if std is None else nn.initializers.normal(std)


def compute_dtype(dtype: Any, *values: jax.Array) -> jnp.dtype:
    """The dtype a module computes in: the one it states, else the one its input and parameters promote to."""
    return jnp.result_type(*values) if dtype is None else jnp.dtype(dtype)


class Dense(nn.Module):
    """x [..., in] @ kernel [in, out] + bias [out].

    Accumulated in fp32 whatever the operands are and rounded once, after the bias, as torch's addmm does. (On
    CPU a bf16 dot that asks for a bf16 result is also several times slower.)
    """

    features: int
    use_bias: bool = False
    init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", kernel_init(self.init_std), (x.shape[-1], self.features), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        return product(x, kernel, bias, compute_dtype(self.dtype, x, kernel), self.precision)


def product(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: jnp.dtype, precision: Any = None
) -> jax.Array:
    """x [..., in] @ kernel [in, out] + bias [out] in `dtype`, rounded once (`Dense`)."""
    rows = x.astype(dtype)
    # XLA's CPU product of a single bf16 row leaves the matrix kernels and takes three times as long as of two.
    doubled = math.prod(x.shape[:-1]) == 1 and jnp.finfo(dtype).bits < 32
    if doubled:
        rows = jnp.broadcast_to(rows.reshape(1, -1), (2, x.shape[-1]))
    y = jax.lax.dot_general(
        rows,
        kernel.astype(dtype),
        (((rows.ndim - 1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    if doubled:
        y = y[:1].reshape(*x.shape[:-1], kernel.shape[-1])
    if bias is not None:
        y = y + bias.astype(dtype).astype(y.dtype)
    return y.astype(dtype)
