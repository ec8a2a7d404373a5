"""Kimi K2.5: the text half of a wrapper, its packed experts, and what stands beside the decoder."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file

from dewconv.converters.closing import choose_spelling, close, respell_statements
from dewconv.converters.codecs import Stored
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.loading import load
from dewconv.converters.quantisation import codec_of
from dewconv.converters.source import open_source
from dewconv.families import find
from dewconv.families.errors import FindingsError
from dewconv.families.rules import leaf_shapes
from dewconv.parity import verify
from dewconv.parity.decoders import layer_leaves, leaf_differences
from dewconv.parity.fixtures import write_checkpoint
from dewconv.parity.gates import released_names
from dewconv.parity.round_trip import compare_sources

FAMILY = find("kimi_k25")
DATA = Path(__file__).parents[1] / "data"
RELEASE = "moonshotai__Kimi-K2.5"
CONFIG = json.loads((DATA / "configs" / f"{RELEASE}.json").read_text())
TINY = FAMILY.variants["kimi_k25"].config


def read(text=None, **changes):
    config = {key: value for key, value in {**TINY, **changes}.items() if value is not ...}
    inner = {**config["text_config"], **(text or {})}
    config["text_config"] = {key: value for key, value in inner.items() if value is not ...}
    return FAMILY.read(config)[0]


def test_the_text_half_is_kimi_k2s():
    assert FAMILY is find("deepseek_v3")
    fields, notices = FAMILY.read(CONFIG)
    instruct, _ = FAMILY.read(json.loads((DATA / "configs" / "moonshotai__Kimi-K2-Instruct.json").read_text()))
    assert fields.yarn is not None
    assert (fields.yarn.factor, fields.yarn.beta_fast, fields.yarn.beta_slow) == (64.0, 32.0, 1.0)
    assert (fields.norm_eps, fields.max_seq_len) == (1e-5, 262144)
    assert fields.replace(yarn=instruct.yarn, norm_eps=1e-6, max_seq_len=131072) == instruct
    assert notices == ()


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [(False, False, False), (..., False, False), (False, ..., False), (True, True, True), (True, ..., True)],
)
def test_the_tie_is_read_from_either_place(top, text, tied):
    assert read({"tie_word_embeddings": text}, tie_word_embeddings=top).tie_embeddings is tied


@pytest.mark.parametrize(
    ("text", "top", "said"),
    [
        ({}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({}, {"surprise": 1}, "surprise"),
        ({"surprise": 1}, {}, "surprise"),
        ({"pruned_heads": {"0": [1]}}, {}, "pruned_heads"),
        ({"tie_encoder_decoder": True}, {}, "tie_encoder_decoder"),
        ({"cross_attention_hidden_size": 8}, {}, "cross_attention_hidden_size"),
        ({"model_type": "kimi_linear"}, {}, "model_type"),
        ({}, {"model_type": "gemma3"}, "model_type"),
    ],
)
def test_what_is_not_kimis_is_refused(text, top, said):
    with pytest.raises(FindingsError, match=said):
        read(text, **top)


def test_the_released_packed_names_close():
    """Every expert's matrix is three tensors, the others one."""
    logical = released_names(FAMILY, DATA)[RELEASE]
    stored = {}
    for name, shape in logical.items():
        if ".mlp.experts." in name:
            rows, columns = shape
            stored[f"{name}_packed"] = Stored(f"{name}_packed", "I32", (rows, columns // 8))
            stored[f"{name}_scale"] = Stored(f"{name}_scale", "BF16", (rows, columns // 32))
            stored[f"{name}_shape"] = Stored(f"{name}_shape", "I32", (2,))
        else:
            stored[name] = Stored(name, "F32" if name.endswith("correction_bias") else "BF16", shape)
    assert stored["language_model.model.layers.60.mlp.experts.383.up_proj.weight_packed"].shape == (2048, 896)
    assert stored["language_model.model.layers.1.mlp.experts.0.down_proj.weight_scale"].shape == (7168, 64)
    grouping = codec_of(CONFIG).group(stored)
    assert grouping.findings == ()
    assert grouping.tensors.keys() == logical.keys()
    fields, _ = FAMILY.read(CONFIG)
    statements = list(FAMILY.weights(fields))
    spelling, findings = choose_spelling(FAMILY, statements, grouping.tensors)
    assert (spelling.body, findings) == ("language_model.model.", [])
    closing = close(respell_statements(statements, spelling), FAMILY.wrapper.carried, grouping.tensors)
    assert closing.findings == ()
    assert list(leaf_differences(fields, leaf_shapes(closing.placements))) == []
    assert {item.name.split(".")[0] for item in closing.carried} == {"vision_tower", "mm_projector"}
    assert sum(tensor.quantised for tensor in grouping.tensors.values()) == 60 * 384 * 3


def unpacked(held, name):
    """By the definition: eight codes a word, the lowest bits first, each stored plus 8; a scale for 32 columns."""
    words, scales = held[f"{name}_packed"].numpy(), held[f"{name}_scale"].float().numpy()
    codes = np.stack([words.view(np.uint32) >> 4 * place & 15 for place in range(8)], -1).reshape(len(words), -1)
    values = (codes.astype(np.int64) - 8).astype(np.float32) * np.repeat(scales, 32, 1)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def tensors_of(path):
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("k25") / "source", FAMILY.variants["kimi_k25_int4"], FAMILY)


def test_kept_codes_come_back_byte_for_byte(tmp_path, packed):
    source = open_source(packed)
    banks = import_checkpoint(source, tmp_path / "banks", quantized="keep")
    tower = {name for name in source.tensors if name.startswith(("vision_tower.", "mm_projector."))}
    shapes = {name for name in source.tensors if name.endswith(".weight_shape")}
    assert len(tower) == 3 + 2 * 12 + 2 + 6
    assert set(banks.manifest.carried) == tower | shapes
    assert export_checkpoint(banks, tmp_path / "back").exact
    assert list(compare_sources(source, open_source(tmp_path / "back"))) == []


def test_decoded_banks_hold_the_values_and_export_plain(tmp_path, packed):
    held = tensors_of(packed)
    banks = import_checkpoint(open_source(packed), tmp_path / "banks", quantized="decode")
    _, variables = load(tmp_path / "banks", dtype="float32")
    leaves = layer_leaves(FAMILY.read(json.loads((packed / "config.json").read_text()))[0], variables["params"])
    kept = layer_leaves(
        FAMILY.read(json.loads((packed / "config.json").read_text()))[0], load(packed, dtype="float32")[1]["params"]
    )
    assert leaves.keys() == kept.keys()
    assert all(np.array_equal(leaves[path], kept[path]) for path in leaves)
    for expert in (0, 6):
        for name in ("gate_proj", "up_proj", "down_proj"):
            wanted = unpacked(held, f"language_model.model.layers.2.mlp.experts.{expert}.{name}.weight").T
            assert np.array_equal(leaves[f"layers_2/mlp/experts/{name}/kernel"][expert], wanted)
    assert not export_checkpoint(banks, tmp_path / "plain").exact
    found = tensors_of(tmp_path / "plain")
    assert not [name for name in found if name.endswith(("_packed", "_scale", "_shape"))]
    assert found.keys() == {
        name.removesuffix("_packed") for name in held if not name.endswith((".weight_scale", ".weight_shape"))
    }
    name = "language_model.model.layers.1.mlp.experts.3.down_proj.weight"
    assert np.array_equal(found[name].float().numpy(), unpacked(held, name))
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()


def test_the_text_half_alone_is_a_kimi_k2(tmp_path, packed):
    banks = import_checkpoint(open_source(packed), tmp_path / "banks", text_only=True)
    export_checkpoint(banks, tmp_path / "text")
    half = open_source(tmp_path / "text")
    assert half.config["model_type"] in ("kimi_k2", "deepseek_v3")
    assert "text_config" not in half.config
    assert half.config["quantization_config"]["format"] == "pack-quantized"
    assert {name.split(".")[0] for name in half.tensors} == {"model", "lm_head"}
    assert FAMILY.read(half.config)[0] == FAMILY.read(open_source(packed).config)[0]
    # Its record at the top level, its names without a prefix: K2-Thinking's form.
    again = import_checkpoint(half, tmp_path / "again")
    assert export_checkpoint(again, tmp_path / "back").exact
    assert list(compare_sources(half, open_source(tmp_path / "back"))) == []
    assert verify(tmp_path / "text", checks=("logits",), tokens=24, dtype="float32").passed


def test_a_tower_that_the_config_promises_is_missed(tmp_path):
    path = write_checkpoint(tmp_path / "source", FAMILY.variants["kimi_k25"], FAMILY)
    file = path / "model.safetensors"
    from safetensors.torch import save_file

    kept = {name: one for name, one in load_file(file).items() if not name.startswith("vision_tower.")}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(FindingsError, match="vision_config"):
        import_checkpoint(open_source(path), tmp_path / "banks")
    assert not (tmp_path / "banks").exists()
    import_checkpoint(open_source(path), tmp_path / "text", text_only=True)
