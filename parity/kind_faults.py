"""Faults in what a kind of layer does: its rope, its window, and which layers are of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields as record_fields
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_kinds, layer_types
from ..dew_core.records import MLA, LayerKind, RopeScaling, YarnScaling
from ..dew_core.rope import yarn_amplitude, yarn_softmax_correction
from .edits import altered, together
from .seeding import Fault, Model, Seeded, Seeds

Kinds = dict[str, LayerKind]


def stated(fields: DecoderFields) -> Kinds:
    """Every kind of the pattern with nothing left to the model."""
    resolved = layer_kinds(fields, layer_types(fields))
    return {
        name: LayerKind(**{f.name: getattr(kind, f.name) for f in record_fields(LayerKind)})
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


def frequencies_as_theta(layer: LayerKind, model: Model) -> LayerKind | None:
    """The factor put on theta (NTK) where it divides the frequencies."""
    if layer.rope_scaling is None or layer.rope_scaling.rope_type != "linear":
        return None
    dim = rotary_width(model.fields)
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
    factors = {yarn_amplitude(kind.yarn) for kind in stated(model.fields).values() if kind.yarn is not None}
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


def scale_of(fields: DecoderFields) -> float:
    """What scores are multiplied by."""
    if fields.attention_scale is not None:
        return fields.attention_scale
    correction = yarn_softmax_correction(fields.yarn) if isinstance(fields.mixer, MLA) else 1.0
    return fields.head_features**-0.5 * correction


def rotary_width(fields: DecoderFields) -> int:
    """The features of a head that positions may turn."""
    return fields.mixer.qk_rope_head_dim if isinstance(fields.mixer, MLA) else fields.head_features


def partial_rotary(model: Model) -> Iterator[Seeded]:
    factor, whole = model.fields.partial_rotary_factor, rotary_width(model.fields)
    if factor is None:
        yield altered(model, "half the frequencies", partial_rotary_factor=0.5)
        width = whole // 4 * 2
        yield altered(
            model,
            "the first half",
            partial_rotary_factor=width / whole,
            partial_rotary_type="prefix",
        )
        return
    rotated = int(whole * factor)
    yield altered(model, "the whole head", partial_rotary_factor=None)
    yield altered(model, "frequencies of the whole head", partial_rotary_type="proportional")
    for label, width in (("a pair more", rotated + 2), ("a pair fewer", rotated - 2)):
        if 0 < width <= whole:
            # Half a feature more, so that the product with head_dim does not round below it.
            yield altered(model, label, partial_rotary_factor=min(1.0, (width + 0.5) / whole))


KIND_FAULTS = (
    Fault(
        "rope_theta_wrong",
        "theta at another family's default (rope 2)",
        "rope",
        together(
            each_kind("ten times", lambda k, m: replace(k, rope_theta=10 * (k.rope_theta or 1.0))),
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
            each_kind("1", yarned(lambda y: y if yarn_amplitude(y) == 1 else replace(y, attention_factor=1.0))),
            each_kind("stated one ignored", yarned(lambda y: replace(y, attention_factor=None))),
            each_kind("ratio lost", yarned(lambda y: replace(y, mscale=None, mscale_all_dim=None))),
            each_kind(
                "ratio inverted",
                yarned(lambda y: replace(y, mscale=y.mscale_all_dim, mscale_all_dim=y.mscale)),
            ),
            each_kind("mscale_all_dim ignored", yarned(lambda y: replace(y, mscale_all_dim=None))),
            each_kind("squared", yarned(lambda y: replace(y, attention_factor=yarn_amplitude(y) ** 2))),
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
        "partial_rotary",
        "part of the head rotated for all of it, another part, or all for a part (rope 21, 32)",
        "rope",
        partial_rotary,
        "numbers",
    ),
    Fault(
        "rope_interleave_flipped",
        "neighbouring features rotated for halves, or halves for neighbours (rope-layout 17)",
        "rope",
        lambda m: iter([altered(m, "flipped", rope_interleave=not m.fields.rope_interleave)]),
        "numbers",
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
)
"""Faults of layer kinds."""
