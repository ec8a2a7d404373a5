"""A config-only directory of each release: its runs, its size, and what is carried, before any weight is there."""

import json
import shutil
from math import prod
from pathlib import Path

import pytest

from dewconv.converters.inspection import inspect_source
from dewconv.converters.source import open_source
from dewconv.families import find
from dewconv.parity.gates import close_config, close_names, released_configs, released_names

DATA = Path(__file__).parents[1] / "data"
FAMILIES = ("qwen3_moe", "olmo3", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def inspected(release, tmp_path):
    shutil.copy(DATA / "configs" / f"{release}.json", tmp_path / "config.json")
    return inspect_source(open_source(tmp_path))


@pytest.mark.parametrize(
    ("release", "billions", "runs"),
    [
        ("Qwen__Qwen3-30B-A3B", 30.5, [("layers_0_47", 48)]),
        ("Qwen__Qwen3-30B-A3B-FP8", 30.5, [("layers_0_47", 48)]),
        ("Qwen__Qwen3-235B-A22B-FP8", 235.1, [("layers_0_93", 94)]),
        ("zai-org__GLM-4-9B-0414", 9.4, [("layers_0_39", 40)]),
    ],
)
def test_a_plan_without_the_download(tmp_path, release, billions, runs):
    found = inspected(release, tmp_path)
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert [(run.bank, run.layers) for run in found.runs] == runs
    assert found.parameter_bytes == 2 * found.parameters
    assert found.problems == ()


def test_olmo3_runs_by_its_pattern_and_says_where_yarn_is(tmp_path):
    found = inspected("allenai__Olmo-3.1-32B-Instruct", tmp_path)
    assert found.parameters == pytest.approx(32.2e9, rel=0.005)
    assert [run.layers for run in found.runs] == [3, 1] * 16
    assert found.fields.kinds["full_attention"].yarn.factor == 8.0
    assert found.fields.kinds["sliding_attention"].yarn is None
    assert any("YaRN turns full_attention layers alone" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("release", "billions", "with_depth", "dense"),
    [("zai-org__GLM-4.5", 355, True, 3), ("zai-org__GLM-4.6", 355, True, 3), ("zai-org__GLM-4.5-Air", 106, False, 1)],
)
def test_glm_moe_counts(tmp_path, release, billions, with_depth, dense):
    """The published totals leave out the embedding and the head; GLM-4.5's 355B has the prediction depth in it,
    Air's 106B has not."""
    found = inspected(release, tmp_path)
    fields, config = found.fields, json.loads((tmp_path / "config.json").read_text())
    tables = 2 * fields.vocab_size * fields.emb_features
    depth = f"model.layers.{fields.num_layers}."
    names = released_names(find("glm4_moe"), DATA)[release]
    own = ("embed_tokens.weight", "shared_head.head.weight")
    carried = sum(prod(shape) for name, shape in names.items() if name.startswith(depth) and not name.endswith(own))
    assert found.parameters - tables + with_depth * carried == pytest.approx(billions * 1e9, rel=0.005)
    last = fields.num_layers - 1
    assert [(run.bank, run.layers) for run in found.runs] == [
        ("layers_0" if dense == 1 else f"layers_0_{dense - 1}", dense),
        (f"layers_{dense}_{last}", fields.num_layers - dense),
    ]
    assert config["num_nextn_predict_layers"] == 1
    assert found.notices == ()  # of what a config announces nothing is carried before a file holds it


@pytest.mark.parametrize(
    ("release", "billions", "dense", "depths"),
    [
        ("deepseek-ai__DeepSeek-V3", 671.0, 3, 1),
        ("moonshotai__Kimi-K2-Instruct", 1026.4, 1, 0),
        ("moonshotai__Kimi-K2.5", 1026.4, 1, 0),
    ],
)
def test_latent_attention_counts(tmp_path, release, billions, dense, depths):
    """V3's 671B are the decoder's alone, the embedding and the head with them; its 685B on disk have the prediction
    depth too. Kimi K2 is said to have 1T, 32B active: the total here is the sum of its published sizes,
    and K2.5's text half is as large."""
    found = inspected(release, tmp_path)
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert [(run.bank, run.layers) for run in found.runs] == [
        ("layers_0" if dense == 1 else f"layers_0_{dense - 1}", dense),
        (f"layers_{dense}_60", 61 - dense),
    ]
    names = released_names(find("deepseek_v3"), DATA)[release]
    apart = ("model.layers.61.", "vision_tower.", "mm_projector.")
    own = sum(prod(shape) for name, shape in names.items() if not name.startswith(apart))
    assert found.parameters == own
    assert sum(map(prod, names.values())) == pytest.approx((684.5e9 if depths else own), rel=0.005)
    assert found.notices == ()
    assert found.problems == ()


def test_glm_flash_counts(tmp_path):
    """ "30B" is the decoder, the embedding and the head with it; the 31B on disk have layer 47 too, whose own
    embedding and head are copies."""
    found = inspected("zai-org__GLM-4.7-Flash", tmp_path)
    assert found.parameters == pytest.approx(30e9, rel=0.005)
    assert [(run.bank, run.layers) for run in found.runs] == [("layers_0", 1), ("layers_1_46", 46)]
    names = released_names(find("glm4_moe_lite"), DATA)["zai-org__GLM-4.7-Flash"]
    depth = {name: shape for name, shape in names.items() if name.startswith("model.layers.47.")}
    assert found.parameters == sum(map(prod, names.values())) - sum(map(prod, depth.values()))
    assert sum(map(prod, names.values())) == pytest.approx(31.2e9, rel=0.005)
    assert found.notices == ()  # of what a config announces nothing is carried before a file holds it
    assert found.problems == ()


@pytest.mark.parametrize(
    ("family", "release", "billions", "on_disk", "tensors", "runs"),
    [
        ("deepseek_v32", "deepseek-ai__DeepSeek-V3.2", 671.9, 685.4, 46493, [3, 58]),
        ("glm_moe_dsa", "zai-org__GLM-5", 744, 754, 59870, [3, 75]),
        ("glm_moe_dsa", "zai-org__GLM-5.2", 744, 754, None, [2, 1, *(3, 1) * 18, 3]),
    ],
)
def test_sparse_attention_counts(tmp_path, family, release, billions, on_disk, tensors, runs):
    """V3.2's 671B and GLM-5's 744B are the decoder's alone, the embedding, the head and the indexers with them; 685B
    and 754B on disk have the prediction depth too. GLM-5.1 is published with 59870 tensors."""
    found = inspected(release, tmp_path)
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert [run.layers for run in found.runs] == runs
    names = released_names(find(family), DATA)[release]
    assert tensors in (None, len(names))
    depth = f"model.layers.{found.fields.num_layers}."
    assert found.parameters == sum(prod(shape) for name, shape in names.items() if not name.startswith(depth))
    assert sum(map(prod, names.values())) == pytest.approx(on_disk * 1e9, rel=0.005)
    assert found.notices == ()
    assert found.problems == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_released_configs_close(name):
    found = {
        release: close_config(find(name), config) for release, config in released_configs(find(name), DATA).items()
    }
    assert found
    assert not any(found.values()), found


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe", "olmo3", "glm4", "glm4_moe_lite", "deepseek_v3"])
def test_released_names_close(name):
    family = find(name)
    configs = released_configs(family, DATA)
    for release, tensors in released_names(family, DATA).items():
        assert close_names(family, configs[release], tensors) == []
