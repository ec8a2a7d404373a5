"""What a decoder cannot be: fields whose machinery is not built, and fields that contradict each other.

Functions of the decoder fields alone (a `DecoderFields` or the decoder itself), without JAX, so that a plan
can be refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as record_fields
from typing import Any

from .fields import DecoderFields
from .layers import ResolvedKind
from .mixture import refuse_unbuildable_mixture

UNBUILT: Mapping[str, str] = {
    "v_norm": "value norms",
    "attention_k_eq_v": "values read from the key projection",
    "layer_scalar": "per-layer output scalars",
    "use_double_wide_mlp": "doubled feed-forward widths",
    "per_layer_input_dim": "per-layer input embeddings",
    "per_layer_input_vocab": "per-layer input embeddings",
    "num_kv_shared_layers": "keys and values shared across layers",
    "kv_shared_layers": "keys and values shared across layers",
    "mixer": "token mixers other than grouped-query attention",
    "num_nextn_predict_layers": "multi-token prediction depths",
    "index_share_for_mtp_iteration": "multi-token prediction depths",
    "mtp_layer_type": "multi-token prediction depths",
    "mtp_hyper_connections": "multi-token prediction depths",
    "altup": "AltUp residual copies",
    "laurel_rank": "LAuReL blocks",
    "hyper_connections": "hyper-connections",
    "attention_residuals": "attention residuals",
    "activation_sparsity_pattern": "sparse feed-forward gates",
    "mask_token_id": "masked diffusion",
}
"""The fields whose machinery this decoder does not build, each with what it would need."""

_DEFAULTS = {f.name: f.default for f in record_fields(DecoderFields)}


def refuse_unbuildable_fields(fields: Any, kinds: Mapping[str, ResolvedKind]) -> None:
    """Raise ValueError for a field, or a pair of fields, this decoder cannot build, naming the field.

    fields: a `DecoderFields` or the decoder. kinds: its resolved kinds by name.
    """
    for name, machinery in UNBUILT.items():
        value = getattr(fields, name)
        if value != _DEFAULTS[name]:
            raise ValueError(
                f"{name}={value!r}: {machinery} are not supported yet; leave {name} at {_DEFAULTS[name]!r}"
            )
    if fields.mixture is not None:
        refuse_unbuildable_mixture(fields.mixture, fields.num_layers)
    _refuse_senseless_sizes(fields)
    for name, kind in kinds.items():
        _refuse_senseless_kind(fields, name, kind)
    _refuse_senseless_pairs(fields)


def refuse_unbuildable_mup(fields: Any, kinds: Mapping[str, ResolvedKind]) -> None:
    """Raise ValueError for a multiplier or an initialisation a decoder cannot carry, naming the field."""
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        value = getattr(fields, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r}: a multiplier is a finite number above 0")
    std = fields.initializer_range
    if std is not None and not 0 < std < float("inf"):
        raise ValueError(f"initializer_range={std!r}: a standard deviation is a finite number above 0")
    if fields.depth_scaled_init and std is None:
        raise ValueError("depth_scaled_init=True needs initializer_range: there is no std to scale")


def _refuse_senseless_sizes(fields: Any) -> None:
    for name in ("vocab_size", "emb_features", "num_layers", "num_heads", "max_seq_len"):
        value = getattr(fields, name)
        if value < 1:
            raise ValueError(f"{name}={value!r}: a decoder has at least one")
    if fields.head_dim is None and fields.emb_features % fields.num_heads:
        raise ValueError(
            f"emb_features={fields.emb_features} does not divide into num_heads={fields.num_heads} heads; set head_dim"
        )
    if not 0.0 <= fields.dropout_rate < 1.0:
        raise ValueError(f"dropout_rate={fields.dropout_rate!r}: a rate is in [0, 1)")
    outside = [token for token in fields.embedding_zero_ids if not 0 <= token < fields.vocab_size]
    if outside:
        raise ValueError(f"embedding_zero_ids names {outside[0]}, outside vocab_size={fields.vocab_size}")


def _refuse_senseless_kind(fields: Any, name: str, kind: ResolvedKind) -> None:
    if kind.mixer is not None:
        raise ValueError(f"kind {name!r} sets mixer={kind.mixer!r}: only grouped-query attention is supported yet")
    if kind.num_kv_heads < 1 or fields.num_heads % kind.num_kv_heads:
        raise ValueError(
            f"num_heads={fields.num_heads} is not a multiple of num_kv_heads={kind.num_kv_heads} (kind {name!r})"
        )
    if kind.head_dim < 2 or kind.head_dim % 2:
        raise ValueError(f"head_dim={kind.head_dim} of kind {name!r}: rotary positions need an even number")
    for limit in ("window", "chunk"):
        value = getattr(kind, limit)
        if value is not None and value < 1:
            raise ValueError(f"{limit}={value} of kind {name!r}: a layer attends at least one key")
        if value is not None and not fields.causal:
            raise ValueError(f"{limit}={value} of kind {name!r} needs causal=True: causal=False attends every key")
    if kind.rope_scaling is not None and kind.yarn is not None:
        raise ValueError(f"kind {name!r} sets rope_scaling and yarn: a kind has one rotary ramp or none")


def _refuse_senseless_pairs(fields: Any) -> None:
    if not fields.pre_norms and not fields.sandwich_norms:
        raise ValueError(
            "pre_norms=False needs sandwich_norms=True: a block norms its sublayers' inputs, their outputs or both"
        )
    factor = fields.partial_rotary_factor
    if factor is not None and not 0.0 < factor <= 1.0:
        raise ValueError(f"partial_rotary_factor={factor!r}: a fraction of the head is in (0, 1]")
    for name in ("final_logit_softcap", "attn_logit_softcap"):
        value = getattr(fields, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value!r}: a softcap is above 0, or None for none")
