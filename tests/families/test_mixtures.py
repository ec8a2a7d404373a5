"""Which layers are sparse, by either key of a config or both."""

import pytest

from dewconv.dew_core.fields import DecoderFields
from dewconv.families.fields import Unreadable
from dewconv.families.mixtures import FIRST_DENSE, MLP_TYPES, sigmoid_experts

SIZES = {
    "experts": 8,
    "chosen": 2,
    "groups": 1,
    "kept": 1,
    "width": 16,
    "shared": 1,
    "normalised": True,
    "scaling": 1.5,
    "layers": 5,
}
LISTED, NUMBERED, BOTH = (MLP_TYPES,), (FIRST_DENSE,), (MLP_TYPES, FIRST_DENSE)
MIXED = ["sparse", "dense", "dense", "sparse", "dense"]


def line(said_by, first_dense=1):
    return sigmoid_experts(**SIZES, first_dense=first_dense, said_by=said_by)


def sparse(said_by, config, first_dense=1):
    return line(said_by, first_dense).read(config)["mixture"].layers


@pytest.mark.parametrize(
    ("said_by", "config", "layers"),
    [
        (NUMBERED, {}, (1, 2, 3, 4)),
        (NUMBERED, {FIRST_DENSE: 3}, (3, 4)),
        (LISTED, {}, (1, 2, 3, 4)),
        (LISTED, {MLP_TYPES: None}, (1, 2, 3, 4)),
        (LISTED, {FIRST_DENSE: 1}, (1, 2, 3, 4)),
        (LISTED, {"num_hidden_layers": 1, FIRST_DENSE: 3}, ()),
        (LISTED, {MLP_TYPES: MIXED}, (0, 3)),
        (LISTED, {MLP_TYPES: MIXED, FIRST_DENSE: 3}, (0, 3)),
        (BOTH, {}, (1, 2, 3, 4)),
        (BOTH, {FIRST_DENSE: 3}, (3, 4)),
        (BOTH, {FIRST_DENSE: 9}, ()),
        (BOTH, {MLP_TYPES: MIXED, FIRST_DENSE: 3}, (0, 3)),
        (BOTH, {MLP_TYPES: None, FIRST_DENSE: 3}, (3, 4)),
        (BOTH, {MLP_TYPES: ["dense"] * 5}, ()),
    ],
)
def test_the_strongest_key_says_which_layers_are_sparse(said_by, config, layers):
    """transformers 5.24 `DeepseekV3Config`, `Glm4MoeLiteConfig` and `GlmMoeDsaConfig`."""
    assert sparse(said_by, config) == layers
    depth = config.get("num_hidden_layers", 5)
    fields = DecoderFields(vocab_size=8, num_layers=depth, mixture=line(said_by).read(config)["mixture"])
    written = line(said_by).write(fields)
    assert (MLP_TYPES in written) is (said_by != NUMBERED)
    assert sparse(said_by, {"num_hidden_layers": depth, **written}) == layers


@pytest.mark.parametrize(
    ("config", "key", "found"),
    [
        ({MLP_TYPES: MIXED[:4]}, MLP_TYPES, "5 entries"),
        ({MLP_TYPES: "sparse"}, MLP_TYPES, "a list"),
        ({MLP_TYPES: ["sparse"] * 4 + ["hash_moe"]}, MLP_TYPES, "dense or sparse"),
        ({FIRST_DENSE: 3}, FIRST_DENSE, "does not read it"),
        ({FIRST_DENSE: -1}, FIRST_DENSE, "whole number"),
    ],
)
def test_what_the_class_does_not_compute_is_refused(config, key, found):
    """`Glm4MoeLiteConfig` makes the first layer dense whatever `first_k_dense_replace` says."""
    with pytest.raises(Unreadable) as caught:
        sparse(LISTED, config)
    assert key in caught.value.finding.what
    assert found in caught.value.finding.needed


def test_a_list_is_no_key_of_a_class_that_has_none():
    assert MLP_TYPES not in line(NUMBERED).keys
    assert {MLP_TYPES, FIRST_DENSE} <= set(line(LISTED).keys) & set(line(BOTH).keys)
