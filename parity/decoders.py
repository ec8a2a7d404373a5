"""The JAX side: a decoder and its parameters, and everything that is compared with the reference.

Products run at the highest precision. Compiled functions are kept by decoder fields and shapes, so that decoders
which differ in their weights alone share them.
"""

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
from ..dew_core.layers import layer_plan
from ..dew_core.stack import INTERMEDIATES, StackView, layer_output, layer_outputs
from ..dew_core.transformer import CausalTransformer
from .references import Forward

PRECISION = "highest"


@lru_cache(maxsize=64)
def _model(fields_json: str, dtype: str, scan: bool, longest: int) -> CausalTransformer:
    fields = DecoderFields.from_json(json.loads(fields_json))
    given = fields.replace(dtype=dtype, scan_layers=scan, max_seq_len=longest).kwargs()
    # Compiled functions are kept by model, which must hash.
    return CausalTransformer(**{**given, "kinds": None if fields.kinds is None else FrozenDict(fields.kinds)})


def _scaled(model: CausalTransformer, tokens: jax.Array) -> jax.Array:
    return model.scaled_embeddings(model.token_embeddings(tokens))


@lru_cache(maxsize=256)
def _forward(model: CausalTransformer, streams: bool, padded: bool) -> Any:
    def run(variables: Any, tokens: jax.Array, positions: Any, mask: Any, segments: Any) -> Any:
        call = {"positions": positions, "attention_mask": mask, "segment_ids": segments} if padded else {}
        if not streams:
            return model.apply(variables, tokens, **call), ()
        logits, sown = model.apply(
            variables, tokens, **call, capture_intermediates=layer_outputs, mutable=[INTERMEDIATES]
        )
        entering = model.apply(variables, tokens, method=_scaled)
        outputs = (layer_output(sown[INTERMEDIATES], index) for index in range(model.num_layers))
        return logits, (entering, *outputs)

    return jax.jit(run)


@lru_cache(maxsize=64)
def _step(model: CausalTransformer) -> Any:
    def run(variables: Any, cache: Any, tokens: jax.Array) -> Any:
        logits, out = model.apply({**variables, "cache": cache}, tokens, decode=True, mutable=["cache"])
        return logits, out["cache"]

    return jax.jit(run)


@lru_cache(maxsize=64)
def _gradient(model: CausalTransformer) -> Any:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens)[:, :-1]
        taken = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - taken)

    return jax.jit(jax.value_and_grad(loss))


@dataclass(frozen=True)
class JaxDecoder:
    """A decoder in one compute dtype and one layout.

    fields: the decoder's. params: its tree, banked or one subtree a layer. dtype: compute dtype. scan: whether runs
    of layers scan.
    """

    fields: DecoderFields
    params: Mapping[str, Any]
    dtype: str = "float32"
    scan: bool = True

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
    ) -> Forward:
        """Logits, and with `streams` the residual stream, of tokens [B, S].

        Positions, mask and segments [B, S] go together: all or none.
        """
        padded = positions is not None
        ids = jnp.asarray(tokens, jnp.int32)
        extra: tuple[Any, ...] = (None, None, None)
        if padded:
            real = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
            own = np.zeros(ids.shape, np.int32) if segments is None else segments
            extra = (jnp.asarray(positions, jnp.int32), jnp.asarray(real), jnp.asarray(own, jnp.int32))
        with jax.default_matmul_precision(PRECISION):
            logits, seen = _forward(self.model, streams, padded)(self.variables, ids, *extra)
        return Forward(_float32(logits), tuple(map(_float32, seen)))

    def cached(self, tokens: np.ndarray, prefill: int = 1) -> np.ndarray:
        """Logits [B, S, vocab] of tokens [B, S] through the cache: the first `prefill` at once, then one a step."""
        ids = jnp.asarray(tokens, jnp.int32)
        length = ids.shape[1]
        model, cache = self._cache(ids.shape[0], length)
        pieces = [(0, prefill), *((i, i + 1) for i in range(prefill, length))]
        parts = []
        with jax.default_matmul_precision(PRECISION):
            for start, stop in pieces:
                logits, cache = _step(model)(self.variables, cache, ids[:, start:stop])
                parts.append(_float32(logits))
        return np.concatenate(parts, axis=1)

    def greedy(self, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` greedy tokens [B, count] after prompt [B, S], and the logits [B, count, vocab] they came from."""
        ids = jnp.asarray(prompt, jnp.int32)
        model, cache = self._cache(ids.shape[0], ids.shape[1] + count)
        chosen, seen = [], []
        with jax.default_matmul_precision(PRECISION):
            for _ in range(count):
                logits, cache = _step(model)(self.variables, cache, ids)
                seen.append(_float32(logits[:, -1]))
                ids = jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
                chosen.append(np.asarray(ids[:, 0]))
        return np.stack(chosen, axis=1), np.stack(seen, axis=1)

    def gradients(self, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The mean next-token cross entropy of tokens [B, S] and its gradient by per-layer leaf path."""
        with jax.default_matmul_precision(PRECISION):
            loss, tree = _gradient(self.model)(self.params, jnp.asarray(tokens, jnp.int32))
        return float(loss), {path: _float32(leaf) for path, leaf in layer_leaves(self.fields, tree).items()}

    def unrolled(self) -> JaxDecoder:
        """The same weights with one subtree a layer and no scan."""
        tree = unflatten_dict({tuple(path.split("/")): leaf for path, leaf in self.leaves().items()})
        return JaxDecoder(self.fields, tree, self.dtype, scan=False)

    def leaves(self) -> dict[str, Any]:
        """The parameters by per-layer leaf path (`layers_0/self_attn/q_proj/kernel`)."""
        return layer_leaves(self.fields, self.params)

    def _cache(self, batch: int, slots: int) -> tuple[CausalTransformer, Any]:
        model = self._of_length(slots)
        shapes = jax.eval_shape(
            lambda v: model.apply(v, batch, method=CausalTransformer.init_cache, mutable=["cache"])[1]["cache"],
            self.variables,
        )
        return model, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def from_leaves(
    fields: DecoderFields, leaves: Mapping[str, np.ndarray], dtype: str = "float32", scan: bool = True
) -> JaxDecoder:
    """A decoder from per-layer leaves, cast to `dtype` as transformers' from_pretrained casts every weight, with
    its runs banked when `scan`."""
    tree = unflatten_dict(
        {tuple(path.split("/")): jnp.asarray(leaf, jnp.dtype(dtype)) for path, leaf in leaves.items()}
    )
    if scan:
        tree = StackView(layer_plan(fields).groups).stack({"params": tree})["params"]
    return JaxDecoder(fields, tree, dtype, scan)


def layer_leaves(fields: DecoderFields, params: Mapping[str, Any]) -> dict[str, Any]:
    """Per-layer leaves of a banked or unrolled parameter tree, by path."""
    tree = StackView(layer_plan(fields).groups).unstack({"params": dict(params)})["params"]
    return {"/".join(path): leaf for path, leaf in flatten_dict(tree).items()}


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
    return np.asarray(jnp.asarray(array, jnp.float32))
