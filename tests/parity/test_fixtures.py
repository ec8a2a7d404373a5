import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dewconv.families import families, find
from dewconv.parity.fixtures import draw_weights, write_checkpoint

CASES = [("qwen3", "biases"), ("qwen3", "mixed"), ("gemma3", "text"), ("gemma3", "wrapper_hub")]


def tensors_of(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_no_weight_is_neutral(family, variant):
    owner = find(family)
    offset = family == "gemma3"
    for name, tensor in draw_weights(owner.variants[variant], owner).items():
        values = tensor.float().numpy()
        assert np.isfinite(values).all()
        assert values.std() > 0, name
        if values.ndim == 1:
            assert np.abs(values).min() > 0.05, name
            scale = values + 1 if offset and "norm" in name and "vision" not in name else values
            if "norm" in name and not name.endswith("bias"):
                assert (np.abs(scale - 1) > 0.05).all(), name
                assert scale.min() > 0.3, name


def test_a_checkpoint_is_a_function_of_its_seed(tmp_path):
    owner = find("qwen3")
    one, two, other = (
        write_checkpoint(tmp_path / name, owner.variants["untied"], owner, seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    first = (one / "model.safetensors").read_bytes()
    assert first == (two / "model.safetensors").read_bytes()
    assert first != (other / "model.safetensors").read_bytes()


def test_storage_dtypes_and_shards_are_the_variants(tmp_path):
    owner = find("gemma3")
    variant = owner.variants["deep"]
    path = write_checkpoint(tmp_path / "deep", variant, owner)
    assert len(list(path.glob("*.safetensors"))) == 2
    index = json.loads((path / "model.safetensors.index.json").read_text())
    tensors = tensors_of(path)
    assert set(index["weight_map"]) == set(tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name.endswith(variant.float32) else torch.bfloat16), name
    wide = next(tensor for name, tensor in tensors.items() if name.endswith("q_norm.weight"))
    assert (wide != wide.bfloat16().float()).any()


@pytest.mark.parametrize(("variant", "equal"), [("tied_copy", True), ("tied_different", False)])
def test_a_tied_heads_copy_is_on_disk(variant, equal):
    owner = find("qwen3")
    tensors = draw_weights(owner.variants[variant], owner)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]) is equal


def test_the_hubs_prefix_comes_without_the_familys_rules():
    owner = find("gemma3")
    names = set(draw_weights(owner.variants["wrapper_hub"], owner))
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in names
    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in names
    assert "multi_modal_projector.mm_input_projection_weight" in names
    saved = set(draw_weights(owner.variants["wrapper_saved"], owner))
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in saved


def test_kimi_k25s_tower_is_named_and_joined_as_released():
    owner = find("kimi_k25")
    tensors = draw_weights(owner.variants["kimi_k25"], owner)
    block = "vision_tower.encoder.blocks.1."
    assert {name.removeprefix(block) for name in tensors if name.startswith(block)} == {
        f"{name}.{part}"
        for name in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
        for part in ("weight", "bias")
    }
    assert tuple(tensors[block + "wqkv.weight"].shape) == (48, 16)
    assert {name.split(".")[0] for name in tensors} == {"language_model", "vision_tower", "mm_projector"}
    assert {"vision_tower.patch_embed.pos_emb.weight", "mm_projector.proj.2.bias"} <= tensors.keys()
    assert "language_model.model.layers.2.mlp.gate.e_score_correction_bias" in tensors


def test_drawing_leaves_a_variants_config_alone():
    """transformers 5.24 `Kimi_K25Config` renames the text half's model type in the mapping it is given."""
    owner = find("kimi_k25")
    draw_weights(owner.variants["kimi_k25"], owner)
    assert owner.variants["kimi_k25"].config["text_config"]["model_type"] == "kimi_k2"


def test_every_variants_spelling_has_hub_names():
    from dewconv.parity.fixtures import architecture
    from dewconv.parity.hub_names import HUB_NAMES, PLAIN

    for family in families():
        for name, variant in family.variants.items():
            spelled = architecture(variant.config, family), variant.spelling.body
            assert variant.spelling.body == PLAIN or spelled in HUB_NAMES, (family.name, name)
