"""Faults of latent attention: a head or a latent cut in the wrong place, YaRN's two corrections mixed up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..dew_core.records import MLA, YarnScaling
from ..dew_core.rope import yarn_amplitude, yarn_mscale
from ..families.rules import Rule
from .edits import HEAD_AXIS, KVA, KVAB, KVB, OUT, QA, QLB, Edits, Q, altered, reread, seeded, short, together, where
from .rule_faults import backwards, heads_in_order, rotated, swapped
from .seeding import Fault, Model, Seeded, Seeds

LATENT_NORMS = ("self_attn/q_a_layernorm/scale", "self_attn/kv_a_layernorm/scale")
QUERIES, KEYS = (QLB, Q), (KVA, KVAB)
"""The rules of rotated features: of every head, and of the one key behind the latent."""


def mixer_of(model: Model) -> MLA | None:
    """The model's latent attention, None where it has none."""
    mixer = model.fields.mixer
    return mixer if isinstance(mixer, MLA) else None


def reordered(rule: Rule, axis: int, order: Sequence[int]) -> list[Rule]:
    """The rule with feature i of the leaf's axis filled from feature order[i], a run of neighbours a rule."""
    head = (slice(None),) * axis
    found, start = [], 0
    for stop in range(1, len(order) + 1):
        if stop < len(order) and order[stop] == order[stop - 1] + 1:
            continue
        source = rule.source_view[(*head, slice(order[start], order[stop - 1] + 1))]
        found.append(replace(rule, source_view=source, leaf_view=rule.leaf_view[(*head, slice(start, stop))]))
        start = stop
    return found


Order = Callable[[MLA, int], Sequence[int]]
"""The features of a rule, from the sizes and the number of heads."""


def misread(label: str, orders: dict[tuple[str, ...], Order]) -> Seeds:
    """The features of some leaves taken in another order, all at once."""

    def seeds(model: Model) -> Iterator[Seeded]:
        mixer, heads = mixer_of(model), model.fields.num_heads
        if mixer is None:
            return
        found: dict[int, tuple[Rule, Sequence[int]]] = {}
        for leaves, order in orders.items():
            features = order(mixer, heads)
            if list(features) == list(range(len(features))):
                continue
            found |= {at: (rule, features) for at, rule in where(model, *leaves)}

        def edits() -> Edits:
            return {at: reordered(rule, HEAD_AXIS[short(rule.leaf)], order) for at, (rule, order) in found.items()}

        if found:
            yield seeded(model, label, edits)

    return seeds


def each_head(order: Iterable[int], width: int, heads: int) -> list[int]:
    """One head's order in every head."""
    inner = list(order)
    return [head * width + feature for head in range(heads) for feature in inner]


def last_first(first: int, last: int) -> list[int]:
    """Features stored as `last` of them and then `first`, read as `first` and then `last`."""
    return [*range(last, last + first), *range(last)]


def rotary_first_of_heads(mixer: MLA, heads: int) -> list[int]:
    return each_head(last_first(mixer.qk_nope_head_dim, mixer.qk_rope_head_dim), mixer.head_dim, heads)


def rotary_first_of_latent(mixer: MLA, heads: int) -> list[int]:
    return last_first(mixer.kv_lora_rank, mixer.qk_rope_head_dim)


def values_first(mixer: MLA, heads: int) -> list[int]:
    nope, value = mixer.qk_nope_head_dim, mixer.v_head_dim
    return each_head(last_first(nope, value), nope + value, heads)


def parts_outside(first: int, last: int, heads: int) -> list[int]:
    """All heads' first parts stored before all heads' last ones, where the file has them head by head."""
    order: list[int] = []
    for head in range(heads):
        order += range(head * first, (head + 1) * first)
        order += range(heads * first + head * last, heads * first + (head + 1) * last)
    return order


def paired(change: Callable[[int], list[int]]) -> dict[tuple[str, ...], Order]:
    """A change of the rotary features alone, in every query head and in the shared key."""

    def of_heads(mixer: MLA, heads: int) -> list[int]:
        nope = mixer.qk_nope_head_dim
        inner = [*range(nope), *(nope + feature for feature in change(mixer.qk_rope_head_dim))]
        return each_head(inner, mixer.head_dim, heads)

    def of_key(mixer: MLA, heads: int) -> list[int]:
        rank = mixer.kv_lora_rank
        return [*range(rank), *(rank + feature for feature in change(mixer.qk_rope_head_dim))]

    return {QUERIES: of_heads, KEYS: of_key}


def neighbours_to_halves(width: int) -> list[int]:
    return [*range(0, width, 2), *range(1, width, 2)]


def halves_to_neighbours(width: int) -> list[int]:
    return [half * (width // 2) + pair for pair in range(width // 2) for half in (0, 1)]


def backwards_turned(model: Model) -> Iterator[Seeded]:
    """The two features of every pair exchanged: the rotation runs backwards."""

    def exchanged(width: int) -> list[int]:
        if model.fields.rope_interleave:
            return [feature ^ 1 for feature in range(width)]
        return [*range(width // 2, width), *range(width // 2)]

    yield from misread("queries and keys", paired(exchanged))(model)


def relabelled(prefix: str, seeds: Seeds) -> Seeds:
    """The same instances under a longer label."""
    return lambda model: (Seeded(f"{prefix}, {one.label}", one.build) for one in seeds(model))


def softmax_scales(model: Model) -> Iterator[Seeded]:
    mixer, yarn, stated = mixer_of(model), model.fields.yarn, model.fields.attention_scale
    if mixer is None or stated is not None:
        return
    plain = mixer.head_dim**-0.5
    wrong = {
        "of the plain features": mixer.qk_nope_head_dim**-0.5,
        "of the rotary features": mixer.qk_rope_head_dim**-0.5,
        "of the value": mixer.v_head_dim**-0.5,
    }
    if yarn is None:
        for label, value in wrong.items():
            if value != plain:
                yield altered(model, label, attention_scale=value)
        return
    every, own = (yarn_mscale(yarn.factor, value or 0.0) for value in (yarn.mscale_all_dim, yarn.mscale))
    corrections = {
        "missing": 1.0,
        "not squared": every,
        "twice": every**4,
        "of mscale": own**2,
        "of the factor alone": yarn_mscale(yarn.factor) ** 2,
        "inverted": every**-2,
    }
    for label, value in corrections.items():
        if abs(value - every**2) > 1e-6:
            yield altered(model, label, attention_scale=plain * value)


def amplitudes(model: Model) -> Iterator[Seeded]:
    """Wrong factors on cos and sin, the softmax's left as it is."""
    yarn = model.fields.yarn
    if mixer_of(model) is None or yarn is None:
        return
    right = yarn_amplitude(yarn)
    every, own = (yarn_mscale(yarn.factor, value or 0.0) for value in (yarn.mscale_all_dim, yarn.mscale))
    wrong = {
        "none": 1.0,
        "of the factor alone": yarn_mscale(yarn.factor),
        "of mscale alone": own,
        "of mscale_all_dim alone": every,
        "inverted": every / own,
    }
    for label, value in wrong.items():
        if abs(value - right) > 1e-6:
            yield altered(model, label, yarn=replace(yarn, attention_factor=value))


def corrections_exchanged(yarn: YarnScaling) -> YarnScaling:
    return replace(yarn, mscale=yarn.mscale_all_dim, mscale_all_dim=yarn.mscale)


def factors_exchanged(model: Model) -> Iterator[Seeded]:
    yarn = model.fields.yarn
    if mixer_of(model) is not None and yarn is not None and yarn.mscale != yarn.mscale_all_dim:
        yield altered(model, "mscale and mscale_all_dim", yarn=corrections_exchanged(yarn))


def norm_eps(model: Model) -> Iterator[Seeded]:
    mixer, own = mixer_of(model), model.fields.norm_eps
    if mixer is not None and own != mixer.latent_norm_eps:
        yield altered(model, "the block's", mixer=replace(mixer, latent_norm_eps=own))


def latent_sizes(model: Model) -> Iterator[Seeded]:
    mixer = mixer_of(model)
    if mixer is None:
        return
    nope, rope, value = mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim
    wrong = {
        "kv_lora_rank": replace(mixer, kv_lora_rank=mixer.kv_lora_rank + 2),
        "kv_lora_rank and the rotary key": replace(
            mixer, kv_lora_rank=mixer.kv_lora_rank + 2, qk_rope_head_dim=rope - 2, qk_nope_head_dim=nope + 2
        ),
        "q_lora_rank": replace(mixer, q_lora_rank=(mixer.q_lora_rank or 0) + 2),
        "no q_lora_rank": replace(mixer, q_lora_rank=None),
        "plain features for rotary ones": replace(mixer, qk_nope_head_dim=nope + 2, qk_rope_head_dim=rope - 2),
        "plain features for values": replace(mixer, qk_nope_head_dim=nope + 2, v_head_dim=value - 2),
        "values": replace(mixer, v_head_dim=value + 2),
        "none": None,
    }
    for label, new in wrong.items():
        if new != mixer:
            yield altered(model, label, mixer=new)
            if new is not None:
                yield reread(model, f"{label}, rules following", mixer=new)


LATENT_FAULTS = (
    Fault(
        "latent_rotary_first",
        "the rotary slice taken from the front of a head or of the latent",
        "latent attention",
        together(
            misread("queries", {QUERIES: rotary_first_of_heads}),
            misread("keys", {KEYS: rotary_first_of_latent}),
            misread("queries and keys", {QUERIES: rotary_first_of_heads, KEYS: rotary_first_of_latent}),
        ),
        "numbers",
    ),
    Fault(
        "latent_values_first",
        "kv_b_proj's heads read as value and then key",
        "latent attention",
        misread("kv_b_proj", {(KVB,): values_first}),
        "numbers",
    ),
    Fault(
        "latent_parts_outside_heads",
        "all heads' first parts before all heads' last ones",
        "latent attention",
        together(
            misread("queries", {QUERIES: lambda m, h: parts_outside(m.qk_nope_head_dim, m.qk_rope_head_dim, h)}),
            misread("kv_b_proj", {(KVB,): lambda m, h: parts_outside(m.qk_nope_head_dim, m.v_head_dim, h)}),
        ),
        "numbers",
    ),
    Fault(
        "latent_heads_out_of_order",
        "heads off by one, or in the opposite order, on one side",
        "latent attention",
        together(
            relabelled("rotated", heads_in_order(((QLB,), (KVB,)), rotated)),
            relabelled("reversed", heads_in_order(((QLB,), (KVB,)), backwards)),
        ),
        "numbers",
    ),
    Fault(
        "latent_projections_swapped",
        "two projections of one shape exchanged",
        "latent attention of square matrices",
        swapped((QA, QLB, KVA, KVB, OUT)),
        "numbers",
    ),
    Fault(
        "latent_norms_swapped",
        "the query's and the key's latent norm exchanged",
        "latents of one length",
        swapped(LATENT_NORMS),
        "numbers",
    ),
    Fault(
        "latent_pairs_regrouped",
        "rotary features permuted at load and rotated as they were stored (rope-layout 17)",
        "latent attention",
        together(
            misread("neighbours to halves", paired(neighbours_to_halves)),
            misread("halves to neighbours", paired(halves_to_neighbours)),
            misread("queries alone", {QUERIES: paired(neighbours_to_halves)[QUERIES]}),
        ),
        "numbers",
    ),
    Fault("latent_rotation_backwards", "sin negated", "latent attention", backwards_turned, "numbers"),
    Fault(
        "latent_softmax_scale_wrong",
        "YaRN's correction of the softmax missing or of the wrong factor, or another width's root (rope 3)",
        "latent attention",
        softmax_scales,
        "numbers",
    ),
    Fault(
        "latent_amplitude_wrong",
        "YaRN's ratio on cos and sin ignored or inverted (rope 3)",
        "latent attention with YaRN",
        amplitudes,
        "numbers",
    ),
    Fault(
        "latent_factors_exchanged",
        "mscale taken for mscale_all_dim (rope 3)",
        "latent attention with two factors",
        factors_exchanged,
        "numbers",
    ),
    Fault(
        "latent_norm_eps_wrong",
        "rms_norm_eps on the latents, whose norms keep the class default",
        "latent attention beside another epsilon",
        norm_eps,
        "numbers",
    ),
    Fault(
        "latent_sizes_wrong",
        "a width of latent attention off, its rules as they were and following (naming 56)",
        "latent attention",
        latent_sizes,
        "refused",
    ),
)
"""Faults of latent attention."""
