"""Which experts both sides choose: margins, agreement, and a check that tells a wrong router."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.dew_core.records import Mixture
from dewconv.families import ConversionError, find
from dewconv.families.rules import settle
from dewconv.parity import checks, choice_checks, write_checkpoint
from dewconv.parity.candidate import build_candidate, reference_run
from dewconv.parity.edits import ROUTER, merged, rolled, short
from dewconv.parity.expert_faults import EXPERT_FAULTS
from dewconv.parity.fault_runner import Stand
from dewconv.parity.probes import make_probe
from dewconv.parity.references import Routed, load_reference
from dewconv.parity.replay import repeating
from dewconv.parity.routing import CLEAR, margins, same_choice, score_bound

FAMILIES = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
ROUTED = [
    (name, variant)
    for name in FAMILIES
    for variant, spec in find(name).variants.items()
    if find(name).read(spec.config)[0].mixture.layers
]


def routed(logits, bias=None):
    logits = np.asarray(logits, np.float32)[None, None]
    return Routed(np.zeros((1, 1, 1), int), logits, None if bias is None else np.asarray(bias, np.float32))


def test_a_softmax_margin_is_the_gap_of_the_logits_at_the_cut():
    assert margins(Mixture(4, 2), routed([3.0, 1.0, 2.0, 0.5]))[0, 0] == pytest.approx(1.0)
    assert margins(Mixture(4, 3), routed([3.0, 1.0, 2.0, 0.5]))[0, 0] == pytest.approx(0.5)
    assert margins(Mixture(4, 4), routed([3.0, 1.0, 2.0, 0.5]))[0, 0] == np.inf


def test_a_sigmoid_margin_counts_the_bias():
    mixture = Mixture(2, 1, score_function="sigmoid", bias=True)
    assert margins(mixture, routed([0.0, 0.0], [7.0, 7.1]))[0, 0] == pytest.approx(0.1, rel=1e-5)


def test_groups_have_margins_of_their_own():
    mixture = Mixture(4, 1, score_function="sigmoid", bias=True, groups=2, groups_per_token=1)
    # Biased scores -2, -1 and -1.9, -1.02: the groups' sums lie 0.08 apart, the experts of the kept one 0.88.
    found = margins(mixture, routed([0.0] * 4, [-2.5, -1.5, -2.4, -1.52]))
    assert found[0, 0] == pytest.approx(0.04, rel=1e-4)
    # The best expert of all is in the group that is dropped, which no margin may count.
    wide = margins(mixture, routed([0.0] * 4, [-1.0, -9.0, -2.0, -3.0]))
    assert wide[0, 0] == pytest.approx(1.0)


def test_the_order_of_a_choice_does_not_matter():
    one, other = Routed(np.array([[[2, 0], [1, 3]]])), Routed(np.array([[[0, 2], [1, 2]]]))
    assert same_choice(one, other).tolist() == [[True, False]]


@pytest.mark.parametrize(("family", "variant"), ROUTED, ids=lambda value: str(value))
def test_margins_of_the_variants_are_clear_of_ties(tmp_path, family, variant):
    """Twice the bound of a score, the least at which both sides must choose alike, in float32."""
    owner = find(family)
    spec = owner.variants[variant]
    path = write_checkpoint(tmp_path / variant, spec, owner)
    plan = plan_import(open_source(path))
    probe = make_probe(plan.fields, spec.config, shortest=spec.length)
    reference = load_reference(path, owner, spec.config, "float32")
    found = reference.forward(probe.tokens, streams=True).routed
    mixture = plan.fields.mixture
    assert tuple(found) == mixture.layers
    smallest = min(
        float((margins(mixture, one) / score_bound(mixture, one, "float32", layer + 1)).min())
        for layer, one in found.items()
    )
    assert smallest > CLEAR
    taken = np.concatenate([one.experts.reshape(-1) for one in found.values()])
    assert set(taken.tolist()) == set(range(mixture.experts))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    owner = find("glm4_moe")
    path = write_checkpoint(tmp_path_factory.mktemp("routing"), owner.variants["qk_norm"], owner)
    return reference_run(path)


def compared(run, statements):
    decoder = build_candidate(run, run.fields, tuple(statements))
    return checks.Comparison(run.torch, decoder, run.probe, (), str)


def test_the_check_passes_with_every_choice_counted(run):
    result = choice_checks.routing(compared(run, run.statements))
    assert result.passed
    assert result.figures["choices"] == result.figures["same"] == run.probe.tokens.size * 2
    assert result.figures["smallest_margin"] > CLEAR
    assert (
        result.note
        == f"{result.figures['choices']} of {result.figures['choices']} tokens took the same experts in both"
    )


def test_the_check_names_where_a_wrong_router_departs(run):
    statements = merged(settle(run.statements, run.tensors)[0])
    broken = [r for s in statements for r in (rolled(s, 1) if short(getattr(s, "leaf", "")) == ROUTER else [s])]
    result = choice_checks.routing(compared(run, broken))
    assert result.passed is False
    assert result.worst["layer"] == 1
    assert result.worst["torch"] != result.worst["jax"]
    assert result.figures["same"] < result.figures["choices"]


def test_a_dense_model_has_nothing_to_route(run):
    dense = compared(run, run.statements)
    dense = replace(dense, jax=replace(dense.jax, fields=dense.jax.fields.replace(mixture=None)))
    assert choice_checks.routing(dense).passed is None


OF_THE_CHOICE = ("router_rotated", "correction_bias_dropped", "groups_wrong", "group_score_wrong", "groups_invented")
"""The faults of a mixture whose router chooses otherwise."""

REPEATED = [("qwen3_moe", "experts"), ("glm4_moe", "groups"), ("glm4_moe", "bias_seven")]


@pytest.fixture(scope="module", params=REPEATED, ids=lambda pair: "-".join(pair))
def stands(request, tmp_path_factory):
    """One variant in both dtypes, whatever it is stored in."""
    family, variant = request.param
    owner = find(family)
    path = write_checkpoint(tmp_path_factory.mktemp("repeated") / variant, owner.variants[variant], owner)
    return {dtype: Stand(reference_run(path, dtype=dtype), variant) for dtype in ("float32", "bfloat16")}


def honest(stand):
    return compared(stand.reference, stand.reference.statements)


def test_routers_that_repeat_their_own_choice_change_nothing(stands):
    run = stands["bfloat16"].reference
    tokens, routes = run.probe.tokens, run.forward.routes
    np.testing.assert_array_equal(run.torch.forward(tokens, routes=routes).logits, run.forward.logits)
    own = run.torch.forward(tokens, streams=True)
    np.testing.assert_array_equal(own.logits, run.forward.logits)


def test_routers_take_the_experts_they_are_given(stands):
    run = stands["float32"].reference
    tokens, mixture = run.probe.tokens, run.fields.mixture
    others = (run.forward.routes + 1) % mixture.experts
    given = run.torch.forward(tokens, streams=True, routes=others)
    for layer, one in given.routed.items():
        np.testing.assert_array_equal(one.experts, others[:, :, layer])
    assert np.abs(given.logits - run.forward.logits).max() > 1e3 * run.logits_bound
    ours = honest(stands["float32"]).jax.forward(tokens, streams=True, routes=others)
    assert np.abs(ours.logits - given.logits).max() <= run.logits_bound
    # What it tells is its own choice, made from the numbers of those it was given.
    first = min(ours.routed)
    assert same_choice(ours.routed[first], run.forward.routed[first]).all()
    assert np.abs(run.torch.cached(tokens, 5, others) - given.logits).max() <= run.logits_bound


def test_a_router_without_a_topk_is_not_repeated():
    class Odd(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    routers = {0: Odd(3, 4)}
    with pytest.raises(ConversionError, match="Odd of layer 0"), repeating(routers, np.zeros((1, 2, 1, 1), np.int32)):
        routers[0](torch.ones(2, 3))
    assert "forward" not in vars(routers[0])


def test_numbers_are_compared_given_equal_choices_below_float32_alone(stands):
    assert not honest(stands["float32"]).repeats
    comparison = honest(stands["bfloat16"])
    assert comparison.repeats
    for check in (checks.logits, choice_checks.routing, checks.decode):
        result = check(comparison)
        assert result.passed, result
        # No bound was widened to hold another choice.
        assert result.bound is None or result.bound == comparison.bound


def test_no_wrong_router_hides_behind_repeated_choices(stands):
    """Every fault of the choice is caught in float32, where nothing is repeated, and in bfloat16 too, by the choice."""
    seen = set()
    for fault in (fault for fault in EXPERT_FAULTS if fault.name in OF_THE_CHOICE):
        for seeded in fault.seeds(stands["float32"].model):
            seen.add(fault.name)
            for stand in stands.values():
                run, (fields, statements) = stand.reference, seeded.build()
                found = checks.Comparison(run.torch, build_candidate(run, fields, statements), run.probe, (), str)
                assert choice_checks.routing(found).passed is False, f"{fault.name}: {seeded.label} in {run.dtype}"
    assert "router_rotated" in seen
