"""What is exported is a checkpoint to transformers: `from_pretrained(directory)`, asked for nothing else."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import dewconv
from dewconv.converters.loading import read_parameters
from dewconv.converters.trees import nested
from dewconv.families import find
from dewconv.parity import write_checkpoint

LOAD = """
import hashlib, json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

told = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    whole = hasattr(AutoConfig.from_pretrained(path), "text_config")
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model, info = kind.from_pretrained(path, output_loading_info=True)
    digest = hashlib.sha256()
    head = {"head": model.get_output_embeddings().weight}
    for name, tensor in sorted((model.get_decoder().state_dict() | head).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    told[path.name] = {
        "wrong": {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")},
        "class": type(model).__name__,
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "decoder": digest.hexdigest(),
    }
print(json.dumps(told))
"""


SHARDS = {"max_shard_size": "20kB"}
HALF = {"text_only": True}
TUNED = {"tuned": True}
"""Weights that `save` was given: the checkpoint's, each twice as large."""
EXPORTS = {
    "qwen3-tied": ("qwen3", "tied", {}),
    "qwen3-shards": ("qwen3", "untied", SHARDS),
    "qwen3-bfloat16": ("qwen3", "untied", {"dtype": "bfloat16"}),
    "gemma3-text": ("gemma3", "text", {}),
    "gemma3-hub-whole": ("gemma3", "wrapper_hub", {}),
    "gemma3-hub-text": ("gemma3", "wrapper_hub", HALF),
    "gemma3-saved-whole": ("gemma3", "wrapper_saved", {}),
    "gemma3-saved-text": ("gemma3", "wrapper_saved", HALF),
    "olmo3": ("olmo3", "yarn", SHARDS),
    "glm4": ("glm4", "biases", SHARDS),
    "qwen3_moe-single": ("qwen3_moe", "experts", SHARDS),
    "qwen3_moe-fused": ("qwen3_moe", "fused", SHARDS),
    "glm4_moe-single": ("glm4_moe", "qk_norm", SHARDS),
    "glm4_moe-bias": ("glm4_moe", "bias_seven", SHARDS),
    "gemma3-tuned": ("gemma3", "wrapper_hub", TUNED),
    "qwen3_moe-tuned": ("qwen3_moe", "fused", TUNED),
    "glm4_moe-tuned": ("glm4_moe", "bias_seven", TUNED),
}
"""directory -> family, variant, and how its banks are exported: other shards, another dtype, the text half, other
weights."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    where = tmp_path_factory.mktemp("reload")
    out, banks = where / "out", {}
    out.mkdir()
    for name, (family, variant, options) in EXPORTS.items():
        owner, source = find(family), out / f"source-{family}-{variant}"
        if source not in banks:
            write_checkpoint(source, owner.variants[variant], owner)
            banks[source] = dewconv.import_checkpoint(source, where / source.name, unverified=True)
        held = banks[source]
        if options is TUNED:
            leaves = {path: array * 2 for path, array in read_parameters(held.path)[1].items()}
            held = dewconv.save(where / name, None, nested(leaves), held)
        dewconv.export_checkpoint(held, out / name, **{key: value for key, value in options.items() if key != "tuned"})
    done = subprocess.run([sys.executable, "-c", LOAD, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", EXPORTS)
def test_nothing_is_missing_unexpected_or_of_another_shape(told, name):
    out, found = told
    one = found[name]
    assert one["wrong"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    assert one["class"] == json.loads((out / name / "config.json").read_text())["architectures"][0]
    family, variant, options = EXPORTS[name]
    # The same weights in other files are the same model, bit for bit; a cast is another.
    same = one["decoder"] == found[f"source-{family}-{variant}"]["decoder"]
    assert same is not bool({"dtype", "tuned"} & options.keys())


def test_a_text_half_is_the_wrappers_decoder(told):
    _, found = told
    for spelling in ("hub", "saved"):
        whole, half = found[f"gemma3-{spelling}-whole"], found[f"gemma3-{spelling}-text"]
        assert whole["class"] == "Gemma3ForConditionalGeneration"
        assert half["class"] == "Gemma3ForCausalLM"
        assert half["decoder"] == whole["decoder"]


def test_tied_heads_come_back_tied_without_a_tensor(told):
    out, found = told
    for name in ("qwen3-tied", "gemma3-text", "gemma3-hub-whole", "gemma3-hub-text"):
        assert found[name]["tied"], name
        for file in (out / name).glob("*.safetensors"):
            assert not any("lm_head" in tensor for tensor in load_file(file))
    assert not found["qwen3-shards"]["tied"]


def test_changed_weights_keep_names_shapes_and_dtypes(told):
    out, _ = told
    for name, (family, variant, options) in EXPORTS.items():
        if options is not TUNED:
            continue
        before = load_file(out / f"source-{family}-{variant}" / "model.safetensors")
        after = load_file(out / name / "model.safetensors")
        assert after.keys() == before.keys()
        for tensor, value in before.items():
            carried = tensor.startswith(("vision_tower.", "multi_modal_projector."))
            assert torch.equal(after[tensor], value if carried else value * 2), tensor
            assert after[tensor].dtype == value.dtype, tensor


def test_the_check_can_fail(tmp_path):
    owner = find("qwen3")
    path = write_checkpoint(tmp_path / "out" / "broken", owner.variants["untied"], owner)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "out")], capture_output=True, text=True)
    wrong = json.loads(done.stdout.splitlines()[-1])["broken"]["wrong"]
    assert wrong["missing_keys"] == ["model.layers.1.mlp.up_proj.weight"]
    assert wrong["unexpected_keys"] == ["model.layers.0.extra.weight"]
