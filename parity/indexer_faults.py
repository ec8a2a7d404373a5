"""Faults of the lightning indexer: other keys chosen, by another rotation, from other features, or by another layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..dew_core.layers import DEFAULT_KIND, kv_sharing, layer_plan
from ..dew_core.records import Indexer, LayerKind
from ..families.rules import Rule, Statement
from .edits import altered, at_layer, carry, dropping, edited, heads_of, reread, seeded, short, together, where
from .latent_faults import each_head, mixer_of, reordered
from .rule_faults import backwards, rotated, swapped
from .seeding import Fault, Model, Seeded, Seeds

IQ, IK, IW = (f"self_attn/indexer/{name}/kernel" for name in ("wq_b", "wk", "weights_proj"))
INS, INB = "self_attn/indexer/k_norm/scale", "self_attn/indexer/k_norm/bias"
INDEXER_LEAVES = (IQ, IK, INS, INB, IW)
FEATURE_AXIS = {IQ: 1, IK: 1, INS: 0, INB: 0}
EVERY_KEY = 2**20
"""More keys than any probe has."""


def indexer_of(model: Model) -> Indexer | None:
    """The model's indexer, None where it has none."""
    mixer = mixer_of(model)
    return None if mixer is None else mixer.indexer


def with_indexer(model: Model, label: str, change: Callable[..., Seeded] = altered, **changes: Any) -> Seeded:
    """An instance that changes the indexer's record, or takes it away (`indexer=None`)."""
    mixer = mixer_of(model)
    assert mixer is not None
    assert mixer.indexer is not None
    new = None if "indexer" in changes else replace(mixer.indexer, **changes)
    return change(model, label, mixer=replace(mixer, indexer=new))


def pairs_swapped(model: Model) -> Iterator[Seeded]:
    indexer = indexer_of(model)
    if indexer is not None:
        flipped = not indexer.indexer_rope_interleave
        yield with_indexer(model, "neighbours" if flipped else "halves", indexer_rope_interleave=flipped)


def features(label: str, leaves: Sequence[str], order: Callable[[Indexer, int], list[int]]) -> Seeds:
    """The features of an index head taken in another order, from the indexer and the number that turn."""

    def seeds(model: Model) -> Iterator[Seeded]:
        indexer, mixer = indexer_of(model), mixer_of(model)
        if indexer is None or mixer is None:
            return
        inner = order(indexer, mixer.qk_rope_head_dim)
        if inner == list(range(indexer.index_head_dim)):
            return

        def edits() -> Mapping[int, Sequence[Statement]]:
            found = {}
            for at, rule in where(model, *leaves):
                leaf = short(rule.leaf)
                heads = indexer.index_n_heads if leaf == IQ else 1
                found[at] = reordered(rule, FEATURE_AXIS[leaf], each_head(inner, indexer.index_head_dim, heads))
            return found

        yield seeded(model, label, edits)

    return seeds


QUERY, KEY = (IQ,), (IK, INS, INB)


def turning_last(indexer: Indexer, turning: int) -> list[int]:
    """The last features where the first are looked for."""
    plain = indexer.index_head_dim - turning
    return [*range(plain, indexer.index_head_dim), *range(plain)]


def turned_backwards(indexer: Indexer, turning: int) -> list[int]:
    """The two features of every pair exchanged."""
    half = turning // 2
    pairs = [feature ^ 1 for feature in range(turning)]
    halves = [*range(half, turning), *range(half)]
    first = pairs if indexer.indexer_rope_interleave else halves
    return [*first, *range(turning, indexer.index_head_dim)]


def heads_disordered(order: Callable[[Sequence[int]], Sequence[int]], prefix: str) -> Seeds:
    """The heads of the queries, or of the weights, in another order than the other's."""

    def seeds(model: Model) -> Iterator[Seeded]:
        indexer = indexer_of(model)
        if indexer is None:
            return
        heads = indexer.index_n_heads
        for leaf in (IQ, IW):

            def edits(leaf: str = leaf) -> Mapping[int, Sequence[Statement]]:
                return {at: heads_of(rule, 1, heads, order(range(heads))) for at, rule in where(model, leaf)}

            yield seeded(model, f"{prefix}, {leaf}", edits)

    return seeds


LARGE_EPSILON = 1e-2
"""Below it another epsilon moves so few scores past each other that chance decides whether a choice changes."""


def norm_eps(model: Model) -> Iterator[Seeded]:
    indexer, own = indexer_of(model), model.fields.norm_eps
    if indexer is not None and own >= LARGE_EPSILON and own != indexer.index_norm_eps:
        yield with_indexer(model, "the block's", index_norm_eps=own)


def count_wrong(model: Model) -> Iterator[Seeded]:
    indexer = indexer_of(model)
    if indexer is None:
        return
    wrong = {"one more": indexer.index_topk + 1, "half": (indexer.index_topk + 1) // 2, "every key": EVERY_KEY}
    if indexer.index_topk > 1:
        wrong["one less"] = indexer.index_topk - 1
    for label, count in wrong.items():
        if count != indexer.index_topk:
            yield with_indexer(model, label, index_topk=count)


def dropped(model: Model) -> Iterator[Seeded]:
    """No indexer, its tensors kept for export: dense attention."""
    if indexer_of(model) is None:
        return

    def without(model: Model, label: str, **changes: Any) -> Seeded:
        return dropping(model, label, INDEXER_LEAVES, kv_shared_layers=None, **changes)

    yield with_indexer(model, "its tensors carried", without, indexer=None)


def sizes_wrong(model: Model) -> Iterator[Seeded]:
    indexer = indexer_of(model)
    if indexer is None:
        return
    heads, width = indexer.index_n_heads, indexer.index_head_dim
    wrong: dict[str, dict[str, Any]] = {
        "heads": {"index_n_heads": heads + 2},
        "features": {"index_head_dim": width + 2},
        "none": {"indexer": None},
    }
    for label, changes in wrong.items():
        yield with_indexer(model, label, **changes)
        yield with_indexer(model, f"{label}, rules following", reread, **changes)


def sharing_wrong(model: Model) -> Iterator[Seeded]:
    """An indexer looked for where there is none; a last layer with one, which repeats another's choice instead."""
    if indexer_of(model) is None:
        return
    d, last = model.fields, model.fields.num_layers - 1
    if d.kv_shared_layers:
        yield altered(model, "no layer shares", kv_shared_layers=None)
        yield reread(model, "no layer shares, rules following", kv_shared_layers=None)
    if last in (d.kv_shared_layers or ()) or last == 0:
        return
    sharing = (*(d.kv_shared_layers or ()), last)
    yield altered(model, "the last layer shares", kv_shared_layers=sharing)

    def build() -> tuple:
        edits = {at: _without_layer(rule, last) for at, rule in where(model, *INDEXER_LEAVES)}
        return d.replace(kv_shared_layers=sharing), edited(model.statements, edits)

    yield Seeded("the last layer shares, its tensors carried", build)


def _without_layer(rule: Rule, layer: int) -> list[Statement]:
    kept = [index for index in rule.over["l"] if index != layer]
    there = carry(at_layer(rule, layer, layer))
    return [replace(rule, over={**rule.over, "l": kept}), *there] if kept else there


def choice_of_another(model: Model) -> Iterator[Seeded]:
    """A sharing layer that repeats the choice of the indexer before the last one."""
    d = model.fields
    if indexer_of(model) is None or d.kinds or d.layer_types or not d.kv_shared_layers:
        return
    plan, sharing = layer_plan(d), kv_sharing(d)
    owning = [index for index, spec in enumerate(plan.specs) if not spec.kv_shared]
    for layer, provider in sharing.items():
        if provider == owning[0]:
            continue
        # Of another type, its provider is passed over.
        types = [DEFAULT_KIND] * d.num_layers
        types[provider] = "other"
        kinds = {DEFAULT_KIND: LayerKind(), "other": LayerKind()}
        yield altered(model, f"layer {layer}", layer_types=tuple(types), kinds=kinds)


INDEXER_FAULTS = (
    Fault(
        "indexer_pairs_swapped",
        "the indexer turned in the attention's pairs, or GLM-5's in DeepSeek-V3.2's (rope-layout 17, dsa 48)",
        "an indexer",
        pairs_swapped,
        "numbers",
    ),
    Fault(
        "indexer_rotary_last",
        "the rotary slice taken from the back of an index head, as the attention's is",
        "an indexer of heads that do not turn whole",
        together(
            features("queries and keys", (*QUERY, *KEY), turning_last),
            features("queries", QUERY, turning_last),
            features("keys", KEY, turning_last),
        ),
        "numbers",
    ),
    Fault(
        "indexer_rotation_backwards",
        "sin negated in the indexer",
        "an indexer",
        features("queries and keys", (*QUERY, *KEY), turned_backwards),
        "numbers",
    ),
    Fault(
        "indexer_heads_out_of_order",
        "a head's queries under another head's weight",
        "an indexer",
        together(heads_disordered(rotated, "rotated"), heads_disordered(backwards, "reversed")),
        "numbers",
    ),
    Fault(
        "indexer_norm_swapped",
        "the layer norm's scale and bias exchanged",
        "an indexer",
        swapped((INS, INB)),
        "numbers",
    ),
    Fault(
        "indexer_norm_eps_wrong",
        "rms_norm_eps on the index keys, whose layer norm has its own (dsa 48)",
        "an indexer beside a large epsilon",
        norm_eps,
        "numbers",
    ),
    Fault(
        "indexer_count_wrong",
        "a key more or fewer than index_topk, or all of them",
        "an indexer",
        count_wrong,
        "numbers",
    ),
    Fault(
        "indexer_dropped",
        "dense attention in place of sparse: equal until index_topk keys are seen (dsa 48)",
        "an indexer",
        dropped,
        "numbers",
    ),
    Fault(
        "indexer_sizes_wrong",
        "a size of the indexer off, its rules as they were and following",
        "an indexer",
        sizes_wrong,
        "refused",
    ),
    Fault(
        "indexer_sharing_wrong",
        "an indexer in every layer, or one too few (dsa 48)",
        "an indexer",
        sharing_wrong,
        "caught",
    ),
    Fault(
        "indexer_choice_of_another",
        "a sharing layer that repeats the choice of an indexer further back",
        "a sharing layer behind two indexers",
        choice_of_another,
        "numbers",
    ),
)
"""Faults of the lightning indexer."""
