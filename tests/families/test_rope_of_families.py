"""Rope by family: OLMo 3's YaRN against a hand-computed one, GLM's part of a head."""

import json
import math
import re

import numpy as np
import pytest

from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.inspection import inspect_source
from dewconv.converters.loading import load
from dewconv.converters.source import open_source
from dewconv.dew_core.layers import layer_plan
from dewconv.dew_core.rope import rotary_freqs
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.parity import write_checkpoint


def frequencies(family, variant, kind="full_attention", **changes):
    owner = find(family)
    config = {key: value for key, value in {**owner.variants[variant].config, **changes}.items() if value is not ...}
    fields, _ = owner.read(config)
    found = layer_plan(fields).kinds[kind]
    return rotary_freqs(
        found.head_dim,
        found.rope_theta,
        rope_scaling=found.rope_scaling,
        yarn=found.yarn,
        partial_rotary_factor=fields.partial_rotary_factor,
        partial_rotary_type=fields.partial_rotary_type,
    )


@pytest.mark.parametrize(
    ("variant", "amplitude"),
    [("yarn", 0.1 * math.log(8) + 1), ("yarn_factor", 1.3), ("yarn_off", 1.0)],
)
def test_olmo3_scales_full_layers_alone(variant, amplitude):
    dim, theta = 32, 500_000.0
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    sliding, one = frequencies("olmo3", variant, "sliding_attention")
    assert one == 1.0
    np.testing.assert_allclose(sliding, plain, rtol=1e-6)

    def place(turns):
        return dim * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    full, found = frequencies("olmo3", variant)
    assert found == pytest.approx(amplitude)
    np.testing.assert_allclose(full, plain * (1 - ramp) + plain / 8 * ramp, rtol=1e-6)
    assert (full != sliding).any()


def test_olmo3_spellings_agree():
    yarn = find("olmo3").variants["yarn"].config["rope_scaling"]
    nested = {
        "full_attention": {**yarn, "rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    for kind in nested:
        old, new = (
            frequencies("olmo3", "yarn", kind),
            frequencies("olmo3", "yarn", kind, rope_theta=..., rope_scaling=..., rope_parameters=nested),
        )
        assert old[1] == new[1]
        assert (old[0] == new[0]).all()


@pytest.mark.parametrize("family", ["glm4", "glm4_moe"])
@pytest.mark.parametrize(("factor", "width"), [(0.5, 8), (..., 8), (None, 8), (0.25, 4), (1.0, 16)])
def test_glm_turns_part_of_a_head(family, factor, width):
    variant = "biases" if family == "glm4" else "qk_norm"
    found, amplitude = frequencies(family, variant, head_dim=16, partial_rotary_factor=factor, rope_theta=10000.0)
    assert amplitude == 1.0
    np.testing.assert_allclose(found, 10000.0 ** (-np.arange(0, width, 2) / width), rtol=1e-6)


def test_glm_pairs_are_neighbours_in_the_dense_family_alone():
    dense, sparse = find("glm4"), find("glm4_moe")
    assert dense.read(dense.variants["biases"].config)[0].rope_interleave
    assert not sparse.read(sparse.variants["qk_norm"].config)[0].rope_interleave


def test_a_factor_stated_twice_must_agree():
    owner = find("glm4")
    config = {**owner.variants["factor_inside"].config, "partial_rotary_factor": 0.25}
    with pytest.raises(FindingsError, match="partial_rotary_factor"):
        owner.read(config)


@pytest.mark.parametrize("family", ["glm4", "glm4_moe"])
def test_a_factor_nobody_stated_is_told_with_the_decoder(tmp_path, family):
    """The class's half, in what `inspect` says and in the manifest of the banks."""
    owner = find(family)
    path = write_checkpoint(tmp_path / "source", owner.variants["factor_absent"], owner)
    assert "partial_rotary_factor" not in (path / "config.json").read_text()
    assert inspect_source(open_source(path)).to_json()["decoder"]["partial_rotary_factor"] == 0.5
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    assert json.loads((banks.path / "dewconv.json").read_text())["decoder"]["partial_rotary_factor"] == 0.5


def test_an_attention_factor_of_olmo3_counts_and_keeps_its_text(tmp_path):
    """Stated 1.0 and 1.3 and not stated: three models, each text as it was."""
    owner = find("olmo3")
    logits = {}
    for variant, text in (("yarn", None), ("yarn_off", "1.0"), ("yarn_factor", "1.3000000000000003")):
        path = write_checkpoint(tmp_path / variant, owner.variants[variant], owner)
        config = (path / "config.json").read_text()
        if text is not None:
            config = re.sub(r'("attention_factor": )[\d.]+', rf"\g<1>{text}", config)
            (path / "config.json").write_text(config)
        banks = import_checkpoint(open_source(path), tmp_path / f"{variant}-banks")
        export_checkpoint(banks, tmp_path / f"{variant}-back")
        assert (tmp_path / f"{variant}-back" / "config.json").read_text() == config
        assert (text is None) is ("attention_factor" not in config)
        assert text is None or f'"attention_factor": {text}' in config
        model, variables = load(banks.path)
        logits[variant] = np.asarray(model.apply(variables, np.arange(80)[None]))
    for one, other in (("yarn", "yarn_off"), ("yarn", "yarn_factor"), ("yarn_off", "yarn_factor")):
        assert np.abs(logits[one] - logits[other]).max() > 1e-2 * np.abs(logits[one]).max()
