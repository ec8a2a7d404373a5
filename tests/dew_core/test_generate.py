"""Generation against a hand loop of full forwards and against transformers, and how tokens are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dewconv.dew_core import generate as generation
from dewconv.dew_core.generate import decoding_variables, generate, stream
from dewconv.dew_core.records import LayerKind
from dewconv.dew_core.sampling import draw, kept_logits
from dewconv.dew_core.stack import StackView
from dewconv.dew_core.transformer import CausalTransformer

MODEL = CausalTransformer(
    vocab_size=61,
    emb_features=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_features=24,
    max_seq_len=8,  # shorter than what is generated: the cache is the request's
    layer_types=("sliding", "full", "full"),
    kinds={"sliding": LayerKind(window=5), "full": LayerKind(rope_theta=1e6)},
)
PROMPT = np.random.default_rng(2).integers(1, 61, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def variables():
    shapes = jax.eval_shape(lambda: MODEL.init(jax.random.key(0), PROMPT))
    rng = np.random.default_rng(0)

    def leaf(shape):
        values = rng.standard_normal(shape.shape).astype(np.float32) * 0.4
        return jnp.asarray(values + 0.8 if len(shape.shape) == 1 else values)

    return jax.tree.map(leaf, shapes)


@pytest.fixture(scope="module")
def greedy(variables):
    """12 likeliest tokens of each row, by a full forward a token over one padded width."""
    forward = jax.jit(lambda tokens: MODEL.apply(variables, tokens))
    rows = np.pad(PROMPT, ((0, 0), (0, 12)))
    for at in range(PROMPT.shape[1], rows.shape[1]):
        rows[:, at] = np.asarray(forward(rows)[:, at - 1]).argmax(-1)
    return rows[:, PROMPT.shape[1] :]


def test_greedy_is_the_hand_loop(variables, greedy):
    assert len({tuple(row) for row in greedy}) == 2
    assert len(set(greedy[0])) > 2
    np.testing.assert_array_equal(generate(MODEL, variables, PROMPT, max_new_tokens=12), greedy)


def test_greedy_is_the_hand_loop_in_a_banked_scan(variables, greedy):
    banks = StackView(MODEL.plan.groups).stack(variables)
    assert "layers_1_2" in banks["params"]
    scanned = MODEL.clone(scan_layers=True)
    np.testing.assert_array_equal(generate(scanned, banks, PROMPT, max_new_tokens=12), greedy)


def test_left_padded_rows_are_the_single_rows(variables, greedy):
    short = PROMPT[:1, 4:]
    alone = generate(MODEL, variables, short, max_new_tokens=12)
    batch = np.concatenate([np.pad(short, ((0, 0), (4, 0)), constant_values=33), PROMPT[1:]])
    mask = np.ones(batch.shape, bool)
    mask[0, :4] = False
    together = generate(MODEL, variables, batch, attention_mask=mask, max_new_tokens=12)
    np.testing.assert_array_equal(together, np.concatenate([alone, greedy[1:]]))


def test_a_row_stops_after_a_stop_id(variables, greedy):
    stop = int(greedy[0, 3])
    ends = [list(row).index(stop) if stop in row else None for row in greedy]
    got = generate(MODEL, variables, PROMPT, max_new_tokens=12, stop_ids=(stop, 60), pad_id=59)
    for row, (want, end) in enumerate(zip(greedy, ends, strict=True)):
        kept = 12 if end is None else end + 1
        np.testing.assert_array_equal(got[row, :kept], want[:kept])
        assert set(got[row, kept:]) <= {59}


def test_streamed_tokens_are_the_generated_ones(variables, greedy):
    chunks = list(stream(MODEL, variables, PROMPT, max_new_tokens=12, chunk=5))
    assert [chunk.shape[1] for chunk in chunks] == [1, 4, 5, 2]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), greedy)
    stop = int(greedy[0, 2])
    (one, *rest) = list(stream(MODEL, variables, PROMPT[:1], max_new_tokens=12, chunk=12, stop_ids=(stop,)))
    assert one.shape[1] + sum(chunk.shape[1] for chunk in rest) == list(greedy[0]).index(stop) + 1


def test_a_long_prompt_is_read_in_blocks(variables, greedy, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_BLOCK", 4)
    np.testing.assert_array_equal(generate(MODEL, variables, PROMPT, max_new_tokens=12), greedy)


def test_nearby_lengths_share_a_program(variables):
    generate(MODEL, variables, PROMPT, max_new_tokens=12)
    before = generation._prefill._cache_size(), generation._decode._cache_size()
    generate(MODEL, variables, PROMPT[:, 2:], max_new_tokens=20)
    assert (generation._prefill._cache_size(), generation._decode._cache_size()) == before


def test_greedy_is_transformers():
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    theirs = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.7 if parameter.ndim == 1 else 0))
        want = theirs.generate(torch.from_numpy(PROMPT).long(), max_new_tokens=12, do_sample=False)
    read = {name: jnp.asarray(value.detach().numpy()) for name, value in theirs.state_dict().items()}
    params = {
        "embed_tokens": {"embedding": read["model.embed_tokens.weight"]},
        "norm": {"scale": read["model.norm.weight"]},
    }
    for index in range(2):
        at = f"model.layers.{index}."
        params[f"layers_{index}"] = {
            "self_attn": {
                **{
                    n: {"kernel": read[f"{at}self_attn.{n}.weight"].T} for n in ("q_proj", "k_proj", "v_proj", "o_proj")
                },
                **{n: {"scale": read[f"{at}self_attn.{n}.weight"]} for n in ("q_norm", "k_norm")},
            },
            "mlp": {n: {"kernel": read[f"{at}mlp.{n}.weight"].T} for n in ("gate_proj", "up_proj", "down_proj")},
            **{n: {"scale": read[f"{at}{n}.weight"]} for n in ("input_layernorm", "post_attention_layernorm")},
        }
    ours = CausalTransformer(
        vocab_size=61,
        emb_features=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_features=24,
        rope_theta=1e6,
        norm_eps=1e-6,
        scale_after_cast=True,
    )
    got = generate(ours, {"params": params}, PROMPT, max_new_tokens=12)
    np.testing.assert_array_equal(got, want[:, PROMPT.shape[1] :].numpy())


# Drawing.


def test_a_draw_among_one_token_is_greedy(variables, greedy):
    for limit in ({"top_k": 1}, {"top_p": 1e-6}):
        got = generate(MODEL, variables, PROMPT, max_new_tokens=12, temperature=0.7, rng=jax.random.key(0), **limit)
        np.testing.assert_array_equal(got, greedy)


def test_draws_follow_the_key_and_not_the_chunks(variables):
    call = {"max_new_tokens": 12, "temperature": 2.0}
    one = generate(MODEL, variables, PROMPT, rng=jax.random.key(0), **call)
    pieces = list(stream(MODEL, variables, PROMPT, rng=jax.random.key(0), chunk=3, **call))
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), one)
    other = generate(MODEL, variables, PROMPT, rng=jax.random.key(1), **call)
    assert (one != other).any()


@pytest.mark.parametrize("top_k", [None, 5, 100])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9])
def test_what_is_kept_is_what_transformers_keeps(top_k, top_p):
    logits = np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32) * 3
    want = TemperatureLogitsWarper(0.7)(None, torch.from_numpy(logits))
    if top_k is not None:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p is not None:
        want = TopPLogitsWarper(top_p)(None, want)
    got = np.asarray(kept_logits(jnp.asarray(logits), 0.7, top_k, top_p))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want.numpy()))
    np.testing.assert_allclose(got[np.isfinite(got)], want.numpy()[np.isfinite(got)], rtol=1e-6)


def test_draws_are_distributed_as_the_kept_tokens():
    probabilities = np.array([0.4, 0.3, 0.2, 0.08, 0.02])
    logits = jnp.broadcast_to(jnp.log(probabilities), (20000, 5))
    drawn = np.asarray(draw(logits, jax.random.key(0), 1.0, None, 0.85))
    kept = np.array([0.4, 0.3, 0.2]) / 0.9
    share = np.bincount(drawn, minlength=5) / 20000
    assert share[3:].sum() == 0
    # Five standard deviations of a share of 20000 draws.
    assert np.abs(share[:3] - kept).max() < 5 * np.sqrt(0.25 / 20000)


# The layout generation wants.


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_decoding_variables_are_rows_in_fp32_on_cpu(variables, stored):
    low = jax.tree.map(lambda leaf: leaf.astype(stored), variables)
    banks = StackView(MODEL.plan.groups).stack(low)
    plain, rows = decoding_variables(MODEL.clone(scan_layers=True, dtype=stored), banks)
    assert not plain.scan_layers
    assert plain.dtype is None
    want = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    assert jax.tree.structure(rows) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, rows, want)
    assert {leaf.dtype for leaf in jax.tree.leaves(rows)} == {jnp.dtype("float32")}
    kept = decoding_variables(MODEL, banks, dtype="bfloat16")[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}


def test_decoding_variables_copy_nothing_that_is_ready(variables):
    _, rows = decoding_variables(MODEL, variables)
    for one, other in zip(jax.tree.leaves(rows), jax.tree.leaves(variables), strict=True):
        assert one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()


def test_decoding_variables_join_a_bank_and_its_layers(variables):
    banks = StackView(MODEL.plan.groups).stack(variables)["params"]
    mixed = {**banks, "layers_1_2": {k: v for k, v in banks["layers_1_2"].items() if k != "mlp"}}
    for name in ("layers_1", "layers_2"):
        mixed[name] = {"mlp": variables["params"][name]["mlp"]}
    _, rows = decoding_variables(MODEL, {"params": mixed})
    jax.tree.map(np.testing.assert_array_equal, rows, variables)


def test_a_step_copies_no_cache(variables):
    """One-token steps write the cache in place: the loop's scratch is smaller than one layer's keys."""
    model = MODEL.clone(max_seq_len=4096)
    cache = jax.eval_shape(lambda: generation._empty_cache(model, variables, 1))
    sampling = generation._sampling(0.0, None, None, (), 0, None)
    logits, position = jax.ShapeDtypeStruct((1, 61), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.eval_shape(lambda *a: generation._first(sampling, *a, 64), cache, logits, position)
    compiled = generation._decode.lower(model, variables, sampling, state, np.int32(5)).compile()
    memory = compiled.memory_analysis()
    keys = 2 * 4096 * 8 * 4
    assert memory.alias_size_in_bytes > 6 * keys
    copies = [line for line in compiled.as_text().splitlines() if "= f32[1,2,4096,8]" in line and " copy(" in line]
    assert not copies


# What is refused.


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("temperature=-1.0", {"temperature": -1.0}),
        ("temperature=nan", {"temperature": float("nan")}),
        ("pass rng=", {"temperature": 1.0}),
        ("top_k=0", {"top_k": 0}),
        ("top_p=0.0", {"top_p": 0.0}),
        ("top_p=1.5", {"top_p": 1.5}),
        ("max_new_tokens=0", {"max_new_tokens": 0}),
        ("attention_mask is", {"attention_mask": np.ones((2, 3))}),
        ("row 1 of the prompt ends in padding", {"attention_mask": np.array([[1] * 9, [1] * 8 + [0]])}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(variables, match, call):
    with pytest.raises(ValueError, match=match):
        generate(MODEL, variables, PROMPT, **{"max_new_tokens": 4, **call})


def test_an_empty_prompt_is_refused(variables):
    with pytest.raises(ValueError, match="at least one token"):
        generate(MODEL, variables, np.zeros((1, 0), np.int32), max_new_tokens=1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("chunk", [1, 12])
def test_logits_that_are_not_finite_end_it(value, chunk, variables, greedy):
    """A token that is drawn later on has a spoilt embedding, in a model whose head is a table of its own."""
    model = MODEL.clone(tie_embeddings=False)
    table = variables["params"]["embed_tokens"]["embedding"]
    row = greedy[0].tolist()
    at = next(i for i in range(1, 11) if row[i] not in (*row[:i], *PROMPT[0]))
    spoilt = {
        "params": {
            **variables["params"],
            "embed_tokens": {"embedding": table.at[row[at], 0].set(value)},
            "lm_head": {"kernel": table.T},
        }
    }
    with pytest.raises(FloatingPointError, match=rf"new token {at + 2} are not finite"):
        list(stream(model, spoilt, PROMPT[:1], max_new_tokens=12, chunk=chunk))
