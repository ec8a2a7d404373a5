"""Experts on disk: two stored forms, what is missing or mixed, depths past the last layer, biases in float32."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.parity.fixtures import draw_weights, write_checkpoint
from dewconv.parity.round_trip import compare_sources


def written(tmp_path, family, variant, name="source"):
    owner = find(family)
    return write_checkpoint(tmp_path / name, owner.variants[variant], owner)


def banks_of(path, out):
    return import_checkpoint(open_source(path), out)


def arrays(banks):
    found = {}
    for file in banks.headers:
        with safe_open(banks.path / file, "pt") as bank:
            found |= {(file, key): bank.get_tensor(key) for key in bank.keys()}  # noqa: SIM118
    return found


def tensors_of(path):
    return {name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()}


def rewritten(path, change):
    """The one-file checkpoint with its tensors changed."""
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("family", "single"),
    [
        ("qwen3_moe", "experts"),
        ("glm4_moe", "qk_norm"),
        ("glm4_moe_lite", "untied"),
        ("deepseek_v3", "untied"),
        ("deepseek_v32", "untied"),
        ("glm_moe_dsa", "untied"),
    ],
)
def test_both_forms_give_the_same_banks_and_come_back_in_their_own(tmp_path, family, single):
    found = {}
    for variant in (single, "fused"):
        path = written(tmp_path, family, variant, variant)
        banks = banks_of(path, tmp_path / f"banks-{variant}")
        found[variant] = arrays(banks)
        export_checkpoint(banks, tmp_path / f"back-{variant}")
        assert list(compare_sources(open_source(path), open_source(tmp_path / f"back-{variant}"))) == []
    names = {variant: set(load_file(tmp_path / variant / "model.safetensors")) for variant in found}
    assert "model.layers.1.mlp.experts.gate_up_proj" in names["fused"]
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in names[single]
    assert found[single].keys() == found["fused"].keys()
    assert all((one == found["fused"][key]).all() for key, one in found[single].items())


def test_a_missing_expert_is_named_with_its_layer(tmp_path):
    path = written(tmp_path, "qwen3_moe", "experts")
    gone = re.compile(r"layers\.1\.mlp\.experts\.2\.")
    rewritten(path, lambda tensors: {name: one for name, one in tensors.items() if not gone.search(name)})
    with pytest.raises(FindingsError, match=r"model\.layers\.1\.mlp\.experts\.2\.gate_proj\.weight"):
        banks_of(path, tmp_path / "banks")
    assert not (tmp_path / "banks").exists()


@pytest.mark.parametrize("kind", ["gate_up_proj", "down_proj"])
def test_a_mix_of_forms_in_one_layer_is_refused_naming_the_layer(tmp_path, kind):
    path, other = written(tmp_path, "qwen3_moe", "experts"), written(tmp_path, "qwen3_moe", "fused", "other")
    name = f"model.layers.2.mlp.experts.{kind}"
    extra = load_file(other / "model.safetensors")[name]
    rewritten(path, lambda tensors: {**tensors, name: extra})
    with pytest.raises(FindingsError, match=r"the experts of layer 2") as caught:
        banks_of(path, tmp_path / "banks")
    assert "one form" in str(caught.value)


def test_layers_may_differ_in_their_form(tmp_path):
    path, other = written(tmp_path, "qwen3_moe", "experts"), written(tmp_path, "qwen3_moe", "fused", "other")
    first = {n: t for n, t in load_file(other / "model.safetensors").items() if "layers.0.mlp.experts." in n}
    rewritten(path, lambda ts: {**{n: t for n, t in ts.items() if "layers.0.mlp.experts." not in n}, **first})
    mixed, whole = banks_of(path, tmp_path / "a"), banks_of(other, tmp_path / "b")
    assert all((one == arrays(whole)[key]).all() for key, one in arrays(mixed).items())
    export_checkpoint(mixed, tmp_path / "back")
    assert list(compare_sources(open_source(path), open_source(tmp_path / "back"))) == []


@pytest.mark.parametrize(("variant", "expected"), [("experts", True), ("unnormalised", False), ("norm_absent", False)])
def test_qwen3_moe_normalises_as_the_config_says(variant, expected):
    owner = find("qwen3_moe")
    assert owner.read(owner.variants[variant].config)[0].mixture.norm_topk_prob is expected


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"num_hidden_layers": 6, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({"num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, (1, 3)),
        ({"num_hidden_layers": 4}, (0, 1, 2, 3)),
    ],
)
def test_qwen3_moe_sparse_layers(changes, sparse):
    owner = find("qwen3_moe")
    fields, _ = owner.read({**owner.variants["experts"].config, **changes})
    assert fields.mixture.layers == sparse
    assert owner.read(owner.write(fields))[0] == fields


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_local_experts": 5}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("glm4_moe", {"n_group": 4}, "n_group"),
        ("glm4_moe", {"n_group": 6}, "n_group"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group"),
        ("glm4_moe", {"n_group": 3, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ],
)
def test_impossible_mixtures_are_refused_by_key(family, changes, key):
    owner = find(family)
    config = next(iter(owner.variants.values())).config
    with pytest.raises(FindingsError, match=key):
        owner.read({**config, **changes})


SIGMOID = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Families with a correction bias in their routers and prediction depths after their last layer."""


@pytest.mark.parametrize("family", SIGMOID)
def test_correction_biases_near_seven_keep_their_bits(tmp_path, family):
    path = written(tmp_path, family, "bias_seven")
    before = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = before[name].numpy()
    assert bias.dtype == np.float32
    assert 6.85 < bias.min() < bias.max() < 7.15
    assert (
        len(set(before[name].bfloat16().tolist())) < len(set(bias.tolist()))
        or (before[name].bfloat16().float() != before[name]).any()
    )
    wide = find(family).variants["bias_seven"].float32
    assert {str(one.dtype) for n, one in before.items() if not n.endswith(wide)} == {"torch.bfloat16"}
    export_checkpoint(banks_of(path, tmp_path / "banks"), tmp_path / "back")
    assert list(compare_sources(open_source(path), open_source(tmp_path / "back"))) == []
    after = load_file(tmp_path / "back" / "model.safetensors")[name].numpy()
    assert after.dtype == np.float32
    assert after.tobytes() == bias.tobytes()


@pytest.mark.parametrize("family", SIGMOID)
@pytest.mark.parametrize("depths", [1, 3])
def test_prediction_depths_that_share_a_shard_with_the_head_come_back(tmp_path, depths, family):
    owner = find(family)
    spec = owner.variants["depths"]
    spec = replace(spec, depths=depths, config={**spec.config, "num_nextn_predict_layers": depths})
    path = write_checkpoint(tmp_path / "source", spec, owner)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    ends = tuple(f"model.layers.{spec.config['num_hidden_layers'] + depth}." for depth in range(depths))
    beside = {name for name, file in index.items() if file == index["lm_head.weight"]}
    assert beside == {"lm_head.weight", *(name for name in index if name.startswith(ends))}
    banks = banks_of(path, tmp_path / "banks")
    assert set(banks.manifest.carried) == beside - {"lm_head.weight"}
    export_checkpoint(banks, tmp_path / "back")
    assert list(compare_sources(open_source(path), open_source(tmp_path / "back"))) == []
    # In other files, which have nothing to do with the source's: every tensor all the same.
    export_checkpoint(banks, tmp_path / "divided", max_shard_size="20kB")
    assert len(list((tmp_path / "divided").glob("*.safetensors"))) > 3
    held, divided = tensors_of(path), tensors_of(tmp_path / "divided")
    assert divided.keys() == held.keys()
    assert all(torch.equal(one, divided[name]) for name, one in held.items())


def test_depths_that_the_config_does_not_announce_are_refused(tmp_path):
    path = written(tmp_path, "glm4_moe", "depths")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(FindingsError, match=r"model\.layers\.4\."):
        banks_of(path, tmp_path / "banks")


def test_variants_of_a_seed_share_their_weights_across_forms():
    owner = find("qwen3_moe")
    single, fused = (draw_weights(owner.variants[v], owner) for v in ("experts", "fused"))
    both = fused["model.layers.0.mlp.experts.gate_up_proj"]
    assert (single["model.layers.0.mlp.experts.3.up_proj.weight"] == both[3, 18:]).all()
