"""What faults are made of: edits of rules, of the views they read, and of decoder fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..dew_core.fields import DecoderFields
from ..families.rules import Carried, Rule, Statement, View
from .seeding import Model, Seeded, Seeds, Statements

# Leaves by their names within a layer

Q, K, V, OUT = (f"self_attn/{name}_proj/kernel" for name in "qkvo")
QB, KB, VB, OB = (f"self_attn/{name}_proj/bias" for name in "qkvo")
QN, KN = "self_attn/q_norm/scale", "self_attn/k_norm/scale"
GATE, UP, DOWN = (f"mlp/{name}_proj/kernel" for name in ("gate", "up", "down"))
NORMS = tuple(
    f"{name}/scale"
    for name in ("input_layernorm", "attention_output_norm", "post_attention_layernorm", "mlp_output_norm")
)
EMBED, HEAD, FINAL = "embed_tokens/embedding", "lm_head/kernel", "norm/scale"
QA, QLB, KVA, KVB = (f"self_attn/{name}/kernel" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
QAB, KVAB = "self_attn/q_a_proj/bias", "self_attn/kv_a_proj_with_mqa/bias"
HEAD_AXIS = {Q: 1, K: 1, V: 1, OUT: 0, QB: 0, KB: 0, VB: 0, QLB: 1, KVA: 1, KVB: 1, KVAB: 0}
QK, QKN = (Q, K, QB, KB), (Q, K, QB, KB, QN, KN)

EXPERTS = tuple(f"mlp/experts/{name}_proj/kernel" for name in ("gate", "up", "down"))
SHARED = tuple(f"mlp/shared_experts/{name}_proj/kernel" for name in ("gate", "up", "down"))
ROUTER, CORRECTION = "mlp/gate/kernel", "mlp/gate/e_score_correction_bias"

# Statements

Edits = Mapping[int, Sequence[Statement]]
"""Position in the statements -> what stands there instead."""


def edited(statements: Statements, edits: Edits) -> Statements:
    """The statements with some replaced, each by any number of others."""
    return tuple(new for at, old in enumerate(statements) for new in edits.get(at, (old,)))


def rules(model: Model) -> list[tuple[int, Rule]]:
    """Every rule with its position in the statements."""
    return [(at, item) for at, item in enumerate(model.statements) if isinstance(item, Rule)]


def short(leaf: str) -> str:
    """A leaf's name within its layer: `self_attn/q_proj/kernel`."""
    return leaf.removeprefix("layers_{l}/")


def where(model: Model, *endings: str) -> list[tuple[int, Rule]]:
    """The rules whose leaves have one of these names within their layer."""
    return [(at, rule) for at, rule in rules(model) if short(rule.leaf) in endings]


def seeded(model: Model, label: str, edits: Callable[[], Edits]) -> Seeded:
    """An instance that changes the rules alone."""
    return Seeded(label, lambda: (model.fields, edited(model.statements, edits())))


def each_rule(change: Callable[[Rule], Sequence[Statement]]) -> Seeds:
    """An instance a rule: the rule replaced by what `change` makes of it."""

    def seeds(model: Model) -> Iterator[Seeded]:
        for at, rule in rules(model):
            yield seeded(model, short(rule.leaf), lambda at=at, rule=rule: {at: change(rule)})

    return seeds


def carry(rule: Rule) -> list[Statement]:
    """The rule's tensors kept for export and not computed with."""
    names = dict.fromkeys(place.source for place in rule.placements())
    return [Carried(name, "seeded fault") for name in names]


def merged(statements: Iterable[Statement]) -> Statements:
    """The statements with rules that differ in their layers alone made one, as a family might have said it."""
    found: dict[Any, Statement] = {}
    for at, item in enumerate(statements):
        key: Any = at
        if isinstance(item, Rule) and "l" in item.over:
            others = tuple((name, tuple(values)) for name, values in item.over.items() if name != "l")
            key = (item.source, item.source_view, item.leaf, item.leaf_view, others)
        before = found.get(key)
        if isinstance(before, Rule) and isinstance(item, Rule):
            item = replace(item, over={**item.over, "l": [*before.over["l"], *item.over["l"]]})
        found[key] = item
    return tuple(found.values())


# Rules


def at_layer(rule: Rule, source: int, leaf: int) -> Rule:
    """One layer of a rule: tensor of layer `source` into the leaf of layer `leaf`."""
    over = {name: values for name, values in rule.over.items() if name != "l"}
    return Rule(
        rule.source.replace("{l}", str(source)),
        rule.source_view,
        rule.leaf.replace("{l}", str(leaf)),
        rule.leaf_view,
        over,
    )


def moved(rule: Rule, order: Mapping[int, int]) -> list[Rule]:
    """The rule with the leaf of layer l filled from the tensor of layer order[l]."""
    return [at_layer(rule, order.get(layer, layer), layer) for layer in rule.over["l"]]


def rolled(rule: Rule, axis: int, by: int = 1) -> list[Rule]:
    """The rule with its leaf's axis rotated: place i gets what place i + by should have."""
    head = (slice(None),) * axis
    near, far = (*head, slice(by, None)), (*head, slice(0, by))
    length = rule.leaf_view.shape[axis]
    return [
        replace(rule, source_view=rule.source_view[near], leaf_view=rule.leaf_view[(*head, slice(0, length - by))]),
        replace(rule, source_view=rule.source_view[far], leaf_view=rule.leaf_view[(*head, slice(length - by, None))]),
    ]


def heads_of(rule: Rule, axis: int, heads: int, order: Sequence[int]) -> list[Rule]:
    """The rule with head h of the leaf's axis filled from head order[h]."""
    width = rule.leaf_view.shape[axis] // heads

    def cut(view: View, head: int) -> View:
        return view[(*(slice(None),) * axis, slice(head * width, (head + 1) * width))]

    return [
        replace(rule, source_view=cut(rule.source_view, order[h]), leaf_view=cut(rule.leaf_view, h))
        for h in range(heads)
    ]


def pairs_regrouped(rule: Rule, axis: int, heads: int, interleave: bool) -> list[Rule]:
    """The rule with each head's features re-paired: halves (i, i + n) laid out as neighbours, or back."""
    view, leaf = rule.source_view, rule.leaf_view
    n = view.shape[axis] // heads // 2
    inner = (heads, 2, n) if interleave else (heads, n, 2)
    outer = (heads, n, 2) if interleave else (heads, 2, n)
    if len(view.shape) == 1:
        return [replace(rule, source_view=view.reshape(*inner).transpose(0, 2, 1), leaf_view=leaf.reshape(*outer))]
    rows = view.shape[0]
    return [
        replace(
            rule,
            source_view=view.reshape(rows, *inner).transpose(0, 1, 3, 2),
            leaf_view=leaf.reshape(rows, *outer),
        )
    ]


def halves_exchanged(rule: Rule, axis: int, heads: int) -> list[Rule]:
    """The rule with the two rotary halves of every head exchanged: the rotation runs backwards."""
    count = 2 * heads
    return heads_of(rule, axis, count, [h ^ 1 for h in range(count)])


# Fields


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
