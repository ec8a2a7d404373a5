"""Every parameter is computed with: moving it moves the logits, and no element of it is without a gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import families
from dewconv.families.rules import assign_leaves, leaf_shapes, placements
from dewconv.parity.bounds import rounding_bound
from dewconv.parity.candidate import source_tensors
from dewconv.parity.decoders import PRECISION, QUICK, from_leaves
from dewconv.parity.fixtures import CORRECTION, write_checkpoint

TOKENS = np.random.default_rng(0).integers(8, 131, (2, 24)).astype(np.int32)


def kinds_of_leaves(family, variant):
    """The leaves of a variant's decoder, by name below the layer."""
    fields, _ = family.read(family.variants[variant].config)
    shapes = leaf_shapes(placements(family.weights(fields)))
    return {path.partition("/")[2] if path.startswith("layers_") else path for path in shapes}


def covering(family):
    """Few variants that have every kind of leaf the family has in any."""
    held = {variant: kinds_of_leaves(family, variant) for variant in family.variants}
    wanted, chosen = set().union(*held.values()), []
    while wanted:
        chosen.append(max(held, key=lambda variant: len(held[variant] & wanted)))
        wanted -= held[chosen[-1]]
    return chosen


CASES = [(family, variant) for family in families() for variant in covering(family)]


def decoder_of(tmp_path, family, variant):
    """The variant's fields, the same with every token taking all experts, and its leaves in float32."""
    path = write_checkpoint(tmp_path / variant, family.variants[variant], family)
    plan = plan_import(open_source(path))
    fields, mixture = plan.fields, plan.fields.mixture
    if mixture is not None:
        whole = fields.replace(mixture=replace(mixture, top_k=mixture.experts, groups_per_token=mixture.groups))
    else:
        whole = fields
    leaves = assign_leaves(plan.placements, source_tensors(plan))
    return fields, whole, {path: np.asarray(leaf, np.float32) for path, leaf in leaves.items()}


def logits_of(fields, leaves):
    return from_leaves(fields, leaves, scan=False, quick=True).forward(TOKENS).logits


@pytest.mark.parametrize(("family", "variant"), CASES, ids=lambda value: getattr(value, "name", value))
def test_noise_on_any_leaf_moves_the_logits(tmp_path, family, variant):
    own, whole, leaves = decoder_of(tmp_path, family, variant)
    biases = [path for path in leaves if path.endswith(CORRECTION)]
    noise = np.random.default_rng(1)
    # A correction bias speaks where a choice is made; every other leaf where no expert is left out.
    for fields, paths in ((whole, [path for path in leaves if path not in biases]), (own, biases)):
        if not paths:
            continue
        honest = logits_of(fields, leaves)
        bound = rounding_bound("float32", fields.num_layers, float(np.abs(honest).max()))
        for path in paths:
            moved = leaves[path] + noise.normal(0.0, 0.3, leaves[path].shape).astype(np.float32)
            assert np.abs(logits_of(fields, {**leaves, path: moved}) - honest).max() > 10 * bound, path


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_no_element_is_without_a_gradient(tmp_path, family):
    """Of a sum of logits with drawn weights; a table's rows that no token names have none."""
    _, fields, leaves = decoder_of(tmp_path, family, covering(family)[0])
    decoder = from_leaves(fields, leaves, scan=False, quick=True)
    weights = np.random.default_rng(2).normal(0.0, 1.0, (*TOKENS.shape, fields.vocab_size)).astype(np.float32)

    def weighed(params):
        return jnp.sum(decoder.model.apply({"params": params}, TOKENS) * weights)

    with jax.default_matmul_precision(PRECISION):
        gradients = jax.jit(jax.grad(weighed), compiler_options=QUICK)(decoder.params)
    named = np.unique(TOKENS)
    for path, leaf in flatten_dict(dict(gradients), sep="/").items():
        if path.endswith(CORRECTION) or "/indexer/" in path:  # they choose, and a choice has no gradient
            assert not np.asarray(leaf).any()
            continue
        rows = np.asarray(leaf)[named] if path == "embed_tokens/embedding" and not fields.tie_embeddings else leaf
        assert np.asarray(rows != 0).all(), (path, float(np.asarray(rows == 0).mean()))
