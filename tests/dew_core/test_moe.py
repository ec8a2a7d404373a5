"""Routing, sparse dispatch and the experts, against transformers and against dense loops."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, Llama4TextConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, load_balancing_loss_func

from dewconv.dew_core.grouped import block_rows, grouped_matmul
from dewconv.dew_core.mixture import refuse_unbuildable_mixture
from dewconv.dew_core.moe import SparseMLP, capacity_positions, expert_capacity
from dewconv.dew_core.records import Mixture
from dewconv.dew_core.router import Router, Routes, load_balancing_loss
from dewconv.dew_core.stack import StackView
from dewconv.dew_core.transformer import CausalTransformer

DIM = 24


def qwen3(experts=6, top_k=3, width=20, normed=True):
    config = Qwen3MoeConfig(
        hidden_size=DIM,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=normed,
        experts_implementation="eager",
    )
    mixture = Mixture(experts, top_k, expert_features=width, norm_topk_prob=normed)
    return Qwen3MoeSparseMoeBlock(config), mixture


def grouped_sigmoid(
    config_class, block_class, experts=12, top_k=4, groups=4, kept=2, width=20, shared=2, normed=True, scaling=2.5
):
    config = config_class(
        hidden_size=DIM,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        n_shared_experts=shared,
        norm_topk_prob=normed,
        routed_scaling_factor=scaling,
        experts_implementation="eager",
    )
    mixture = Mixture(
        experts,
        top_k,
        score_function="sigmoid",
        groups=groups,
        groups_per_token=kept,
        bias=True,
        norm_topk_prob=normed,
        scaling=scaling,
        expert_features=width,
        shared_features=shared * width,
    )
    return block_class(config), mixture


def glm4(**choices):
    return grouped_sigmoid(Glm4MoeConfig, Glm4MoeMoE, **choices)


def deepseek(**choices):
    return grouped_sigmoid(DeepseekV3Config, DeepseekV3MoE, **choices)


def loaded(reference, seed=0, bias=None):
    """The reference with random weights, and the same weights as SparseMLP's variables, in fp32."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for weight in (*reference.parameters(), *reference.buffers()):
            weight.copy_(torch.tensor(rng.standard_normal(tuple(weight.shape), np.float32) * 0.3))
        if bias is not None:
            reference.gate.e_score_correction_bias.copy_(torch.tensor(np.asarray(bias, np.float32)))
    return {"params": leaves(lambda tensor: tensor.detach().float().numpy(), reference)}


def leaves(read, reference):
    """SparseMLP's tree of `read(tensor)` of the reference's tensors."""
    fused, down = read(reference.experts.gate_up_proj), read(reference.experts.down_proj)
    width = fused.shape[1] // 2
    tree = {
        "gate": {"kernel": read(reference.gate.weight).T},
        "experts": {
            "gate_proj": {"kernel": fused[:, :width].swapaxes(1, 2)},
            "up_proj": {"kernel": fused[:, width:].swapaxes(1, 2)},
            "down_proj": {"kernel": down.swapaxes(1, 2)},
        },
    }
    if hasattr(reference.gate, "e_score_correction_bias"):
        tree["gate"]["e_score_correction_bias"] = read(reference.gate.e_score_correction_bias)
    shared = getattr(reference, "shared_experts", getattr(reference, "shared_expert", None))
    if shared is not None:
        names = ("gate_proj", "up_proj", "down_proj")
        tree["shared_experts"] = {name: {"kernel": read(getattr(shared, name).weight).T} for name in names}
    if hasattr(reference, "shared_expert_gate"):
        tree["shared_expert_gate"] = {"kernel": read(reference.shared_expert_gate.weight).T}
    return jax.tree.map(jnp.asarray, tree)


def states(seed=1, batch=2, length=13):
    return np.random.default_rng(seed).standard_normal((batch, length, DIM)).astype(np.float32)


def choices(reference, x):
    """The reference router's expert ids, sorted: its order under `sorted=False` says nothing."""
    return np.sort(reference.gate(torch.as_tensor(x).reshape(-1, DIM))[2].numpy(), axis=-1)


@cache
def compiled(mixture, dtype=None):
    model = SparseMLP(DIM, 0, mixture, dtype=dtype)
    return jax.jit(lambda variables, x, routes: model.apply(variables, x, routes, mutable=["router"]))


def sown(mixture, variables, x, routes=None, dtype=None):
    """(output, what the router sowed)."""
    out, state = compiled(mixture, dtype)(variables, jnp.asarray(x), routes)
    return np.asarray(out), state["router"]["gate"]


def routing(mixture, variables, x):
    """(expert ids, weights) of an ungrouped softmax router."""
    router = Router(mixture.experts, mixture.top_k, norm_topk_prob=mixture.norm_topk_prob)
    return jax.tree.map(np.asarray, jax.jit(router.apply)({"params": variables["params"]["gate"]}, jnp.asarray(x)))


CASES = {
    "qwen3": lambda: qwen3(),
    "qwen3 unnormalised": lambda: qwen3(normed=False),
    "qwen3 square": lambda: qwen3(width=DIM),
    "qwen3 gate_up square": lambda: qwen3(width=DIM // 2),
    "qwen3 one of one": lambda: qwen3(experts=1, top_k=1),
    "qwen3 every expert": lambda: qwen3(experts=5, top_k=5),
    "qwen3 more experts than slots": lambda: qwen3(experts=150, top_k=2),
    "glm4": lambda: glm4(),
    "glm4 one group": lambda: glm4(groups=1, kept=1),
    "glm4 square": lambda: glm4(width=DIM),
    "deepseek": lambda: deepseek(experts=21, groups=7, kept=3),
    "deepseek unnormalised": lambda: deepseek(normed=False),
    "deepseek gate_up square": lambda: deepseek(width=DIM // 2, shared=1),
}
BIASES = {"drawn": 0.0, "released": 7.0, "negative": -2.0}


def bias_of(mixture, name):
    if not mixture.bias:
        return None
    spread = 0.2 if name == "released" else 0.6
    return BIASES[name] + spread * np.random.default_rng(5).uniform(-0.5, 0.5, mixture.experts)


@pytest.mark.parametrize("name", CASES)
def test_fp32(name):
    reference, mixture = CASES[name]()
    x = states()
    for bias in BIASES if mixture.bias else ("drawn",):
        variables = loaded(reference, bias=bias_of(mixture, bias))
        mine, router = sown(mixture, variables, x)
        np.testing.assert_array_equal(np.sort(router["experts"].reshape(-1, mixture.top_k)), choices(reference, x))
        theirs = reference(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def test_negative_bias_keeps_to_its_groups():
    """Every biased score is negative: a masked group filled with zeros would win."""
    reference, mixture = deepseek(experts=8, top_k=2, groups=4, kept=2)
    variables = loaded(reference, bias=bias_of(mixture, "negative"))
    x = states(length=40)
    _, router = sown(mixture, variables, x)
    np.testing.assert_array_equal(np.sort(router["experts"].reshape(-1, 2)), choices(reference, x))
    # The groups bind: without them some token would choose otherwise.
    free = replace(mixture, groups=1, groups_per_token=1)
    _, ungrouped = sown(free, variables, x)
    assert (np.sort(ungrouped["experts"]) != np.sort(router["experts"])).any()


def test_group_scores_differ():
    """Two good experts beat one better: top2 and max choose different groups."""
    logits = jnp.log(jnp.asarray([0.9, 0.01, 0.6, 0.6]) / (1 - jnp.asarray([0.9, 0.01, 0.6, 0.6])))
    choice = {}
    for score in ("top2", "max"):
        router = Router(4, 1, "sigmoid", groups=2, groups_per_token=1, group_score=score)
        experts, _ = router.apply({"params": {"kernel": logits[None]}}, jnp.ones((1, 1, 1)))
        choice[score] = int(experts[0, 0, 0])
    assert choice == {"top2": 2, "max": 0}


def test_ties_go_to_the_lower_id():
    experts, weights = Router(7, 3).apply({"params": {"kernel": jnp.zeros((4, 7))}}, jnp.ones((1, 2, 4)))
    np.testing.assert_array_equal(experts, [[[0, 1, 2]] * 2])
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_router_scores_in_fp32():
    """Two experts' scores 1e-3 apart: a bf16 gate would not tell them apart."""
    kernel = jnp.zeros((256, 5)).at[:, 1].set(1 / 16).at[:, 3].set(1 / 16).at[0, 3].add(2**-12)
    x = jnp.full((1, 1, 256), 0.25, jnp.bfloat16)
    logits = (x @ kernel.astype(jnp.bfloat16))[0, 0]
    assert logits[1] == logits[3]
    router = Router(5, 1)
    experts, weights = router.apply({"params": {"kernel": kernel.astype(jnp.float32)}}, x)
    assert int(experts[0, 0, 0]) == 3
    assert weights.dtype == jnp.float32


@pytest.mark.parametrize("name", ["glm4", "deepseek", "deepseek unnormalised"])
def test_bf16(name):
    """The eager experts' roundings, bit for bit but where a sum's last bit tips one."""
    reference, mixture = CASES[name]()
    variables = loaded(reference, bias=bias_of(mixture, "released"))
    gate = reference.gate.weight.data, reference.gate.e_score_correction_bias.data
    reference = reference.to(torch.bfloat16)
    # Released checkpoints load with the gate and its bias in fp32 (`_keep_in_fp32_modules_strict`).
    reference.gate.weight.data, reference.gate.e_score_correction_bias.data = gate
    kept = variables["params"]["gate"]
    variables = {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables["params"])}
    variables["params"]["gate"] = kept
    x = torch.tensor(states(length=60)).to(torch.bfloat16)
    theirs = reference(x).detach().float().numpy()
    mine, router = sown(mixture, variables, jnp.asarray(x.float().numpy()).astype(jnp.bfloat16), dtype="bfloat16")
    assert mine.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.sort(router["experts"].reshape(-1, mixture.top_k)), choices(reference, x))
    mine = np.asarray(mine, np.float32)
    assert (mine != theirs).mean() < 0.02
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=2**-7 * np.abs(theirs).max())


def test_shared_gate():
    config = Qwen2MoeConfig(
        hidden_size=DIM,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    )
    reference = Qwen2MoeSparseMoeBlock(config)
    mixture = Mixture(6, 3, norm_topk_prob=False, expert_features=20, shared_features=28, shared_gate=True)
    variables, x = loaded(reference), states()
    mine, _ = sown(mixture, variables, x)
    theirs = reference(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(np.asarray(mine), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def test_scaled_inputs():
    config = Llama4TextConfig(
        hidden_size=DIM, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2, hidden_act="silu"
    )
    reference = Llama4TextMoe(config)
    loaded_tensors = np.random.default_rng(0)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(torch.tensor(loaded_tensors.standard_normal(tuple(weight.shape), np.float32) * 0.3))

    def read(tensor):
        return jnp.asarray(tensor.detach().numpy())

    fused, shared = read(reference.experts.gate_up_proj), reference.shared_expert
    params = {
        "gate": {"kernel": read(reference.router.weight).T},
        "experts": {
            "gate_proj": {"kernel": fused[..., :20]},
            "up_proj": {"kernel": fused[..., 20:]},
            "down_proj": {"kernel": read(reference.experts.down_proj)},
        },
        "shared_experts": {
            name: {"kernel": read(getattr(shared, name).weight).T} for name in ("gate_proj", "up_proj", "down_proj")
        },
    }
    mixture = Mixture(
        6, 2, score_function="sigmoid", norm_topk_prob=False, scale_inputs=True, expert_features=20, shared_features=20
    )
    x = states()
    mine, _ = sown(mixture, {"params": params}, x)
    theirs = reference(torch.tensor(x))[0].detach().numpy().reshape(x.shape)
    np.testing.assert_allclose(np.asarray(mine), theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("name", ["qwen3", "qwen3 more experts than slots", "glm4", "deepseek unnormalised"])
def test_gradients(name):
    reference, mixture = CASES[name]()
    variables, x = loaded(reference, bias=bias_of(mixture, "released")), states()
    seed = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    rows = torch.tensor(x, requires_grad=True)
    (reference(rows) * torch.tensor(seed)).sum().backward()

    def loss(params, x):
        return jnp.sum(SparseMLP(DIM, 0, mixture).apply({"params": params}, x) * seed)

    grads, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], jnp.asarray(x))

    def gradient(tensor):
        return np.zeros(tensor.shape, np.float32) if tensor.grad is None else tensor.grad.numpy()

    theirs = leaves(gradient, reference)
    assert jax.tree.structure(theirs) == jax.tree.structure(grads)
    for mine, other in zip(jax.tree.leaves((grads, dx)), jax.tree.leaves((theirs, rows.grad.numpy())), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=4e-6 * max(1e-3, np.abs(other).max()))


def dense_masked(params, mixture, x, experts, weights):
    """Every expert on every token, masked: what the sparse dispatch has to equal."""
    out = np.zeros(x.shape, np.float64)
    kernels = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params["experts"].items()}
    for expert in range(mixture.experts):
        gate, up = x @ kernels["gate_proj"][expert], x @ kernels["up_proj"][expert]
        made = (gate / (1 + np.exp(-gate)) * up) @ kernels["down_proj"][expert]
        out += made * np.where(experts == expert, weights, 0).sum(-1)[..., None]
    return out


@pytest.mark.parametrize("implementation", ["blocks", "ragged_dot"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3 one of one", "qwen3 more experts than slots"])
def test_dispatch_equals_the_dense_loop(name, implementation):
    reference, mixture = CASES[name]()
    mixture = replace(mixture, implementation=implementation)
    variables, x = loaded(reference), states(length=70)
    mine, _ = sown(mixture, variables, x)
    truth = dense_masked(variables["params"], mixture, x, *routing(mixture, variables, x))
    np.testing.assert_allclose(np.asarray(mine), truth, rtol=0, atol=2e-6 * np.abs(truth).max())


GROUPS = {
    "even": [40, 40, 40, 0, 0, 0],
    "empty ends": [0, 0, 90, 0, 30, 0],
    "one by one": [1, 1, 1, 1, 1, 115],
    "all in the last": [0, 0, 0, 0, 0, 120],
    "short of the rows": [30, 0, 41, 3, 0, 0],
    "none": [0, 0, 0, 0, 0, 0],
}


@partial(jax.jit, static_argnames="implementation")
def grouped_with_gradients(rows, weights, sizes, seed, implementation):
    made, pull = jax.vjp(lambda *operands: grouped_matmul(*operands, sizes, implementation), rows, weights)
    return made, *pull(seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_matmul(name, dtype):
    sizes = np.asarray(GROUPS[name], np.int32)
    rng = np.random.default_rng(4)
    rows = jnp.asarray(rng.standard_normal((120, 10)), dtype)
    weights = jnp.asarray(rng.standard_normal((sizes.size, 10, 6)), dtype)
    seed = jnp.asarray(rng.standard_normal((120, 6)), dtype)
    expected = [np.zeros(value.shape) for value in (seed, rows, weights)]
    wide = [np.asarray(value, np.float64) for value in (rows, weights, seed)]
    for row, group in enumerate(np.repeat(np.arange(sizes.size), sizes)):
        expected[0][row] = wide[0][row] @ wide[1][group]
        expected[1][row] = wide[1][group] @ wide[2][row]
        expected[2][group] += np.outer(wide[0][row], wide[2][row])
    for implementation in ("blocks", "ragged_dot"):
        outputs = grouped_with_gradients(rows, weights, jnp.asarray(sizes), seed, implementation)
        for mine, other in zip(outputs, expected, strict=True):
            assert mine.dtype == jnp.dtype(dtype)
            # The sums are exact to fp32; bf16 results are then rounded once, by half an ulp.
            atol = (2e-6 if dtype == "float32" else 2**-8) * max(1.0, np.abs(other).max())
            np.testing.assert_allclose(np.asarray(mine, np.float64), other, rtol=0, atol=atol)


def test_grouped_matmul_refuses_a_name():
    with pytest.raises(ValueError, match="implementation='cuda'"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.asarray([2]), "cuda")


def test_infinities_stay_in_their_group():
    """A block that runs into the next group's rows must not carry their infinities into its own gradient."""
    rows = jnp.ones((6, 2)).at[3].set(jnp.inf)
    weights, sizes = jnp.ones((2, 2, 2)), jnp.asarray([3, 3])
    grads = jax.grad(lambda w: jnp.sum(grouped_matmul(rows, w, sizes, "blocks")))(weights)
    np.testing.assert_array_equal(grads[0], np.full((2, 2), 3.0))


def test_bf16_weights_are_not_converted_ahead_of_the_loop():
    """One row of 64 experts must not make an fp32 copy of them all."""
    weights = jax.ShapeDtypeStruct((64, 128, 256), jnp.bfloat16)
    rows, sizes = jax.ShapeDtypeStruct((1, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    call = jax.jit(lambda r, w, s: grouped_matmul(r, w, s, "blocks"))
    memory = call.lower(rows, weights, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 128 * 256


def test_block_rows():
    assert [block_rows(rows, 128) for rows in (8, 1024, 4096, 16384, 10**6)] == [8, 16, 32, 64, 128]


def naive_capacity(experts, capacity):
    """Slots kept, by walking each sequence's slots in order."""
    kept = np.zeros(experts.shape, bool)
    for row in range(experts.shape[0]):
        taken = {}
        for slot in np.ndindex(*experts.shape[1:]):
            expert = int(experts[(row, *slot)])
            kept[(row, *slot)] = taken.get(expert, 0) < capacity
            taken[expert] = taken.get(expert, 0) + 1
    return kept


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 100.0])
def test_capacity(factor):
    reference, mixture = CASES["qwen3"]()
    variables, x = loaded(reference), states(length=17)
    experts, weights = routing(mixture, variables, x)
    capacity = expert_capacity(17 * mixture.top_k, mixture.experts, factor)
    kept = naive_capacity(experts, capacity)
    np.testing.assert_array_equal(
        np.asarray(capacity_positions(jnp.asarray(experts), mixture.experts)) < capacity, kept
    )
    assert kept.all() == (factor == 100.0)
    truth = dense_masked(variables["params"], mixture, x, experts, np.where(kept, weights, 0))
    mine, _ = sown(replace(mixture, capacity_factor=factor), variables, x)
    np.testing.assert_allclose(mine, truth, rtol=0, atol=2e-6 * np.abs(truth).max())


def test_capacity_of_one_token_is_one():
    assert expert_capacity(2, 64, 1.0) == 1


def test_routes_replay():
    reference, mixture = CASES["deepseek"]()
    variables, x = loaded(reference, bias=bias_of(mixture, "drawn")), states()
    own, router = sown(mixture, variables, x)
    rng = np.random.default_rng(6)
    record = np.stack([rng.permutation(mixture.experts)[: mixture.top_k] for _ in range(26)]).reshape(2, 13, -1)
    routed = rng.random((2, 13)) < 0.5
    out, replayed = sown(mixture, variables, x, Routes(jnp.asarray(record), jnp.asarray(routed)))
    expected = np.where(routed[..., None], record, router["experts"])
    np.testing.assert_array_equal(replayed["experts"], expected)
    np.testing.assert_array_equal(out[~routed], own[~routed])
    # The weights are the scores of the experts taken.
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ np.asarray(variables["params"]["gate"]["kernel"]))))
    weights = np.take_along_axis(scores, expected, -1)
    weights = weights / weights.sum(-1, keepdims=True) * mixture.scaling
    truth = dense_masked(variables["params"], mixture, x, expected, weights)
    params = {name: variables["params"][name] for name in ("gate", "experts")}
    alone = replace(mixture, shared_features=0)
    mine, _ = sown(alone, {"params": params}, x, Routes(jnp.asarray(record), jnp.asarray(routed)))
    np.testing.assert_allclose(mine, truth, rtol=0, atol=3e-6 * np.abs(truth).max())
    # A record of one's own choices changes nothing.
    same, _ = sown(mixture, variables, x, Routes(router["experts"], jnp.ones((2, 13), bool)))
    np.testing.assert_array_equal(same, own)


def test_a_record_of_layers():
    routes = Routes.of_layers(np.zeros((2, 5, 3, 4), np.uint8), None, layers=3, top_k=4)
    assert routes.experts.dtype == jnp.int32
    assert routes.routed.shape == (2, 5, 3)
    with pytest.raises(ValueError, match="routed_experts has shape"):
        Routes.of_layers(np.zeros((2, 5, 4, 3)), None, layers=3, top_k=4)
    with pytest.raises(ValueError, match="routed has shape"):
        Routes.of_layers(np.zeros((2, 5, 3, 4)), np.ones((5, 2)), layers=3, top_k=4)


def test_statistics_and_their_loss():
    reference, mixture = CASES["qwen3"]()
    variables, x = loaded(reference), states()
    _, router = sown(mixture, variables, x)
    logits, _, ids = reference.gate(torch.tensor(x).reshape(-1, DIM))
    load = np.bincount(ids.numpy().reshape(-1), minlength=6) / 26
    np.testing.assert_allclose(router["load"], load, rtol=1e-5)
    np.testing.assert_allclose(router["probability"], logits.softmax(-1).mean(0).detach().numpy(), rtol=1e-5)
    other = torch.tensor(np.random.default_rng(8).standard_normal((26, 6)).astype(np.float32))
    theirs = [load_balancing_loss_func((layer,), 6, 3).item() for layer in (logits, other)]
    together = load_balancing_loss_func((logits, other), 6, 3).item()
    probs = other.softmax(-1)
    second = {
        "load": jnp.asarray(np.bincount(probs.topk(3)[1].numpy().reshape(-1), minlength=6) / 26),
        "probability": jnp.asarray(probs.mean(0).numpy()),
    }
    for collection in (
        {"layers_0": {"mlp": {"gate": router}}, "layers_2": {"mlp": {"gate": second}}},
        {"layers_0_1": {"gate": {name: jnp.stack([router[name], second[name]]) for name in second}}},
    ):
        np.testing.assert_allclose(load_balancing_loss(collection), np.mean(theirs), rtol=1e-5)
        np.testing.assert_allclose(load_balancing_loss(collection, pooled=True), together, rtol=1e-5)
    with pytest.raises(ValueError, match="no router statistics"):
        load_balancing_loss({})

    def loss(params):
        return load_balancing_loss(compiled(mixture)({"params": params}, jnp.asarray(x), None)[1]["router"])

    reference.zero_grad()
    load_balancing_loss_func((logits,), 6, 3).backward()
    grads = jax.grad(loss)(variables["params"])
    np.testing.assert_allclose(grads["gate"]["kernel"], reference.gate.weight.grad.numpy().T, rtol=0, atol=1e-6)


def test_nothing_is_sown_unasked():
    _, mixture = CASES["glm4"]()
    model = SparseMLP(DIM, 0, mixture)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2, DIM)))
    assert set(variables) == {"params"}
    assert variables["params"]["experts"]["down_proj"]["kernel"].shape == (12, 20, DIM)
    spread = np.asarray(variables["params"]["experts"]["gate_proj"]["kernel"]).std(axis=(1, 2))
    np.testing.assert_allclose(spread, DIM**-0.5, rtol=0.15)
    assert jax.eval_shape(model.apply, variables, jnp.zeros((1, 2, DIM))).shape == (1, 2, DIM)


def test_remat_keeps_the_products():
    """A policy naming the experts' products spares the backward pass their recomputation."""
    reference, mixture = CASES["qwen3"]()
    variables, x = loaded(reference), jnp.asarray(states())
    counts = {}
    for names in ((), ("gate_proj", "up_proj", "down_proj")):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        run = jax.checkpoint(lambda x: jnp.sum(SparseMLP(DIM, 0, mixture).apply(variables, x) ** 2), policy=policy)
        counts[names] = str(jax.make_jaxpr(jax.grad(run))(x)).count("while[")
    assert counts["gate_proj", "up_proj", "down_proj"] < counts[()]


REFUSED = {
    "parallel=True": {"parallel": True},
    "dispatch='exchange'": {"dispatch": "exchange"},
    "hash_layers": {"hash_layers": (0,)},
    "latent_features": {"latent_features": 8},
    "latent_norm": {"latent_norm": True},
    "score_function='tanh'": {"score_function": "tanh"},
    "group_score='sum'": {"group_score": "sum"},
    "implementation='cuda'": {"implementation": "cuda"},
    "experts=8 does not divide into groups=3": {"groups": 3},
    "two experts a group": {"groups": 8, "groups_per_token": 4},
    "groups_per_token=3 is more than groups=2": {"groups": 2, "groups_per_token": 3},
    "top_k=3 is more than the 2 experts": {"groups": 4, "groups_per_token": 1, "top_k": 3},
    "top_k=9 is more than experts=8": {"top_k": 9},
    "top_k=0": {"top_k": 0},
    "expert_features=0": {"expert_features": 0},
    "shared_gate=True needs shared_features": {"shared_gate": True},
    "shared_features=-1": {"shared_features": -1},
    "capacity_factor=0": {"capacity_factor": 0.0},
    "scaling=nan": {"scaling": float("nan")},
    "layers names 4, outside num_layers=4": {"layers": (1, 4)},
    "layers names 1 twice": {"layers": (1, 1)},
    "every=0": {"every": 0},
    "layers and every": {"layers": (1,), "every": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        refuse_unbuildable_mixture(Mixture(**{"experts": 8, **REFUSED[message]}), num_layers=4)


FIELDS = {
    "vocab_size": 37,
    "emb_features": DIM,
    "num_layers": 5,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_features": 28,
    "max_seq_len": 16,
    "tie_embeddings": False,
    # Layer 0 dense, 1-3 sparse, 4 dense: a run of each sort.
    "mixture": Mixture(7, 3, layers=(1, 2, 3), expert_features=20, shared_features=12, bias=True),
}


@cache
def decoder():
    """(plain decoder, scanned decoder, their variables with nothing neutral, tokens)."""
    plain, scanned = (CausalTransformer(**FIELDS, scan_layers=scan) for scan in (False, True))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 37, (2, 9)))
    shapes = jax.eval_shape(plain.init, jax.random.key(0), tokens)
    assert set(shapes) == {"params"}
    rng = np.random.default_rng(4)
    variables = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * 0.3 + 0.05), shapes)
    return plain, scanned, variables, tokens


@cache
def decoded(scan, record=False):
    """(logits, router statistics) of one forward, under the record of expert 6, 0 and 2 for the first row."""
    model, (_, _, variables, tokens) = decoder()[scan], decoder()
    call = {}
    if record:
        ids = jnp.broadcast_to(jnp.asarray([6, 0, 2]), (2, 9, 5, 3))
        call = {"routed_experts": ids, "routed": jnp.asarray([[True] * 9, [False] * 9])}
    run = jax.jit(lambda variables: model.apply(variables, tokens, mutable=["router"], **call))
    logits, state = run(variables)
    return np.asarray(logits), jax.tree.map(np.asarray, state["router"])


def test_the_decoder_s_tree():
    plain, _, variables, _ = decoder()
    tree = variables["params"]
    assert set(tree["layers_0"]["mlp"]) == {"gate_proj", "up_proj", "down_proj"}
    assert set(tree["layers_1"]["mlp"]) == {"gate", "experts", "shared_experts"}
    assert tree["layers_3"]["mlp"]["experts"]["up_proj"]["kernel"].shape == (7, DIM, 20)
    assert plain.plan.bank_names == ("layers_0", "layers_1_3", "layers_4")


@pytest.mark.parametrize("record", [False, True])
def test_the_scanned_decoder_equals_the_loop(record):
    (one, loop), (other, scan) = (decoded(scan, record) for scan in (False, True))
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(one).max())
    assert set(loop) == {"layers_1", "layers_2", "layers_3"}
    assert jax.tree.structure(loop) == jax.tree.structure(scan)
    for name in loop:
        np.testing.assert_array_equal(loop[name]["mlp"]["gate"]["experts"], scan[name]["mlp"]["gate"]["experts"])


def test_the_decoder_replays_a_record():
    (free, own), (bound, replayed) = decoded(True), decoded(True, True)
    for name in own:
        ids = replayed[name]["mlp"]["gate"]["experts"]
        assert (ids[0] == [6, 0, 2]).all()
        np.testing.assert_array_equal(ids[1], own[name]["mlp"]["gate"]["experts"][1])
    assert np.abs(bound - free)[0].max() > 1e-2
    np.testing.assert_allclose(bound[1], free[1], rtol=0, atol=1e-5)


def test_a_sparse_decoder_runs_its_banks_and_its_cache():
    _, scanned, variables, tokens = decoder()
    banked = StackView(scanned.plan.groups).stack(variables)
    assert banked["params"]["layers_1_3"]["mlp"]["experts"]["down_proj"]["kernel"].shape == (3, 7, 20, DIM)
    whole = decoded(False)[0]

    @jax.jit
    def step(cache, token):
        return scanned.apply({**banked, **cache}, token, decode=True, mutable=["cache"])

    cache = jax.jit(lambda: scanned.apply(banked, 2, method=CausalTransformer.init_cache, mutable=["cache"])[1])()
    for position in range(tokens.shape[1]):
        logits, cache = step(cache, tokens[:, position : position + 1])
        assert set(cache) == {"cache"}
        np.testing.assert_allclose(logits[:, 0], whole[:, position], rtol=0, atol=1e-5 * np.abs(whole).max())


def test_gradients_through_scan_and_remat():
    plain, _, variables, tokens = decoder()
    remat = CausalTransformer(**FIELDS, scan_layers=True, remat="minimal")

    def gradients(model):
        return jax.jit(jax.grad(lambda variables: jnp.mean(model.apply(variables, tokens) ** 2)))(variables)

    loop, scan = gradients(plain), gradients(remat)
    assert jax.tree.structure(loop) == jax.tree.structure(scan)
    for one, other in zip(jax.tree.leaves(loop), jax.tree.leaves(scan), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * max(1e-3, np.abs(one).max()))
    router = loop["params"]["layers_2"]["mlp"]["gate"]
    assert np.abs(router["kernel"]).max() > 0
    assert not np.abs(router["e_score_correction_bias"]).any()


def test_decoder_refusals():
    plain, _, variables, tokens = decoder()
    ids = jnp.zeros((2, 9, 5, 3), jnp.int32)
    dense = CausalTransformer(**{**FIELDS, "mixture": None})
    with pytest.raises(ValueError, match="routed_experts needs a mixture"):
        jax.eval_shape(lambda v: dense.apply(v, tokens, routed_experts=ids), variables)
    with pytest.raises(ValueError, match="routed marks the tokens"):
        jax.eval_shape(lambda v: plain.apply(v, tokens, routed=ids[..., 0, 0] == 0), variables)
    with pytest.raises(ValueError, match="routed_experts records"):
        jax.eval_shape(lambda v: plain.apply(v, tokens, routed_experts=ids[:, :8]), variables)
    outside = CausalTransformer(**{**FIELDS, "mixture": Mixture(7, 3, layers=(5,))})
    with pytest.raises(ValueError, match="layers names 5"):
        jax.eval_shape(lambda: outside.init(jax.random.key(0), tokens))
