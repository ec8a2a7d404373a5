"""Generation: a prefill of the prompt and a loop of one-token steps, each compiled once a bucket of lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from .layers import group_layers, group_name
from .sampling import draw
from .transformer import CausalTransformer

BUCKET = 64
"""Prompts and new tokens are rounded up to multiples of this many slots, so that nearby lengths share a program."""

PREFILL_BLOCK = 512
"""Longer prompts are read this many tokens at a time, which bounds the memory of attention scores."""


@flax.struct.dataclass
class Decoding:
    """Where a generation stands: what one step hands the next.

    cache: the decode cache. token [B]: the last drawn. position [B]: the one it will be read at. done [B]: rows that
    have stopped. drawn: how many tokens were drawn. new [B, room]: the drawn tokens, `pad_id` past a stop. finite:
    whether the largest logit was a number wherever a token was drawn.
    """

    cache: Any
    token: jax.Array
    position: jax.Array
    done: jax.Array
    drawn: jax.Array
    new: jax.Array
    finite: jax.Array


@flax.struct.dataclass
class Sampling:
    """How tokens are drawn and when a row stops. key None draws the likeliest token."""

    stop: jax.Array
    pad: jax.Array
    key: jax.Array | None
    temperature: jax.Array
    top_p: jax.Array | None
    top_k: int | None = flax.struct.field(pytree_node=False, default=None)


def generate(
    model: CausalTransformer,
    variables: Mapping[str, Any],
    tokens: Any,
    *,
    attention_mask: Any = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    rng: jax.Array | None = None,
) -> np.ndarray:
    """The tokens that follow each row of tokens [B, S]: [B, max_new_tokens] int32, the prompt not among them.

    attention_mask [B, S]: the prompt's real tokens, for rows of unequal length; pad them on the left. temperature 0
    takes the likeliest token; above 0 tokens are drawn with `rng`, after temperature, top_k and top_p in that order.
    A row stops after one of stop_ids, and holds pad_id from there on; all rows stopped ends the loop.

    The cache holds the prompt and the new tokens, whatever the model's max_seq_len. `decoding_variables` gives the
    layout and dtype that decode fastest. Raises ValueError for arguments that make no sense, FloatingPointError when
    the logits that a token is drawn from hold NaN or their largest is infinite.
    """
    chunks = list(
        stream(
            model,
            variables,
            tokens,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_ids=stop_ids,
            pad_id=pad_id,
            rng=rng,
            chunk=max_new_tokens,
        )
    )
    new = np.concatenate(chunks, axis=1)
    return np.pad(new, ((0, 0), (0, max_new_tokens - new.shape[1])), constant_values=pad_id)


def stream(
    model: CausalTransformer,
    variables: Mapping[str, Any],
    tokens: Any,
    *,
    attention_mask: Any = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    rng: jax.Array | None = None,
    chunk: int = 1,
) -> Iterator[np.ndarray]:
    """`generate`'s tokens as they come: [B, n] int32 arrays of at most `chunk` tokens a row, ending when every row
    has stopped. The arguments, and the tokens, are `generate`'s."""
    prompt, mask = _prompt(tokens, attention_mask)
    sampling = _sampling(temperature, top_k, top_p, stop_ids, pad_id, rng)
    if max_new_tokens < 1 or chunk < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}, chunk={chunk}: generate at least one token")
    room = _rounded(max_new_tokens, BUCKET)
    model = model.clone(max_seq_len=prompt.shape[1] + room)

    cache = _empty_cache(model, variables, prompt.shape[0])
    positions = np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)
    width = min(prompt.shape[1], PREFILL_BLOCK)
    logits = None
    for start in range(0, prompt.shape[1], width):
        block = slice(start, start + width)
        cache, logits = _prefill(model, variables, cache, prompt[:, block], mask[:, block], positions[:, block])
    state = _first(sampling, cache, logits, positions[:, -1] + 1, room)

    sent = 0
    while True:
        drawn, done, finite = jax.device_get((state.drawn, state.done, state.finite))
        if not finite:
            raise FloatingPointError(f"the logits of new token {drawn} are not finite")
        if drawn > sent:
            yield np.asarray(state.new[:, sent:drawn])
        sent = int(drawn)
        if sent >= max_new_tokens or done.all():
            return
        ahead = chunk if sent >= chunk else chunk - sent
        state = _decode(model, variables, sampling, state, np.int32(min(sent + ahead, max_new_tokens)))


def decoding_variables(
    model: CausalTransformer, variables: Mapping[str, Any], dtype: Any = None
) -> tuple[CausalTransformer, dict[str, Any]]:
    """The decoder and its variables as generation runs them fastest on the default backend: (model, variables).

    Layers run unrolled, one subtree each. On CPU, where one-token dots in bf16 run at a fraction of memory speed,
    parameters narrower than fp32 become fp32; elsewhere they keep their dtype. `dtype` states one for all floating
    parameters instead. Leaves that are already so are the given arrays themselves; a bank's rows are cut and cast one
    at a time, so dropping the given variables leaves one copy.
    """
    plain = model.clone(scan_layers=False, dtype=None, parent=None)
    out: dict[str, Any] = {}
    for collection, tree in variables.items():
        out[collection] = {}
        for name, subtree in tree.items():
            layers = group_layers(name)
            if layers is None or len(layers) == 1:
                rows = {name: jax.tree.map(partial(_decoding_leaf, row=None, dtype=dtype), subtree)}
            else:
                rows = {
                    group_name(layer, 1): jax.tree.map(partial(_decoding_leaf, row=row, dtype=dtype), subtree)
                    for row, layer in enumerate(layers)
                }
            for key, value in rows.items():
                held = out[collection].get(key)
                out[collection][key] = value if held is None else _joined(held, value)
    return plain, out


def _joined(one: Any, other: Any) -> Any:
    return {**one, **{key: _joined(one[key], item) if key in one else item for key, item in other.items()}}


def _decoding_leaf(leaf: Any, row: int | None, dtype: Any) -> jax.Array:
    wanted = leaf.dtype
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        if dtype is not None:
            wanted = jnp.dtype(dtype)
        elif jax.default_backend() == "cpu":
            wanted = jnp.promote_types(leaf.dtype, jnp.float32)
    if wanted != leaf.dtype:
        return _cast(leaf, wanted) if row is None else _cast_row(leaf, row, wanted)
    if row is None:
        return jnp.asarray(leaf)
    # On CPU a row of a host array is a view, and an aligned view is put on the device without a copy.
    return jnp.asarray(leaf[row]) if jax.default_backend() != "cpu" else jax.device_put(np.asarray(leaf)[row])


@partial(jax.jit, static_argnums=1)
def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf.astype(dtype)


@partial(jax.jit, static_argnums=2)
def _cast_row(leaf: jax.Array, row: Any, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False).astype(dtype)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _prompt(tokens: Any, attention_mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """The prompt and its mask, padded on the left to a bucket's width."""
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens are {tokens.shape}: generate takes [batch, prompt], at least one token each")
    mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask is {mask.shape}, tokens are {tokens.shape}")
    if not mask[:, -1].all():
        row = int(np.argmin(mask[:, -1]))
        raise ValueError(f"row {row} of the prompt ends in padding: pad prompts on the left to generate")
    length = tokens.shape[1]
    width = _rounded(length, BUCKET if length <= PREFILL_BLOCK else PREFILL_BLOCK)
    left = ((0, 0), (width - length, 0))
    return np.pad(tokens, left), np.pad(mask, left)


def _sampling(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_ids: Sequence[int],
    pad_id: int,
    rng: jax.Array | None,
) -> Sampling:
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature!r}: it is 0 (the likeliest token) or above")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k!r}: keep at least one token, or None for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r}: it is in (0, 1], or None for all")
    if temperature > 0 and rng is None:
        raise ValueError("temperature above 0 draws tokens: pass rng=jax.random.key(seed)")
    sampled = temperature > 0
    return Sampling(
        stop=jnp.asarray(list(stop_ids), jnp.int32),
        pad=jnp.asarray(pad_id, jnp.int32),
        key=rng if sampled else None,
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=jnp.asarray(top_p, jnp.float32) if sampled and top_p is not None and top_p < 1 else None,
        top_k=top_k if sampled else None,
    )


def _empty_cache(model: CausalTransformer, variables: Mapping[str, Any], batch: int) -> Any:
    def allocate(variables: Any) -> Any:
        return model.apply(variables, batch, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"]

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(allocate, variables))


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _prefill(model, variables, cache, tokens, mask, positions):
    """The cache after one block of the prompt, and the logits [B, V] of the block's last slot."""
    (_, logits), written = model.apply(
        {**variables, "cache": cache},
        tokens,
        jnp.full((tokens.shape[0],), tokens.shape[1] - 1),
        attention_mask=mask,
        positions=positions,
        decode=True,
        method=CausalTransformer.states_and_logits_at,
        mutable=["cache"],
    )
    return written["cache"], logits


def _drawn(sampling: Sampling, state: Decoding, logits: jax.Array) -> Decoding:
    """`state` with one more token a row, drawn from logits [B, V]; the cache and positions stay."""
    key = None if sampling.key is None else jax.random.fold_in(sampling.key, state.drawn)
    token = draw(logits, key, sampling.temperature, sampling.top_k, sampling.top_p)
    token = jnp.where(state.done, sampling.pad, token)
    done = state.done | (token[:, None] == sampling.stop[None, :]).any(axis=1)
    new = jax.lax.dynamic_update_slice_in_dim(state.new, token[:, None], state.drawn, axis=1)
    # A maximum passes NaN on, so that one number a row tells. What a stopped row computes is not read.
    finite = state.finite & (jnp.isfinite(logits.max(axis=-1)) | state.done).all()
    return state.replace(token=token, done=done, new=new, drawn=state.drawn + 1, finite=finite)


@partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _first(sampling, cache, logits, position, room):
    """The state after the prompt: its first new token drawn."""
    batch = logits.shape[0]
    state = Decoding(
        cache=cache,
        token=jnp.zeros((batch,), jnp.int32),
        position=position,
        done=jnp.zeros((batch,), jnp.bool_),
        drawn=jnp.zeros((), jnp.int32),
        new=jnp.full((batch, room), sampling.pad),
        finite=jnp.ones((), jnp.bool_),
    )
    return _drawn(sampling, state, logits)


@partial(jax.jit, static_argnames="model", donate_argnames="state")
def _decode(model, variables, sampling, state, until):
    """One-token steps until `until` tokens are drawn, every row has stopped or logits are not finite."""

    def going(state: Decoding) -> jax.Array:
        return (state.drawn < until) & ~state.done.all() & state.finite

    def step(state: Decoding) -> Decoding:
        logits, written = model.apply(
            {**variables, "cache": state.cache},
            state.token[:, None],
            positions=state.position[:, None],
            decode=True,
            mutable=["cache"],
        )
        state = state.replace(cache=written["cache"], position=state.position + 1)
        return _drawn(sampling, state, logits[:, 0])

    return jax.lax.while_loop(going, step, state)
