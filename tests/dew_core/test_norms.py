"""RMSNorm's roundings and scale conventions, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dewconv.dew_core.norms import RMSNorm

CONVENTIONS = {
    "qwen3": (Qwen3RMSNorm, {"scale_after_cast": True}),
    "gemma3": (Gemma3RMSNorm, {"scale_offset": True}),
    "olmo3": (Olmo3RMSNorm, {}),
}


def run_both(family, dtype, ours=None):
    """(JAX output, torch output, input) in fp32 for one convention; `ours` overrides the JAX fields."""
    kind, fields = CONVENTIONS[family]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 250), np.float32) * 3
    weight = rng.standard_normal(250).astype(np.float32) * 0.4 + (0 if family == "gemma3" else 1)
    reference = kind(250, eps=1e-6).to(getattr(torch, dtype))
    reference.weight.data.copy_(torch.tensor(weight))
    theirs = reference(torch.tensor(x).to(getattr(torch, dtype))).detach()
    norm = RMSNorm(eps=1e-6, **(fields if ours is None else ours))
    scale = jnp.asarray(weight).astype(dtype)
    mine = jax.jit(norm.apply)({"params": {"scale": scale}}, jnp.asarray(x).astype(dtype))
    assert mine.dtype == jnp.dtype(dtype)
    assert theirs.dtype == getattr(torch, dtype)
    return np.asarray(mine, np.float32), theirs.float().numpy()


@pytest.mark.parametrize("family", CONVENTIONS)
def test_fp32(family):
    mine, theirs = run_both(family, "float32")
    # The mean's summation order differs, which moves each row by an ulp or two.
    np.testing.assert_allclose(mine, theirs, rtol=5e-7, atol=1e-7)


@pytest.mark.parametrize("family", CONVENTIONS)
def test_bf16_is_bit_equal(family):
    mine, theirs = run_both(family, "bfloat16")
    # Bit-equal but where the mean's last bit tips a rounding: at most a few values in 16000, one bf16 ulp each.
    differing = mine != theirs
    assert differing.mean() < 5e-4
    np.testing.assert_allclose(mine, theirs, rtol=2**-7, atol=0)


def test_the_two_roundings_differ_in_bf16():
    mine, theirs = run_both("qwen3", "bfloat16", ours={"scale_after_cast": False})
    assert (mine != theirs).mean() > 0.05


def test_offset_is_added_in_fp32():
    """1 + scale in bf16 would lose a scale below 2^-8."""
    norm = RMSNorm(eps=0.0, scale_offset=True)
    scale = jnp.full((4,), 2**-9, jnp.bfloat16)
    out = norm.apply({"params": {"scale": scale}}, jnp.ones((1, 4), jnp.float32))
    np.testing.assert_array_equal(np.asarray(out), np.float32(1 + 2**-9))


def test_fresh_norm_is_neutral():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
    for offset in (False, True):
        norm = RMSNorm(scale_offset=offset)
        variables = norm.init(jax.random.key(0), x)
        assert variables["params"]["scale"].shape == (8,)
        out = np.asarray(norm.apply(variables, x))
        np.testing.assert_allclose(np.square(out).mean(-1), 1, rtol=1e-4)
