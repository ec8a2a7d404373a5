"""The decoder: token embeddings, the layer stack, the final norm and an fp32 head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from . import layers as plans
from .attention import AttentionMetadata
from .block import DecoderBlock, LayerInputs
from .head import HeadKernel, TokenTable, head_logits
from .kv_cache import refuse_unbuildable_cache
from .layers import LayerPlan, ResolvedKind, group_name, layer_plan
from .mixers import MixerContext, mixer_factory
from .mlp import GatedMLP
from .moe import SparseMLP
from .norms import RMSNorm
from .records import (
    MLA,
    AltUp,
    AttentionResiduals,
    BlockWiring,
    GatedActivation,
    HyperConnections,
    KVCache,
    LayerKind,
    MixerBase,
    Mixture,
    RopeScaling,
    YarnScaling,
)
from .refusals import refuse_unbuildable_fields, refuse_unbuildable_mup
from .remat import remat_policy
from .router import Routes
from .stack import (
    DecoderBank,
    StackView,
    banked_collections,
    first_layer_shapes,
    holds_banks,
    run_stack,
)


class CausalTransformer(nn.Module):
    """Decoder-only transformer over token ids: [B, S] int32 -> [B, S, vocab] fp32.

    The fields are `DecoderFields`' own: what each one means and which family sets it is the decoder
    reference's. Those whose machinery is not built are refused by name when they leave their defaults
    (`refuse_unbuildable_fields`).

    dtype: the compute dtype, a name or a dtype; None computes in the parameters' own.

    Variables hold one subtree per layer (`layers_0`, …), one bank per run of like layers (`layers_0_15`, what
    `bank_sites` names), or some leaves each way; either loop runs either store. `init` always creates one
    subtree per layer.
    """

    vocab_size: int
    emb_features: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp: GatedActivation = "swiglu"
    mlp_features: int | tuple[int, ...] | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float | None = None
    partial_rotary_type: str = "proportional"
    rope_interleave: bool = False
    layer_types: tuple[str, ...] | None = None
    kinds: Mapping[str, LayerKind] | None = None
    norm_eps: float = 1e-05
    scale_offset: bool = False
    scale_after_cast: bool = False
    sandwich_norms: bool = False
    pre_norms: bool = True
    qk_norm: bool = True
    qk_norm_scope: str = "head"
    v_norm: bool = False
    attention_k_eq_v: bool = False
    layer_scalar: Literal["frozen", "trainable"] | None = None
    attention_bias: bool = False
    o_proj_bias: bool | None = None
    attention_scale: float | None = None
    attention_sinks: bool = False
    yarn: YarnScaling | None = None
    attn_logit_softcap: float | None = None
    output_gate: bool = False
    embedding_scale: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    initializer_range: float | None = None
    depth_scaled_init: bool = False
    final_logit_softcap: float | None = None
    tie_embeddings: bool = True
    embedding_zero_ids: tuple[int, ...] = ()
    dropout_rate: float = 0.0
    dtype: Any = None
    precision: Any = None
    force_fp32_for_softmax: bool = True
    attention_impl: str = "auto"
    kv_cache: KVCache = KVCache()
    mixture: Mixture | None = None
    use_double_wide_mlp: bool = False
    causal: bool = True
    per_layer_input_dim: int | None = None
    per_layer_input_vocab: int | None = None
    num_kv_shared_layers: int = 0
    kv_shared_layers: tuple[int, ...] | None = None
    mixer: MixerBase | None = None
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    mtp_layer_type: str | None = None
    mtp_hyper_connections: HyperConnections | None = None
    altup: AltUp | None = None
    laurel_rank: int | None = None
    hyper_connections: HyperConnections | None = None
    attention_residuals: AttentionResiduals | None = None
    swiglu_limit: float | None = None
    activation_sparsity_pattern: tuple[float, ...] | None = None
    mask_token_id: int | None = None
    scan_layers: bool = False
    bank_layers: int | None = None
    remat: Any = None

    def __post_init__(self) -> None:
        # jax.jit takes a decoder as a static argument by its hash, which a dict has not.
        if isinstance(self.kinds, dict):
            object.__setattr__(self, "kinds", FrozenDict(self.kinds))
        super().__post_init__()

    # What the fields resolve to.

    @property
    def plan(self) -> LayerPlan:
        """The layer plan the decoder is built from (`layer_plan` of its fields)."""
        return layer_plan(self)

    @property
    def init_stds(self) -> tuple[float | None, float | None]:
        """The normal std of the hidden matrices and of the projections back into the residual stream, or
        (None, None) for the modules' own initializers."""
        if self.initializer_range is None:
            return None, None
        hidden = self.initializer_range / math.sqrt(self.logits_scaling)
        return hidden, hidden / math.sqrt(2 * self.num_layers) if self.depth_scaled_init else hidden

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Each layer's dense feed-forward width; a width of 0 is a layer without a feed-forward."""
        return plans.mlp_widths(self)

    @property
    def hidden_features(self) -> int:
        """The model's one feed-forward width. Raises ValueError when its layers differ."""
        widths = sorted(set(self.mlp_widths))
        if len(widths) != 1:
            raise ValueError(f"mlp_features gives the layers widths {widths}: the model has no one width")
        return widths[0]

    @property
    def hash_layers(self) -> set[int]:
        """The sparse layers routing by a token table: none, the mixture's `hash_layers` are refused."""
        return set()

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers whose feed-forward routes to experts."""
        return plans.sparse_layers(self)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """The layers that read another layer's stash, in order (`layers.sharing_layers`)."""
        return plans.sharing_layers(self)

    @property
    def kv_sharing(self) -> dict[int, int]:
        """Sharing layer index to the provider it reads, both of one layer type (`layers.kv_sharing`). A sharing layer
        has no indexer and repeats the provider's choice of keys."""
        return plans.kv_sharing(self)

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """This decoder's stored stack: its scanned runs, or one layer per bank for a plain loop."""
        groups = self.plan.groups if self.scan_layers else tuple((i, 1) for i in range(self.num_layers))
        return (DecoderBank((), StackView(groups), self.scan_layers),)

    def kind_of(self, layer_type: str) -> ResolvedKind:
        """What the layers of `layer_type` do, the model's defaults included."""
        return plans.resolve_kind(self, dict(self.kinds or {}).get(layer_type, LayerKind()))

    def layer_kinds(self, types: Sequence[str]) -> dict[str, ResolvedKind]:
        """Every kind the pattern names, resolved. Raises ValueError as `layers.layer_kinds` does."""
        return plans.layer_kinds(self, types)

    def mixer_context(self, kind: ResolvedKind, layer_type: str, kv_shared: bool) -> MixerContext:
        """One layer's attention geometry: the kind's resolved values. A windowed kind rotates every
        dimension, so the partial rotary belongs to the kinds that attend the whole sequence, where Gemma 4
        puts it."""
        return MixerContext(
            layer_type=layer_type,
            kv_shared=kv_shared,
            num_heads=self.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            rope_theta=kind.rope_theta,
            rope_scaling=kind.rope_scaling,
            yarn=kind.yarn,
            partial_rotary_factor=None if kind.window is not None else self.partial_rotary_factor,
            partial_rotary_type=self.partial_rotary_type,
            window=kind.window,
            chunk=kind.chunk,
            mixer=kind.mixer,
        )

    def refuse_unbuildable_mup(self, kinds: Mapping[str, ResolvedKind]) -> None:
        """Raise ValueError for a multiplier or an initialisation this decoder cannot carry."""
        refuse_unbuildable_mup(self, kinds)

    def refuse_unbuildable_fields(self, kinds: Mapping[str, ResolvedKind]) -> None:
        """Raise ValueError for a field, or a pair of fields, this decoder cannot build, naming the field."""
        refuse_unbuildable_fields(self, kinds)
        refuse_unbuildable_cache(self.kv_cache)

    def feedforward_factories(self) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module] | None, None]:
        """The dense gated MLP, the routed experts and the parallel branch, each built from keywords.

        A dense decoder has the first alone, and the parallel branch is refused. They take `hidden_features`
        beside a name, since widths are per layer.
        """
        hidden_std, output_std = self.init_stds
        shared: dict[str, Any] = {
            "features": self.emb_features,
            "activation": self.mlp,
            "swiglu_limit": self.swiglu_limit,
            "init_std": hidden_std,
            "output_init_std": output_std,
            "dtype": self.dtype,
            "precision": self.precision,
        }
        sparse = None if self.mixture is None else partial(SparseMLP, mixture=self.mixture, **shared)
        return partial(GatedMLP, **shared), sparse, None

    def mixer_factory(self, context: MixerContext) -> Callable[..., nn.Module]:
        """The token mixer of one layer as a factory taking a name (`mixers.MIXERS`)."""
        hidden_std, output_std = self.init_stds
        shared = {
            "rope_interleaved": self.rope_interleave,
            "max_seq_len": self.max_seq_len,
            "causal": self.causal,
            "qk_norm": self.qk_norm,
            "qk_norm_scope": self.qk_norm_scope,
            "norm_eps": self.norm_eps,
            "scale_offset": self.scale_offset,
            "scale_after_cast": self.scale_after_cast,
            "attention_bias": self.attention_bias,
            "o_proj_bias": self.o_proj_bias,
            "attention_scale": self.attention_scale,
            "attention_sinks": self.attention_sinks,
            "attn_logit_softcap": self.attn_logit_softcap,
            "output_gate": self.output_gate,
            "force_fp32_for_softmax": self.force_fp32_for_softmax,
            "attention_impl": self.attention_impl,
            "kv_cache": self.kv_cache,
            "init_std": hidden_std,
            "output_init_std": output_std,
            "dtype": self.dtype,
            "precision": self.precision,
        }
        return mixer_factory(context, shared)

    def build_block(self, index: int, **module: Any) -> DecoderBlock:
        """Layer `index`'s block; `module` is flax's own `name` or `parent`."""
        spec = self.plan.specs[index]
        dense, sparse, _ = self.feedforward_factories()
        feedforward = sparse if spec.routed else dense if spec.width else None
        return DecoderBlock(
            mixer=self.mixer_factory(self.mixer_context(spec.kind, spec.layer_type, spec.kv_shared)),
            feedforward=None if feedforward is None else partial(feedforward, hidden_features=spec.width),
            routed=spec.routed,
            wiring=BlockWiring(self.pre_norms, self.sandwich_norms, self.layer_scalar),
            norm_eps=self.norm_eps,
            scale_offset=self.scale_offset,
            scale_after_cast=self.scale_after_cast,
            residual_multiplier=self.residual_multiplier,
            dropout_rate=self.dropout_rate,
            remat=remat_policy(self.remat),
            dtype=self.dtype,
            precision=self.precision,
            **module,
        )

    def setup(self) -> None:
        """Build the embeddings, the layers and their scanned runs, the final norm and the head."""
        plan = self.plan
        self.refuse_unbuildable_fields(plan.kinds)
        self.refuse_unbuildable_mup(plan.kinds)
        self.embed_tokens = TokenTable(
            self.vocab_size, self.emb_features, init_std=self.initializer_range, dtype=self.dtype
        )
        self.layers = [self.build_block(index) for index in range(self.num_layers)]
        # A run's block is named for its range; `init` never calls it, so the tree holds layers alone.
        self.runs = [
            self.build_block(first, name=group_name(first, count)) for first, count in plan.groups if count > 1
        ]
        self.norm = RMSNorm(
            eps=self.norm_eps,
            scale_offset=self.scale_offset,
            scale_after_cast=self.scale_after_cast,
            dtype=self.dtype,
        )
        if not self.tie_embeddings:
            self.lm_head = HeadKernel(self.emb_features, self.vocab_size, init_std=self.initializer_range)

    # The forward.

    def __call__(self, tokens: jax.Array, **kwargs: Any) -> jax.Array:
        """Logits [B, S, vocab] in fp32 of tokens [B, S]; the keywords are `hidden_states`'s."""
        return self.logits(self.hidden_states(tokens, **kwargs))

    def states_and_logits(self, tokens: jax.Array, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        """The final states [B, S, D] and the logits [B, S, vocab] of one forward."""
        states = self.hidden_states(tokens, **kwargs)
        return states, self.logits(states)

    def states_and_logits_at(self, tokens: jax.Array, slots: jax.Array, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        """The final states [B, S, D], and the logits [B, vocab] of the one position a row that `slots` [B]
        names.

        The states are gathered before the head, so that a prefill never makes [B, S, vocab].
        """
        states = self.hidden_states(tokens, **kwargs)
        rows = jnp.take_along_axis(states, slots[:, None, None], axis=1)[:, 0]
        return states, self.logits(rows)

    def logits(self, states: jax.Array) -> jax.Array:
        """The head over final states [..., D]: [..., vocab] in fp32, soft-capped when the model says so."""
        table = self.embed_tokens.embedding if self.tie_embeddings else self.lm_head()
        logits = head_logits(states, table, self.tie_embeddings, self.precision)
        cap = self.final_logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def token_embeddings(self, tokens: jax.Array) -> jax.Array:
        """The table's rows [B, S, D] of tokens [B, S], unscaled; `embedding_zero_ids` read token zero's."""
        if self.embedding_zero_ids:
            placeholder = jnp.isin(tokens, jnp.asarray(self.embedding_zero_ids, tokens.dtype))
            tokens = jnp.where(placeholder, 0, tokens)
        return self.embed_tokens(tokens)

    def scaled_embeddings(self, x: jax.Array) -> jax.Array:
        """Token embeddings x as the first layer reads them.

        With `embedding_scale`, times sqrt(emb_features) rounded to x's dtype, as transformers 5.24 does
        (`Gemma3TextScaledWordEmbedding`): 34.0 and not 33.94 at 1152 features in bf16. The decoder reference
        keeps the factor in fp32; parity with transformers' bf16 needs the rounded one, and in fp32 the two
        are equal. Then times `embedding_multiplier`, a python scalar in torch: the product is taken in fp32
        and rounded once.
        """
        if self.embedding_scale:
            x = x * jnp.asarray(math.sqrt(self.emb_features), x.dtype)
        if self.embedding_multiplier != 1.0:
            x = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * self.embedding_multiplier).astype(x.dtype)
        return x

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        train: bool = False,
        decode: bool = False,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        input_embeddings: jax.Array | None = None,
        embedding_positions: jax.Array | None = None,
        attention_pairwise_mask: jax.Array | None = None,
        attention_key_positions: jax.Array | None = None,
        image_groups: Any = None,
        rotary_positions: Any = None,
        routed_experts: Any = None,
        routed: Any = None,
        selected_keys: Any = None,
    ) -> jax.Array:
        """The final normed states [B, S, D] of tokens [B, S], divided by `logits_scaling` (in fp32) when it
        is set.

        train: drop out, from the rng stream "dropout". decode: append to the cache and attend it (collection
        "cache", mutable). positions [B, S] int32: None counts the real tokens of `attention_mask`, the columns
        without one, and the cache's cursor when decoding. segment_ids [B, S]: the documents of packed rows,
        beside per-document positions. attention_mask [B, S]: the real tokens; the others are never attended,
        and their own states mean nothing. input_embeddings [B, N, D] replace the scaled token embeddings at
        embedding_positions [B, N]. attention_pairwise_mask [B, Q, K] bool: explicit visibility in place of
        the causal rule; attention_key_positions [B, K]: the keys' coordinates, for local layers. routed_experts
        [B, S, layers, top_k]: recorded expert ids the sparse layers' routers repeat, indexed by decoder layer, and
        routed [B, S] bool the tokens the record covers, None for all (`Routes.of_layers`). selected_keys
        [B, S, layers, T] bool: recorded choices of keys (of the cache's slots when decoding) in place of the indexers'.

        Raises ValueError for half a pair of arguments, for decoding with causal=False, and by name for the
        arguments of machinery this decoder does not build.
        """
        unbuilt = {
            "image_groups": image_groups,
            "rotary_positions": rotary_positions,
        }
        for name, value in unbuilt.items():
            if value is not None:
                raise ValueError(f"{name} is not supported yet by this decoder; leave it None")
        if (input_embeddings is None) != (embedding_positions is None):
            raise ValueError("input_embeddings and embedding_positions go together: pass both or neither")
        routes = self._routes(routed_experts, routed, tokens.shape)
        selected = self._selected(selected_keys, tokens.shape)
        inputs = None if routes is None and selected is None else LayerInputs(routes, selected)
        if decode and not self.causal:
            raise ValueError("decode=True needs causal=True: a decoder that attends both ways has no cache")
        x = self.scaled_embeddings(self.token_embeddings(tokens))
        if input_embeddings is not None:
            rows = jnp.arange(x.shape[0])[:, None]
            x = x.at[rows, embedding_positions].set(input_embeddings.astype(x.dtype))
        metadata = None
        if attention_mask is not None:
            attention_mask = attention_mask.astype(jnp.bool_)
        given = (attention_mask, attention_pairwise_mask, attention_key_positions)
        if any(value is not None for value in given):
            metadata = AttentionMetadata(*given)
        x = self.stack(
            x,
            train=train,
            decode=decode,
            positions=positions,
            segment_ids=segment_ids,
            per_layer_input=inputs,
            attention_metadata=metadata,
        )
        x = self.norm(x)
        if self.logits_scaling != 1.0:
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) / self.logits_scaling
        return x

    def _routes(self, routed_experts: Any, routed: Any, shape: tuple[int, ...]) -> Routes | None:
        if routed_experts is None:
            if routed is not None:
                raise ValueError("routed marks the tokens of routed_experts: pass both, or routed_experts alone")
            return None
        if self.mixture is None:
            raise ValueError("routed_experts needs a mixture: this decoder routes to no experts")
        routes = Routes.of_layers(routed_experts, routed, self.num_layers, self.mixture.top_k)
        if routes.experts.shape[:2] != shape:
            raise ValueError(f"routed_experts records {routes.experts.shape[:2]} tokens, the tokens are {shape}")
        return routes

    def _selected(self, keys: Any, shape: tuple[int, ...]) -> jax.Array | None:
        if keys is None:
            return None
        kinds = self.plan.kinds.values()
        if any(not isinstance(kind.mixer, MLA) or kind.mixer.indexer is None for kind in kinds):
            raise ValueError("selected_keys needs an indexer in every kind of layer: this decoder chooses no keys")
        keys = jnp.asarray(keys, jnp.bool_)
        if keys.ndim != 4 or keys.shape[:3] != (*shape, self.num_layers):
            raise ValueError(f"selected_keys has shape {keys.shape}; it is [B, S, layers, T] of tokens {shape}")
        return keys

    def stack(self, x: jax.Array, **call: Any) -> jax.Array:
        """The layer stack over x [B, S, D]: the plain loop or the scanned runs, whichever way the store lies.

        The keywords are `run_stack`'s. A scan carries the residual stream in one dtype, so the stream enters
        it in the dtype it settles in (`residual_dtype`).
        """
        specs, groups, store = self.plan.specs, self.plan.groups, self.variables
        scanned = self.scan_layers and not self.is_initializing()
        loop = groups if scanned else tuple((index, 1) for index in range(self.num_layers))

        def run(model: CausalTransformer, x: jax.Array) -> jax.Array:
            blocks = {block.name: block for block in model.runs}
            store: dict | None = {} if any(spec.kv_shared for spec in specs) else None
            return run_stack(model.layers, lambda _, name: blocks[name], specs, loop, x, kv_store=store, **call)

        banked = self.banked_collections()
        if scanned:
            view = StackView(groups, banked=banked)
            x = x.astype(self.residual_dtype(x, **call))
            read, unread = view.stack, view.unstack
        elif holds_banks(store):
            view = StackView(groups)
            read, unread = view.unstack, dict
        else:
            return run(self, x)

        def write(variables: Mapping[str, Mapping]) -> dict:
            return view.restored(unread(variables), store)

        return nn.map_variables(run, True, trans_in_fn=read, trans_out_fn=write, mutable=True)(self, x)

    def banked_collections(self) -> tuple[str, ...]:
        """The collections whose layer subtrees the store holds as banks alone.

        See `stack.banked_collections`, whose errors it raises.
        """
        return banked_collections(self.variables, self.plan.groups)

    def residual_dtype(self, x: jax.Array, **call: Any) -> jnp.dtype:
        """The dtype the residual stream settles in: x's promoted with what the first layer returns for it.

        The keywords are `run_stack`'s. The layer runs abstractly and apart: nothing is computed, cached or
        sown.
        """
        block = self.build_block(0, parent=None)
        streams = {name: jax.random.key(0) for name in self.scope.rngs}

        # Every layer's input on axis 2; the block takes its own.
        call["per_layer_input"] = jax.tree.map(lambda leaf: leaf[:, :, 0], call.get("per_layer_input"))

        def first(variables: Any, x: Any) -> jax.Array:
            out, _ = block.apply(variables, x, kv_store=None, mutable=True, rngs=streams, **call)
            return out

        return jnp.promote_types(x.dtype, jax.eval_shape(first, self.first_layer_shapes(), x).dtype)

    def first_layer_shapes(self) -> dict:
        """The first layer's variables as `jax.ShapeDtypeStruct`s, from layer 0's subtree, the first row of
        the first bank, or both when each holds some of the leaves."""
        return first_layer_shapes(self.variables, self.plan.groups)

    def head_table(self, params: Mapping[str, Any]) -> tuple[jax.Array, bool]:
        """The head matrix as `params` (the decoder's own tree) stores it, and whether its rows are the
        vocabulary: the [vocab, D] table and True when tied, lm_head's [D, vocab] kernel and False
        otherwise."""
        if self.tie_embeddings:
            return params["embed_tokens"]["embedding"], True
        return params["lm_head"]["kernel"], False

    def head_weight(self, params: Mapping[str, Any]) -> jax.Array:
        """The [D, vocab] head matrix in its stored dtype; a tied head is the table transposed."""
        table, vocab_major = self.head_table(params)
        return table.T if vocab_major else table

    def init_cache(self, batch_size: int) -> None:
        """Allocate a zeroed decode cache for `batch_size` rows of `max_seq_len` slots:

        cache = model.apply(variables, B, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"]
        """
        self.hidden_states(jnp.zeros((batch_size, 1), jnp.int32), decode=True)
