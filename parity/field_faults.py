"""Faults in the fields table: the right weights in a decoder that was read wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan, layer_types
from ..dew_core.records import AltUp, AttentionResiduals, HyperConnections, KVCache, MixerBase, Mixture
from ..families.rules import Carried, Rule
from .edits import (
    HEAD,
    KB,
    KN,
    KVAB,
    NORMS,
    OB,
    QAB,
    QB,
    QN,
    VB,
    altered,
    always,
    carry,
    dropping,
    edited,
    moved,
    reread,
    setting,
    together,
    where,
)
from .kind_faults import scale_of
from .seeding import Fault, Model, Seeded, Seeds


def attention_scales(model: Model) -> Iterator[Seeded]:
    d, scale = model.fields, scale_of(model.fields)
    wrong = {
        "head_dim for the config's scalar": d.head_features**-0.5,
        "hidden / heads for head_dim": (d.emb_features / d.num_heads) ** -0.5,
        "none": 1.0,
        "twice": scale * scale,
        "the root forgotten": scale**2,
        "the root of the root": scale**0.5,
        "inverted": 1 / scale,
        "scaled by 1.001": scale * 1.001,
    }
    for label, value in wrong.items():
        if abs(value - scale) > 1e-9 * scale:
            yield altered(model, label, attention_scale=value)


def caps(name: str, values: Iterable[float]) -> Seeds:
    """A cap where there is none, and none, half and double where there is one."""

    def seeds(model: Model) -> Iterator[Seeded]:
        cap = getattr(model.fields, name)
        if cap is None:
            for value in values:
                yield altered(model, f"{value:g} where there is none", **{name: value})
            return
        yield altered(model, "dropped", **{name: None})
        yield altered(model, "halved", **{name: cap / 2})
        yield altered(model, "doubled", **{name: cap * 2})

    return seeds


def embedding_scales(model: Model) -> Iterator[Seeded]:
    d = model.fields
    root = d.emb_features**0.5
    yield altered(
        model, "dropped" if d.embedding_scale else "where there is none", embedding_scale=not d.embedding_scale
    )
    if d.embedding_scale:
        yield altered(model, "twice", embedding_multiplier=root)
        yield altered(model, "of head_dim", embedding_multiplier=(d.head_features / d.emb_features) ** 0.5)


def embedding_scale_unrounded(model: Model) -> Iterator[Seeded]:
    """sqrt(hidden) kept in float32 and rounded with the product: the same in float32, not in bfloat16."""
    d = model.fields
    if d.embedding_scale and not (d.emb_features**0.5).is_integer():
        yield altered(model, "float32", embedding_scale=False, embedding_multiplier=d.emb_features**0.5)


def activations(model: Model) -> Iterator[Seeded]:
    for name in ("swiglu", "geglu", "geglu_exact"):
        if name != model.fields.mlp:
            yield altered(model, f"{name} for {model.fields.mlp}", mlp=name)


def eps_wrong(model: Model) -> Iterator[Seeded]:
    for value in (1e-5, 1e-6, 0.0):
        if value != model.fields.norm_eps:
            yield altered(model, f"{value:g}", norm_eps=value)


def qk_norm_dropped(model: Model) -> Iterator[Seeded]:
    if model.fields.qk_norm:
        yield dropping(model, "q_norm and k_norm", (QN, KN), qk_norm=False)


def output_norms_dropped(model: Model) -> Iterator[Seeded]:
    if model.fields.sandwich_norms:
        if not model.fields.pre_norms:
            return
        yield dropping(model, "both outputs", (NORMS[1], NORMS[3]), sandwich_norms=False)

        def build() -> tuple:
            # The names of a pre-norm block: post_attention_layernorm norms the feed-forward's input.
            (at, taken), (off, dropped) = where(model, NORMS[1])[0], where(model, NORMS[2])[0]
            carried = {index: carry(rule) for index, rule in where(model, NORMS[3])}
            edits = {**carried, at: [replace(taken, leaf=dropped.leaf)], off: carry(dropped)}
            return model.fields.replace(sandwich_norms=False), edited(model.statements, edits)

        yield Seeded("read as a pre-norm block", build)


def input_norms_dropped(model: Model) -> Iterator[Seeded]:
    if model.fields.sandwich_norms and model.fields.pre_norms:
        yield dropping(model, "both inputs", (NORMS[0], NORMS[2]), pre_norms=False)


INPUT_BIASES = (QB, KB, VB, QAB, KVAB)
"""Of grouped-query attention's projections, and of latent attention's."""


def biases_dropped(model: Model) -> Iterator[Seeded]:
    d = model.fields
    if d.attention_bias:
        yield dropping(model, "q, k, v and o", (*INPUT_BIASES, OB), attention_bias=False, o_proj_bias=False)
    output = d.attention_bias if d.o_proj_bias is None else d.o_proj_bias
    if d.attention_bias and output:
        yield dropping(model, "q, k and v", INPUT_BIASES, attention_bias=False, o_proj_bias=True)
    if output:
        yield dropping(model, "o", (OB,), o_proj_bias=False)


def head_dropped(model: Model) -> Iterator[Seeded]:
    if not model.fields.tie_embeddings:
        yield dropping(model, "lm_head", (HEAD,), tie_embeddings=True)


def tie_flag_wrong(model: Model) -> Iterator[Seeded]:
    yield altered(model, "flag flipped", tie_embeddings=not model.fields.tie_embeddings)


def last_layer_dropped(model: Model) -> Iterator[Seeded]:
    """One layer fewer, its tensors carried: a truncated model that closes."""
    d = model.fields
    last = d.num_layers - 1
    if last < 1:
        return
    pattern = layer_types(d)[:last]

    def build() -> tuple:
        statements = []
        for item in model.statements:
            if isinstance(item, Rule) and "l" in item.over:
                statements += [rule for rule in moved(item, {}) if not rule.leaf.startswith(f"layers_{last}/")]
            else:
                statements.append(item)
        kinds = None if d.kinds is None else {name: kind for name, kind in d.kinds.items() if name in pattern}
        types = None if d.layer_types is None else pattern
        mixture = d.mixture
        if mixture is not None and mixture.layers is not None:
            mixture = replace(mixture, layers=tuple(layer for layer in mixture.layers if layer != last))
        fields = d.replace(num_layers=last, layer_types=types, kinds=kinds, mixture=mixture)
        return fields, (*statements, Carried(f"model.layers.{last}.", "seeded fault"))

    yield Seeded("the last", build)


def sizes_wrong(model: Model) -> Iterator[Seeded]:
    """Every size off, the rules as they were and the rules following."""
    d = model.fields
    width = d.mlp_features if isinstance(d.mlp_features, int) else 4 * d.emb_features
    wrong: dict[str, Any] = {
        "vocab_size": d.vocab_size + 1,
        "emb_features": d.emb_features + 2,
        "num_layers": d.num_layers - 1,
        "num_heads": 2 * d.num_heads,
        "num_kv_heads": 1 if d.kv_heads > 1 else d.num_heads,
        "head_dim": d.head_features + 2,
    }
    if any(not spec.routed for spec in layer_plan(d).specs):
        wrong["mlp_features"] = width + 1
    for name, value in wrong.items():
        yield altered(model, name, **{name: value})
        if d.layer_types is None or name != "num_layers":
            yield reread(model, f"{name}, rules following", **{name: value})


UNBUILT: dict[str, Any] = {
    "altup": AltUp(),
    "attention_residuals": AttentionResiduals(),
    "hyper_connections": HyperConnections(),
    "mtp_hyper_connections": HyperConnections(),
    "v_norm": True,
    "attention_k_eq_v": True,
    "layer_scalar": "frozen",
    "use_double_wide_mlp": True,
    "per_layer_input_dim": 4,
    "per_layer_input_vocab": 16,
    "num_kv_shared_layers": 1,
    "kv_shared_layers": (1,),
    "mixer": MixerBase(),
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "mtp_layer_type": "full_attention",
    "laurel_rank": 2,
    "activation_sparsity_pattern": (0.5,),
    "mask_token_id": 1,
}
"""Fields of machinery that a dense decoder has not, set."""


def unbuilt_set(model: Model) -> Iterator[Seeded]:
    for name, value in UNBUILT.items():
        if getattr(model.fields, name) != value:
            yield altered(model, name, **{name: value})


def structure_wrong(model: Model) -> Iterator[Seeded]:
    """Fields that change which parameters there are, their rules left as they were."""
    d = model.fields
    wrong: dict[str, Any] = {
        "attention_sinks": True,
        "output_gate": True,
        "attention_bias": not d.attention_bias,
        "o_proj_bias": not (d.attention_bias if d.o_proj_bias is None else d.o_proj_bias),
        "qk_norm": not d.qk_norm,
        "sandwich_norms": not d.sandwich_norms,
        "pre_norms": not d.pre_norms,
        "mixture": Mixture(4) if d.mixture is None else None,
    }
    for name, value in wrong.items():
        yield altered(model, name, **{name: value})


def multipliers(model: Model) -> Iterator[Seeded]:
    for name in ("residual_multiplier", "logits_scaling", "embedding_multiplier"):
        for value in (0.5, 2.0, 1.001):
            if getattr(model.fields, name) == 1.0:
                yield altered(model, f"{name} {value:g}", **{name: value})


def inert(name: str, why: str, when: Callable[[DecoderFields], bool] = always, **changes: Any) -> Fault:
    """A field that cannot move a forward pass: altering it must not."""
    return Fault(f"inert_{name}", f"{name} set wrongly", "a decoder", setting(name, when, **changes), "equal", why)


"""Faults of the fields table."""


FIELD_FAULTS = (
    Fault(
        "scale_offset_flipped",
        "(1 + w) missing, or added where the weight is plain (norm 6, 26)",
        "a norm",
        lambda m: iter([altered(m, "flipped", scale_offset=not m.fields.scale_offset)]),
        "numbers",
    ),
    Fault("norm_eps_wrong", "another class's epsilon", "a norm", eps_wrong, "numbers"),
    Fault("qk_norm_dropped", "q_norm and k_norm not computed", "q/k norms", qk_norm_dropped, "numbers"),
    Fault(
        "qk_norm_scope_wrong",
        "a norm over the projection for one over a head, or back (qk-norm 39)",
        "q/k norms",
        together(
            setting("projection", lambda d: d.qk_norm and d.qk_norm_scope == "head", qk_norm_scope="projection"),
            setting("head", lambda d: d.qk_norm and d.qk_norm_scope == "projection", qk_norm_scope="head"),
        ),
        "refused",
    ),
    Fault(
        "output_norms_dropped", "Gemma's block built as Llama's", "a sandwich block", output_norms_dropped, "numbers"
    ),
    Fault(
        "input_norms_dropped",
        "a sandwich block built as a post-norm one",
        "a sandwich block",
        input_norms_dropped,
        "numbers",
    ),
    Fault("biases_dropped", "biases not computed", "biases", biases_dropped, "numbers"),
    Fault("head_dropped", "an own head replaced by the embedding (tied 7, 10)", "an own head", head_dropped, "numbers"),
    Fault(
        "tie_flag_wrong", "the wrapper's tie flag read at the wrong level (tied 7)", "a head", tie_flag_wrong, "refused"
    ),
    Fault("last_layer_dropped", "a layer short, its tensors carried", "two layers", last_layer_dropped, "numbers"),
    Fault(
        "sizes_wrong",
        "a size derived, not read: head_dim from hidden / heads (shape 24)",
        "a size",
        sizes_wrong,
        "refused",
    ),
    Fault("activation_wrong", "silu for gelu, erf for tanh (gemma4-moe 52)", "a gated MLP", activations, "numbers"),
    Fault(
        "causality_dropped",
        "every key seen",
        "causality",
        setting("both ways", lambda d: d.causal, causal=False),
    ),
    Fault(
        "attention_scale_wrong",
        "head_dim for the config's scalar, a root off, or none",
        "attention",
        attention_scales,
        "numbers",
    ),
    Fault(
        "final_softcap_wrong",
        "a logit cap missing, or where it is null (softcap 50)",
        "logits",
        caps("final_logit_softcap", (30.0, 50.0)),
        "numbers",
    ),
    Fault(
        "attention_softcap_wrong",
        "Gemma 2's score cap where it is null (softcap 50)",
        "attention",
        caps("attn_logit_softcap", (50.0, 2.0)),
        "numbers",
    ),
    Fault(
        "embedding_scale_wrong",
        "sqrt(hidden) missing or twice (embed-scale 42)",
        "an embedding",
        embedding_scales,
        "numbers",
    ),
    Fault(
        "embedding_scale_unrounded",
        "sqrt(hidden) not rounded to bfloat16 (embed-scale 42)",
        "an embedding scale that bfloat16 rounds",
        embedding_scale_unrounded,
        "numbers",
        shows_in="bfloat16",
    ),
    Fault("multiplier_wrong", "a muP multiplier where the family has none", "no multiplier", multipliers, "numbers"),
    Fault(
        "tokens_zeroed",
        "placeholder ids read as token zero",
        "a vocabulary",
        lambda m: iter([altered(m, "odd ids", embedding_zero_ids=tuple(range(1, m.fields.vocab_size, 2)))]),
        "numbers",
    ),
    Fault(
        "swiglu_limit_set",
        "gpt-oss's clamp on a plain MLP",
        "a gated MLP",
        lambda m: iter([altered(m, "0.5", swiglu_limit=0.5)]),
        "numbers",
    ),
    Fault(
        "structure_wrong",
        "a parameter the checkpoint has not, or without one it has",
        "a block",
        structure_wrong,
        "refused",
    ),
    Fault("unbuilt_set", "another architecture's machinery", "a dense decoder", unbuilt_set, "refused"),
    Fault(
        "scale_after_cast_flipped",
        "Gemma's norm rounding for Llama's",
        "a norm",
        lambda m: iter([altered(m, "flipped", scale_after_cast=not m.fields.scale_after_cast)]),
        "within",
        "float32 rounds nothing between the two orders, and in bfloat16 they differ by the one rounding that the "
        "bound allows every norm",
    ),
    inert("max_seq_len", "sizes the decode cache alone; the harness gives it the probe's length", max_seq_len=4096),
    inert("initializer_range", "read by init alone", initializer_range=0.5),
    inert("depth_scaled_init", "read by init alone", initializer_range=0.02, depth_scaled_init=True),
    inert("dropout_rate", "no forward pass of the checks trains", dropout_rate=0.3),
    inert("dtype", "the harness states the compute dtype of both sides", dtype="bfloat16"),
    inert("scan_layers", "the harness runs both layouts itself", scan_layers=True),
    inert("remat", "recomputes the backward pass, and the forward is the same", remat="minimal"),
    inert(
        "partial_rotary_type",
        "read beside a partial_rotary_factor alone",
        lambda d: d.partial_rotary_factor is None,
        partial_rotary_type="prefix",
    ),
    inert(
        "force_fp32_for_softmax",
        "in a float32 model the softmax is in float32 either way",
        force_fp32_for_softmax=False,
    ),
    inert("kv_cache", "the stored dtype of a cache, in a forward without one", kv_cache=KVCache(dtype="float32")),
    Fault(
        "bank_layers_set",
        "runs cut shorter than the bank's",
        "a stack",
        lambda m: iter([altered(m, "1", bank_layers=1)]),
        "within",
        "the same layers under fewer scans: a compiler may round differently, a model is not different",
    ),
    Fault(
        "attention_impl_set",
        "another attention kernel",
        "attention",
        setting("xla", always, attention_impl="xla"),
        "within",
        "another kernel for the same product: what differs is rounding",
    ),
    Fault(
        "precision_set",
        "the matmul precision left at its default",
        "a product",
        setting("default", always, precision="default"),
        "within",
        "a CPU has one float32 precision; on an accelerator the harness asks for the highest itself",
    ),
    Fault(
        "swiglu_limit_high",
        "gpt-oss's clamp at 100",
        "a gated MLP",
        lambda m: iter([altered(m, "100", swiglu_limit=100.0)]),
        "equal",
        "no gate or up value of a tiny variant reaches 100 (OLMo 3's, which no norm precedes, pass 10), so that a "
        "clamp there changes nothing",
    ),
)
"""Faults of the fields table."""
