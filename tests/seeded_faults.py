"""What is asked of every family's seeded faults: each is caught by some variant, what cannot be caught is not, and the
honest pair passes. `parity/faults` has a file a family, so that families run beside each other."""

import json
from dataclasses import fields as record_fields
from dataclasses import replace

import pytest

from dewconv.dew_core.fields import DecoderFields
from dewconv.parity.cards import status
from dewconv.parity.expert_faults import EXPERT_FAULTS
from dewconv.parity.fault_runner import Bench, instances_of, run_faults
from dewconv.parity.faults import CATALOGUE
from dewconv.parity.indexer_faults import INDEXER_FAULTS
from dewconv.parity.latent_faults import LATENT_FAULTS
from dewconv.parity.seeding import Fault, Seeded

EXPERTS = {fault.name for fault in EXPERT_FAULTS}
"""Kinds that a model without experts has none of."""
LATENT = {fault.name for fault in LATENT_FAULTS}
"""Kinds that grouped-query attention has none of."""
INDEXER = {fault.name for fault in INDEXER_FAULTS}
"""Kinds that a model without an indexer has none of."""
ONE_PLAIN_ROPE = {
    "rope_thetas_exchanged",
    "rope_scaling_dropped",
    "rope_scaling_spread",
    "rope_factor_wrong",
    "linear_factor_on_theta",
    "llama3_ramp_wrong",
    "yarn_amplitude_lost",
    "yarn_amplitude_on_scores",
    "yarn_ramp_wrong",
}
NO_WINDOW = {"window_off", "window_dropped", "window_spread", "window_as_chunk", "pattern_wrong"}

NOT_LATENT = {
    *NO_WINDOW,
    "queries_and_keys_swapped",
    "keys_and_values_swapped",
    "queries_and_outputs_swapped",
    "qk_norms_swapped",
    "biases_swapped",
    "grouping_interleaved",
    "key_heads_repeated",
    "rope_pairs_uninterleaved",
    "rope_halves_exchanged",
    "qk_norm_dropped",
    "qk_norm_scope_wrong",
    "correction_bias_invented",
    "rope_thetas_exchanged",
    "rope_scaling_spread",
    "linear_factor_on_theta",
    "llama3_ramp_wrong",
    "window_spread",
    "output_norms_dropped",
    "input_norms_dropped",
    "embedding_scale_unrounded",
}
"""Kinds that a model of latent attention without windows has none of."""

ABSENT = {
    "olmo3": {
        *EXPERTS,
        *LATENT,
        *INDEXER,
        "linear_factor_on_theta",
        "llama3_ramp_wrong",
        "window_invented",
        "output_norms_dropped",
        "input_norms_dropped",
        "embedding_scale_unrounded",
    },
    "glm4": {
        *EXPERTS,
        *LATENT,
        *INDEXER,
        *ONE_PLAIN_ROPE,
        *NO_WINDOW,
        "qk_norms_swapped",
        "qk_norm_dropped",
        "qk_norm_scope_wrong",
        "embedding_scale_unrounded",
        "inert_partial_rotary_type",
    },
    "qwen3_moe": {
        *LATENT,
        *INDEXER,
        *ONE_PLAIN_ROPE,
        "correction_bias_dropped",
        "correction_bias_missing_in_layers",
        "groups_wrong",
        "group_score_wrong",
        "shared_experts_dropped",
        "shared_width_wrong",
        "window_spread",
        "pattern_wrong",
        "output_norms_dropped",
        "input_norms_dropped",
        "embedding_scale_unrounded",
    },
    "glm4_moe": {
        *LATENT,
        *INDEXER,
        *ONE_PLAIN_ROPE,
        *NO_WINDOW,
        "correction_bias_invented",
        "output_norms_dropped",
        "input_norms_dropped",
        "embedding_scale_unrounded",
        "inert_partial_rotary_type",
    },
    "deepseek_v3": {*NOT_LATENT, *INDEXER},
    "glm4_moe_lite": {*NOT_LATENT, *INDEXER},
    "deepseek_v32": {*NOT_LATENT, "rope_pairs_interleaved", "indexer_choice_of_another"},
    "glm_moe_dsa": {
        *NOT_LATENT,
        *ONE_PLAIN_ROPE,
        "rope_pairs_interleaved",
        "latent_amplitude_wrong",
        "latent_factors_exchanged",
    },
    "qwen3": {
        *EXPERTS,
        *LATENT,
        *INDEXER,
        "output_norms_dropped",
        "input_norms_dropped",
        "rope_thetas_exchanged",
        "rope_scaling_spread",
        "embedding_scale_unrounded",
    },
    "gemma3": {*EXPERTS, *LATENT, *INDEXER, "llama3_ramp_wrong", "window_invented"},
}
"""Kinds that no variant of a family can have: Qwen3 has one norm a sublayer and one rope, Gemma 3 no llama3 ramp
and always a window, OLMo 3 outputs' norms alone, GLM-4 no q/k norm and a partial rope. No GLM variant scales its rope
or has a window, and none of Qwen3-MoE scales it: no release does. Latent attention has no projection of keys or of
values, no norm of heads, and one rope, whose pairs are neighbours where an indexer is."""

OUT_OF_REACH = {
    "scale_after_cast_flipped",
    "inert_max_seq_len",
    "inert_initializer_range",
    "inert_depth_scaled_init",
    "inert_dropout_rate",
    "inert_dtype",
    "inert_scan_layers",
    "inert_remat",
    "inert_partial_rotary_type",
    "inert_force_fp32_for_softmax",
    "inert_kv_cache",
    "bank_layers_set",
    "attention_impl_set",
    "precision_set",
    "swiglu_limit_high",
    "expert_matmul_set",
}
"""What no check can catch; the catalogue gives each its reason."""

NARROWEST = 10.0
"""How far beyond its bound the least of all caught faults must be, so that no platform's rounding decides."""

ALTERED_BY = {"qk_norm_scope": "qk_norm_scope_wrong"}
"""Fields that one kind of fault alters, and only in a model that has what they speak of."""


@pytest.mark.slow
class SeededFaults:
    """The tests of one family, which a class derived from this names: `family`."""

    @pytest.fixture(scope="class")
    def bench(self, request, tmp_path_factory):
        return Bench(request.cls.family, tmp_path_factory.mktemp(request.cls.family.name))

    @pytest.fixture(scope="class")
    def report(self, bench):
        return run_faults(bench.family, bench=bench)

    def test_the_card_claims_it(self, bench):
        assert status(bench.family.name) >= 4

    def test_every_fault_comes_out_as_the_catalogue_says(self, report):
        wrong = [(outcome.fault, outcome.label, outcome.expect, outcome.attempts[-3:]) for outcome in report.uncaught]
        assert wrong == []

    def test_the_honest_pair_is_not_caught(self, report, bench):
        assert [attempt for attempt in report.honest if attempt.how] == []
        assert {attempt.variant for attempt in report.honest if attempt.dtype == "float32"} >= {"square"}
        assert all(attempt.entering == 0.0 for attempt in report.honest)
        assert report.passed

    def test_what_cannot_be_caught_is_what_is_listed(self, report):
        uncaught = {outcome.fault for outcome in report.outcomes if not outcome.caught}
        assert uncaught == OUT_OF_REACH - ABSENT[report.family]
        assert {fault.name for fault in CATALOGUE if fault.out_of_reach} == OUT_OF_REACH
        assert all(fault.why for fault in CATALOGUE if fault.out_of_reach)
        low = [a for o in report.outcomes if o.fault == "scale_after_cast_flipped" for a in o.attempts]
        assert [(a.dtype, a.equal) for a in low] == [("float32", True), ("bfloat16", False)]

    def test_kinds_that_do_not_apply_are_known(self, report):
        assert set(report.absent) == ABSENT[report.family]
        assert all(report.absent.values())

    def test_margins_are_wide(self, report):
        assert report.narrowest.margin > NARROWEST, report.narrowest

    def test_the_embedding_scale_is_caught_in_bfloat16_alone(self, report):
        caught = [o for o in report.outcomes if o.fault == "embedding_scale_unrounded"]
        if report.family == "gemma3":
            last = caught[0].attempts[-1]
            assert (last.dtype, last.how) == ("bfloat16", "embeddings")
            assert all(attempt.how is None for attempt in caught[0].attempts[:-1])
        else:
            assert caught == []

    def test_the_record_is_json(self, report):
        record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert record["passed"] is True
        assert record["uncaught"] == []
        assert record["instances"] == len(report.outcomes) > 250
        assert record["caught"] == record["instances"] - sum(
            k["instances"] for k in record["kinds"].values() if not k["by"]
        )
        assert record["narrowest"]["margin"] == report.narrowest.margin

    def test_every_decoder_field_is_altered_by_some_fault(self, bench):
        """max_seq_len to remat: no field is left that no fault touches."""
        touched = set()
        for fault in CATALOGUE:
            for variants in instances_of(fault, bench).values():
                variant, seeded = next(iter(variants.items()))
                honest = bench.stand(variant).model.fields
                try:
                    broken = seeded.build()[0]
                except ValueError:
                    continue
                names = [field.name for field in record_fields(DecoderFields)]
                touched |= {name for name in names if getattr(broken, name) != getattr(honest, name)}
        reached_by_kinds = {"rope_theta", "rope_scaling", "yarn"}
        idle = {name for name, kind in ALTERED_BY.items() if kind in ABSENT[bench.family.name]}
        assert "kinds" in touched
        assert {field.name for field in record_fields(DecoderFields)} - touched <= reached_by_kinds | idle

    def test_the_runner_tells_a_catalogue_that_is_wrong(self, bench):
        """What breaks nothing is not caught, what moves the numbers is not inert, a wrong expectation shows."""

        def nothing(model):
            yield Seeded("nothing", lambda: (model.fields, model.statements))

        def activation(model):
            yield Seeded("activation", lambda: (replace(model.fields, mlp="geglu_exact"), model.statements))

        def empty(model):
            yield Seeded("no rules", lambda: (model.fields, ()))

        def tried(seeds, expect):
            report = run_faults(bench.family, faults=[Fault("tried", "", "", seeds, expect)], bench=bench)
            return report.outcomes[0].good

        first = next(iter(bench.family.variants))
        limited = Bench(replace(bench.family, variants={first: bench.family.variants[first]}), bench.directory)
        bench = limited
        assert [tried(nothing, expect) for expect in ("refused", "numbers", "caught", "equal", "within")] == [
            False,
            False,
            False,
            True,
            True,
        ]
        assert [tried(activation, expect) for expect in ("refused", "numbers", "caught", "equal", "within")] == [
            False,
            True,
            True,
            False,
            False,
        ]
        assert [tried(empty, expect) for expect in ("refused", "numbers", "equal")] == [True, False, False]
