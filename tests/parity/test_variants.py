"""torch and JAX on what converters are known to get wrong, one model each: every position's logits, in float32.

The seeded faults that run with every change pass through Qwen3's variants and a few of other families; here are
others', and theirs that no fault reaches there. `make faults` and the parity matrix run them all.
"""

from dataclasses import replace

import pytest

from dewconv.families import find
from dewconv.parity import evaluate_candidate, reference_run, write_checkpoint

TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
RAMP = {"head_dim": 16, "rope_theta": 100.0, "max_position_embeddings": 64}
"""A base at which the original length decides several frequencies."""
CASES = {
    "gemma3 scaled, full layers alone": ("gemma3", "linear", TWO_KINDS),
    "gemma3 not scaled": ("gemma3", "linear", {**TWO_KINDS, "rope_scaling": None}),
    "qwen3 tied over another head": ("qwen3", "tied_different", {}),
    "qwen3 yarn of max_position_embeddings": ("qwen3", "yarn_no_original", RAMP),
    "olmo3 yarn, amplitude off": ("olmo3", "yarn_off", {}),
    "olmo3 yarn, amplitude stated": ("olmo3", "yarn_factor", {}),
    "glm4 neighbours over half a head": ("glm4", "biases", {}),
    "glm4 neighbours over a quarter": ("glm4", "plain", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "glm4_moe halves over a quarter of a head": ("glm4_moe", "air", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "glm4_moe_lite as released": ("glm4_moe_lite", "untied", {}),
    "qwen3_moe not normalised by default": ("qwen3_moe", "norm_absent", {}),
    "deepseek_v3 rotary halves": ("deepseek_v3", "half_split", {}),
    "glm_moe_dsa sharing by a schedule": ("glm_moe_dsa", "schedule", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_position_agrees(tmp_path, case):
    family, variant, changes = CASES[case]
    owner = find(family)
    spec = owner.variants[variant]
    spec = replace(spec, config={**spec.config, **changes})
    reference = reference_run(write_checkpoint(tmp_path / variant, spec, owner), shortest=spec.length)
    found = evaluate_candidate(reference, reference.fields, reference.statements, scan=False)
    assert found.refused is None
    assert reference.probe.length >= 48
    assert found.ratio < 0.7
