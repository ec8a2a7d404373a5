"""What a decoder cannot be: fields whose machinery is not built, and fields that contradict each other.

Functions of the decoder fields alone (a `DecoderFields` or the decoder itself), without JAX, so that a plan
can be refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as record_fields
from typing import Any

from .fields import DecoderFields
from .layers import ResolvedKind, layer_plan, layer_types, sharing_layers
from .mixture import refuse_unbuildable_mixture
from .records import MLA, Indexer

UNBUILT: Mapping[str, str] = {
    "v_norm": "value norms",
    "attention_k_eq_v": "values read from the key projection",
    "layer_scalar": "per-layer output scalars",
    "use_double_wide_mlp": "doubled feed-forward widths",
    "per_layer_input_dim": "per-layer input embeddings",
    "per_layer_input_vocab": "per-layer input embeddings",
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


def unbuildable(fields: Any) -> str | None:
    """Why no decoder can be built of `fields` (a `DecoderFields`), None when one can: what the decoder itself would
    raise, said before anything is read or written."""
    try:
        kinds = layer_plan(fields).kinds
        refuse_unbuildable_fields(fields, kinds)
        refuse_unbuildable_mup(fields, kinds)
    except ValueError as error:
        return str(error)
    return None


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
    _refuse_unbuilt_sharing(fields, kinds)
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
    mixer_dim = None if fields.mixer is None else fields.mixer.head_dim
    if fields.head_dim is None and mixer_dim is None and fields.emb_features % fields.num_heads:
        raise ValueError(
            f"emb_features={fields.emb_features} does not divide into num_heads={fields.num_heads} heads; set head_dim"
        )
    if not 0.0 <= fields.dropout_rate < 1.0:
        raise ValueError(f"dropout_rate={fields.dropout_rate!r}: a rate is in [0, 1)")
    outside = [token for token in fields.embedding_zero_ids if not 0 <= token < fields.vocab_size]
    if outside:
        raise ValueError(f"embedding_zero_ids names {outside[0]}, outside vocab_size={fields.vocab_size}")


def _refuse_senseless_kind(fields: Any, name: str, kind: ResolvedKind) -> None:
    if isinstance(kind.mixer, MLA):
        _refuse_senseless_latent(fields, name, kind, kind.mixer)
    elif kind.mixer is not None:
        raise ValueError(
            f"mixer={kind.mixer!r} of kind {name!r}: this token mixer is not supported yet; leave mixer at None "
            "(grouped-query attention) or an MLA"
        )
    if kind.num_kv_heads < 1 or fields.num_heads % kind.num_kv_heads:
        raise ValueError(
            f"num_heads={fields.num_heads} is not a multiple of num_kv_heads={kind.num_kv_heads} (kind {name!r})"
        )
    if kind.mixer is None and (kind.head_dim < 2 or kind.head_dim % 2):
        raise ValueError(f"head_dim={kind.head_dim} of kind {name!r}: rotary positions need an even number")
    for limit in ("window", "chunk"):
        value = getattr(kind, limit)
        if value is not None and value < 1:
            raise ValueError(f"{limit}={value} of kind {name!r}: a layer attends at least one key")
        if value is not None and not fields.causal:
            raise ValueError(f"{limit}={value} of kind {name!r} needs causal=True: causal=False attends every key")
    if kind.rope_scaling is not None and kind.yarn is not None:
        raise ValueError(f"kind {name!r} sets rope_scaling and yarn: a kind has one rotary ramp or none")


def _refuse_unbuilt_sharing(fields: Any, kinds: Mapping[str, ResolvedKind]) -> None:
    """An indexer's choice is all that layers share."""
    types = layer_types(fields)
    for layer in sharing_layers(fields):
        mixer = kinds[types[layer]].mixer
        if not isinstance(mixer, MLA) or mixer.indexer is None:
            field = "num_kv_shared_layers" if fields.kv_shared_layers is None else "kv_shared_layers"
            raise ValueError(
                f"{field}={getattr(fields, field)!r}: keys and values shared across layers are not supported yet "
                f"(layer {layer} has no indexer, whose choice may be shared); leave {field} at {_DEFAULTS[field]!r}"
            )


def _refuse_senseless_latent(fields: Any, name: str, kind: ResolvedKind, mixer: MLA) -> None:
    """Latent attention's own sizes, and the grouped-query fields it has no use for: those must agree with it."""
    sizes = {f: getattr(mixer, f) for f in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
    if mixer.q_lora_rank is not None:
        sizes["q_lora_rank"] = mixer.q_lora_rank
    for field, value in sizes.items():
        if value < 1:
            raise ValueError(f"{field}={value} of kind {name!r}: latent attention has at least one feature there")
    if mixer.qk_rope_head_dim < 2 or mixer.qk_rope_head_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim={mixer.qk_rope_head_dim} of kind {name!r}: rotary positions need an even number"
        )
    if not 0 <= mixer.latent_norm_eps < float("inf"):
        raise ValueError(f"latent_norm_eps={mixer.latent_norm_eps!r} of kind {name!r}: it is a finite number")
    if mixer.indexer is not None:
        _refuse_senseless_indexer(name, mixer, mixer.indexer)
    if kind.head_dim != mixer.head_dim:
        raise ValueError(
            f"head_dim={kind.head_dim} of kind {name!r}: a head of this MLA has qk_nope_head_dim + qk_rope_head_dim, "
            f"{mixer.head_dim}; leave head_dim at None"
        )
    if kind.num_kv_heads != fields.num_heads:
        raise ValueError(
            f"num_kv_heads={kind.num_kv_heads} of kind {name!r}: latent attention expands a key for each of the "
            f"num_heads={fields.num_heads}; leave num_kv_heads at None"
        )
    unused = {
        "qk_norm": "latent attention norms its latents, not its heads",
        "attention_sinks": "latent attention has no sinks",
        "output_gate": "latent attention has no output gate",
    }
    for field, why in unused.items():
        if getattr(fields, field):
            raise ValueError(f"{field}=True with the MLA of kind {name!r}: {why}; set {field}=False")


def _refuse_senseless_indexer(name: str, mixer: MLA, indexer: Indexer) -> None:
    for field in ("index_n_heads", "index_topk"):
        if getattr(indexer, field) < 1:
            raise ValueError(f"{field}={getattr(indexer, field)} of kind {name!r}: an indexer has at least one")
    if indexer.index_head_dim < mixer.qk_rope_head_dim:
        raise ValueError(
            f"index_head_dim={indexer.index_head_dim} of kind {name!r}: its first qk_rope_head_dim="
            f"{mixer.qk_rope_head_dim} features turn"
        )
    if not 0 <= indexer.index_norm_eps < float("inf"):
        raise ValueError(f"index_norm_eps={indexer.index_norm_eps!r} of kind {name!r}: it is a finite number")


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
