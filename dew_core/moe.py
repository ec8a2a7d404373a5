"""The sparse feed-forward: every token through the few experts its router chose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .dense import Dense, compute_dtype, kernel_init
from .grouped import grouped_matmul
from .mixture import refuse_unbuildable_mixture
from .mlp import GATED_ACTIVATIONS, GatedMLP, gated_product
from .records import GatedActivation, Mixture
from .router import Router, Routes


def expert_capacity(slots: int, experts: int, capacity_factor: float) -> int:
    """Slots an expert takes of a sequence's `slots` (tokens times top_k): its fair share times the factor, rounded
    down (MaxText `expert_capacity_per_batch`), and at least one."""
    return max(1, int(slots / experts * capacity_factor))


def capacity_positions(experts: jax.Array, num_experts: int) -> jax.Array:
    """Each slot's place, from 0, in the queue of its expert within its sequence: experts [B, S, k] ->
    [B, S, k] int32.

    Tokens queue in order and a token's slots best first (MaxText `generate_masks`). A slot whose place is not
    below `expert_capacity` is dropped.
    """
    flat = experts.reshape(experts.shape[0], -1)
    # By a stable sort, since a one-hot of [B, S k, num_experts] is an array of the number of experts.
    order = jnp.argsort(flat, axis=-1, stable=True)
    queues = jnp.take_along_axis(flat, order, axis=-1)
    first = jax.vmap(lambda queue: jnp.searchsorted(queue, jnp.arange(num_experts), side="left"))(queues)
    places = jnp.arange(flat.shape[1]) - jnp.take_along_axis(first, queues, axis=-1)
    rows = jnp.arange(flat.shape[0])[:, None]
    return jnp.zeros_like(flat).at[rows, order].set(places.astype(flat.dtype)).reshape(experts.shape)


class GroupedDense(nn.Module):
    """rows [T, in], sorted by expert, times each expert's kernel of [experts, in, features]: [T, features]."""

    experts: int
    features: int
    implementation: str = "auto"
    init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    @nn.compact
    def __call__(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        initial = kernel_init(self.init_std)
        shape = (rows.shape[-1], self.features)

        def stacked(key: jax.Array) -> jax.Array:
            return jax.vmap(lambda each: initial(each, shape, jnp.float32))(jax.random.split(key, self.experts))

        kernel = self.param("kernel", stacked)
        dtype = compute_dtype(self.dtype, rows, kernel)
        return grouped_matmul(
            rows.astype(dtype), kernel.astype(dtype), group_sizes, self.implementation, self.precision
        )


class Experts(nn.Module):
    """The routed experts, each a bias-free gated MLP: rows [T, features], sorted by expert, -> [T, features]."""

    experts: int
    features: int
    hidden_features: int
    activation: GatedActivation = "swiglu"
    swiglu_limit: float | None = None
    implementation: str = "auto"
    init_std: float | None = None
    output_init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def setup(self) -> None:
        shared: dict[str, Any] = {
            "implementation": self.implementation,
            "dtype": self.dtype,
            "precision": self.precision,
        }
        self.gate_proj = GroupedDense(self.experts, self.hidden_features, init_std=self.init_std, **shared)
        self.up_proj = GroupedDense(self.experts, self.hidden_features, init_std=self.init_std, **shared)
        self.down_proj = GroupedDense(self.experts, self.features, init_std=self.output_init_std, **shared)

    def __call__(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        gate = checkpoint_name(self.gate_proj(rows, group_sizes), "gate_proj")
        up = checkpoint_name(self.up_proj(rows, group_sizes), "up_proj")
        hidden = gated_product(self.activation, gate, up, self.swiglu_limit)
        return checkpoint_name(self.down_proj(hidden, group_sizes), "down_proj")


class SparseMLP(nn.Module):
    """x [B, S, features] -> [B, S, features] through the experts each token routes to, and the shared ones.

    mixture: the experts and the routing, field by field as the record and `Router` say. hidden_features is the
    experts' width when the mixture's `expert_features` is None. shared_features is the width of one gated MLP
    every token takes beside its experts (transformers 5.24 `DeepseekV3MoE`), shared_gate a sigmoid of a learned
    scalar on its output (`Qwen2MoeSparseMoeBlock`). scale_inputs multiplies the experts' inputs by the weights in
    place of their outputs (`Llama4TextMoe`). capacity_factor drops the slots past each sequence's per-expert
    capacity, without renormalising the weights of those kept; a cached decoding step is a sequence of its own.

    Tokens are sorted by expert, so the work grows with tokens times top_k and not with the number of experts. The
    weighted outputs join in ascending expert id, each rounded to the compute dtype as the experts classes' eager
    loop rounds them.

    Raises ValueError, naming the field, for a mixture that is not built or contradicts itself.
    """

    features: int
    hidden_features: int
    mixture: Mixture
    activation: GatedActivation = "swiglu"
    swiglu_limit: float | None = None
    init_std: float | None = None
    output_init_std: float | None = None
    dtype: Any = None
    precision: Any = None

    def setup(self) -> None:
        mixture = self.mixture
        refuse_unbuildable_mixture(mixture)
        if self.activation not in GATED_ACTIVATIONS:
            raise ValueError(f"mlp is {self.activation!r}; it is one of {', '.join(GATED_ACTIVATIONS)}")
        shared: dict[str, Any] = {
            "activation": self.activation,
            "swiglu_limit": self.swiglu_limit,
            "init_std": self.init_std,
            "output_init_std": self.output_init_std,
            "dtype": self.dtype,
            "precision": self.precision,
        }
        routing = ("score_function", "norm_topk_prob", "scaling", "groups", "groups_per_token", "group_score", "bias")
        self.gate = Router(
            mixture.experts,
            mixture.top_k,
            **{name: getattr(mixture, name) for name in routing},
            init_std=self.init_std,
        )
        width = self.hidden_features if mixture.expert_features is None else mixture.expert_features
        self.experts = Experts(mixture.experts, self.features, width, implementation=mixture.implementation, **shared)
        if mixture.shared_features:
            self.shared_experts = GatedMLP(self.features, mixture.shared_features, **shared)
        if mixture.shared_gate:
            self.shared_expert_gate = Dense(1, init_std=self.init_std, dtype=self.dtype, precision=self.precision)

    def __call__(self, x: jax.Array, routes: Routes | None = None) -> jax.Array:
        if self.dtype is not None:
            x = x.astype(self.dtype)
        out = self._routed(x, *self.gate(x, routes))
        if not self.mixture.shared_features:
            return out
        shared = self.shared_experts(x)
        if self.mixture.shared_gate:
            gate = self.shared_expert_gate(x)
            shared = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(gate.dtype) * shared
        return out + shared

    def _routed(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """The experts' weighted sum [B, S, D] of x [B, S, D] under ids and weights [B, S, k]."""
        mixture = self.mixture
        count, top_k = mixture.experts, mixture.top_k
        if mixture.capacity_factor is not None:
            capacity = expert_capacity(x.shape[1] * top_k, count, mixture.capacity_factor)
            kept = capacity_positions(experts, count) < capacity
            # No group takes a dropped slot: it sorts past the last, where a grouped matmul gives zeros.
            experts = jnp.where(kept, experts, count)
        experts, weights = lax.sort_key_val(experts, weights, dimension=-1)

        tokens = x.reshape(-1, x.shape[-1])
        slots, scales = experts.reshape(-1), weights.reshape(-1)
        order = jnp.argsort(slots, stable=True)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        group_sizes = jnp.zeros(count, jnp.int32).at[slots].add(1, mode="drop")

        rows = tokens[order // top_k]
        if mixture.scale_inputs:
            rows = (rows.astype(jnp.float32) * scales[order, None]).astype(rows.dtype)
            scales = jnp.ones_like(scales)
        made = self.experts(rows, group_sizes)

        dtype = made.dtype
        made = made[place].reshape(-1, top_k, made.shape[-1]).astype(jnp.promote_types(dtype, jnp.float32))
        scales = scales.reshape(-1, top_k, 1)
        total = _rounded(made[:, 0] * scales[:, 0], dtype)
        for slot in range(1, top_k):
            total = _rounded(total + _rounded(made[:, slot] * scales[:, slot], dtype), dtype)
        return total.astype(dtype).reshape(x.shape)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x to dtype's precision in its own. (XLA may skip the rounding of a cast there and back.)"""
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x
    return lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
