"""Rotary frequencies, amplitudes and the rotation, against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Glm4Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

from dewconv.dew_core.records import RopeScaling, YarnScaling
from dewconv.dew_core.rope import apply_rotary, rotary_freqs, rotary_tables

# torch's vectorised fp32 power is off the correctly rounded one by up to 2 ulp, about one value in a hundred, and
# each of the few fp32 operations of a ramp may round the other way.
ULPS = 4


def hf_config(head_dim, theta, parameters):
    return Qwen3Config(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )


def hf_freqs(head_dim, theta, parameters):
    config = hf_config(head_dim, theta, parameters)
    inverse, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return inverse.numpy(), float(amplitude)


def assert_freqs(ours, theirs):
    inverse, amplitude = ours
    assert inverse.dtype == np.float32
    np.testing.assert_array_max_ulp(inverse, theirs[0], maxulp=ULPS)
    assert amplitude == pytest.approx(theirs[1], rel=1e-15)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_default_frequencies(head_dim, theta):
    inverse, amplitude = rotary_freqs(head_dim, theta)
    config = hf_config(head_dim, theta, {"rope_type": "default"})
    reference = modeling_qwen3.Qwen3RotaryEmbedding(config)
    np.testing.assert_array_max_ulp(inverse, reference.inv_freq.numpy(), maxulp=2)
    assert amplitude == reference.attention_scaling == 1.0


@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize("factor", [1.0, 4.0, 8.0, 40.0])
@pytest.mark.parametrize("original", [16, 4096, 131072])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn(head_dim, original, factor, truncate):
    stated = {"original_max_position_embeddings": original, "factor": factor}
    if truncate is not None:
        stated["truncate"] = truncate
    theirs = hf_freqs(head_dim, 10000.0, {"rope_type": "yarn", **stated})
    assert_freqs(rotary_freqs(head_dim, 10000.0, yarn=YarnScaling(**stated)), theirs)


@pytest.mark.parametrize(
    "extra",
    [
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 1.7},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"beta_fast": 32.0, "beta_slow": 32.0, "truncate": False},
    ],
)
def test_yarn_options(extra):
    stated = {"original_max_position_embeddings": 4096, "factor": 40.0, **extra}
    theirs = hf_freqs(64, 150000.0, {"rope_type": "yarn", **stated})
    assert_freqs(rotary_freqs(64, 150000.0, yarn=YarnScaling(**stated)), theirs)


def test_yarn_options_matter():
    base = {"factor": 8.0, "original_max_position_embeddings": 4096}
    plain, amplitude = rotary_freqs(64, 10000.0, yarn=YarnScaling(**base))
    assert not np.allclose(plain, rotary_freqs(64, 10000.0, yarn=YarnScaling(**base, truncate=False))[0], rtol=1e-3)
    assert not np.allclose(plain, rotary_freqs(64, 10000.0, yarn=YarnScaling(**base, beta_fast=16))[0], rtol=1e-3)
    assert amplitude > 1.2


def test_linear():
    theirs = hf_freqs(128, 1e6, {"rope_type": "linear", "factor": 8.0})
    assert_freqs(rotary_freqs(128, 1e6, rope_scaling=RopeScaling("linear", factor=8.0)), theirs)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 0.5, 2.0, 64)]
)
def test_llama3(head_dim, factor, low, high, original):
    stated = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    theirs = hf_freqs(head_dim, 500000.0, {"rope_type": "llama3", **stated})
    assert_freqs(rotary_freqs(head_dim, 500000.0, rope_scaling=RopeScaling("llama3", **stated)), theirs)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
def test_partial_proportional(factor):
    theirs = hf_freqs(64, 1e6, {"rope_type": "proportional", "partial_rotary_factor": factor})
    ours = rotary_freqs(64, 1e6, partial_rotary_factor=factor, partial_rotary_type="proportional")
    assert_freqs(ours, theirs)
    assert len(ours[0]) == 32
    assert np.count_nonzero(ours[0]) == int(factor * 32)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
def test_partial_prefix(factor):
    config = Glm4Config(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": factor},
    )
    theirs = modeling_glm4.Glm4RotaryEmbedding.compute_default_rope_parameters(config)
    ours = rotary_freqs(64, 1e6, partial_rotary_factor=factor, partial_rotary_type="prefix")
    assert_freqs(ours, (theirs[0].numpy(), theirs[1]))
    assert len(ours[0]) == int(64 * factor) // 2


def test_partial_prefix_yarn():
    parameters = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
    }
    yarn = YarnScaling(factor=8.0, original_max_position_embeddings=4096)
    ours = rotary_freqs(64, 1e6, yarn=yarn, partial_rotary_factor=0.5, partial_rotary_type="prefix")
    assert_freqs(ours, hf_freqs(64, 1e6, parameters))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables_at_long_positions(dtype):
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    reference = modeling_qwen3.Qwen3RotaryEmbedding(hf_config(64, 10000.0, parameters))
    positions = np.array([[0, 1, 255, 257, 4095, 4097, 16383, 131071]], np.int32)
    cos, sin = reference(torch.zeros(1, dtype=getattr(torch, dtype)), torch.tensor(positions))
    inverse = reference.inv_freq.numpy()
    _, amplitude = rotary_freqs(64, 10000.0, yarn=YarnScaling(factor=4.0, original_max_position_embeddings=4096))
    ours = rotary_tables(jnp.asarray(positions), inverse, amplitude, jnp.dtype(dtype))
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        atol = 2e-7 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(np.asarray(mine, np.float32), theirs[..., :32].float().numpy(), rtol=0, atol=atol)


ROTATIONS = {
    "half": (modeling_qwen3.apply_rotary_pos_emb, False, None),
    "half_prefix": (modeling_qwen3_next.apply_rotary_pos_emb, False, 0.5),
    "interleaved_prefix": (modeling_glm4.apply_rotary_pos_emb, True, 0.5),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotation(case):
    reference, interleaved, factor = ROTATIONS[case]
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((2, 9, heads, 16), np.float32) for heads in (4, 2))
    positions = rng.integers(0, 500, (2, 9)).astype(np.int32)
    inverse, amplitude = rotary_freqs(16, 10000.0, partial_rotary_factor=factor, partial_rotary_type="prefix")
    angles = torch.tensor(positions)[..., None].float() * torch.tensor(inverse)
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    theirs = reference(torch.tensor(query), torch.tensor(key), cos, sin, unsqueeze_dim=2)
    tables = rotary_tables(jnp.asarray(positions), inverse, amplitude, jnp.float32)
    for mine, other in zip((query, key), theirs, strict=True):
        mine = apply_rotary(jnp.asarray(mine), *tables, interleaved=interleaved)
        np.testing.assert_allclose(np.asarray(mine), other.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rope_scaling": RopeScaling(), "yarn": YarnScaling()}, "rope_scaling and yarn"),
        ({"partial_rotary_type": "whole"}, "partial_rotary_type is 'whole'"),
        ({"rope_scaling": RopeScaling(rope_type="dynamic")}, "rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.3, "partial_rotary_type": "prefix"}, "head_dim 10"),
        ({"partial_rotary_factor": 0.5, "yarn": YarnScaling()}, "yarn over a proportional"),
    ],
)
def test_refusals(arguments, named):
    with pytest.raises(ValueError, match=named):
        rotary_freqs(10, 10000.0, **arguments)
