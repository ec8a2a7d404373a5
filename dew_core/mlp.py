"""The gated feed-forward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from .dense import Dense
from .records import GatedActivation

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_exact")


def activate(name: str, x: jax.Array) -> jax.Array:
    """The gate's nonlinearity, computed in fp32 and rounded to x's dtype as torch's kernels do.

    swiglu is silu, geglu the tanh approximation of gelu (HF's gelu_pytorch_tanh), geglu_exact the erf form
    (HF's gelu). Raises ValueError for another name.
    """
    values = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if name == "swiglu":
        values = values * jax.nn.sigmoid(values)
    elif name in ("geglu", "geglu_exact"):
        values = jax.nn.gelu(values, approximate=name == "geglu")
    else:
        raise ValueError(f"mlp is {name!r}; it is one of {', '.join(GATED_ACTIVATIONS)}")
    return values.astype(x.dtype)


def gated_product(name: str, gate: jax.Array, up: jax.Array, limit: float | None = None) -> jax.Array:
    """act(gate) * up, with the gate capped from above at `limit` and up on both sides when it is set. Raises as
    `activate` does."""
    if limit is not None:
        gate = jnp.minimum(gate, jnp.asarray(limit, gate.dtype))
        up = jnp.clip(up, -limit, limit)
    return activate(name, gate) * up


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)): [..., features] -> [..., features], bias-free.

    swiglu_limit caps the gate from above and the up projection on both sides before the activation
    (transformers 5.24 `Glm5NextTextMLP`, DeepSeek V4). activation_sparsity, Gemma 3n's gaussian top-k on the
    gate, is refused.
    """

    features: int
    hidden_features: int
    activation: GatedActivation = "swiglu"
    activation_sparsity: float = 0.0
    swiglu_limit: float | None = None
    init_std: float | None = None
    output_init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def setup(self) -> None:
        if self.activation not in GATED_ACTIVATIONS:
            raise ValueError(f"mlp is {self.activation!r}; it is one of {', '.join(GATED_ACTIVATIONS)}")
        if self.activation_sparsity:
            raise ValueError(
                f"activation_sparsity is {self.activation_sparsity}; the sparse gate (Gemma 3n) is not built"
            )
        shared: dict[str, Any] = {"dtype": self.dtype, "precision": self.precision}
        self.gate_proj = Dense(self.hidden_features, init_std=self.init_std, **shared)
        self.up_proj = Dense(self.hidden_features, init_std=self.init_std, **shared)
        self.down_proj = Dense(self.features, init_std=self.output_init_std, **shared)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = checkpoint_name(self.gate_proj(x), "gate_proj")
        up = checkpoint_name(self.up_proj(x), "up_proj")
        hidden = gated_product(self.activation, gate, up, self.swiglu_limit)
        return checkpoint_name(self.down_proj(hidden), "down_proj")
