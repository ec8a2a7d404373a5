"""The gated MLP and the projection, against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from dewconv.dew_core.dense import Dense
from dewconv.dew_core.mlp import GatedMLP, activate

HF_NAMES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "geglu_exact": "gelu"}
LEAVES = ("gate_proj", "up_proj", "down_proj")


def loaded(reference, scale=0.3, seed=0):
    """The reference with random weights, and the same weights as this MLP's variables."""
    rng = np.random.default_rng(seed)
    params = {}
    for name in LEAVES:
        weight = getattr(reference, name).weight
        value = rng.standard_normal(tuple(weight.shape)).astype(np.float32) * scale
        weight.data.copy_(torch.tensor(value))
        params[name] = {"kernel": jnp.asarray(value.T)}
    return {"params": params}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HF_NAMES)
def test_activation(name, dtype):
    x = torch.linspace(-12, 12, 4001).to(getattr(torch, dtype))
    theirs = ACT2FN[HF_NAMES[name]](x).float().numpy()
    mine = np.asarray(activate(name, jnp.asarray(x.float().numpy()).astype(dtype)), np.float32)
    # torch's gelu adds 1 to an erf or tanh near -1: what is left of it is good to eps times x, and no better.
    cancelled = 2 * np.abs(x.float().numpy()) * np.finfo(np.float32).eps
    rounding = 2**-7 if dtype == "bfloat16" else 1e-6
    assert (np.abs(mine - theirs) <= rounding * np.abs(theirs) + cancelled).all()
    if dtype == "bfloat16":
        settled = np.abs(theirs) > 1e-2
        assert (mine != theirs)[settled].mean() < 0.01


@pytest.mark.parametrize("name", ["swiglu", "geglu_exact"])
def test_activation_against_float64(name):
    x = np.linspace(-8, 8, 4001).astype(np.float32)
    truth = ACT2FN[HF_NAMES[name]](torch.tensor(x, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(np.asarray(activate(name, jnp.asarray(x))), truth, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", HF_NAMES)
def test_mlp(name):
    reference = Qwen3MLP(Qwen3Config(hidden_size=20, intermediate_size=28, hidden_act=HF_NAMES[name]))
    variables = loaded(reference)
    x = np.random.default_rng(1).standard_normal((2, 5, 20)).astype(np.float32)
    mine = GatedMLP(20, 28, activation=name).apply(variables, jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(mine), reference(torch.tensor(x)).detach().numpy(), rtol=0, atol=5e-6)


def test_the_gelus_differ():
    x = jnp.linspace(-3, 3, 100)
    assert float(jnp.abs(activate("geglu", x) - activate("geglu_exact", x)).max()) > 1e-4


def test_swiglu_limit():
    class Config:
        hidden_size, intermediate_size, hidden_act, swiglu_limit = 20, 28, "silu", 1.5

    reference = Glm5NextTextMLP(Config())
    variables = loaded(reference, scale=1.0)
    x = np.random.default_rng(1).standard_normal((2, 5, 20)).astype(np.float32)
    mine = np.asarray(GatedMLP(20, 28, swiglu_limit=1.5).apply(variables, jnp.asarray(x)))
    np.testing.assert_allclose(mine, reference(torch.tensor(x)).detach().numpy(), rtol=0, atol=2e-5)
    free = np.asarray(GatedMLP(20, 28).apply(variables, jnp.asarray(x)))
    assert np.abs(free - mine).max() > 1


def test_refusals():
    x = jnp.ones((1, 1, 20))
    with pytest.raises(ValueError, match="'relu'"):
        GatedMLP(20, 28, activation="relu").init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"activation_sparsity is 0\.95"):
        GatedMLP(20, 28, activation_sparsity=0.95).init(jax.random.key(0), x)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_against_linear(dtype, length):
    rng = np.random.default_rng(2)
    kind = getattr(torch, dtype)
    linear = torch.nn.Linear(300, 70).to(kind)
    weight, bias = rng.standard_normal((70, 300)), rng.standard_normal(70)
    linear.weight.data.copy_(torch.tensor(weight))
    linear.bias.data.copy_(torch.tensor(bias))
    x = torch.tensor(rng.standard_normal((1, length, 300))).to(kind)
    params = {
        "kernel": jnp.asarray(weight.T, jnp.float32).astype(dtype),
        "bias": jnp.asarray(bias, jnp.float32).astype(dtype),
    }
    mine = jax.jit(Dense(70, use_bias=True).apply)({"params": params}, jnp.asarray(x.float().numpy()).astype(dtype))
    theirs = linear(x).detach().float().numpy()
    assert mine.dtype == jnp.dtype(dtype)
    assert mine.shape == theirs.shape
    mine = np.asarray(mine, np.float32)
    if dtype == "float32":
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-5)
    else:
        np.testing.assert_allclose(mine, theirs, rtol=2**-7, atol=1e-4)
        assert (mine != theirs).mean() < 0.02


def test_init_std():
    std = {
        s: float(Dense(256, init_std=s).init(jax.random.key(0), jnp.ones((1, 1024)))["params"]["kernel"].std())
        for s in (None, 0.02)
    }
    assert std[None] == pytest.approx(1 / 32, rel=0.02)
    assert std[0.02] == pytest.approx(0.02, rel=0.02)
