"""The router: which experts a token takes, and with what weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import lax

from .dense import kernel_init

ROUTER = "router"
"""The collection a router sows its choices into when the caller makes it mutable."""


class Routes(NamedTuple):
    """Recorded choices a router repeats in place of its own.

    experts: ids [B, S, top_k], or [B, S, layers, top_k] on its way to the layers. routed: [B, S] (or
    [B, S, layers]) bool, the tokens the record covers; the others choose for themselves. The weights always come
    from this model's own scores of the experts taken.
    """

    experts: jax.Array
    routed: jax.Array

    @classmethod
    def of_layers(cls, experts: Any, routed: Any, layers: int, top_k: int) -> Routes:
        """The record of a whole decoder: experts [B, S, layers, top_k] indexed by decoder layer, dense layers
        included (what vLLM's `routed_experts` and SGLang's `meta_info.routed_experts` return), and routed
        [B, S], None for every token. Raises ValueError for other shapes."""
        experts = jnp.asarray(experts, jnp.int32)
        if experts.ndim != 4 or experts.shape[2:] != (layers, top_k):
            raise ValueError(
                f"routed_experts has shape {experts.shape}; it is [B, S, layers, top_k], here [B, S, {layers}, {top_k}]"
            )
        covered = jnp.ones(experts.shape[:2], jnp.bool_) if routed is None else jnp.asarray(routed, jnp.bool_)
        if covered.shape != experts.shape[:2]:
            raise ValueError(f"routed has shape {covered.shape}, routed_experts {experts.shape}: it is [B, S]")
        return cls(experts, jnp.broadcast_to(covered[:, :, None], experts.shape[:3]))


class Router(nn.Module):
    """x [B, S, D] -> (expert ids [B, S, top_k] int32, best first, and their weights [B, S, top_k] fp32).

    Scores are fp32 at the highest precision whatever the dtypes of x and of the kernel [D, experts].

    score_function "softmax" scores by the softmax over all experts (transformers 5.24 `Qwen3MoeTopKRouter`),
    "sigmoid" one by one (`DeepseekV3TopkRouter`, `Glm4MoeTopkRouter`). bias adds `e_score_correction_bias`
    [experts] to the scores for the choice alone. groups splits the experts into as many; a token keeps the
    groups_per_token best, by the sum of their two best scores (group_score "top2", DeepSeek V3) or their best
    one ("max", DeepSeek V2), and no score of the others can win, however negative those kept are. Equal scores
    go to the lower id. The weights are the chosen experts' scores without the bias, divided by their sum with
    norm_topk_prob (plus 1e-20 under sigmoid), always times scaling.

    The bias is no gradient's business: the choice has none.

    Sows into collection "router", when mutable: experts [B, S, top_k], choice [B, S, top_k], which differs from
    experts where a record was repeated and the router would have chosen otherwise, load [experts], the mean number of a
    token's slots that took each expert (summing to top_k), and probability [experts], the mean score as a
    fraction of the token's scores (summing to 1). Every position counts, padding too.
    """

    experts: int
    top_k: int = 2
    score_function: str = "softmax"
    norm_topk_prob: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: str = "top2"
    bias: bool = False
    init_std: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array, routes: Routes | None = None) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", kernel_init(self.init_std), (x.shape[-1], self.experts), jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits, axis=-1) if self.score_function == "softmax" else jax.nn.sigmoid(logits)
        choice = lax.stop_gradient(scores)
        if self.bias:
            bias = self.param("e_score_correction_bias", nn.initializers.zeros_init(), (self.experts,), jnp.float32)
            choice = choice + lax.stop_gradient(bias.astype(jnp.float32))
        if self.groups > 1:
            choice = self._within_groups(choice)
        own = experts = lax.top_k(choice, self.top_k)[1]
        if routes is not None:
            experts = jnp.where(routes.routed[..., None], routes.experts.astype(experts.dtype), experts)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.norm_topk_prob:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (total + 1e-20 if self.score_function == "sigmoid" else total)
        if self.scaling != 1.0:
            weights = weights * self.scaling
        if self.is_mutable_collection(ROUTER) and not self.is_initializing():
            self._sow_statistics(scores, experts, own)
        return experts, weights

    def _within_groups(self, choice: jax.Array) -> jax.Array:
        grouped = choice.reshape(*choice.shape[:-1], self.groups, self.experts // self.groups)
        best = lax.top_k(grouped, 2 if self.group_score == "top2" else 1)[0].sum(axis=-1)
        kept = lax.top_k(best, self.groups_per_token)[1]
        mask = jnp.any(kept[..., None] == jnp.arange(self.groups), axis=-2)
        return jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)

    def _sow_statistics(self, scores: jax.Array, experts: jax.Array, own: jax.Array) -> None:
        tokens = experts.size // self.top_k
        load = jnp.zeros(self.experts, jnp.float32).at[experts.reshape(-1)].add(1.0 / tokens)
        share = scores / jnp.sum(scores, axis=-1, keepdims=True)
        probability = share.reshape(-1, self.experts).mean(axis=0)
        sown = {"experts": experts, "choice": own, "load": load, "probability": probability}
        for name, value in sown.items():
            self.sow(ROUTER, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def load_balancing_loss(router: Mapping[str, Any], pooled: bool = False) -> jax.Array:
    """E sum_i f_i P_i over the experts (Switch Transformer, arXiv 2101.03961, eq. 4-6), from the "router"
    collection of an apply: a scalar, top_k when the load is even, to be scaled and added to the loss.

    f_i is the mean number of a token's slots that took expert i, P_i the mean of its share of the scores; the
    gradient flows through P alone. The mean of the sparse layers' losses; pooled averages f and P over the layers
    first, as transformers 5.24's `load_balancing_loss_func` does. Raises ValueError for a collection without
    statistics.
    """
    leaves = flatten_dict(router)
    loads = [_rows(leaf) for path, leaf in leaves.items() if path[-1] == "load"]
    shares = [_rows(leaves[(*path[:-1], "probability")]) for path in leaves if path[-1] == "load"]
    if not loads:
        raise ValueError(f"no router statistics: apply with mutable=['{ROUTER}'] and pass that collection")
    load, share = jnp.concatenate(loads), jnp.concatenate(shares)
    if pooled:
        load, share = load.mean(axis=0, keepdims=True), share.mean(axis=0, keepdims=True)
    return load.shape[-1] * jnp.mean(jnp.sum(load * share, axis=-1))


def _rows(leaf: jax.Array) -> jax.Array:
    """[experts], or [layers, experts] of a bank, as rows of layers."""
    return leaf.reshape(-1, leaf.shape[-1])
