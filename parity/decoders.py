"""The JAX side: a decoder and its parameters, and everything that is compared with the reference.

Products run at the highest precision. Compiled functions are kept by decoder fields and shapes, so that decoders
which differ in their weights alone share them. Everything outside them is numpy: an eager operation is a compilation
of its own.
"""

# flax types the results of `apply` as unions of trees, and jax takes modules for unhashable.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict

from ..dew_core.fields import DecoderFields
from ..dew_core.indexer import INDEXER_COLLECTION
from ..dew_core.layers import group_layers, group_name, layer_plan
from ..dew_core.router import ROUTER
from ..dew_core.stack import INTERMEDIATES, layer_output, layer_outputs
from ..dew_core.transformer import CausalTransformer
from .choices import Choices
from .fixtures import CORRECTION
from .references import WIDER, Forward, Routed
from .selection import Selected

PRECISION = "highest"
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options that halve the time to compile: what tiny decoders spend theirs on. The program is the same, its
machine code is not optimised."""


@lru_cache(maxsize=64)
def _model(fields_json: str, dtype: str, scan: bool, longest: int) -> CausalTransformer:
    fields = DecoderFields.from_json(json.loads(fields_json))
    given = fields.replace(dtype=dtype, scan_layers=scan, max_seq_len=longest).kwargs()
    # Compiled functions are kept by model, which must hash.
    return CausalTransformer(**{**given, "kinds": None if fields.kinds is None else FrozenDict(fields.kinds)})


def _scaled(model: CausalTransformer, tokens: jax.Array) -> jax.Array:
    return model.scaled_embeddings(model.token_embeddings(tokens))


@lru_cache(maxsize=256)
def _forward(model: CausalTransformer, streams: bool, padded: bool, quick: bool) -> Any:
    def run(variables: Any, tokens: jax.Array, positions: Any, mask: Any, segments: Any, routes: Any) -> Any:
        call = {"positions": positions, "attention_mask": mask, "segment_ids": segments} if padded else {}
        call |= routes
        if not streams:
            return model.apply(variables, tokens, **call), (), {}, {}
        written = [INTERMEDIATES, ROUTER, INDEXER_COLLECTION]
        logits, sown = model.apply(variables, tokens, **call, capture_intermediates=layer_outputs, mutable=written)
        entering = model.apply(variables, tokens, method=_scaled)
        outputs = (layer_output(sown[INTERMEDIATES], index) for index in range(model.num_layers))
        return logits, (entering, *outputs), sown.get(ROUTER, {}), sown.get(INDEXER_COLLECTION, {})

    return jax.jit(run, compiler_options=QUICK if quick else None)


@lru_cache(maxsize=64)
def _step(model: CausalTransformer, quick: bool) -> Any:
    def run(variables: Any, cache: Any, tokens: jax.Array, routes: Any) -> Any:
        logits, out = model.apply({**variables, "cache": cache}, tokens, decode=True, **routes, mutable=["cache"])
        return logits, out["cache"]

    return jax.jit(run, compiler_options=QUICK if quick else None)


@lru_cache(maxsize=64)
def _gradient(model: CausalTransformer, quick: bool) -> Any:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens)[:, :-1]
        taken = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - taken)

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK if quick else None)


@dataclass(frozen=True)
class JaxDecoder:
    """A decoder in one compute dtype and one layout.

    fields: the decoder's. params: its tree, banked or one subtree a layer. dtype: compute dtype. scan: whether runs
    of layers scan. quick: compile without optimising (`QUICK`).
    """

    fields: DecoderFields
    params: Mapping[str, Any]
    dtype: str = "float32"
    scan: bool = True
    quick: bool = False

    @cached_property
    def model(self) -> CausalTransformer:
        return self._of_length(self.fields.max_seq_len)

    def _of_length(self, longest: int) -> CausalTransformer:
        # max_seq_len sizes the decode cache and nothing else.
        return _model(json.dumps(self.fields.to_json(), sort_keys=True), self.dtype, self.scan, longest)

    @property
    def variables(self) -> dict[str, Any]:
        return {"params": self.params}

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        streams: bool = False,
        routes: Choices | np.ndarray | None = None,
    ) -> Forward:
        """Logits, and with `streams` the residual stream, of tokens [B, S].

        Positions, mask and segments [B, S] go together: all or none. routes: what to take in place of the routers'
        and indexers' own choices (experts [B, S, layers, k] alone, or both). The forward tells their own either way.
        """
        padded = positions is not None
        ids = np.asarray(tokens, np.int32)
        extra: tuple[Any, ...] = (None, None, None)
        if padded:
            real = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
            own = np.zeros(ids.shape, np.int32) if segments is None else segments
            extra = (np.asarray(positions, np.int32), real, np.asarray(own, np.int32))
        with jax.default_matmul_precision(PRECISION):
            logits, seen, router, indexer = _forward(self.model, streams, padded, self.quick)(
                self.variables, ids, *extra, Choices.of(routes).call()
            )
        sown = layer_leaves(self.fields, router)
        chosen = {
            layer: Routed(sown[path])
            for layer in range(self.fields.num_layers)
            for path in sown
            if path.startswith(f"layers_{layer}/") and path.endswith("/choice")
        }
        kept = layer_leaves(self.fields, indexer)
        selected = {
            layer: Selected(kept[f"{stem}/selected"], kept[f"{stem}/scores"])
            for layer in range(self.fields.num_layers)
            if f"{(stem := f'layers_{layer}/self_attn/indexer')}/selected" in kept
        }
        return Forward(_float32(logits), tuple(map(_float32, seen)), chosen, selected)

    def cached(
        self, tokens: np.ndarray, prefill: int = 1, room: int = 0, routes: Choices | np.ndarray | None = None
    ) -> np.ndarray:
        """Logits [B, S, vocab] of tokens [B, S] through the cache: the first `prefill` at once, then one a step.

        room: slots of the cache, S when that is more. routes as in `forward`.
        """
        ids = np.asarray(tokens, np.int32)
        length = ids.shape[1]
        slots, given = max(length, room), Choices.of(routes)
        step, cache = self._decoding(ids.shape[0], slots)
        pieces = [(0, prefill), *((i, i + 1) for i in range(prefill, length))]
        parts = []
        with jax.default_matmul_precision(PRECISION):
            for start, stop in pieces:
                logits, cache = step(
                    self.variables, cache, ids[:, start:stop], given.columns(start, stop, slots).call()
                )
                parts.append(_float32(logits))
        return np.concatenate(parts, axis=1)

    def greedy(
        self, prompt: np.ndarray, count: int, room: int = 0, routes: Choices | np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`count` greedy tokens [B, count] after prompt [B, S], and the logits [B, count, vocab] they came from.

        The prompt goes through the cache a token a step too. room: slots of the cache. routes: what to
        take, of the S + count - 1 tokens of a continuation that began with the same ones.
        """
        prompt = np.asarray(prompt, np.int32)
        length = prompt.shape[1]
        slots, given = max(length + count, room), Choices.of(routes)
        step, cache = self._decoding(prompt.shape[0], slots)
        chosen: list[np.ndarray] = []
        seen: list[np.ndarray] = []
        with jax.default_matmul_precision(PRECISION):
            for index in range(length + count - 1):
                ids = prompt[:, index] if index < length else chosen[-1]
                logits, cache = step(self.variables, cache, ids[:, None], given.columns(index, index + 1, slots).call())
                if index >= length - 1:
                    seen.append(_float32(logits)[:, 0])
                    chosen.append(seen[-1].argmax(-1).astype(np.int32))
        return np.stack(chosen, axis=1), np.stack(seen, axis=1)

    def gradients(self, tokens: np.ndarray, wide_head: bool = False) -> tuple[float, dict[str, np.ndarray]]:
        """The mean next-token cross entropy of tokens [B, S] and its gradient by per-layer leaf path.

        wide_head: compute the head one precision up, and nothing else. What that moves is the rounding of its sums
        over the vocabulary.
        """
        with jax.default_matmul_precision(PRECISION), jax.enable_x64(wide_head and WIDER[self.dtype] == "float64"):
            params = self._with_wide_head() if wide_head else self.params
            loss, tree = _gradient(self.model, self.quick)(params, np.asarray(tokens, np.int32))
            found = {path: _float32(leaf) for path, leaf in layer_leaves(self.fields, tree).items()}
        return float(loss), found

    def _with_wide_head(self) -> Mapping[str, Any]:
        """The parameters with the head's table one precision up: the head computes in its table's dtype when that is
        wider than the states', and tokens read the table in the decoder's."""
        module, leaf = ("embed_tokens", "embedding") if self.fields.tie_embeddings else ("lm_head", "kernel")
        table = np.asarray(self.params[module][leaf]).astype(WIDER[self.dtype])
        return {**self.params, module: {**self.params[module], leaf: jnp.asarray(table)}}

    def unrolled(self) -> JaxDecoder:
        """The same weights with one subtree a layer and no scan."""
        tree = unflatten_dict({tuple(path.split("/")): leaf for path, leaf in self.leaves().items()})
        return JaxDecoder(self.fields, tree, self.dtype, scan=False, quick=self.quick)

    def leaves(self) -> dict[str, np.ndarray]:
        """The parameters by per-layer leaf path (`layers_0/self_attn/q_proj/kernel`)."""
        return layer_leaves(self.fields, self.params)

    def _decoding(self, batch: int, slots: int) -> tuple[Any, Any]:
        """The compiled step and an empty cache of `batch` rows of `slots` slots."""
        model = self._of_length(slots)
        shapes = jax.eval_shape(
            lambda v: model.apply(v, batch, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"],
            self.variables,
        )
        return _step(model, self.quick), jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def from_leaves(
    fields: DecoderFields,
    leaves: Mapping[str, np.ndarray],
    dtype: str = "float32",
    scan: bool = True,
    quick: bool = False,
) -> JaxDecoder:
    """A decoder from per-layer leaves, cast to `dtype` as transformers' from_pretrained casts every weight but a
    router's correction bias, with its runs banked when `scan`."""
    kept = {
        path: np.asarray(leaf).astype(jnp.dtype("float32" if path.endswith(CORRECTION) else dtype))
        for path, leaf in leaves.items()
    }
    if scan:
        for first, count in layer_plan(fields).groups:
            rows = [f"layers_{index}/" for index in range(first, first + count)]
            for path in [path for path in kept if count > 1 and path.startswith(rows[0])]:
                below = path.removeprefix(rows[0])
                kept[f"{group_name(first, count)}/{below}"] = np.stack([kept.pop(row + below) for row in rows])
    tree = unflatten_dict({tuple(path.split("/")): jax.device_put(leaf) for path, leaf in kept.items()})
    return JaxDecoder(fields, tree, dtype, scan, quick)


def layer_leaves(fields: DecoderFields, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Per-layer leaves of a banked or unrolled parameter tree, by path."""
    found: dict[str, np.ndarray] = {}
    for path, leaf in flatten_dict(dict(params)).items():
        layers, below = group_layers(path[0]), "/".join(path[1:])
        if layers is None or len(layers) == 1:
            found["/".join(path)] = np.asarray(leaf)
        else:
            found |= {f"layers_{layer}/{below}": row for layer, row in zip(layers, np.asarray(leaf), strict=True)}
    return found


def own_leaves(fields: DecoderFields) -> Mapping[str, tuple[int, ...]]:
    """The decoder's own parameter tree, leaf path -> shape: `jax.eval_shape` of its init."""
    return _own_leaves(json.dumps(fields.to_json(), sort_keys=True))


@lru_cache(maxsize=256)
def _own_leaves(fields_json: str) -> Mapping[str, tuple[int, ...]]:
    model = _model(fields_json, "float32", False, 1)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    return {"/".join(path): tuple(leaf.shape) for path, leaf in flatten_dict(tree).items()}


def leaf_differences(fields: DecoderFields, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """How leaf shapes differ from the decoder's own tree, a line each."""
    own = own_leaves(fields)
    for path in sorted(own.keys() | shapes.keys()):
        if path not in shapes:
            yield f"{path}: the decoder has it {own[path]}, no rule fills it"
        elif path not in own:
            yield f"{path}: a rule fills it {tuple(shapes[path])}, the decoder has no such parameter"
        elif tuple(shapes[path]) != own[path]:
            yield f"{path}: the rules make it {tuple(shapes[path])}, the decoder has {own[path]}"


def _float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
