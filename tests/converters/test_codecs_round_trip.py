"""Quantised checkpoints there and back: every byte kept, and the values that `load` and a decoding import make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dewconv.converters import banks as banks_module
from dewconv.converters import plan as plan_module
from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.differences import differences, open_tensors
from dewconv.converters.exporting import export_checkpoint, plan_export
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.inspection import inspect_source
from dewconv.converters.leaves import read_banks
from dewconv.converters.loading import read_parameters
from dewconv.converters.plan import plan_import
from dewconv.converters.saving import save
from dewconv.converters.source import open_source
from dewconv.families.errors import ConversionError, FindingsError
from dewconv.families.qwen3_moe import FAMILY as QWEN3_MOE
from dewconv.families.registry import find

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BLOCK = (16, 8)
RECORD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8},
        }
    },
}


@pytest.fixture
def moe_family(monkeypatch):
    """qwen3_moe found by its model_type, registered or not."""

    def found(model_type):
        return QWEN3_MOE if model_type == "qwen3_moe" else find(model_type)

    for module in (plan_module, banks_module):
        monkeypatch.setattr(module, "find", found)


def scale_of(shape, dtype, seed, block=BLOCK):
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    generator = np.random.default_rng(seed)
    if dtype == E8M0:
        return generator.integers(110, 135, grid, np.uint8).view(E8M0)
    return generator.uniform(1e-3, 3, grid).astype(dtype)


def quantise(weights, chosen, dtype=F32, suffix="_scale_inv"):
    """Random FP8 codes and scales in place of the weights `chosen`."""
    result = {}
    for seed, (name, array) in enumerate(weights.items()):
        result[name] = array
        if chosen(name):
            codes = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
            result[name] = codes.view(E4M3)
            scale = name + suffix if suffix.startswith("_") else name.removesuffix(".weight") + suffix
            result[scale] = scale_of(array.shape, dtype, seed + 1000)
    return result


def values(weights, name, block=BLOCK):
    """What a weight decodes to, by numpy's whole arrays."""
    array = weights[name]
    if array.dtype != E4M3:
        return array
    stem = name.removesuffix(".weight")
    scale = next(weights[key] for key in (name + "_scale_inv", name + "_scale", stem + ".scale") if key in weights)
    scale = scale.astype(np.float32)
    if scale.size != 1:
        scale = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: array.shape[0], : array.shape[1]]
    with np.errstate(all="ignore"):
        return (array.astype(np.float32) * scale.reshape(scale.shape or (1, 1))).astype(BF16)


def bits(array):
    """As bits, every NaN of bfloat16 as one."""
    if array.dtype != BF16:
        return array.view(np.uint8)
    return np.where(np.isnan(array.astype(np.float32)), np.uint16(0x7FC0), array.view(np.uint16))


def same_trees(one, other):
    assert one.keys() == other.keys()
    for path, array in one.items():
        assert (array.dtype, array.shape) == (other[path].dtype, other[path].shape), path
        assert (bits(array) == bits(other[path])).all(), path


def projections(name, above=0):
    parts = name.split(".")
    return name.endswith("_proj.weight") and int(parts[parts.index("layers") + 1]) >= above


def fp8_checkpoint(tiny, path, above=0, shards=3, dtype=F32, suffix="_scale_inv", **changes):
    config = tiny.qwen3_config(quantization_config=RECORD, **changes)
    weights = quantise(tiny.weights_of(config), lambda name: projections(name, above), dtype, suffix)
    return tiny.write(path, config, weights, shards), weights


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [(F32, "_scale_inv"), (BF16, "_scale_inv"), (E8M0, ".scale")],
    ids=["float32", "bfloat16", "e8m0"],
)
def test_codes_and_scales_come_back_byte_for_byte(tiny, tmp_path, dtype, suffix):
    source, weights = fp8_checkpoint(tiny, tmp_path / "s", dtype=dtype, suffix=suffix)
    opened = open_source(source)
    name = "model.layers.1.mlp.up_proj"
    scale = f"{name}.weight{suffix}" if suffix.startswith("_") else name + suffix
    assert opened.tensors[name + ".weight"].file != opened.tensors[scale].file
    banks = import_checkpoint(opened, tmp_path / "b")
    plan = export_checkpoint(banks, tmp_path / "e")
    assert plan.exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    assert json.loads((tmp_path / "e" / "config.json").read_text())["quantization_config"] == RECORD
    assert not check_banks(banks)
    header = banks.headers["layers_0_2.safetensors"].entries
    assert (header["mlp/up_proj/kernel"].dtype, header["mlp/up_proj/kernel"].shape) == ("F8_E4M3", (3, 24, 28))
    assert header["mlp/up_proj/kernel:scale"].shape == (3, 3, 2)
    found = read_banks(banks)
    for layer in range(3):
        wanted = values(weights, f"model.layers.{layer}.mlp.up_proj.weight").T
        assert (bits(found["layers_0_2/mlp/up_proj/kernel"][layer]) == bits(wanted)).all()
    assert all(item.kind == "equal" for item in differences(open_tensors(tmp_path / "b"), open_tensors(source)))


def test_layers_of_one_run_may_be_stored_either_way(tiny, tmp_path):
    source, weights = fp8_checkpoint(tiny, tmp_path / "s", above=3, num_hidden_layers=5)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    keys = set(banks.headers["layers_0_4.safetensors"].entries)
    assert {f"mlp/up_proj/kernel@{layer}" for layer in range(5)} <= keys
    assert {key for key in keys if key.startswith("mlp/up_proj/kernel:")} == {
        "mlp/up_proj/kernel:scale@3",
        "mlp/up_proj/kernel:scale@4",
    }
    found = read_banks(banks)["layers_0_4/mlp/up_proj/kernel"]
    for layer in range(5):
        assert (bits(found[layer]) == bits(values(weights, f"model.layers.{layer}.mlp.up_proj.weight").T)).all()


def test_scales_of_two_dtypes_in_one_run(tiny, tmp_path):
    config = tiny.qwen3_config(quantization_config=RECORD)
    weights = quantise(tiny.weights_of(config), projections)
    name = "model.layers.2.mlp.up_proj.weight_scale_inv"
    weights[name] = weights[name].astype(BF16)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    found = read_banks(banks)["layers_0_2/mlp/up_proj/kernel"]
    for layer in range(3):
        assert (bits(found[layer]) == bits(values(weights, f"model.layers.{layer}.mlp.up_proj.weight").T)).all()


def test_kept_decoded_and_read_from_the_source_are_one_model(tiny, tmp_path):
    source, _ = fp8_checkpoint(tiny, tmp_path / "s", above=1)
    kept = import_checkpoint(open_source(source), tmp_path / "k")
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    same_trees(read_banks(kept), read_banks(decoded))
    same_trees(read_banks(kept), read_parameters(source)[1])
    assert kept.headers["layers_0_2.safetensors"].data_bytes < decoded.headers["layers_0_2.safetensors"].data_bytes
    assert (kept.manifest.quantized, decoded.manifest.quantized) == ("keep", "decode")
    assert kept.manifest.inexact == ()
    assert decoded.manifest.inexact == ("fp8 weights were decoded",)
    assert not decoded.manifest.coded


def test_a_decoded_export_is_a_plain_checkpoint(tiny, tmp_path):
    source, weights = fp8_checkpoint(tiny, tmp_path / "s")
    banks = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    plan = export_checkpoint(banks, tmp_path / "e")
    assert not plan.exact
    assert plan.notices == ("fp8 weights were decoded",)
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    wanted = json.loads((source / "config.json").read_text())
    del wanted["quantization_config"]
    assert config == wanted
    index = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_text())
    held = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors = load_file(tmp_path / "e" / shard)
        assert all(index["weight_map"][name] == shard for name in tensors)
        held |= tensors
    assert held.keys() == index["weight_map"].keys() == {name for name in weights if "scale" not in name}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in held.values())
    for name, array in held.items():
        assert (bits(array) == bits(values(weights, name))).all(), name
    again = open_source(tmp_path / "e")
    second = import_checkpoint(again, tmp_path / "b2")
    assert second.manifest.quantized is None
    same_trees(read_banks(second), read_banks(banks))


def test_a_cast_touches_neither_codes_nor_scales(tiny, tmp_path):
    source, weights = fp8_checkpoint(tiny, tmp_path / "s", dtype=BF16)
    banks = import_checkpoint(open_source(source), tmp_path / "b", dtype="float32")
    entries = banks.headers["layers_0_2.safetensors"].entries
    assert entries["mlp/up_proj/kernel"].dtype == "F8_E4M3"
    assert entries["mlp/up_proj/kernel:scale"].dtype == "BF16"
    assert banks.headers["top.safetensors"].entries["embed_tokens/embedding"].dtype == "F32"
    plan = plan_export(banks)
    held = {entry.name: entry.dtype for header in plan.headers.values() for entry in header.entries.values()}
    assert held["model.layers.0.mlp.up_proj.weight"] == "F8_E4M3"
    assert held["model.layers.0.mlp.up_proj.weight_scale_inv"] == "BF16"
    wide = import_checkpoint(open_source(source), tmp_path / "w", dtype="float32", quantized="decode")
    found = read_banks(wide)["layers_0_2/mlp/up_proj/kernel"]
    wanted = values(weights, "model.layers.1.mlp.up_proj.weight").T.astype(np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[1], wanted)


def modelopt(tiny, path, record_beside):
    record = {
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    changes = {} if record_beside else {"quantization_config": record}
    config = tiny.qwen3_config(**changes)
    weights = {}
    for seed, (name, array) in enumerate(tiny.weights_of(config).items()):
        weights[name] = array
        if projections(name):
            stem = name.removesuffix(".weight")
            weights[name] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8).view(E4M3)
            shape = () if seed % 2 else (1,)
            weights[f"{stem}.weight_scale"] = np.full(shape, 0.01 + 0.37 * seed, np.float32)
            weights[f"{stem}.input_scale"] = np.full((), 1.5, np.float32)
            if stem.endswith(("k_proj", "v_proj")):
                weights[f"{stem}.{stem[-6]}_scale"] = np.full((), 0.5, np.float32)
    beside = {"hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "FP8"}}).encode()}
    return tiny.write(path, config, weights, 2, side_files=beside if record_beside else {}), weights


@pytest.mark.parametrize("record_beside", [False, True], ids=["config", "hf_quant_config"])
def test_a_scale_a_tensor_and_activation_scales(tiny, tmp_path, record_beside):
    source, weights = modelopt(tiny, tmp_path / "s", record_beside)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    carried = {name for name in weights if name.endswith((".input_scale", ".k_scale", ".v_scale"))}
    assert len(carried) == 27
    assert set(banks.manifest.carried) == carried
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    same_trees(read_banks(banks), read_banks(decoded))
    for layer in range(3):
        wanted = values(weights, f"model.layers.{layer}.self_attn.o_proj.weight").T
        assert (bits(read_banks(banks)["layers_0_2/self_attn/o_proj/kernel"][layer]) == bits(wanted)).all()
    export_checkpoint(decoded, tmp_path / "de")
    names = {name for file in (tmp_path / "de").glob("*.safetensors") for name in load_file(file)}
    assert names == {name for name in weights if name.endswith("weight")}
    assert not (tmp_path / "de" / "hf_quant_config.json").exists()


def test_a_scale_a_channel(tiny, tmp_path):
    weights_scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    record = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights_scheme}},
    }
    config = tiny.qwen3_config(quantization_config=record)
    weights = {}
    for seed, (name, array) in enumerate(tiny.weights_of(config).items()):
        weights[name] = array
        if projections(name):
            weights[name] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8).view(E4M3)
            scale = np.random.default_rng(seed + 1).uniform(0.01, 2, (array.shape[0], 1))
            weights[name + "_scale"] = scale.astype(BF16)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    same_trees(read_banks(banks), read_parameters(source)[1])
    name = "model.layers.2.mlp.down_proj.weight"
    wanted = values(weights, name, (1, 28)).T
    assert (bits(read_banks(banks)["layers_0_2/mlp/down_proj/kernel"][2]) == bits(wanted)).all()


def moe_config(**changes):
    return QWEN3_MOE.variants["experts"].config | {"torch_dtype": "bfloat16", "num_hidden_layers": 2} | changes


def moe_weights(tiny, config, experts=True):
    """Hub names and shapes of a tiny Qwen3-MoE, written out by hand."""
    width, inner, count, dim, heads, kv = 24, 18, 6, 10, 4, 2
    shapes = {"model.embed_tokens.weight": (131, width), "model.norm.weight": (width,), "lm_head.weight": (131, width)}
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        shapes |= {here + f"{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {here + f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {
            here + "self_attn.q_proj.weight": (heads * dim, width),
            here + "self_attn.k_proj.weight": (kv * dim, width),
            here + "self_attn.v_proj.weight": (kv * dim, width),
            here + "self_attn.o_proj.weight": (width, heads * dim),
            here + "mlp.gate.weight": (count, width),
        }
        if experts:
            for expert in range(count):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    shape = (width, inner) if name == "down_proj" else (inner, width)
                    shapes[here + f"mlp.experts.{expert}.{name}.weight"] = shape
    return {name: tiny.random_bits(shape, BF16, seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.usefixtures("moe_family")
def test_experts_of_their_own_fp8_tensors_are_stacked(tiny, tmp_path):
    config = moe_config(quantization_config=RECORD)
    weights = quantise(moe_weights(tiny, config), lambda name: name.endswith("_proj.weight"))
    source = tiny.write(tmp_path / "s", config, weights, 3)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    entries = banks.headers["layers_0_1.safetensors"].entries
    assert entries["mlp/experts/gate_proj/kernel"].shape == (2, 6, 24, 18)
    assert entries["mlp/experts/gate_proj/kernel:scale"].shape == (2, 6, 3, 2)
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    found = read_banks(banks)
    same_trees(found, read_banks(decoded))
    for layer in range(2):
        for expert in range(6):
            wanted = values(weights, f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight").T
            assert (bits(found["layers_0_1/mlp/experts/down_proj/kernel"][layer, expert]) == bits(wanted)).all()


@pytest.mark.usefixtures("moe_family")
def test_fused_experts_whose_halves_cut_a_block(tiny, tmp_path):
    config = moe_config(quantization_config=RECORD)
    weights = moe_weights(tiny, config, experts=False)
    generator = np.random.default_rng(0)
    for layer in range(2):
        here = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (6, 36, 24)), ("down_proj", (6, 24, 18))):
            weights[here + name] = generator.integers(0, 256, shape, np.uint8).view(E4M3)
            grid = (6, -(-shape[1] // 16), -(-shape[2] // 8))
            weights[here + name + "_scale_inv"] = generator.uniform(0.1, 2, grid).astype(np.float32)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    found = read_banks(banks)
    same_trees(found, read_parameters(source)[1])
    codes, scale = (weights[f"model.layers.1.mlp.experts.gate_up_proj{end}"] for end in ("", "_scale_inv"))
    wide = np.repeat(np.repeat(scale, 16, 1), 8, 2)[:, :36]
    with np.errstate(all="ignore"):
        whole = (codes.astype(np.float32) * wide).astype(BF16)
    for name, half in (("gate_proj", whole[:, :18]), ("up_proj", whole[:, 18:])):
        assert (bits(found[f"layers_0_1/mlp/experts/{name}/kernel"][1]) == bits(half.transpose(0, 2, 1))).all()


def int4_weights(tiny, config, inner=16):
    """Experts packed: 24 and 16 columns, in words of eight and groups of eight."""
    weights, generator = moe_weights(tiny, config, experts=False), np.random.default_rng(3)
    for layer in range(2):
        for expert in range(6):
            for name in ("gate_proj", "up_proj", "down_proj"):
                rows, columns = (24, inner) if name == "down_proj" else (inner, 24)
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                words = generator.integers(-(2**31), 2**31, (rows, columns // 8)).astype(np.int32)
                weights[stem + "_packed"] = words
                weights[stem + "_scale"] = generator.uniform(-1, 1, (rows, columns // 8)).astype(BF16)
                weights[stem + "_shape"] = np.array([rows, columns], np.int32)
    return weights


def unpacked(weights, stem):
    words, scale = weights[stem + "_packed"], weights[stem + "_scale"].astype(np.float32)
    codes = np.stack([(words >> 4 * k) & 15 for k in range(8)], -1).reshape(words.shape[0], -1)
    return ((codes - 8).astype(np.float32) * np.repeat(scale, 8, 1)).astype(BF16)


@pytest.mark.usefixtures("moe_family")
def test_packed_experts(tiny, tmp_path):
    config = moe_config(quantization_config=INT4, moe_intermediate_size=16)
    weights = int4_weights(tiny, config)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    opened = open_source(source)
    stem = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert opened.tensors[stem + "_packed"].file != opened.tensors[stem + "_scale"].file
    banks = import_checkpoint(opened, tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    entries = banks.headers["layers_0_1.safetensors"].entries
    assert (entries["mlp/experts/down_proj/kernel"].dtype, entries["mlp/experts/down_proj/kernel"].shape) == (
        "I32",
        (2, 6, 2, 24),
    )
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    found = read_banks(banks)
    same_trees(found, read_banks(decoded))
    same_trees(found, read_parameters(source)[1])
    for name in ("gate_proj", "down_proj"):
        wanted = unpacked(weights, f"model.layers.1.mlp.experts.4.{name}.weight").T
        assert (found[f"layers_0_1/mlp/experts/{name}/kernel"][1, 4] == wanted).all()
    export_checkpoint(decoded, tmp_path / "de")
    held = {}
    for file in (tmp_path / "de").glob("*.safetensors"):
        held |= load_file(file)
    assert (held[stem] == unpacked(weights, stem)).all()
    assert not [name for name in held if "packed" in name or "weight_" in name]
    index = json.loads((tmp_path / "de" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == held.keys()


@pytest.mark.usefixtures("moe_family")
def test_a_shape_recorded_wrong_is_refused(tiny, tmp_path):
    config = moe_config(quantization_config=INT4, moe_intermediate_size=16)
    weights = int4_weights(tiny, config)
    name = "model.layers.1.mlp.experts.2.up_proj.weight_shape"
    weights[name] = np.array([24, 16], np.int32)
    source = tiny.write(tmp_path / "s", config, weights)
    with pytest.raises(FindingsError, match=r"up_proj\.weight_shape: found \[24, 16\], needed \[16, 24\]"):
        import_checkpoint(open_source(source), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_quantised_wrapper_and_its_text_half(tiny, tmp_path):
    listed = ["language_model.lm_head", "vision_tower", "language_model.model.layers.0.mlp.up_proj"]
    config = tiny.gemma3_wrapper_config(quantization_config={**RECORD, "modules_to_not_convert": listed})
    plain = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
    # One linear stays as it is, and is listed under the wrapper's prefix alone.
    kept = "language_model.model.layers.0.mlp.up_proj.weight"
    weights = quantise(plain, lambda name: name != kept and name.endswith("_proj.weight"))
    source = tiny.write(tmp_path / "s", config, weights, 3)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    export_checkpoint(banks, tmp_path / "t", text_only=True)
    half = open_source(tmp_path / "t")
    record = half.config["quantization_config"]
    assert record == {**RECORD, "modules_to_not_convert": ["lm_head", "vision_tower", "model.layers.0.mlp.up_proj"]}
    again = import_checkpoint(half, tmp_path / "b2")
    same_trees(read_banks(again), read_banks(banks))
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode", text_only=True)
    same_trees(read_banks(decoded), read_banks(banks))
    export_checkpoint(decoded, tmp_path / "dt")
    assert "quantization_config" not in (tmp_path / "dt" / "config.json").read_text()


def test_a_tied_head_on_disk_twice(tiny, tmp_path):
    config = tiny.qwen3_config(quantization_config=RECORD, tie_word_embeddings=True)
    weights = quantise(tiny.weights_of(config), lambda name: name.endswith(("_proj.weight", "embed_tokens.weight")))
    for end in ("", "_scale_inv"):
        weights["lm_head.weight" + end] = weights["model.embed_tokens.weight" + end]
    source = tiny.write(tmp_path / "s", config, weights, 2)
    banks = import_checkpoint(open_source(source), tmp_path / "b")
    assert banks.manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert export_checkpoint(banks, tmp_path / "e").exact
    assert tiny.files_of(tmp_path / "e") == tiny.files_of(source)
    decoded = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    export_checkpoint(decoded, tmp_path / "de")
    held = {name: array for file in (tmp_path / "de").glob("*.safetensors") for name, array in load_file(file).items()}
    assert (bits(held["lm_head.weight"]) == bits(values(weights, "model.embed_tokens.weight"))).all()
    weights["lm_head.weight_scale_inv"] = weights["lm_head.weight_scale_inv"] * 2
    other = tiny.write(tmp_path / "s2", config, weights, 2)
    banks = import_checkpoint(open_source(other), tmp_path / "b3")
    assert not banks.manifest.aliases
    assert "lm_head/kernel:scale" in banks.headers["top.safetensors"].entries
    assert export_checkpoint(banks, tmp_path / "e3").exact
    assert tiny.files_of(tmp_path / "e3") == tiny.files_of(other)


def test_everything_that_does_not_close_is_told_at_once(tiny, tmp_path):
    config = tiny.qwen3_config(quantization_config=RECORD, surprising_key=1)
    weights = quantise(tiny.weights_of(config), projections)
    del weights["model.layers.0.mlp.up_proj.weight_scale_inv"]
    weights["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    weights[name] = np.ascontiguousarray(weights[name].T)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    with pytest.raises(FindingsError) as caught:
        plan_import(open_source(source))
    text = str(caught.value)
    for needed in (
        "config key 'surprising_key'",
        "tensor model.layers.0.mlp.up_proj.weight: found F8_E4M3 with no scale",
        "tensor model.norm.weight: found dtype BF16 beside its scale model.norm.weight_scale_inv",
        f"tensor {name}: found shape [4, 2], needed shape [2, 4]",
    ):
        assert needed in text, text
    # The norm's scale is told twice: it has no codes, and no rule reads it.
    assert len(caught.value.findings) == 5
    del config["surprising_key"]
    (source / "config.json").write_text(json.dumps(config))
    inspection = inspect_source(open_source(source))
    assert any("up_proj.weight: found F8_E4M3 with no scale" in line for line in inspection.problems)


@pytest.mark.usefixtures("moe_family")
def test_one_expert_stored_otherwise_is_kept_only_decoded(tiny, tmp_path):
    config = moe_config(quantization_config=RECORD)
    plain = "model.layers.1.mlp.experts.3.up_proj.weight"
    weights = quantise(moe_weights(tiny, config), lambda name: name.endswith("_proj.weight") and name != plain)
    source = tiny.write(tmp_path / "s", config, weights, 2)
    with pytest.raises(FindingsError, match=r"F8_E4M3 x F32 .* and BF16 \(model\.layers\.1\.mlp\.experts\.3"):
        plan_import(open_source(source))
    assert any("BF16 (model.layers.1.mlp.experts.3" in line for line in inspect_source(open_source(source)).problems)
    banks = import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    found = read_banks(banks)["layers_0_1/mlp/experts/up_proj/kernel"][1]
    for expert in range(6):
        wanted = values(weights, f"model.layers.1.mlp.experts.{expert}.up_proj.weight").T
        assert (bits(found[expert]) == bits(wanted)).all()


def test_modules_listed_and_stored_in_fp8_are_told(tiny, tmp_path):
    config = tiny.qwen3_config(quantization_config={**RECORD, "modules_to_not_convert": ["model.layers.1.mlp"]})
    weights = quantise(tiny.weights_of(config), projections)
    plan = plan_import(open_source(tiny.write(tmp_path / "s", config, weights)))
    (notice,) = [text for text in plan.notices if "FP8" in text]
    assert notice.startswith("model.layers.1.mlp.down_proj.weight and 2 more: stored in FP8, and listed")


def test_quantised_must_be_kept_or_decoded(tiny, tmp_path):
    source, _ = fp8_checkpoint(tiny, tmp_path / "s")
    with pytest.raises(ConversionError, match="not one of keep, decode"):
        plan_import(open_source(source), quantized="maybe")


@pytest.mark.parametrize("name", ["Qwen__Qwen3-32B-FP8", "Qwen__Qwen3-32B-FP8-Static-PerTensor"])
def test_released_fp8_configs_close(tmp_path, name):
    (tmp_path / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    found = inspect_source(open_source(tmp_path))
    assert found.problems == ()
    assert found.fields is not None
    assert abs(found.parameters / 32.8e9 - 1) < 0.005


def test_what_load_gives_is_saved_and_exported_decoded(tiny, tmp_path):
    source, weights = fp8_checkpoint(tiny, tmp_path / "s", above=1)
    kept = import_checkpoint(open_source(source), tmp_path / "k")
    tree = read_banks(kept)
    nested: dict = {}
    for path, array in tree.items():
        node = nested
        *parents, last = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    for number, like in enumerate((kept, source)):
        saved = save(tmp_path / f"n{number}", None, nested, like)
        assert saved.manifest.quantized == "decode"
        same_trees(read_banks(saved), tree)
        export_checkpoint(saved, tmp_path / f"o{number}")
        held = {}
        for file in (tmp_path / f"o{number}").glob("*.safetensors"):
            held |= load_file(file)
        assert held.keys() == {name for name in weights if "scale" not in name}
        for name, array in held.items():
            assert (bits(array) == bits(values(weights, name))).all(), name
        assert "quantization_config" not in (tmp_path / f"o{number}" / "config.json").read_text()


def test_load_decodes(tiny, tmp_path):
    jax = pytest.importorskip("jax")
    import dewconv

    source, _ = fp8_checkpoint(tiny, tmp_path / "s", above=1)
    import_checkpoint(open_source(source), tmp_path / "k")
    import_checkpoint(open_source(source), tmp_path / "d", quantized="decode")
    trees = [dewconv.load(tmp_path / name)[1] for name in ("k", "d", "s")]
    wide = dewconv.load(tmp_path / "k", dtype="float32")[1]
    for other in trees[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(bits(np.asarray(a)), bits(np.asarray(b))), trees[0], other
        )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b)), trees[0], wide)


def test_the_command_keeps_or_decodes(tiny, tmp_path):
    source, _ = fp8_checkpoint(tiny, tmp_path / "s")
    command = [sys.executable, "-m", "dewconv", "import", str(source), "--unverified", "--json"]
    for mode, exact in (("keep", True), ("decode", False)):
        out = tmp_path / mode
        result = subprocess.run([*command, str(out), "--quantized", mode], check=True, capture_output=True, text=True)
        assert json.loads(result.stdout)["exact"] is exact
        assert open_banks(out).manifest.quantized == mode
    result = subprocess.run([*command, "--dry-run"], check=True, capture_output=True, text=True)
    plan = json.loads(result.stdout)
    assert (plan["codec"], plan["quantized"]) == ("fp8", "keep")


MEMORY = """
import sys
from dewconv.converters.source import open_source
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.exporting import export_checkpoint

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

before, peak = anonymous(), 0
def watch(*event):
    global peak
    peak = max(peak, anonymous() - before)
source, banks, out, mode = sys.argv[1:]
made = import_checkpoint(open_source(source), banks, quantized=mode, progress=watch)
export_checkpoint(made, out, progress=watch)
print(peak)
"""


@pytest.mark.parametrize("mode", ["keep", "decode"])
def test_anonymous_memory_does_not_grow_with_the_tensors(tiny, tmp_path, mode):
    peaks = []
    for inner in (1024, 12288):
        config = tiny.qwen3_config(
            num_hidden_layers=1, hidden_size=1280, intermediate_size=inner, quantization_config=RECORD
        )
        config["quantization_config"] = {**RECORD, "weight_block_size": [128, 128]}
        shapes = {
            "self_attn.q_proj.weight": (40, 1280),
            "self_attn.k_proj.weight": (20, 1280),
            "self_attn.v_proj.weight": (20, 1280),
            "self_attn.o_proj.weight": (1280, 40),
            "mlp.gate_proj.weight": (inner, 1280),
            "mlp.up_proj.weight": (inner, 1280),
            "mlp.down_proj.weight": (1280, inner),
        }
        norms = {"input_layernorm.weight": 1280, "post_attention_layernorm.weight": 1280}
        norms |= {"self_attn.q_norm.weight": 10, "self_attn.k_norm.weight": 10}
        weights = {
            "model.embed_tokens.weight": np.ones((131, 1280), BF16),
            "lm_head.weight": np.ones((131, 1280), BF16),
            "model.norm.weight": np.ones(1280, BF16),
        }
        weights |= {f"model.layers.0.{name}": np.ones(size, BF16) for name, size in norms.items()}
        for name, shape in shapes.items():
            weights[f"model.layers.0.{name}"] = np.full(shape, 0x38, np.uint8).view(E4M3)
            weights[f"model.layers.0.{name}_scale_inv"] = scale_of(shape, F32, 1, (128, 128))
        path = tiny.write(tmp_path / str(inner), config, weights)
        arguments = [str(path), str(tmp_path / f"{inner}-b"), str(tmp_path / f"{inner}-e"), mode]
        result = subprocess.run([sys.executable, "-c", MEMORY, *arguments], check=True, capture_output=True, text=True)
        peaks.append(int(result.stdout))
    decoded = 2 * sum(array.size for name, array in weights.items() if name.endswith("_proj.weight"))
    assert decoded > 90e6
    assert peaks[1] < peaks[0] + decoded / 4
