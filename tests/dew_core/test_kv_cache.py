"""Cached decoding is the full forward, a row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dewconv.dew_core.attention import AttentionMetadata, CausalSelfAttention
from dewconv.dew_core.kv_cache import gather_cache_rows
from dewconv.dew_core.records import KVCache

FEATURES, SLOTS = 24, 16


def mixer_with_weights(**fields):
    mixer = CausalSelfAttention(4, 2, 8, max_seq_len=SLOTS, attention_bias=True, **fields)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        value = 0.3 * rng.standard_normal(leaf.shape) + (jax.tree_util.keystr(path).endswith("['scale']"))
        return jnp.asarray(value, jnp.float32)

    return mixer, jax.tree_util.tree_map_with_path(draw, shapes)


def states(rows, length, seed=8):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, FEATURES)), jnp.float32)


class Decoder:
    """A mixer, its weights and the cache it has written so far."""

    def __init__(self, mixer, variables, rows):
        self.variables = variables
        self.full = jax.jit(mixer.apply)
        self.step = jax.jit(lambda v, x, **call: mixer.apply(v, x, decode=True, mutable=["cache"], **call))
        self.cache = self.step(variables, states(rows, 1))[1]["cache"]

    def __call__(self, x, **call):
        out, written = self.step({**self.variables, "cache": self.cache}, x, **call)
        self.cache = written["cache"]
        return out


def close(a, b, atol=3e-6):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def test_allocation_writes_nothing():
    mixer, variables = mixer_with_weights()
    cache = Decoder(mixer, variables, 3).cache
    assert jax.tree.map(jnp.shape, cache) == {
        "cached_key": (3, 2, SLOTS, 8),
        "cached_value": (3, 2, SLOTS, 8),
        "cached_valid": (3, SLOTS),
        "cached_positions": (3, SLOTS),
        "cursor": (3,),
    }
    assert all(not leaf.any() for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize(
    "fields", [{}, {"window": 3}, {"chunk": 4}, {"attention_sinks": True, "output_gate": True}], ids=str
)
@pytest.mark.parametrize("prompt", [1, 5])
def test_steps_are_the_full_forward(fields, prompt):
    mixer, variables = mixer_with_weights(**fields)
    x = states(2, 11)
    decode = Decoder(mixer, variables, 2)
    outs = [decode(x[:, :prompt])] + [decode(x[:, i : i + 1]) for i in range(prompt, 11)]
    close(jnp.concatenate(outs, axis=1), decode.full(variables, x))
    np.testing.assert_array_equal(decode.cache["cursor"], [11, 11])
    np.testing.assert_array_equal(decode.cache["cached_positions"][0, :11], np.arange(11))
    assert int(decode.cache["cached_valid"].sum()) == 22


def test_a_prompt_in_pieces():
    mixer, variables = mixer_with_weights(window=4)
    x = states(1, 9)
    decode = Decoder(mixer, variables, 1)
    outs = [decode(x[:, :3]), decode(x[:, 3:8]), decode(x[:, 8:])]
    close(jnp.concatenate(outs, axis=1), decode.full(variables, x))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"chunk": 4}], ids=str)
def test_padded_prompts_continue_as_unpadded_ones(fields, side):
    """Positions default to counting real tokens, so no gap opens at the padding."""
    mixer, variables = mixer_with_weights(**fields)
    short, long = states(1, 7), states(1, 10, seed=9)
    junk = 50 * states(1, 3, seed=10)
    prompt = jnp.concatenate([junk, short[:, :3]] if side == "left" else [short[:, :3], junk], axis=1)
    mask = jnp.asarray([[0] * 3 + [1] * 3 if side == "left" else [1] * 3 + [0] * 3, [1] * 6], bool)
    decode = Decoder(mixer, variables, 2)
    metadata = AttentionMetadata(attention_mask=mask)
    first = decode(jnp.concatenate([prompt, long[:, :6]]), attention_metadata=metadata)
    rest = [decode(jnp.concatenate([short[:, 3 + i : 4 + i], long[:, 6 + i : 7 + i]])) for i in range(4)]
    rest = jnp.concatenate(rest, axis=1)
    close(rest[:1], decode.full(variables, short)[:, 3:])
    close(jnp.concatenate([first[1:], rest[1:]], axis=1), decode.full(variables, long))


def test_rows_at_different_cursors():
    """Two rows decoded apart and gathered into one batch go on as they were."""
    mixer, variables = mixer_with_weights()
    x = states(2, 9)
    alone = [Decoder(mixer, variables, 1) for _ in range(2)]
    alone[0](x[:1, :3])
    alone[1](x[1:, :6])
    both = Decoder(mixer, variables, 2)
    both.cache = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), alone[0].cache, alone[1].cache)
    step = both(jnp.stack([x[0, 3:4], x[1, 6:7]]))
    np.testing.assert_array_equal(both.cache["cursor"], [4, 7])
    full = both.full(variables, x)
    close(step[:, 0], jnp.stack([full[0, 3], full[1, 6]]))


def test_gather_rows():
    mixer, variables = mixer_with_weights()
    x = states(3, 6)
    decode = Decoder(mixer, variables, 3)
    decode(x[:, :5])
    rows = np.array([2, 0, 0, 1])
    gathered = Decoder(mixer, variables, 4)
    gathered.cache = gather_cache_rows(decode.cache, rows)
    close(gathered(x[rows, 5:]), decode.full(variables, x)[rows, 5:])


def test_stored_dtype():
    mixer, variables = mixer_with_weights(kv_cache=KVCache(dtype="bfloat16"))
    x = states(1, 6)
    decode = Decoder(mixer, variables, 1)
    assert decode.cache["cached_key"].dtype == jnp.bfloat16
    decode(x[:, :5])
    difference = jnp.abs(decode(x[:, 5:]) - decode.full(variables, x)[:, 5:]).max()
    assert 1e-5 < float(difference) < 0.1


def test_a_prompt_longer_than_the_cache_is_refused():
    mixer, variables = mixer_with_weights()
    decode = Decoder(mixer, variables, 1)
    with pytest.raises(ValueError, match="17 tokens do not fit a decode cache of max_seq_len 16"):
        decode(states(1, 17))
