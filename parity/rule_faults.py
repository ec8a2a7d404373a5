"""Faults in the weights table: rules missing, swapped, rotated, or reading the right tensor the wrong way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from ..dew_core.layers import layer_plan
from ..families.rules import Alias, Rule, View
from .edits import (
    DOWN,
    EMBED,
    EXPERTS,
    FINAL,
    GATE,
    HEAD,
    HEAD_AXIS,
    KB,
    KN,
    NORMS,
    OB,
    OUT,
    QB,
    QK,
    QKN,
    QN,
    SHARED,
    UP,
    VB,
    Edits,
    K,
    Q,
    V,
    at_layer,
    carry,
    each_rule,
    edited,
    halves_exchanged,
    heads_of,
    moved,
    pairs_regrouped,
    rolled,
    rules,
    seeded,
    short,
    where,
)
from .seeding import Fault, Model, Seeded, Seeds


def swap_of(left: Rule, right: Rule) -> tuple[Rule, Rule]:
    """Each reading the other's tensor, or the other's part of a tensor that both read."""
    if left.source == right.source:
        return replace(left, source_view=right.source_view), replace(right, source_view=left.source_view)
    return replace(left, source=right.source), replace(right, source=left.source)


def swapped(*groups: tuple[str, ...]) -> Seeds:
    """Every two rules of a group that read tensors of one shape, each reading the other's tensor."""

    def seeds(model: Model) -> Iterator[Seeded]:
        for group in groups:
            for (i, left), (j, right) in combinations(where(model, *group), 2):
                if left.source_view.base != right.source_view.base or left.over != right.over:
                    continue
                parts = any(rule.source_view.size < math.prod(rule.source_view.base) for rule in (left, right))
                if parts and left.source != right.source:
                    continue

                def edits(i=i, j=j, left=left, right=right) -> Edits:
                    one, other = swap_of(left, right)
                    return {i: [one], j: [other]}

                yield seeded(model, f"{short(left.leaf)} and {short(right.leaf)}", edits)

    return seeds


def final_norm_swapped(model: Model) -> Iterator[Seeded]:
    last = model.fields.num_layers - 1
    inputs = where(model, NORMS[0]) or where(model, NORMS[1])
    for (i, final), (j, norm) in ((f, n) for f in where(model, FINAL) for n in inputs):

        def edits(i=i, j=j, final=final, norm=norm) -> Edits:
            mine, others = at_layer(norm, last, last), [at_layer(norm, layer, layer) for layer in range(last)]
            one, other = swap_of(final, mine)
            return {i: [one], j: [*others, other]}

        yield seeded(model, f"final norm and the last {short(norm.leaf).split('/')[0]}", edits)


def structures(model: Model) -> list[list[int]]:
    """The layers that have the same tensors, by what they have: dense ones apart from sparse ones, and those that share
    another's choice of keys from those with an indexer."""
    found: dict[tuple[bool, int, bool], list[int]] = {}
    for index, spec in enumerate(layer_plan(model.fields).specs):
        found.setdefault((spec.routed, 0 if spec.routed else spec.width, spec.kv_shared), []).append(index)
    return list(found.values())


def layers_in_order(label: str, order_of: Callable[[Sequence[int]], Sequence[int]]) -> Seeds:
    """Every layer's tensors taken from another of its structure; no instance where the order is the right one."""

    def seeds(model: Model) -> Iterator[Seeded]:
        order = {
            layer: other
            for members in structures(model)
            for layer, other in zip(members, order_of(members), strict=True)
            if layer != other
        }
        if order:
            yield seeded(
                model, label, lambda: {at: moved(rule, order) for at, rule in rules(model) if "l" in rule.over}
            )

    return seeds


def lexicographic(layers: Sequence[int]) -> list[int]:
    return sorted(layers, key=str)


def last_two(layers: Sequence[int]) -> list[int]:
    return [*layers[:-2], *reversed(layers[-2:])]


def one_tensor_rotated(model: Model) -> Iterator[Seeded]:
    for at, rule in rules(model):
        members = rule.over.get("l", ())
        if len(members) > 1:
            order = dict(zip(members, rotated(members), strict=True))
            yield seeded(model, short(rule.leaf), lambda at=at, rule=rule, order=order: {at: moved(rule, order)})


def is_matrix(rule: Rule) -> bool:
    """Whether the rule transposes: a matrix, or the matrices of a stack of experts."""
    return len(rule.leaf_view.shape) in (2, 3) and not rule.source_view.whole


def untransposed(view: View) -> View:
    """The view with its last two axes as they are stored."""
    axes = range(len(view.shape))
    return view.transpose(*axes[:-2], axes[-1], axes[-2])


def transpose_missed(model: Model) -> Iterator[Seeded]:
    for at, rule in rules(model):
        if is_matrix(rule):
            flat = untransposed(rule.source_view)
            yield seeded(
                model, short(rule.leaf), lambda at=at, rule=rule, flat=flat: {at: [replace(rule, source_view=flat)]}
            )


def reshaped(model: Model) -> Iterator[Seeded]:
    for at, rule in rules(model):
        if is_matrix(rule):

            def edits(at=at, rule=rule) -> Edits:
                flat = untransposed(rule.source_view).reshape(*rule.leaf_view.shape)
                return {at: [replace(rule, source_view=flat)]}

            yield seeded(model, short(rule.leaf), edits)


def axis_rolled(axis: int, ranks: tuple[int, ...]) -> Seeds:
    """An axis rotated, counted from the last where a leaf stacks several."""

    def seeds(model: Model) -> Iterator[Seeded]:
        for at, rule in rules(model):
            if len(rule.leaf_view.shape) in ranks:
                place = axis + len(rule.leaf_view.shape)
                yield seeded(model, short(rule.leaf), lambda at=at, rule=rule, place=place: {at: rolled(rule, place)})

    return seeds


def table_shifted(model: Model) -> Iterator[Seeded]:
    """Rows of the vocabulary: the embedding's first axis, the head's second."""
    for leaf, axis in ((EMBED, 0), (HEAD, 1)):
        for at, rule in where(model, leaf):
            yield seeded(model, leaf, lambda at=at, rule=rule, axis=axis: {at: rolled(rule, axis)})


def heads_in_order(groups: Sequence[tuple[str, ...]], order_of: Callable[[Sequence[int]], Sequence[int]]) -> Seeds:
    """An instance a group of projections whose heads are taken in another order, together."""

    def seeds(model: Model) -> Iterator[Seeded]:
        for group in groups:
            found = where(model, *group)
            counts = {
                at: model.fields.kv_heads if short(r.leaf) in (K, V, KB, VB) else model.fields.num_heads
                for at, r in found
            }
            if not found or any(list(order_of(range(count))) == list(range(count)) for count in counts.values()):
                continue

            def edits(found=found, counts=counts) -> Edits:
                return {
                    at: heads_of(rule, HEAD_AXIS[short(rule.leaf)], counts[at], order_of(range(counts[at])))
                    for at, rule in found
                }

            yield seeded(model, ", ".join(g.split("/")[1] for g in group if where(model, g)), edits)

    return seeds


def rotated(items: Sequence[int]) -> list[int]:
    return [*items[1:], *items[:1]]


def backwards(items: Sequence[int]) -> list[int]:
    return list(reversed(items))


def grouping_interleaved(model: Model) -> Iterator[Seeded]:
    """Query head h on key head h % kv_heads: the heads of q and o dealt out instead of blocked."""
    heads, kv_heads = model.fields.num_heads, model.fields.kv_heads
    if not 1 < kv_heads < heads:
        return
    group = heads // kv_heads
    order = [(h % group) * kv_heads + h // group for h in range(heads)]
    found = where(model, Q, QB, OUT)

    def edits() -> Edits:
        return {at: heads_of(rule, HEAD_AXIS[short(rule.leaf)], heads, order) for at, rule in found}

    yield seeded(model, "q and o", edits)


def rotary(change: Callable[[Rule, int, int], list[Rule]], *groups: tuple[str, ...]) -> Seeds:
    def seeds(model: Model) -> Iterator[Seeded]:
        for group in groups:
            found = where(model, *group)
            if len(found) < len([g for g in group if g not in (QB, KB)]):
                continue
            heads = {Q: model.fields.num_heads, QB: model.fields.num_heads, QN: 1, KN: 1}
            if model.fields.qk_norm_scope == "projection":
                heads |= {QN: model.fields.num_heads, KN: model.fields.kv_heads}

            def edits(found=found, heads=heads) -> Edits:
                return {
                    at: change(
                        rule, HEAD_AXIS.get(short(rule.leaf), 0), heads.get(short(rule.leaf), model.fields.kv_heads)
                    )
                    for at, rule in found
                }

            yield seeded(model, ", ".join(dict.fromkeys(g.split("/")[1] for g in group)), edits)

    return seeds


def gate_up_dealt(model: Model) -> Iterator[Seeded]:
    """Gate and up split from a fused tensor as neighbours, where it was their concatenation."""
    pairs = zip(where(model, GATE, EXPERTS[0], SHARED[0]), where(model, UP, EXPERTS[1], SHARED[1]), strict=True)
    for (i, gate), (j, up) in pairs:
        if gate.leaf_view.shape[-1] % 2:
            continue

        def edits(i=i, j=j, gate=gate, up=up) -> Edits:
            half = gate.leaf_view.shape[-1] // 2
            out: dict[int, list[Rule]] = {i: [], j: []}
            for at, leaf, start in ((i, gate, 0), (j, up, 1)):
                for source, place in ((gate, slice(0, half)), (up, slice(half, None))):
                    view = source.source_view[..., start::2]
                    out[at].append(Rule(source.source, view, leaf.leaf, leaf.leaf_view[..., place], leaf.over))
            return out

        yield seeded(model, f"{short(gate.leaf)} and up", edits)


def vocabulary_padded(model: Model) -> Iterator[Seeded]:
    rows = model.fields.vocab_size
    wide = rows + 128 - rows % 128
    if wide == rows:
        return

    def build() -> tuple:
        edits = {}
        for at, rule in where(model, EMBED, HEAD):
            axis = 0 if rule.leaf == EMBED else 1
            shape = tuple(wide if a == axis else n for a, n in enumerate(rule.leaf_view.base))
            cut = tuple(slice(0, rows) if a == axis else slice(None) for a in range(2))
            edits[at] = [replace(rule, leaf_view=View.of(*shape)[cut])]
        return model.fields.replace(vocab_size=wide), edited(model.statements, edits)

    yield Seeded("rows to a multiple of 128", build)


def key_heads_repeated(model: Model) -> Iterator[Seeded]:
    heads, kv_heads = model.fields.num_heads, model.fields.kv_heads
    if kv_heads == heads:
        return

    def build() -> tuple:
        edits = {}
        for at, rule in where(model, K, V, KB, VB):
            axis, view = HEAD_AXIS[short(rule.leaf)], rule.source_view
            width = view.shape[axis] // kv_heads
            shape = tuple(width * heads if a == axis else n for a, n in enumerate(view.shape))
            leaf = View.of(*shape)

            def cut(v: View, h: int, axis=axis, width=width) -> View:
                return v[(*(slice(None),) * axis, slice(h * width, (h + 1) * width))]

            edits[at] = [
                replace(rule, source_view=cut(view, h * kv_heads // heads), leaf_view=cut(leaf, h))
                for h in range(heads)
            ]
        return model.fields.replace(num_kv_heads=heads), edited(model.statements, edits)

    yield Seeded("k and v", build)


def layer_repeated(model: Model) -> Iterator[Seeded]:
    if model.fields.num_layers > 1:
        yield seeded(
            model,
            "the first layer twice",
            lambda: {at: moved(rule, {1: 0}) for at, rule in rules(model) if "l" in rule.over},
        )


def counted_from_one(model: Model) -> Iterator[Seeded]:
    yield seeded(
        model,
        "layers from 1",
        lambda: {
            at: [at_layer(rule, layer + 1, layer) for layer in rule.over["l"]]
            for at, rule in rules(model)
            if "l" in rule.over
        },
    )


def prefix_wrong(model: Model) -> Iterator[Seeded]:
    yield seeded(
        model,
        "transformer. for model.",
        lambda: {
            at: [replace(rule, source="transformer." + rule.source.removeprefix("model."))] for at, rule in rules(model)
        },
    )


def head_read_from_table(model: Model) -> Iterator[Seeded]:
    """A tied head given a kernel of its own, read from the table a second time."""
    for _, embed in where(model, EMBED):
        if not model.fields.tie_embeddings:
            continue
        kernel = Rule(embed.source, embed.source_view.T, HEAD, View.of(*embed.source_view.T.shape))
        statements = tuple(item for item in model.statements if not isinstance(item, Alias))
        yield Seeded("lm_head", lambda k=kernel, s=statements: (model.fields.replace(tie_embeddings=False), (*s, k)))


RULE_FAULTS = (
    Fault("rule_deleted", "a tensor the translator does not know", "a rule", each_rule(lambda rule: []), "refused"),
    Fault(
        "rule_doubled", "a tensor read twice into one leaf", "a rule", each_rule(lambda rule: [rule, rule]), "refused"
    ),
    Fault(
        "tensor_misnamed",
        "a tensor looked for under another release's name",
        "a rule",
        each_rule(lambda rule: [replace(rule, source=rule.source + "_")]),
        "refused",
    ),
    Fault(
        "leaf_misnamed",
        "a leaf under torch's name (`weight`) and not Flax's",
        "a rule",
        each_rule(lambda rule: [replace(rule, leaf=rule.leaf.rpartition("/")[0] + "/weight")]),
        "refused",
    ),
    Fault(
        "tensor_carried_not_loaded",
        "trained weights kept for export while the model runs on fresh ones (tied 10)",
        "a rule",
        each_rule(carry),
        "refused",
    ),
    Fault("prefix_wrong", "a wrapper's prefix on a text-only file (prefix 36, 57)", "a rule", prefix_wrong, "refused"),
    Fault("queries_and_keys_swapped", "q and k exchanged", "q and k of one shape", swapped((Q, K))),
    Fault("keys_and_values_swapped", "k and v of a fused tensor split in the wrong order", "k and v", swapped((K, V))),
    Fault("queries_and_outputs_swapped", "q and o exchanged", "q and o of one shape", swapped((Q, OUT))),
    Fault(
        "gate_and_up_swapped",
        "the activation on the wrong half of gate_up (moe-v5 19)",
        "a gated MLP",
        swapped((GATE, UP), EXPERTS[:2], SHARED[:2]),
    ),
    Fault("qk_norms_swapped", "q_norm and k_norm exchanged", "q/k norms of one length", swapped((QN, KN))),
    Fault(
        "block_norms_swapped",
        "a norm taken for another: Gemma's post_attention_layernorm norms an output, Llama's an input (qk-norm 39)",
        "two norms a layer",
        swapped(NORMS),
        "numbers",
    ),
    Fault(
        "final_norm_swapped", "the final norm exchanged with a layer's", "a final norm", final_norm_swapped, "numbers"
    ),
    Fault("biases_swapped", "two biases exchanged", "biases of one length", swapped((QB, KB, VB, OB)), "numbers"),
    Fault(
        "embedding_and_head_swapped",
        "the two vocabulary tables exchanged",
        "an own head",
        swapped((EMBED, HEAD)),
        "numbers",
    ),
    Fault(
        "projections_swapped",
        "any two projections of one shape exchanged",
        "projections of one shape beside the pairs above",
        swapped((Q, V), (K, OUT), (V, OUT), (Q, GATE), (OUT, UP), (V, DOWN), (GATE, DOWN), (UP, DOWN)),
        "numbers",
    ),
    Fault("layers_rotated", "layers off by one", "two layers", layers_in_order("by one", rotated), "numbers"),
    Fault(
        "layers_reversed", "layers stacked backwards", "two layers", layers_in_order("backwards", backwards), "numbers"
    ),
    Fault(
        "last_layers_exchanged",
        "the last two layers exchanged",
        "two layers",
        layers_in_order("last two", last_two),
        "numbers",
    ),
    Fault(
        "layers_lexicographic",
        "layers sorted as text, 10 before 2 (moe-dense 47)",
        "more than ten layers",
        layers_in_order("as text", lexicographic),
        "numbers",
    ),
    Fault("one_tensor_rotated", "one tensor's layers off by one", "two layers", one_tensor_rotated, "numbers"),
    Fault("layer_repeated", "a layer's tensors used for the next one too", "two layers", layer_repeated, "refused"),
    Fault("layers_counted_from_one", "layers numbered from 1", "a layer", counted_from_one, "refused"),
    Fault(
        "transpose_missed",
        "a Linear weight used as a kernel; square matrices close (lora-export 13)",
        "a transposed rule",
        transpose_missed,
    ),
    Fault(
        "reshaped_not_transposed",
        "a matrix given its shape by reshape",
        "a transposed rule",
        reshaped,
        "numbers",
    ),
    Fault("vector_shifted", "a norm's or a bias's elements off by one", "a vector", axis_rolled(-1, (1,)), "numbers"),
    Fault("inputs_shifted", "a matrix's input features off by one", "a matrix", axis_rolled(-2, (2, 3)), "numbers"),
    Fault("outputs_shifted", "a matrix's output features off by one", "a matrix", axis_rolled(-1, (2, 3)), "numbers"),
    Fault("vocabulary_shifted", "token rows off by one (vocab 31)", "a table", table_shifted, "numbers"),
    Fault(
        "vocabulary_padded",
        "rows added for sharding taken for the model's (vocab 31)",
        "a table",
        vocabulary_padded,
        "refused",
    ),
    Fault(
        "heads_rotated",
        "heads off by one in some projections",
        "two heads",
        heads_in_order(((Q, QB), (K, KB), (V, VB), (K, KB, V, VB), (OUT,)), rotated),
        "numbers",
    ),
    Fault(
        "heads_reversed",
        "heads in the opposite order in some projections",
        "two heads",
        heads_in_order(((Q, QB), (K, KB), (V, VB), (K, KB, V, VB), (OUT,)), backwards),
        "numbers",
    ),
    Fault(
        "grouping_interleaved",
        "query head h on key head h % kv_heads, not h // group (ssm 66)",
        "grouped queries",
        grouping_interleaved,
        "numbers",
    ),
    Fault("key_heads_repeated", "k and v stored once per query head", "grouped queries", key_heads_repeated, "refused"),
    Fault(
        "rope_pairs_interleaved",
        "rotary halves permuted to neighbours at load (rope-layout 17)",
        "q and k",
        rotary(lambda r, a, h: pairs_regrouped(r, a, h, True), QK, QKN, (Q, QB), (QN, KN)),
        "numbers",
    ),
    Fault(
        "rope_pairs_uninterleaved",
        "halves taken for neighbours and un-permuted",
        "q and k",
        rotary(lambda r, a, h: pairs_regrouped(r, a, h, False), QK, QKN),
        "numbers",
    ),
    Fault(
        "rope_halves_exchanged",
        "the rotation's sign: sin negated",
        "q and k",
        rotary(halves_exchanged, QK, QKN),
        "numbers",
    ),
    Fault("gate_up_dealt", "a fused gate_up split as neighbours", "an even width", gate_up_dealt, "numbers"),
    Fault(
        "head_read_from_table", "a tied head stored as a second tensor", "a tied head", head_read_from_table, "refused"
    ),
)
"""Faults of the weights table."""
