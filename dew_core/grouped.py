"""Matmuls of rows grouped by the matrix they take: what routed experts run on.

`jax.lax.ragged_dot` lowers on CPU to one masked product a group, work that grows with the number of groups. The
"blocks" implementation visits the groups that hold rows, a block of rows at a time, so its work grows with the
rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .mixture import IMPLEMENTATIONS


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    implementation: str = "auto",
    precision: Any = None,
) -> jax.Array:
    """rows [T, K], sorted by group, times each group's own matrix of weights [E, K, N]: [T, N] in rows' dtype.

    group_sizes [E] int: the rows of each group, in order; rows past their sum give zeros. Accumulated in fp32
    and rounded once. Differentiable once, in reverse, in rows and weights.

    implementation: "ragged_dot" is `jax.lax.ragged_dot`; "blocks" is a loop over the occupied groups; "auto" is
    blocks when JAX's default backend is the CPU and ragged_dot elsewhere. Raises ValueError for another name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: it is one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = "blocks" if jax.default_backend() == "cpu" else "ragged_dot"
    if implementation == "blocks":
        return _blocks(rows, weights, group_sizes, precision)
    out = lax.ragged_dot(
        rows, weights, group_sizes, precision=precision, preferred_element_type=_accumulator(rows.dtype)
    )
    return out.astype(rows.dtype)


def block_rows(rows: int, groups: int) -> int:
    """Rows a block holds: about half of a group's fair share, so that the last block of a group wastes little,
    between 8 and the 128 past which a larger product is no faster."""
    share = rows / groups
    for limit, size in ((8, 8), (16, 16), (64, 32), (256, 64)):
        if share < limit:
            return size
    return 128


def _accumulator(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _each_group(sizes: jax.Array, carry: Any, visit: Any) -> Any:
    """carry after `visit(group, start, end, carry)` of every group that holds rows, in order."""
    ends = jnp.cumsum(sizes)
    occupied = jnp.nonzero(sizes > 0, size=sizes.shape[0], fill_value=0)[0]
    count = jnp.sum(sizes > 0)

    def step(state: tuple) -> tuple:
        index, carry = state
        group = occupied[index]
        return index + 1, visit(group, ends[group] - sizes[group], ends[group], carry)

    return lax.while_loop(lambda state: state[0] < count, step, (jnp.zeros((), count.dtype), carry))[1]


def _matrix(weights: jax.Array, group: jax.Array) -> jax.Array:
    # XLA's CPU backend computes bf16 in fp32 and would convert all of `weights` ahead of the loop, one pass over
    # every expert for a single token. Tied to the group, the conversion cannot leave the loop.
    weights, group = lax.optimization_barrier((weights, group))
    return lax.optimization_barrier(lax.dynamic_index_in_dim(weights, group, 0, keepdims=False))


def _product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, precision: Any, contract: int) -> jax.Array:
    """rows [T, K] with each group's matrix, contracted on the matrix's axis `contract`."""
    total, block = rows.shape[0], block_rows(rows.shape[0], weights.shape[0])
    padded = jnp.pad(rows, ((0, block), (0, 0)))
    features = weights.shape[2 - contract + 1]

    def visit(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        matrix = _matrix(weights, group)

        def step(state: tuple) -> tuple:
            row, out = state
            taken = lax.dynamic_slice_in_dim(padded, row, block)
            made = lax.dot_general(
                taken,
                matrix,
                (((1,), (contract - 1,)), ((), ())),
                precision=precision,
                preferred_element_type=_accumulator(rows.dtype),
            )
            # A last block runs into the next groups' rows, which they overwrite in their turn.
            return row + block, lax.dynamic_update_slice_in_dim(out, made.astype(out.dtype), row, 0)

        return lax.while_loop(lambda state: state[0] < end, step, (start, out))[1]

    out = _each_group(sizes, jnp.zeros((total + block, features), rows.dtype), visit)[:total]
    return jnp.where(jnp.arange(total)[:, None] < jnp.sum(sizes), out, 0)


def _outer(rows: jax.Array, grads: jax.Array, weights: jax.Array, sizes: jax.Array, precision: Any) -> jax.Array:
    """The weights' gradient [E, K, N]: each group's rows [T, K] against its output gradients [T, N]."""
    block = block_rows(rows.shape[0], weights.shape[0])
    rows, grads = (jnp.pad(value, ((0, block), (0, 0))) for value in (rows, grads))

    def visit(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        def step(state: tuple) -> tuple:
            row, summed = state
            inside = (row + jnp.arange(block) < end)[:, None]
            taken = jnp.where(inside, lax.dynamic_slice_in_dim(rows, row, block), 0)
            # Both sides: an infinity in a row of the next group would be NaN against a zero.
            given = jnp.where(inside, lax.dynamic_slice_in_dim(grads, row, block), 0)
            made = lax.dot_general(
                taken, given, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=summed.dtype
            )
            return row + block, summed + made

        zeros = jnp.zeros(weights.shape[1:], _accumulator(weights.dtype))
        summed = lax.while_loop(lambda state: state[0] < end, step, (start, zeros))[1]
        return lax.dynamic_update_index_in_dim(out, summed.astype(out.dtype), group, 0)

    return _each_group(sizes, jnp.zeros_like(weights), visit)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(rows: jax.Array, weights: jax.Array, sizes: jax.Array, precision: Any) -> jax.Array:
    return _product(rows, weights, sizes, precision, contract=1)


def _blocks_forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array, precision: Any) -> tuple:
    return _blocks(rows, weights, sizes, precision), (rows, weights, sizes)


def _blocks_backward(precision: Any, kept: tuple, grads: jax.Array) -> tuple:
    rows, weights, sizes = kept
    return (
        _product(grads, weights, sizes, precision, contract=2),
        _outer(rows, grads, weights, sizes, precision),
        np.zeros(sizes.shape, jax.dtypes.float0),
    )


_blocks.defvjp(_blocks_forward, _blocks_backward)
