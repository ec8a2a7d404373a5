"""The decoder fields: the keyword record `CausalTransformer(**fields.kwargs())` is built from.

Plain, frozen, JSON-able and importable without JAX, so that planning and converting can reason about a decoder
without building one. Names, order and defaults are `CausalTransformer`'s own (a test holds them together).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from .records import (
    RECORDS,
    AltUp,
    AttentionResiduals,
    GatedActivation,
    HyperConnections,
    KVCache,
    LayerKind,
    MixerBase,
    Mixture,
    RopeScaling,
    YarnScaling,
)


@dataclass(frozen=True)
class DecoderFields:
    """Everything a decoder is: the decoder reference's `CausalTransformer` fields.

    `dtype` is the compute dtype by name ("bfloat16", …), None for the parameters' own. `rope_interleave` is beyond
    the reference's fields: rotary pairs are neighbours, (2i, 2i + 1), as the weights of GLM-4 and DeepSeek V3 are
    stored (the reference permutes such weights; here weights stay as stored).
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
    dtype: str | None = None
    precision: str | None = None
    force_fp32_for_softmax: bool = True
    attention_impl: str = "auto"
    kv_cache: KVCache = field(default_factory=KVCache)
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

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `CausalTransformer`, by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def replace(self, **changes: Any) -> DecoderFields:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the model: `num_kv_heads`, or `num_heads` when unset."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_features(self) -> int:
        """Features of one query head: `head_dim`, else the mixer's, else `emb_features // num_heads`."""
        stated = self.head_dim if self.head_dim is not None or self.mixer is None else self.mixer.head_dim
        return self.emb_features // self.num_heads if stated is None else stated

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values. Records carry their class under "record"."""
        default = DecoderFields(vocab_size=0)
        return {
            f.name: _jsonable(getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DecoderFields:
        """The inverse of `to_json`. Raises ValueError naming a key that is not a decoder field."""
        unknown = sorted(set(value) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"not decoder fields: {', '.join(unknown)}")
        return cls(**{name: _from_jsonable(item) for name, item in value.items()})


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        members = {f.name: _jsonable(getattr(value, f.name)) for f in fields(value)}
        return {"record": type(value).__name__, **members}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    return value


def _from_jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        members = {key: _from_jsonable(item) for key, item in value.items() if key != "record"}
        name = value.get("record")
        if name is None:
            return members
        if name not in RECORDS:
            raise ValueError(f"not a decoder record: {name!r}")
        return RECORDS[name](**members)
    if isinstance(value, list):
        return tuple(_from_jsonable(item) for item in value)
    return value
