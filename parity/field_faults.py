"""Faults in the fields table: the right weights in a decoder that was read wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_kinds, layer_types
from ..dew_core.records import KVCache, LayerKind, MixerBase, Mixture, RopeScaling, YarnScaling
from ..families.rules import Carried, Rule
from .rule_faults import HEAD, KB, KN, NORMS, OB, QB, QN, VB, Edits, carry, edited, moved, where
from .seeding import Fault, Model, Seeded

Seeds = Callable[[Model], Iterator[Seeded]]
Kinds = dict[str, LayerKind]


def altered(model: Model, label: str, **changes: Any) -> Seeded:
    """An instance that changes decoder fields alone."""
    return Seeded(label, lambda: (model.fields.replace(**changes), model.statements))


def reread(model: Model, label: str, **changes: Any) -> Seeded:
    """An instance whose rules follow the wrong fields, as a family's would."""

    def build() -> tuple:
        fields = model.fields.replace(**changes)
        return fields, tuple(model.family.weights(fields))

    return Seeded(label, build)


def dropping(model: Model, label: str, leaves: Iterable[str], **changes: Any) -> Seeded:
    """An instance that carries some leaves' tensors instead of computing with them, in a decoder without them."""

    def build() -> tuple:
        edits: Edits = {at: carry(rule) for at, rule in where(model, *leaves)}
        return model.fields.replace(**changes), edited(model.statements, edits)

    return Seeded(label, build)


def setting(label: str, when: Callable[[DecoderFields], bool], **changes: Any) -> Seeds:
    """One instance with fields set to given values, where `when` holds."""

    def seeds(model: Model) -> Iterator[Seeded]:
        if when(model.fields):
            yield altered(model, label, **changes)

    return seeds


def always(fields: DecoderFields) -> bool:
    return True


def together(*parts: Seeds) -> Seeds:
    """The instances of several."""

    def seeds(model: Model) -> Iterator[Seeded]:
        for part in parts:
            yield from part(model)

    return seeds


# Layer kinds: rope and windows


def stated(fields: DecoderFields) -> Kinds:
    """Every kind of the pattern with nothing left to the model."""
    resolved = layer_kinds(fields, layer_types(fields))
    return {
        name: LayerKind(kind.window, kind.chunk, None, kind.rope_theta, kind.rope_scaling, kind.yarn)
        for name, kind in resolved.items()
    }


def of_kinds(model: Model, label: str, kinds: Kinds, **changes: Any) -> Seeded:
    """An instance with other kinds; what no layer is any more is left out."""
    pattern = tuple(changes.get("layer_types", layer_types(model.fields)))
    used = {name: kind for name, kind in kinds.items() if name in pattern}
    changes = {"layer_types": pattern, "rope_scaling": None, "yarn": None, **changes}
    return altered(model, label, kinds=used, **changes)


def each_kind(label: str, change: Callable[[LayerKind, Model], LayerKind | None]) -> Seeds:
    """An instance a kind, and one of all kinds at once where there are several; None is no fault in that kind."""

    def seeds(model: Model) -> Iterator[Seeded]:
        kinds = stated(model.fields)
        broken = {name: new for name, kind in kinds.items() if (new := change(kind, model)) not in (None, kind)}
        for name, new in broken.items():
            yield of_kinds(model, f"{label}, {name}", {**kinds, name: new})
        if len(broken) > 1:
            yield of_kinds(model, f"{label}, every kind", {**kinds, **broken})

    return seeds


def scaled(
    change: Callable[[RopeScaling], Any], kind: str | None = None
) -> Callable[[LayerKind, Model], LayerKind | None]:
    """A change of a kind's rope scaling (None drops it), where it has one of this type."""

    def apply(layer: LayerKind, model: Model) -> LayerKind | None:
        if layer.rope_scaling is None or kind not in (None, layer.rope_scaling.rope_type):
            return None
        return replace(layer, rope_scaling=change(layer.rope_scaling))

    return apply


def yarned(change: Callable[[YarnScaling], Any]) -> Callable[[LayerKind, Model], LayerKind | None]:
    """A change of a kind's YaRN (None drops it), where it has it."""

    def apply(layer: LayerKind, model: Model) -> LayerKind | None:
        new = None if layer.yarn is None else change(layer.yarn)
        return None if layer.yarn is None or new == layer.yarn else replace(layer, yarn=new)

    return apply


def amplitude(yarn: YarnScaling) -> float:
    from ..dew_core.rope import yarn_amplitude

    return yarn_amplitude(yarn)


def frequencies_as_theta(layer: LayerKind, model: Model) -> LayerKind | None:
    """The factor put on theta (NTK) where it divides the frequencies."""
    if layer.rope_scaling is None or layer.rope_scaling.rope_type != "linear":
        return None
    dim = model.fields.head_features
    theta = (layer.rope_theta or 1.0) * layer.rope_scaling.factor ** (dim / (dim - 2))
    return replace(layer, rope_theta=theta, rope_scaling=None)


def thetas_exchanged(model: Model) -> Iterator[Seeded]:
    kinds = stated(model.fields)
    names = list(kinds)
    for left, right in pairwise(names):
        if kinds[left].rope_theta != kinds[right].rope_theta:
            one = replace(kinds[left], rope_theta=kinds[right].rope_theta)
            other = replace(kinds[right], rope_theta=kinds[left].rope_theta)
            yield of_kinds(model, f"{left} and {right}", {**kinds, left: one, right: other})
            for name, new in ((left, one), (right, other)):
                yield of_kinds(model, f"{name}'s is the other's", {**kinds, name: new})


def scaling_spread(model: Model) -> Iterator[Seeded]:
    """A kind's scaling on the kinds that have none."""
    kinds = stated(model.fields)
    for name, kind in kinds.items():
        if kind.rope_scaling is None and kind.yarn is None:
            continue
        bare = [other for other, k in kinds.items() if k.rope_scaling is None and k.yarn is None]
        if bare:
            spread = {o: replace(kinds[o], rope_scaling=kind.rope_scaling, yarn=kind.yarn) for o in bare}
            yield of_kinds(model, "every kind", {**kinds, **spread})
            moved_off = {name: replace(kind, rope_scaling=None, yarn=None)}
            yield of_kinds(model, "the other kind", {**kinds, **spread, **moved_off})


def scaling_invented(model: Model) -> Iterator[Seeded]:
    kinds = stated(model.fields)
    if any(kind.rope_scaling or kind.yarn for kind in kinds.values()):
        return
    for name, kind in kinds.items():
        yield of_kinds(
            model, f"linear 8, {name}", {**kinds, name: replace(kind, rope_scaling=RopeScaling("linear", 8.0))}
        )


def softmax_amplified(model: Model) -> Iterator[Seeded]:
    """YaRN's second correction, DeepSeek's alone, put on a model that has only the first."""
    factors = {amplitude(kind.yarn) for kind in stated(model.fields).values() if kind.yarn is not None}
    for factor in factors - {1.0}:
        yield altered(model, "squared on the scores", attention_scale=scale_of(model.fields) * factor**2)


def windows(change: Callable[[int], int | None]) -> Callable[[LayerKind, Model], LayerKind | None]:
    return lambda layer, model: None if layer.window is None else replace(layer, window=change(layer.window))


def windows_spread(model: Model) -> Iterator[Seeded]:
    kinds = stated(model.fields)
    width = next((kind.window for kind in kinds.values() if kind.window is not None), None)
    bare = {name: replace(kind, window=width) for name, kind in kinds.items() if kind.window is None}
    if width is not None and bare:
        yield of_kinds(model, "on the full layers", {**kinds, **bare})


def window_invented(model: Model) -> Iterator[Seeded]:
    kinds = stated(model.fields)
    if all(kind.window is None for kind in kinds.values()):
        yield of_kinds(model, "5 keys", {name: replace(kind, window=5) for name, kind in kinds.items()})


def patterns(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Wrong patterns of the model's own kinds."""
    pattern = layer_types(model.fields)
    names = list(dict.fromkeys(pattern))
    if len(names) < 2:
        return
    yield "rotated by one", (*pattern[1:], pattern[0])
    yield "rotated back by one", (pattern[-1], *pattern[:-1])
    if len(names) == 2:
        yield "inverted", tuple(names[1 - names.index(name)] for name in pattern)
    for at in range(1, len(pattern)):
        if pattern[at] != pattern[at - 1]:
            yield f"{pattern[at]} a layer early", (*pattern[: at - 1], pattern[at], *pattern[at:])
            yield f"{pattern[at]} a layer late", (*pattern[:at], pattern[at - 1], *pattern[at + 1 :])
            break
    for name in names:
        yield f"all {name}", (name,) * len(pattern)


def pattern_wrong(model: Model) -> Iterator[Seeded]:
    right = layer_types(model.fields)
    for label, pattern in patterns(model):
        if pattern != right:
            yield of_kinds(model, label, stated(model.fields), layer_types=pattern)


# Scales and caps


def scale_of(fields: DecoderFields) -> float:
    return fields.head_features**-0.5 if fields.attention_scale is None else fields.attention_scale


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
        yield altered(model, "hidden, not its root", embedding_multiplier=root)
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


# Norms, biases, wiring


def eps_wrong(model: Model) -> Iterator[Seeded]:
    for value in (1e-5, 1e-6, 0.0):
        if value != model.fields.norm_eps:
            yield altered(model, f"{value:g}", norm_eps=value)


def qk_norm_dropped(model: Model) -> Iterator[Seeded]:
    if model.fields.qk_norm:
        yield dropping(model, "q_norm and k_norm", (QN, KN), qk_norm=False)


def output_norms_dropped(model: Model) -> Iterator[Seeded]:
    if model.fields.sandwich_norms:
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


def biases_dropped(model: Model) -> Iterator[Seeded]:
    d = model.fields
    if d.attention_bias:
        yield dropping(model, "q, k, v and o", (QB, KB, VB, OB), attention_bias=False, o_proj_bias=False)
        yield dropping(model, "q, k and v", (QB, KB, VB), attention_bias=False, o_proj_bias=True)
    if d.attention_bias if d.o_proj_bias is None else d.o_proj_bias:
        yield dropping(model, "o", (OB,), o_proj_bias=False)


def head_dropped(model: Model) -> Iterator[Seeded]:
    if not model.fields.tie_embeddings:
        yield dropping(model, "lm_head", (HEAD,), tie_embeddings=True)


def tie_flag_wrong(model: Model) -> Iterator[Seeded]:
    yield altered(model, "flag flipped", tie_embeddings=not model.fields.tie_embeddings)


def partial_rotary(model: Model) -> Iterator[Seeded]:
    if model.fields.partial_rotary_factor is None:
        yield altered(model, "half the frequencies", partial_rotary_factor=0.5)
        width = model.fields.head_features // 4 * 2
        yield altered(
            model,
            "the first half",
            partial_rotary_factor=width / model.fields.head_features,
            partial_rotary_type="prefix",
        )


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
        fields = d.replace(num_layers=last, layer_types=types, kinds=kinds)
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
        "mlp_features": width + 1,
    }
    for name, value in wrong.items():
        yield altered(model, name, **{name: value})
        if d.layer_types is None or name != "num_layers":
            yield reread(model, f"{name}, rules following", **{name: value})


# Every field of its own


UNBUILT: dict[str, Any] = {
    "v_norm": True,
    "attention_k_eq_v": True,
    "layer_scalar": "frozen",
    "mixture": Mixture(4),
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
    from ..dew_core.records import AltUp, AttentionResiduals, HyperConnections

    records = {
        "altup": AltUp(),
        "hyper_connections": HyperConnections(),
        "mtp_hyper_connections": HyperConnections(),
        "attention_residuals": AttentionResiduals(),
    }
    for name, value in {**UNBUILT, **records}.items():
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
        "a norm over the projection for one over a head (qk-norm 39)",
        "q/k norms",
        setting("projection", lambda d: d.qk_norm and d.qk_norm_scope == "head", qk_norm_scope="projection"),
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
        "rope_theta_wrong",
        "theta at another family's default (rope 2)",
        "rope",
        together(
            each_kind("ten times", lambda k, m: replace(k, rope_theta=10 * k.rope_theta)),
            each_kind("10000", lambda k, m: replace(k, rope_theta=10000.0)),
            each_kind("500000", lambda k, m: replace(k, rope_theta=500000.0)),
        ),
        "numbers",
    ),
    Fault(
        "rope_thetas_exchanged",
        "the local base on the global layers (rope 1)",
        "two bases",
        thetas_exchanged,
        "numbers",
    ),
    Fault(
        "rope_scaling_dropped",
        "a rope scaling never applied (rope 1)",
        "a rope scaling",
        together(each_kind("linear or llama3", scaled(lambda s: None)), each_kind("YaRN", yarned(lambda y: None))),
        "numbers",
    ),
    Fault(
        "rope_scaling_spread",
        "a scaling on the sliding layers too (rope 1, 8)",
        "a scaling on some kinds",
        scaling_spread,
        "numbers",
    ),
    Fault(
        "rope_scaling_invented",
        "an absent block read as factor 8 (rope 1)",
        "no rope scaling",
        scaling_invented,
        "numbers",
    ),
    Fault(
        "rope_factor_wrong",
        "the factor off",
        "a rope scaling",
        together(
            each_kind("half", scaled(lambda s: replace(s, factor=s.factor / 2))),
            each_kind("half of YaRN", yarned(lambda y: replace(y, factor=y.factor / 2))),
            each_kind("inverted", scaled(lambda s: replace(s, factor=1 / s.factor))),
        ),
        "numbers",
    ),
    Fault(
        "linear_factor_on_theta",
        "linear scaling computed as NTK",
        "linear rope",
        each_kind("theta", frequencies_as_theta),
        "numbers",
    ),
    Fault(
        "llama3_ramp_wrong",
        "llama3 members mixed up or at their defaults",
        "llama3 rope",
        together(
            each_kind("low", scaled(lambda s: replace(s, low_freq_factor=s.low_freq_factor * 2), "llama3")),
            each_kind("high", scaled(lambda s: replace(s, high_freq_factor=s.high_freq_factor * 2), "llama3")),
            each_kind("original 8192", scaled(lambda s: replace(s, original_max_position_embeddings=8192), "llama3")),
            each_kind("as linear", scaled(lambda s: RopeScaling("linear", s.factor), "llama3")),
        ),
        "numbers",
    ),
    Fault(
        "yarn_amplitude_lost",
        "the cos/sin factor forgotten, or a stated one ignored (rope 3, 15, 23)",
        "YaRN",
        together(
            each_kind("1", yarned(lambda y: y if amplitude(y) == 1 else replace(y, attention_factor=1.0))),
            each_kind("stated one ignored", yarned(lambda y: replace(y, attention_factor=None))),
            each_kind("ratio lost", yarned(lambda y: replace(y, mscale=None, mscale_all_dim=None))),
            each_kind(
                "ratio inverted",
                yarned(lambda y: replace(y, mscale=y.mscale_all_dim, mscale_all_dim=y.mscale)),
            ),
            each_kind("mscale_all_dim ignored", yarned(lambda y: replace(y, mscale_all_dim=None))),
            each_kind("squared", yarned(lambda y: replace(y, attention_factor=amplitude(y) ** 2))),
        ),
        "numbers",
    ),
    Fault(
        "yarn_amplitude_on_scores",
        "DeepSeek's softmax correction on another family (rope 3)",
        "YaRN",
        softmax_amplified,
        "numbers",
    ),
    Fault(
        "yarn_ramp_wrong",
        "betas, rounding or original length of YaRN's ramp (rope 15, 63)",
        "YaRN",
        together(
            each_kind("betas exchanged", yarned(lambda y: replace(y, beta_fast=y.beta_slow, beta_slow=y.beta_fast))),
            each_kind("betas 32 and 1", yarned(lambda y: replace(y, beta_fast=32.0, beta_slow=1.0))),
            each_kind(
                "betas doubled", yarned(lambda y: replace(y, beta_fast=2 * y.beta_fast, beta_slow=2 * y.beta_slow))
            ),
            each_kind("not rounded", yarned(lambda y: replace(y, truncate=False))),
            each_kind("rounded", yarned(lambda y: replace(y, truncate=True))),
            each_kind(
                "original doubled",
                yarned(lambda y: replace(y, original_max_position_embeddings=2 * y.original_max_position_embeddings)),
            ),
            each_kind("original 4096", yarned(lambda y: replace(y, original_max_position_embeddings=4096))),
            each_kind(
                "as linear",
                lambda k, m: (
                    None if k.yarn is None else replace(k, yarn=None, rope_scaling=RopeScaling("linear", k.yarn.factor))
                ),
            ),
        ),
        "numbers",
    ),
    Fault(
        "partial_rotary", "only part of the head rotated (rope 21, 32)", "whole-head rope", partial_rotary, "numbers"
    ),
    Fault(
        "window_off",
        "W + 1 or W - 1 keys for W (sliding-window 18)",
        "a window",
        together(
            each_kind("a key more", windows(lambda w: w + 1)),
            each_kind("a key fewer", windows(lambda w: w - 1)),
            each_kind("twice", windows(lambda w: 2 * w)),
        ),
        "numbers",
    ),
    Fault(
        "window_dropped",
        "sliding layers that see everything",
        "a window",
        each_kind("none", windows(lambda w: None)),
        "numbers",
    ),
    Fault(
        "window_spread",
        "the window on the full layers too (layer-pattern 22)",
        "a window on some kinds",
        windows_spread,
        "numbers",
    ),
    Fault(
        "window_invented",
        "a window that use_sliding_window turns off (layer-pattern 22)",
        "no window",
        window_invented,
        "numbers",
    ),
    Fault(
        "window_as_chunk",
        "blocks of W keys for a sliding W",
        "a window",
        each_kind("chunk", lambda k, m: None if k.window is None else replace(k, window=None, chunk=k.window)),
        "numbers",
    ),
    Fault(
        "pattern_wrong",
        "the pattern off by one, inverted or one kind throughout (layer-pattern 22)",
        "two kinds",
        pattern_wrong,
        "numbers",
    ),
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
    inert("partial_rotary_type", "read beside a partial_rotary_factor alone", partial_rotary_type="prefix"),
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
        "gpt-oss's clamp at its own limit of 7, or 10",
        "a gated MLP",
        lambda m: iter([altered(m, "10", swiglu_limit=10.0)]),
        "equal",
        "no gate or up value of a tiny variant reaches 10, so that a clamp there changes nothing",
    ),
)
"""Faults of the fields table."""
