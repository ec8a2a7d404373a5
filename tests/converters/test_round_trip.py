"""export(import(x)) is x: names, dtypes, shapes, shards, headers, metadata and side files, byte for byte."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source
from dewconv.families.errors import ConversionError, FindingsError

BF16 = np.dtype(ml_dtypes.bfloat16)


def bank_array(banks, file, key):
    """A bank tensor as the safetensors library reads it (its bytes; numpy has no bfloat16 there)."""
    entry = banks.headers[file].entries[key]
    with safe_open(banks.path / file, "numpy") as library:
        assert key in library.keys()  # noqa: SIM118
    data = (banks.path / file).read_bytes()
    start = struct.unpack("<Q", data[:8])[0] + 8
    dtype = {"BF16": BF16, "F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}[entry.dtype]
    return np.frombuffer(data[start + entry.begin : start + entry.end], dtype).reshape(entry.shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def trip(checkpoint, tmp_path, **options):
    banks = import_checkpoint(open_source(checkpoint.path), tmp_path / "banks", **options)
    plan = export_checkpoint(banks, tmp_path / "back")
    return banks, plan


def assert_equal_directories(tiny, one, other):
    left, right = tiny.files_of(one), tiny.files_of(other)
    assert set(left) == set(right)
    for name in left:
        assert left[name] == right[name], name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("bank_layers", [None, 1, 5])
def test_twelve_layers_come_back_byte_for_byte(tiny, tmp_path, shards, bank_layers):
    checkpoint = tiny.qwen3(shards=shards, num_hidden_layers=12)
    banks, plan = trip(checkpoint, tmp_path, bank_layers=bank_layers)
    assert plan.exact
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")
    assert check_banks(banks) == []


def test_a_bank_holds_its_layers_in_number_order_transposed(tiny, tmp_path):
    checkpoint = tiny.qwen3(num_hidden_layers=12)
    banks, _ = trip(checkpoint, tmp_path)
    assert set(banks.headers) == {"layers_0_11.safetensors", "top.safetensors"}
    for name, path in {
        "self_attn.q_proj.weight": "self_attn/q_proj/kernel",
        "self_attn.k_proj.weight": "self_attn/k_proj/kernel",
        "self_attn.v_proj.weight": "self_attn/v_proj/kernel",
        "self_attn.o_proj.weight": "self_attn/o_proj/kernel",
        "mlp.gate_proj.weight": "mlp/gate_proj/kernel",
        "mlp.up_proj.weight": "mlp/up_proj/kernel",
        "mlp.down_proj.weight": "mlp/down_proj/kernel",
        "self_attn.q_norm.weight": "self_attn/q_norm/scale",
        "self_attn.k_norm.weight": "self_attn/k_norm/scale",
        "input_layernorm.weight": "input_layernorm/scale",
        "post_attention_layernorm.weight": "post_attention_layernorm/scale",
    }.items():
        bank = bank_array(banks, "layers_0_11.safetensors", path)
        assert len(bank) == 12
        for layer in range(12):
            assert same(bank[layer], checkpoint.weights[f"model.layers.{layer}.{name}"].T), (name, layer)
    weights = checkpoint.weights
    top = {key: bank_array(banks, "top.safetensors", key) for key in banks.headers["top.safetensors"].entries}
    assert set(top) == {"embed_tokens/embedding", "norm/scale", "lm_head/kernel"}
    assert same(top["embed_tokens/embedding"], weights["model.embed_tokens.weight"])
    assert same(top["lm_head/kernel"], weights["lm_head.weight"].T)
    assert same(top["norm/scale"], weights["model.norm.weight"])


def test_a_run_of_one_layer_has_no_layer_axis(tiny, tmp_path):
    config = tiny.gemma3_config()
    weights = tiny.weights_of(config, head=None)
    path = tiny.write(tmp_path / "source", config, weights)
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    assert set(banks.headers) == {f"{b}.safetensors" for b in ("top", "layers_0_4", "layers_5", "layers_6")}
    kernel = bank_array(banks, "layers_5.safetensors", "self_attn/q_proj/kernel")
    assert same(kernel, weights["model.layers.5.self_attn.q_proj.weight"].T)


def test_bank_files_are_aligned_for_mapping(tiny, tmp_path):
    banks, _ = trip(tiny.qwen3(), tmp_path)
    for header in banks.headers.values():
        assert header.data_start % 4096 == 0
        for entry in header.entries.values():
            assert entry.begin % 64 == 0 or entry.nbytes % 64, entry.name


FLOAT32 = {
    "a leaf of every layer": ("self_attn.k_norm.weight", "model.norm.weight"),
    "a leaf of one layer only": ("layers.2.input_layernorm.weight",),
    "a matrix of one layer only": ("layers.1.mlp.down_proj.weight",),
}


@pytest.mark.parametrize("case", FLOAT32)
@pytest.mark.parametrize("shards", [1, 2])
def test_float32_leaves_inside_a_bfloat16_file_stay_float32(tiny, tmp_path, case, shards):
    checkpoint = tiny.qwen3(shards=shards, float32=FLOAT32[case], num_hidden_layers=4)
    assert {array.dtype for array in checkpoint.weights.values()} == {BF16, np.dtype(np.float32)}
    _, plan = trip(checkpoint, tmp_path)
    assert plan.exact
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")


def test_a_leaf_whose_dtype_differs_between_layers_is_stored_by_layer(tiny, tmp_path):
    checkpoint = tiny.qwen3(float32=("layers.2.input_layernorm.weight",), num_hidden_layers=4)
    banks, _ = trip(checkpoint, tmp_path)
    (file,) = (name for name in banks.headers if name.startswith("layers"))
    keys = {key for key in banks.headers[file].entries if key.startswith("input_layernorm")}
    assert keys == {f"input_layernorm/scale@{layer}" for layer in range(4)}
    for layer in range(4):
        stored = bank_array(banks, file, f"input_layernorm/scale@{layer}")
        assert same(stored, checkpoint.weights[f"model.layers.{layer}.input_layernorm.weight"])


def test_special_values_survive_at_a_misaligned_data_start(tiny, tmp_path):
    """NaN payloads, -0, infinities and subnormals, in a file whose data start at an odd byte."""
    checkpoint = tiny.qwen3(num_hidden_layers=1)
    path = checkpoint.path / "model.safetensors"
    special = np.array([0x7FC1, 0xFF81, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F], np.uint16)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length : 8 + length + special.nbytes] = special.tobytes()
    padding = (1 - (8 + length)) % 8
    path.write_bytes(struct.pack("<Q", length + padding) + data[8 : 8 + length] + b" " * padding + data[8 + length :])
    assert (8 + length + padding) % 8 == 1
    trip(checkpoint, tmp_path)
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")


def test_carried_scalars_and_empty_tensors_come_back(tiny, tmp_path):
    config = tiny.gemma3_wrapper_config()
    beside = {
        "vision_tower.scale": np.array(0.5, np.float32).astype(BF16),
        "vision_tower.none": np.zeros((0, 8), BF16),
        "vision_tower.ids": np.arange(300, dtype=np.int64),
        "vision_tower.codes": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    }
    weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights() | beside
    path = tiny.write(tmp_path / "source", config, weights)
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    assert set(banks.manifest.carried) == set(beside) | set(tiny.vision_weights())
    export_checkpoint(banks, tmp_path / "back")
    assert_equal_directories(tiny, path, tmp_path / "back")


def test_scalars_and_empty_tensors_are_carried_at_a_misaligned_start(tiny, tmp_path):
    config = tiny.gemma3_wrapper_config()
    odd = {
        "vision_tower.vision_model.scale": np.array(0x7FC1, np.uint16).view(BF16),
        "vision_tower.vision_model.empty": np.zeros((0, 8), BF16),
        "vision_tower.vision_model.positions": np.arange(300, 305),
    }
    weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights() | odd
    path = tiny.write(tmp_path / "source", config, weights)
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    padding = (3 - (8 + length)) % 8
    file.write_bytes(struct.pack("<Q", length + padding) + data[8 : 8 + length] + b" " * padding + data[8 + length :])
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    assert set(odd) <= set(banks.manifest.carried)
    assert export_checkpoint(banks, tmp_path / "back").exact
    assert_equal_directories(tiny, path, tmp_path / "back")


def test_header_order_metadata_and_spacing_are_the_sources(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    path = checkpoint.path / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    told = {"__metadata__": {"format": "pt", "note": "é"}}
    order = dict(sorted(((k, v) for k, v in header.items() if k != "__metadata__"), reverse=True))
    text = json.dumps(order | told, indent=1).encode() + b" " * 13
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    trip(checkpoint, tmp_path)
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")


def test_a_config_keeps_its_own_text(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    odd = json.dumps(dict(checkpoint.config), indent=7).replace("1000000,", "1000000.0,").replace("1e-06", "0.000001")
    (checkpoint.path / "config.json").write_text(odd + "\n\n")
    trip(checkpoint, tmp_path)
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")


@pytest.mark.parametrize("told", ["float32", "float16", None])
def test_a_config_that_names_another_dtype_than_the_file_has_is_not_followed(tiny, tmp_path, told):
    checkpoint = tiny.qwen3(torch_dtype=told, num_hidden_layers=2)
    assert {array.dtype for array in checkpoint.weights.values()} == {BF16}
    banks, plan = trip(checkpoint, tmp_path)
    assert plan.exact
    assert {entry.dtype for header in banks.headers.values() for entry in header.entries.values()} == {"BF16"}
    assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")


@pytest.mark.parametrize(
    "spelling",
    [("model.", None), ("language_model.model.", None), ("model.language_model.", None)],
    ids=lambda value: value[0],
)
def test_each_prefix_of_gemma3_is_recognised_and_written_back(tiny, tmp_path, spelling):
    body, head = spelling
    config = tiny.gemma3_config() if body == "model." else tiny.gemma3_wrapper_config()
    weights = tiny.weights_of(config, body, head)
    if body != "model.":
        weights |= tiny.vision_weights("model." if body == "model.language_model." else "")
    path = tiny.write(tmp_path / "source", config, weights, shards=2)
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    assert banks.manifest.spelling.body == body
    embedding = bank_array(banks, "top.safetensors", "embed_tokens/embedding")
    assert same(embedding, weights[f"{body}embed_tokens.weight"])
    assert export_checkpoint(banks, tmp_path / "back").exact
    assert_equal_directories(tiny, path, tmp_path / "back")


def test_a_mix_of_prefixes_is_refused_naming_both(tiny, tmp_path):
    config = tiny.gemma3_wrapper_config()
    weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
    moved = "language_model.model.layers.3.mlp.up_proj.weight"
    weights["model.language_model.layers.3.mlp.up_proj.weight"] = weights.pop(moved)
    path = tiny.write(tmp_path / "source", config, weights)
    with pytest.raises(FindingsError) as caught:
        import_checkpoint(open_source(path), tmp_path / "banks")
    text = str(caught.value)
    assert "'model.language_model.' beside 'language_model.model.'" in text
    assert moved in text
    assert not (tmp_path / "banks").exists()


def test_an_unknown_prefix_is_told_with_the_known_ones(tiny, tmp_path):
    config = tiny.gemma3_config()
    path = tiny.write(tmp_path / "source", config, tiny.weights_of(config, "transformer.", None))
    with pytest.raises(FindingsError) as caught:
        import_checkpoint(open_source(path), tmp_path / "banks")
    text = str(caught.value)
    assert "begin with transformer." in text
    assert "'language_model.model.'" in text


class TestTiedHeads:
    """The flag, and whether a head is on disk and equal: every combination."""

    def test_tied_and_absent(self, tiny, tmp_path):
        checkpoint = tiny.qwen3(tie_word_embeddings=True, head=None)
        banks, plan = trip(checkpoint, tmp_path)
        assert plan.exact
        assert banks.manifest.fields.tie_embeddings
        assert not banks.has("top", "lm_head/kernel")
        assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")

    def test_tied_with_an_equal_copy_is_an_alias(self, tiny, tmp_path):
        checkpoint = tiny.qwen3(tie_word_embeddings=True, shards=2)
        weights = dict(checkpoint.weights)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        tiny.write(checkpoint.path, checkpoint.config, weights, shards=2)
        banks, plan = trip(checkpoint, tmp_path)
        assert plan.exact
        assert banks.manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert not banks.has("top", "lm_head/kernel")
        assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")

    def test_tied_over_a_different_head_keeps_the_head_and_warns(self, tiny, tmp_path):
        checkpoint = tiny.qwen3(tie_word_embeddings=True)
        source = open_source(checkpoint.path)
        from dewconv.converters.plan import plan_import

        plan = plan_import(source)
        assert any("lm_head.weight differs" in warning for warning in plan.warnings)
        banks, exported = trip(checkpoint, tmp_path)
        assert exported.exact
        assert not banks.manifest.fields.tie_embeddings
        head = bank_array(banks, "top.safetensors", "lm_head/kernel")
        assert same(head, checkpoint.weights["lm_head.weight"].T)
        assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")

    def test_a_copy_in_another_dtype_is_not_an_alias(self, tiny, tmp_path):
        checkpoint = tiny.qwen3(tie_word_embeddings=True, head=None)
        weights = dict(checkpoint.weights)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].astype(np.float32)
        tiny.write(checkpoint.path, checkpoint.config, weights)
        banks, _ = trip(checkpoint, tmp_path)
        assert banks.manifest.aliases == {}
        assert_equal_directories(tiny, checkpoint.path, tmp_path / "back")

    def test_untied_and_absent_is_refused_by_name(self, tiny, tmp_path):
        checkpoint = tiny.qwen3(tie_word_embeddings=False, head=None)
        with pytest.raises(FindingsError, match=r"tensor lm_head\.weight: found nothing"):
            trip(checkpoint, tmp_path)

    def test_gemma3_ties_when_the_flag_is_absent(self, tiny, tmp_path):
        config = tiny.gemma3_config()
        assert "tie_word_embeddings" not in config
        path = tiny.write(tmp_path / "source", config, tiny.weights_of(config, head=None))
        banks = import_checkpoint(open_source(path), tmp_path / "banks")
        assert banks.manifest.fields.tie_embeddings


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_written(tiny, tmp_path):
    checkpoint = tiny.qwen3(num_hidden_layers=3, surprising_key=7)
    weights = dict(checkpoint.weights)
    weights["model.layers.0.surprise.weight"] = np.zeros((3, 5), np.float32)
    del weights["model.layers.1.mlp.gate_proj.weight"]
    del weights["model.layers.2.mlp.gate_proj.weight"]
    weights["model.layers.2.self_attn.q_proj.weight"] = np.zeros((24, 40), np.float32)
    weights["model.layers.1.self_attn.k_norm.weight"] = np.zeros(10, np.complex64)
    weights["model.embed_tokens.weight"] = np.zeros((130, 24), np.float32)
    tiny.write(checkpoint.path, checkpoint.config, weights)
    before = set(tmp_path.iterdir())
    with pytest.raises(FindingsError) as caught:
        import_checkpoint(open_source(checkpoint.path), tmp_path / "banks")
    text = str(caught.value)
    for needed in (
        "config key 'surprising_key'",
        "tensor model.layers.0.surprise.weight: found a tensor that no rule reads",
        "tensor model.layers.{1-2}.mlp.gate_proj.weight: found nothing, needed shape [28, 24]",
        "tensor model.layers.2.self_attn.q_proj.weight: found shape [24, 40], needed shape [40, 24]",
        "tensor model.layers.1.self_attn.k_norm.weight: found dtype C64",
        "tensor model.embed_tokens.weight: found shape [130, 24], needed shape [131, 24]",
    ):
        assert needed in text, text
    assert len(caught.value.findings) == 8
    assert set(tmp_path.iterdir()) == before


def test_quantised_weights_are_refused_at_planning_naming_the_method(tiny, tmp_path):
    checkpoint = tiny.qwen3(quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ConversionError, match="compressed-tensors"):
        trip(checkpoint, tmp_path)
    wrapped = tiny.gemma3_wrapper_config()
    wrapped["text_config"]["quantization_config"] = {"quant_method": "gptq"}
    path = tiny.write(tmp_path / "other", wrapped, tiny.weights_of(wrapped, "model.language_model.", None))
    with pytest.raises(ConversionError, match="'gptq'"):
        import_checkpoint(open_source(path), tmp_path / "banks")


def test_codes_without_a_quantisation_record_are_refused(tiny, tmp_path):
    codes = tiny.random_bits((28, 24), np.dtype(ml_dtypes.float8_e4m3fn), 5)
    checkpoint = tiny.qwen3(extra={"model.layers.0.mlp.up_proj.weight": codes})
    with pytest.raises(FindingsError, match=r"up_proj\.weight: found dtype F8_E4M3"):
        trip(checkpoint, tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_5", None, 3])
def test_a_family_that_is_not_known_is_refused(tiny, tmp_path, model_type):
    checkpoint = tiny.qwen3(model_type=model_type)
    with pytest.raises(ConversionError):
        trip(checkpoint, tmp_path)


def test_a_config_without_weights_cannot_be_imported(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    (checkpoint.path / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="no weights as safetensors"):
        trip(checkpoint, tmp_path)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_small_shape_comes_back(tiny, tmp_path_factory, data):
    size = st.integers(1, 9)
    kv = data.draw(st.integers(1, 3))
    sizes = {
        "hidden_size": data.draw(size),
        "intermediate_size": data.draw(size),
        "num_attention_heads": kv * data.draw(st.integers(1, 3)),
        "num_key_value_heads": kv,
        "head_dim": 2 * data.draw(st.integers(1, 4)),
        "vocab_size": data.draw(size),
        "num_hidden_layers": data.draw(st.integers(1, 12)),
    }
    tied = data.draw(st.booleans())
    config = tiny.qwen3_config(tie_word_embeddings=tied, **sizes)
    d, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    dim = sizes["head_dim"]
    q, k = sizes["num_attention_heads"] * dim, kv * dim
    shapes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, d)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (d,),
            at + "post_attention_layernorm.weight": (d,),
            at + "self_attn.q_proj.weight": (q, d),
            at + "self_attn.k_proj.weight": (k, d),
            at + "self_attn.v_proj.weight": (k, d),
            at + "self_attn.o_proj.weight": (d, q),
            at + "self_attn.q_norm.weight": (dim,),
            at + "self_attn.k_norm.weight": (dim,),
            at + "mlp.gate_proj.weight": (inner, d),
            at + "mlp.up_proj.weight": (inner, d),
            at + "mlp.down_proj.weight": (d, inner),
        }
    dtypes = st.sampled_from([BF16, np.dtype(np.float32), np.dtype(np.float16)])
    weights = {name: tiny.random_bits(shape, data.draw(dtypes), i) for i, (name, shape) in enumerate(shapes.items())}
    here = tmp_path_factory.mktemp("any")
    source = tiny.write(here / "source", config, weights, shards=data.draw(st.integers(1, 3)))
    options = {"bank_layers": data.draw(st.none() | st.integers(1, 4)), "threads": data.draw(st.integers(1, 3))}
    import_checkpoint(open_source(source), here / "banks", **options)
    assert export_checkpoint(open_banks(here / "banks"), here / "back").exact
    assert_equal_directories(tiny, source, here / "back")
