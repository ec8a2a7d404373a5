from pathlib import Path

import pytest

from dewconv.families import families, find
from dewconv.parity.gates import close_config, close_names, released_configs, released_names

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_released_configs_close(family):
    owner = find(family)
    configs = released_configs(owner, DATA)
    assert configs
    assert {name: close_config(owner, config) for name, config in configs.items()} == {name: [] for name in configs}


def test_an_unread_key_does_not_close():
    owner = find("qwen3")
    config = released_configs(owner, DATA)["Qwen__Qwen3-0.6B"]
    assert any("novel_key" in line for line in close_config(owner, {**config, "novel_key": 1}))


@pytest.mark.parametrize(
    ("family", "release"),
    [("qwen3", "Qwen__Qwen3-0.6B"), ("gemma3", "google__gemma-3-270m"), ("gemma3", "google__gemma-3-4b-it")],
)
def test_released_names_close_three_ways(family, release):
    owner = find(family)
    config = released_configs(owner, DATA)[release]
    tensors = released_names(owner, DATA)[release]
    assert close_names(owner, config, tensors) == []
    missing = dict(tensors)
    name = next(name for name in missing if name.endswith("layers.1.self_attn.k_norm.weight"))
    del missing[name]
    assert any(name in line for line in close_names(owner, config, missing))
    assert any("odd.weight" in line for line in close_names(owner, config, {**tensors, "odd.weight": (3,)}))
