"""Faults of mixtures: experts in the wrong order, a router read or computed wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..dew_core.records import Mixture
from ..families.rules import Carried, Rule, View
from .edits import (
    CORRECTION,
    EXPERTS,
    ROUTER,
    SHARED,
    Edits,
    altered,
    dropping,
    edited,
    rolled,
    seeded,
    together,
    where,
)
from .rule_faults import backwards, rotated
from .seeding import Fault, Model, Seeded, Seeds


def experts_of(rule: Rule, order: Sequence[int]) -> list[Rule]:
    """The rule with expert e of the leaf filled from expert order[e], in either stored form."""
    count = len(order)
    if "e" in rule.over:
        parts = []
        for expert, other in enumerate(order):
            over = {name: values for name, values in rule.over.items() if name != "e"}
            leaf = View.of(count, *rule.leaf_view.base)[expert]
            parts.append(Rule(rule.source.replace("{e}", str(other)), rule.source_view, rule.leaf, leaf, over))
        return parts
    return [
        replace(rule, source_view=rule.source_view[other], leaf_view=rule.leaf_view[expert])
        for expert, other in enumerate(order)
    ]


def first_two(items: Sequence[int]) -> list[int]:
    return [items[1], items[0], *items[2:]]


def last_two_exchanged(items: Sequence[int]) -> list[int]:
    return [*items[:-2], items[-1], items[-2]]


def experts_in_order(label: str, order_of: Callable[[Sequence[int]], Sequence[int]]) -> Seeds:
    """All three projections in another order, and each alone."""

    def seeds(model: Model) -> Iterator[Seeded]:
        if model.fields.mixture is None:
            return
        order = list(order_of(range(model.fields.mixture.experts)))
        groups: list[tuple[str, ...]] = [EXPERTS, *((leaf,) for leaf in EXPERTS)]
        for group in groups:
            found = where(model, *group)
            name = group[0].split("/")[-2] if len(group) == 1 else "all"
            if found:
                yield seeded(
                    model, f"{label}, {name}", lambda found=found: {at: experts_of(rule, order) for at, rule in found}
                )

    return seeds


def router_rotated(model: Model) -> Iterator[Seeded]:
    for leaf in (ROUTER, CORRECTION):
        for at, rule in where(model, leaf):
            yield seeded(
                model, leaf.split("/")[-1], lambda at=at, rule=rule: {at: rolled(rule, -1 + len(rule.leaf_view.shape))}
            )


def mixed(label: str, change: Callable[[Mixture], Mixture | None]) -> Seeds:
    """An instance with another mixture; None or the same one is no fault."""

    def seeds(model: Model) -> Iterator[Seeded]:
        mixture = model.fields.mixture
        if mixture is None:
            return
        new = change(mixture)
        if new is not None and new != mixture:
            yield altered(model, label, mixture=new)

    return seeds


def score_functions(mixture: Mixture) -> Mixture:
    return replace(mixture, score_function="softmax" if mixture.score_function == "sigmoid" else "sigmoid")


def grouped(**changes: Any) -> Callable[[Mixture], Mixture | None]:
    return lambda mixture: replace(mixture, **changes) if mixture.groups > 1 else None


def groups_invented(mixture: Mixture) -> Mixture | None:
    """Two groups, one of them kept, where there are none."""
    if mixture.groups > 1 or mixture.experts % 2 or mixture.top_k > mixture.experts // 2:
        return None
    return replace(mixture, groups=2, groups_per_token=1)


def correction_dropped(model: Model) -> Iterator[Seeded]:
    mixture = model.fields.mixture
    if mixture is not None and mixture.bias:
        yield dropping(model, "carried", (CORRECTION,), mixture=replace(mixture, bias=False))


def shared_dropped(model: Model) -> Iterator[Seeded]:
    mixture = model.fields.mixture
    if mixture is not None and mixture.shared_features:
        yield dropping(model, "carried", SHARED, mixture=replace(mixture, shared_features=0))


def shared_width(model: Model) -> Iterator[Seeded]:
    mixture = model.fields.mixture
    if mixture is None or not mixture.shared_features:
        return
    for label, width in (("twice", 2 * mixture.shared_features), ("the dense width", model.fields.mlp_features)):
        if width != mixture.shared_features:
            yield altered(model, label, mixture=replace(mixture, shared_features=width))


def sparse_layers_wrong(model: Model) -> Iterator[Seeded]:
    mixture, count = model.fields.mixture, model.fields.num_layers
    if mixture is None or not mixture.layers:
        return
    wrong = {
        "one later": tuple(layer for layer in mixture.layers if layer != mixture.layers[0]),
        "one earlier": (mixture.layers[0] - 1, *mixture.layers) if mixture.layers[0] else None,
        "every layer": tuple(range(count)),
        "shifted": tuple((layer + 1) % count for layer in mixture.layers),
    }
    for label, layers in wrong.items():
        if layers is not None and set(layers) != set(mixture.layers):
            yield altered(model, label, mixture=replace(mixture, layers=layers))


def expert_count_wrong(model: Model) -> Iterator[Seeded]:
    mixture = model.fields.mixture
    if mixture is not None:
        for label, change in (("one more", 1), ("one fewer", -1)):
            yield altered(
                model, label, mixture=replace(mixture, experts=mixture.experts + change, groups=1, groups_per_token=1)
            )
        width = mixture.expert_features
        if width is not None and width != model.fields.mlp_features:
            yield altered(model, "the dense width", mixture=replace(mixture, expert_features=None))


def an_expert_dropped(model: Model) -> Iterator[Seeded]:
    """One expert's tensors left out: of a stack, its slice."""
    for at, rule in where(model, *EXPERTS[:1]):
        mixture = model.fields.mixture
        if mixture is not None:

            def edits(at=at, rule=rule, count=mixture.experts) -> Edits:
                return {at: experts_of(rule, range(count))[:-1]}

            yield seeded(model, "the last expert's gate", edits)


def correction_of_one_layer(model: Model) -> Iterator[Seeded]:
    """The bias loaded where it is met first, and carried elsewhere."""
    for at, rule in where(model, CORRECTION):
        members = rule.over.get("l", ())
        if len(members) > 1:

            def build(at=at, rule=rule, members=members) -> tuple:
                first = rule.source.replace("{l}", str(members[0]))
                rest = [rule.source.replace("{l}", str(layer)) for layer in members[1:]]
                one = Rule(first, rule.source_view, rule.leaf.replace("{l}", str(members[0])), rule.leaf_view)
                return model.fields, edited(
                    model.statements, {at: [one, *(Carried(name, "seeded fault") for name in rest)]}
                )

            yield Seeded("the first layer's alone", build)


EXPERT_FAULTS = (
    Fault(
        "experts_out_of_order",
        "experts rotated, reversed, or two exchanged (moe-v5 19)",
        "experts",
        together(
            experts_in_order("rotated", rotated),
            experts_in_order("reversed", backwards),
            experts_in_order("the first two exchanged", first_two),
            experts_in_order("the last two exchanged", last_two_exchanged),
        ),
        "numbers",
    ),
    Fault(
        "expert_dropped", "an expert left as it was initialised (moe-v5 19)", "experts", an_expert_dropped, "refused"
    ),
    Fault("router_rotated", "the router's experts off by one", "a router", router_rotated, "numbers"),
    Fault(
        "correction_bias_dropped",
        "the bias of the choice not added (router 38)",
        "a correction bias",
        correction_dropped,
        "numbers",
    ),
    Fault(
        "correction_bias_missing_in_layers",
        "the bias loaded for one layer of several",
        "a correction bias in two layers",
        correction_of_one_layer,
        "refused",
    ),
    Fault(
        "correction_bias_invented",
        "a bias where the router has none",
        "a router without a bias",
        mixed("set", lambda m: None if m.bias else replace(m, bias=True)),
        "refused",
    ),
    Fault(
        "norm_topk_flipped",
        "weights normalised, or left as they are, against the flag (router 40)",
        "a router of two experts a token",
        mixed("flipped", lambda m: replace(m, norm_topk_prob=not m.norm_topk_prob) if m.top_k > 1 else None),
        "numbers",
    ),
    Fault(
        "routed_scaling_wrong",
        "the routed scaling dropped, doubled or nested in the normalisation (router 40)",
        "a router",
        together(
            mixed("dropped", lambda m: replace(m, scaling=1.0)),
            mixed("twice", lambda m: replace(m, scaling=m.scaling * m.scaling)),
            mixed("scaled by 1.001", lambda m: replace(m, scaling=m.scaling * 1.001)),
        ),
        "numbers",
    ),
    Fault(
        "score_function_wrong",
        "softmax for sigmoid, or back (router 40)",
        "a router whose two functions differ after normalising",
        mixed("exchanged", lambda m: score_functions(m) if m.top_k > 1 or not m.norm_topk_prob else None),
        "numbers",
    ),
    Fault(
        "top_k_off",
        "one expert more or fewer a token",
        "experts",
        together(
            mixed("one more", lambda m: replace(m, top_k=m.top_k + 1) if m.top_k < m.experts else None),
            mixed("one fewer", lambda m: replace(m, top_k=m.top_k - 1) if m.top_k > 1 else None),
        ),
        "caught",
    ),
    Fault(
        "groups_wrong",
        "group limits ignored, or another number of groups (router 38)",
        "groups",
        together(
            mixed("ignored", grouped(groups=1, groups_per_token=1)),
            mixed("all kept", lambda m: replace(m, groups_per_token=m.groups) if m.groups > 1 else None),
            mixed(
                "one kept",
                lambda m: replace(m, groups_per_token=1) if m.groups > 1 and m.top_k <= m.experts // m.groups else None,
            ),
            mixed("halved", lambda m: replace(m, groups=m.groups // 2, groups_per_token=1) if m.groups > 2 else None),
        ),
        "numbers",
    ),
    Fault(
        "group_score_wrong",
        "groups scored by their best expert, DeepSeek V2's rule (router 38)",
        "groups",
        mixed("max", grouped(group_score="max")),
        "numbers",
    ),
    Fault(
        "groups_invented",
        "group limits where there are none",
        "no groups",
        mixed("one of two", groups_invented),
        "numbers",
    ),
    Fault("shared_experts_dropped", "shared experts not computed", "shared experts", shared_dropped, "numbers"),
    Fault("shared_width_wrong", "the shared experts' width", "shared experts", shared_width, "refused"),
    Fault(
        "sparse_layers_wrong",
        "dense and sparse layers mixed up (moe-dense 47)",
        "experts",
        sparse_layers_wrong,
        "refused",
    ),
    Fault("expert_sizes_wrong", "another number or width of experts", "experts", expert_count_wrong, "refused"),
    Fault(
        "expert_inputs_scaled",
        "the weights on the experts' inputs, Llama 4's",
        "experts",
        mixed("inputs", lambda m: replace(m, scale_inputs=True)),
        "numbers",
    ),
    Fault(
        "expert_capacity_set",
        "tokens dropped past a capacity",
        "experts",
        mixed("0.5", lambda m: replace(m, capacity_factor=0.5)),
        "numbers",
    ),
    Fault(
        "mixture_unbuilt_set",
        "another architecture's experts",
        "experts",
        together(
            mixed("parallel", lambda m: replace(m, parallel=True)),
            mixed("hash_layers", lambda m: replace(m, hash_layers=(0,))),
            mixed("latent_features", lambda m: replace(m, latent_features=4)),
            mixed("shared_gate", lambda m: replace(m, shared_gate=True)),
        ),
        "refused",
    ),
    Fault(
        "expert_matmul_set",
        "another grouped matmul",
        "experts",
        mixed("ragged_dot", lambda m: replace(m, implementation="ragged_dot")),
        "within",
        "another kernel for the same product: what differs is rounding",
    ),
)
"""Faults of mixtures."""
