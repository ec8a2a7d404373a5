"""The decoder block against transformers' decoder layers, and its recomputation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Olmo3Config, Qwen3Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.qwen3 import modeling_qwen3

from dewconv.dew_core.attention import CausalSelfAttention
from dewconv.dew_core.block import DecoderBlock
from dewconv.dew_core.mlp import GatedMLP
from dewconv.dew_core.records import AltUp, BlockWiring
from dewconv.dew_core.remat import REMAT_POLICIES, RESIDUALS, RematPolicy, remat_policy

FEATURES, HIDDEN, HEADS, KV, DIM = 24, 28, 4, 2, 16
WIDTHS = {
    "hidden_size": FEATURES,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
}
THETA = {"rope_type": "default", "rope_theta": 10000.0}
PRE = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
SANDWICH = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
POST = {"post_attention_layernorm": "attention_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
LAYERS = {
    "qwen3": lambda: (
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RotaryEmbedding,
        Qwen3Config(**WIDTHS, rope_parameters=THETA),
        PRE,
        {"scale_after_cast": True},
        {},
        "swiglu",
        BlockWiring(),
    ),
    "gemma3": lambda: (
        modeling_gemma3.Gemma3DecoderLayer,
        modeling_gemma3.Gemma3RotaryEmbedding,
        Gemma3TextConfig(**WIDTHS, query_pre_attn_scalar=20, rope_parameters={"full_attention": THETA}),
        SANDWICH,
        {"scale_offset": True},
        {"attention_scale": 20**-0.5},
        "geglu",
        BlockWiring(output_norms=True),
    ),
    "olmo3": lambda: (
        modeling_olmo3.Olmo3DecoderLayer,
        modeling_olmo3.Olmo3RotaryEmbedding,
        Olmo3Config(**WIDTHS, rope_parameters={"full_attention": THETA}),
        POST,
        {},
        {"qk_norm_scope": "projection"},
        "swiglu",
        BlockWiring(pre_norms=False, output_norms=True),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_against_transformers(name, dtype):
    layer, rotary, config, norms, norm_fields, attention_fields, mlp, wiring = LAYERS[name]()
    config._attn_implementation = "eager"
    reference = layer(config, 0).eval().to(getattr(torch, dtype))
    rng = np.random.default_rng(4)
    params: dict = {}
    for path, leaf in reference.named_parameters():
        value = rng.standard_normal(tuple(leaf.shape)).astype(np.float32) * 0.4
        if leaf.ndim == 1 and not norm_fields.get("scale_offset"):
            value += 1
        leaf.data.copy_(torch.tensor(value))
        *owners, _ = path.split(".")
        owners = [norms.get(owner, owner) for owner in owners]
        here = params
        for owner in owners:
            here = here.setdefault(owner, {})
        here["kernel" if leaf.ndim == 2 else "scale"] = jnp.asarray(value).astype(dtype).T
    eps = {"norm_eps": config.rms_norm_eps}
    block = DecoderBlock(
        partial(CausalSelfAttention, HEADS, KV, DIM, **norm_fields, **attention_fields, **eps),
        partial(GatedMLP, FEATURES, HIDDEN, activation=mlp),
        wiring,
        **norm_fields,
        **eps,
    )
    length = 12
    x = torch.tensor(rng.standard_normal((2, length, FEATURES)).astype(np.float32)).to(getattr(torch, dtype))
    where = () if name == "qwen3" else ("full_attention",)
    tables = rotary(config)(x, torch.arange(length)[None], *where)
    mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    theirs = reference(x, position_embeddings=tables, attention_mask=mask)
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).detach().float().numpy()
    mine = jax.jit(block.apply)({"params": params}, jnp.asarray(x.float().numpy()).astype(dtype))
    shapes = jax.eval_shape(block.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    assert mine.dtype == jnp.dtype(dtype)
    bound = (4e-6 if dtype == "float32" else 2**-6) * np.abs(theirs).max()
    assert np.abs(np.asarray(mine, np.float32) - theirs).max() <= bound


def block_and_weights(**fields):
    fields.setdefault("feedforward", partial(GatedMLP, FEATURES, HIDDEN))
    block = DecoderBlock(partial(CausalSelfAttention, HEADS, KV, DIM, max_seq_len=8), **fields)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, FEATURES)), jnp.float32)
    shapes = jax.eval_shape(block.init, jax.random.key(0), x)
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        value = 0.2 * rng.standard_normal(leaf.shape) + (jax.tree_util.keystr(path).endswith("['scale']"))
        return jnp.asarray(value, jnp.float32)

    return block, jax.tree_util.tree_map_with_path(draw, shapes), x


@partial(jax.jit, static_argnums=0)
def run(block, variables, x):
    return block.apply(variables, x)


def gradients(block, variables, x):
    def loss(variables, x):
        return jnp.square(block.apply(variables, x, train=True, rngs={"dropout": jax.random.key(2)})).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)


def test_remat_changes_no_gradient():
    block, variables, x = block_and_weights(dropout_rate=0.2)
    expected = gradients(block, variables, x)
    for name in ("full", "save_qkv_proj", "minimal_with_context"):
        other = gradients(block.clone(remat=remat_policy(name)), variables, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), expected, other)


def test_remat_saves_what_it_names():
    """Less is kept by the fuller recipe: counted in products recomputed by the backward pass."""

    def products(remat):
        block, variables, x = block_and_weights(remat=remat)
        grad = jax.jit(jax.grad(lambda v: jnp.square(block.apply(v, x)).sum()))
        return grad.lower(variables).as_text().count("dot_general")

    none, full, qkv, everything = (
        products(remat_policy(value)) for value in (None, "full", "save_qkv_proj", "minimal_with_context")
    )
    # Seven projections and two contractions; the last projection's product is never needed again.
    assert full > qkv > everything >= none
    assert full - qkv == 3


def test_every_residual_is_named_by_the_block():
    block, variables, x = block_and_weights()
    text = str(jax.make_jaxpr(block.apply)(variables, x))
    missing = {name for name in RESIDUALS if f"name={name}]" not in text.replace("\n", " ")}
    assert missing == {"kv_proj"}  # latent attention's


def test_remat_takes_the_direct_path_when_decoding():
    block, variables, x = block_and_weights(remat=RematPolicy())
    assert "remat" in str(jax.make_jaxpr(block.apply)(variables, x))
    decode = partial(block.apply, decode=True, mutable=["cache"])
    assert "remat" not in str(jax.make_jaxpr(decode)(variables, x))


def test_remat_values():
    assert remat_policy(None) is None
    assert remat_policy("full") == RematPolicy()
    assert remat_policy({"save": ["q_proj"], "offload": ["context"]}) == RematPolicy(("q_proj",), ("context",))
    for policy in REMAT_POLICIES.values():
        assert remat_policy(policy) is policy
        assert set(policy.save) | set(policy.offload) <= set(RESIDUALS)
        assert (policy.checkpoint_policy() is None) == (policy == RematPolicy())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("everything", "'everything'; the named policies are minimal_with_context"),
        ({"save": ["query_proj"]}, "'query_proj'"),
        ({"keep": ["q_proj"]}, "'keep'"),
        ({"save": "q_proj"}, "list of residual names"),
        ({"save": ["q_proj"], "offload": ["q_proj"]}, "both saves and offloads q_proj"),
        (True, "remat is True"),
    ],
    ids=str,
)
def test_remat_refusals(value, named):
    with pytest.raises(ValueError, match=named):
        remat_policy(value)


def test_a_block_of_the_mixer_alone():
    block, variables, x = block_and_weights(feedforward=None)
    assert set(variables["params"]) == {"input_layernorm", "self_attn"}
    assert run(block, variables, x).shape == x.shape


def test_residual_multiplier():
    block, variables, x = block_and_weights(feedforward=None)
    moved = run(block, variables, x) - x
    half = run(block.clone(residual_multiplier=0.5), variables, x) - x
    np.testing.assert_allclose(half, moved / 2, rtol=0, atol=1e-6)


def test_the_stream_keeps_the_compute_dtype():
    block, variables, x = block_and_weights()
    assert run(block.clone(dtype=jnp.bfloat16), variables, x).dtype == jnp.bfloat16
    assert run(block, variables, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"altup": AltUp()}, "altup"),
        ({"laurel_rank": 4}, "laurel_rank"),
        ({"per_layer_input_dim": 8}, "per_layer_input_dim"),
        ({"hash_routed": True}, "hash_routed"),
        ({"wiring": BlockWiring(layer_scalar="frozen")}, "layer_scalar is 'frozen'"),
        ({"wiring": BlockWiring(pre_norms=False)}, "pre_norms and output_norms"),
    ],
    ids=str,
)
def test_refusals(fields, named):
    with pytest.raises(ValueError, match=named):
        block_and_weights(**fields)


def test_per_layer_input_is_refused():
    block, variables, x = block_and_weights()
    with pytest.raises(ValueError, match="per_layer_input"):
        block.apply(variables, x, per_layer_input=x)
