"""DeepSeek V3 in its stored forms: FP8 blocks that matrices cut, prediction depths in FP8, layers told apart."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.loading import load
from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.parity.decoders import layer_leaves
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.references import load_reference
from dewconv.parity.round_trip import compare_sources

FAMILY = find("deepseek_v3")
SCALE = "_scale_inv"
DEPTHS = ("model.layers.3.", "model.layers.4.", "model.layers.5.")


def written(path, variant):
    return write_checkpoint(path, FAMILY.variants[variant], FAMILY)


def tensors_of(path):
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def without(path, *names):
    """The checkpoint with some of its tensors left out of files and index."""
    for file in path.glob("*.safetensors"):
        held = load_file(file)
        save_file({name: one for name, one in held.items() if name not in names}, file, metadata={"format": "pt"})
    for file in path.glob("*.index.json"):
        index = json.loads(file.read_text())
        index["weight_map"] = {name: at for name, at in index["weight_map"].items() if name not in names}
        file.write_text(json.dumps({**index, "metadata": {}}))
    return path


def by_definition(held, name):
    """code * scale in float32, a scale for each block of 128 x 128, rounded once to bfloat16."""
    codes = held[name].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rows, columns = np.indices(codes.shape)
    scales = held[name + SCALE].numpy()[rows // 128, columns // 128]
    return (codes * scales).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("quantized", ["keep", "decode"])
def test_matrices_of_cut_blocks_decode_by_the_definition(tmp_path, quantized):
    """fp8 12: q_a_proj is [200, 136]; kv_a_proj_with_mqa, as in the release, is no whole number of blocks."""
    path = written(tmp_path / "source", "fp8")
    held = tensors_of(path)
    assert tuple(held["model.layers.0.self_attn.q_a_proj.weight"].shape) == (200, 136)
    banks = import_checkpoint(open_source(path), tmp_path / "banks", quantized=quantized)
    stored = {entry.dtype for header in banks.headers.values() for entry in header.entries.values()}
    assert ("F8_E4M3" in stored) is (quantized == "keep")
    leaves = layer_leaves(plan_import(open_source(path)).fields, load(tmp_path / "banks", dtype="float32")[1]["params"])
    coded = [name for name in held if name + SCALE in held]
    assert len(coded) == 3 * 5 + 3 + 2 * (6 * 3 + 3)
    for name in coded:
        leaf = name.removeprefix("model.layers.").removesuffix(".weight")
        layer, _, below = leaf.partition(".")
        parts = below.split(".")
        if "experts" in parts:
            found = leaves[f"layers_{layer}/mlp/experts/{parts[-1]}/kernel"][int(parts[2])]
        else:
            found = leaves[f"layers_{layer}/{'/'.join(parts)}/kernel"]
        assert np.array_equal(found, by_definition(held, name).T), name


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (
            "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv",
            r"experts\.3\.up_proj\.weight: found F8_E4M3 with no",
        ),
        ("model.layers.2.self_attn.kv_b_proj.weight", r"kv_b_proj\.weight: found nothing beside its scale"),
    ],
)
def test_a_scale_or_codes_alone_are_refused(tmp_path, gone, said):
    path = without(written(tmp_path / "source", "fp8"), gone)
    with pytest.raises(FindingsError, match=said):
        import_checkpoint(open_source(path), tmp_path / "banks")
    assert not (tmp_path / "banks").exists()


def test_depths_in_fp8_share_a_file_with_the_head_and_come_back(tmp_path):
    """mtp-shard 5, with three depths whose codes and scales are carried as they are."""
    path = written(tmp_path / "source", "fp8_depths")
    source = open_source(path)
    files = {name: item.file for name, item in source.tensors.items()}
    depths = {name for name in files if name.startswith(DEPTHS)}
    assert {files[name] for name in depths} == {files["lm_head.weight"]}
    assert {source.tensors[name].dtype for name in depths} == {"F8_E4M3", "F32", "BF16"}
    banks = import_checkpoint(source, tmp_path / "banks")
    assert set(banks.manifest.carried) == depths
    assert export_checkpoint(banks, tmp_path / "back").exact
    assert list(compare_sources(source, open_source(tmp_path / "back"))) == []


def test_decoded_depths_are_plain_and_load_in_transformers(tmp_path):
    path = written(tmp_path / "source", "fp8_depths")
    held = tensors_of(path)
    banks = import_checkpoint(open_source(path), tmp_path / "banks", quantized="decode")
    export_checkpoint(banks, tmp_path / "plain")
    found, config = tensors_of(tmp_path / "plain"), json.loads((tmp_path / "plain" / "config.json").read_text())
    assert found.keys() == {name for name in held if not name.endswith(SCALE)}
    for name in ("model.layers.4.mlp.experts.5.down_proj.weight", "model.layers.5.self_attn.q_a_proj.weight"):
        assert found[name].dtype == torch.bfloat16
        assert np.array_equal(found[name].float().numpy(), by_definition(held, name))
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 3
    load_reference(tmp_path / "plain", FAMILY, config, "bfloat16")


def test_what_is_not_converted_is_what_its_header_says(tmp_path):
    """fp8-config 72: the list of modules decides nothing, and is told where it and the file disagree."""
    path = written(tmp_path / "source", "fp8_depths")
    plan = plan_import(open_source(path))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not plan.tensors[name].quantised
    assert plan.tensors[name.replace(".1.", ".2.")].quantised
    assert not [notice for notice in plan.notices if "listed as not converted" in notice]
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.2.self_attn.o_proj"]
    (path / "config.json").write_text(json.dumps(config))
    again = plan_import(open_source(path))
    assert [(t.name, t.format, t.grains) for t in again.tensors.values()] == [
        (t.name, t.format, t.grains) for t in plan.tensors.values()
    ]
    (notice,) = [notice for notice in again.notices if "listed as not converted" in notice]
    assert "model.layers.2.self_attn.o_proj.weight" in notice


def test_scales_of_v31_are_powers_of_two(tmp_path):
    """`scale_fmt: ue8m0`: float32 on disk all the same."""
    held = tensors_of(written(tmp_path / "source", "fp8_depths"))
    scales = torch.cat([tensor.reshape(-1) for name, tensor in held.items() if name.endswith(SCALE)])
    assert scales.dtype == torch.float32
    assert len(scales.unique()) > 3
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))


def test_layers_keep_their_numbers_past_nine(tmp_path):
    """moe-dense 47: a dense run, then a sparse one, in the order of numbers and not of names."""
    path = written(tmp_path / "source", "deep")
    for file in path.glob("*.safetensors"):
        held = load_file(file)
        for name in held:
            if name.endswith("input_layernorm.weight"):
                held[name] = torch.full_like(held[name], 1.0 + int(name.split(".")[2]) / 8)
        save_file(held, file, metadata={"format": "pt"})
    source = open_source(path)
    banks = import_checkpoint(source, tmp_path / "banks")
    assert {"layers_0_1.safetensors", "layers_2_12.safetensors"} <= set(banks.headers)
    leaves = layer_leaves(banks.manifest.fields, load(tmp_path / "banks", dtype="float32")[1]["params"])
    found = [float(leaves[f"layers_{layer}/input_layernorm/scale"][0]) for layer in range(13)]
    assert found == [1.0 + layer / 8 for layer in range(13)]
    export_checkpoint(banks, tmp_path / "back")
    assert list(compare_sources(source, open_source(tmp_path / "back"))) == []
