"""The decoder block: a token mixer, then a feed-forward, both residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from .attention import AttentionMetadata
from .norms import RMSNorm
from .records import AltUp, BlockWiring, GatedActivation, HyperConnections, ResidualSite
from .remat import RematPolicy
from .router import Routes


class LayerInputs(NamedTuple):
    """What one layer is told beside the stream ([B, S, layers, …] on its way to the layers).

    routes: recorded experts, for a routed block. selected: a recorded choice of keys [B, S, T] bool, for a mixer with
    an indexer of its own.
    """

    routes: Routes | None = None
    selected: jax.Array | None = None


class DecoderBlock(nn.Module):
    """x [B, S, features] -> [B, S, features] through self_attn and mlp.

    mixer and feedforward are factories taking a name: mixer's module becomes self_attn and takes
    CausalSelfAttention's call, feedforward's becomes mlp and takes the normed states (routed: and the recorded
    routes, which a dense feed-forward has no use for). A feedforward of None is a block of the mixer alone.
    wiring places the norms: input_layernorm and post_attention_layernorm before the sublayers (pre_norms),
    attention_output_norm and mlp_output_norm after them (output_norms). per_layer_input is the layer's
    `LayerInputs`. kv_store is one dict down the stack, from a mixer to later ones that share what it stashed.

    residual_multiplier multiplies each sublayer's output before it joins the stream (GraniteMoeHybrid),
    dropout_rate drops from it. remat recomputes the block in the backward pass, keeping what the policy
    names; init and cached decoding take the direct path and the parameters are the same either way. routed
    says the feed-forward routes to experts.

    The residual stream stays in the dtype it arrives in (`dtype` when stated). The decoder reference promotes
    it to fp32 under a bf16 policy; transformers adds in the checkpoint's dtype, and with the same weights the
    two depart by a bf16 rounding a sublayer, so that one dtype's parity asks for the narrower stream.

    Raises ValueError, naming the field, for machinery this release does not build.
    """

    mixer: Callable[..., nn.Module]
    feedforward: Callable[..., nn.Module] | None
    wiring: BlockWiring = BlockWiring()
    norm_eps: float = 1e-5
    scale_offset: bool = False
    scale_after_cast: bool = False
    per_layer_input_dim: int = 0
    gate_activation: GatedActivation = "swiglu"
    parallel: Callable[..., nn.Module] | None = None
    altup: AltUp | None = None
    laurel_rank: int | None = None
    hyper_connections: HyperConnections | None = None
    hash_routed: bool = False
    residual_multiplier: float = 1.0
    residual_site: ResidualSite | None = None
    routed: bool = False
    dropout_rate: float = 0.0
    remat: RematPolicy | None = None
    dtype: Any = None
    precision: Any = None

    def refuse_unbuildable(self) -> None:
        """Raise ValueError, naming the field, for a block this release does not build."""
        unbuilt = (
            "per_layer_input_dim",
            "parallel",
            "altup",
            "laurel_rank",
            "hyper_connections",
            "hash_routed",
            "residual_site",
        )
        for name in unbuilt:
            if getattr(self, name):
                raise ValueError(f"{name} is set to {getattr(self, name)!r}; the decoder block does not build it")
        if self.wiring.layer_scalar is not None:
            raise ValueError(f"layer_scalar is {self.wiring.layer_scalar!r}; the decoder block does not build it")
        if not (self.wiring.pre_norms or self.wiring.output_norms):
            raise ValueError("pre_norms and output_norms are both off; a block norms one side of its sublayers")

    def setup(self) -> None:
        self.refuse_unbuildable()

        def norm() -> RMSNorm:
            return RMSNorm(self.norm_eps, self.scale_offset, self.scale_after_cast, self.dtype)

        self.self_attn = self.mixer(name="self_attn")
        if self.wiring.pre_norms:
            self.input_layernorm = norm()
        if self.wiring.output_norms:
            self.attention_output_norm = norm()
        if self.feedforward is not None:
            self.mlp = self.feedforward(name="mlp")
            if self.wiring.pre_norms:
                self.post_attention_layernorm = norm()
            if self.wiring.output_norms:
                self.mlp_output_norm = norm()
        if self.dropout_rate:
            self.dropout = nn.Dropout(self.dropout_rate)

    def __call__(
        self,
        x: jax.Array,
        *,
        train: bool = False,
        decode: bool = False,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        kv_store: dict[str, jax.Array] | None = None,
        per_layer_input: LayerInputs | None = None,
        attention_metadata: AttentionMetadata | None = None,
    ) -> jax.Array:
        if not isinstance(per_layer_input, LayerInputs | None):
            raise ValueError("per_layer_input: the decoder block reads no per-layer input but LayerInputs")
        if self.dtype is not None:
            x = x.astype(self.dtype)

        def run(
            block: DecoderBlock,
            states: jax.Array,
            positions: Any,
            segment_ids: Any,
            metadata: Any,
            inputs: Any,
            given: Any,
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            # A copy: what a recomputed block puts in a dict from outside would be of another trace.
            store = None if given is None else dict(given)
            out = block._sublayers(
                states,
                inputs or LayerInputs(),
                train=train,
                decode=decode,
                positions=positions,
                segment_ids=segment_ids,
                kv_store=store,
                attention_metadata=metadata,
            )
            return out, {name: one for name, one in (store or {}).items() if one is not (given or {}).get(name)}

        if self.remat is not None and not decode and not self.is_initializing():
            run = nn.remat(run, policy=self.remat.checkpoint_policy())
        x, stashed = run(self, x, positions, segment_ids, attention_metadata, per_layer_input, kv_store)
        if kv_store is not None:
            kv_store.update(stashed)
        return x

    def _sublayers(self, x: jax.Array, inputs: LayerInputs, *, train: bool, **call: Any) -> jax.Array:
        pre, post = self.wiring.pre_norms, self.wiring.output_norms
        if inputs.selected is not None:
            call["selected"] = inputs.selected
        states = self.self_attn(self.input_layernorm(x) if pre else x, train=train, **call)
        x = self._join(x, self.attention_output_norm(states) if post else states, train)
        if self.feedforward is None:
            return x
        states = self.post_attention_layernorm(x) if pre else x
        states = self.mlp(states, inputs.routes) if self.routed else self.mlp(states)
        return self._join(x, self.mlp_output_norm(states) if post else states, train)

    def _join(self, x: jax.Array, states: jax.Array, train: bool) -> jax.Array:
        if self.residual_multiplier != 1.0:
            states = states * jnp.asarray(self.residual_multiplier, states.dtype)
        if self.dropout_rate:
            states = self.dropout(states, deterministic=not train)
        return x + states.astype(x.dtype)
