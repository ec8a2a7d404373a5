"""load and save: what aliases, what is refused, and every form a trained tree comes in."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import flax.core
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dewconv.converters import loading
from dewconv.converters.banks import open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.loading import load
from dewconv.converters.plan import plan_import
from dewconv.converters.saving import save
from dewconv.converters.source import open_source
from dewconv.converters.trees import flatten, nested
from dewconv.dew_core.transformer import CausalTransformer
from dewconv.families.errors import ConversionError, FindingsError

BF16 = np.dtype(ml_dtypes.bfloat16)


def leaves(variables):
    return dict(flatten(variables["params"]))


def ordinary(tiny, checkpoint, shards=1, dtype=None):
    """Ordinary values in place of the checkpoint's random bits."""
    rng = np.random.default_rng(1)
    weights = {
        name: rng.normal(0, 1, array.shape).astype(dtype or array.dtype) for name, array in checkpoint.weights.items()
    }
    tiny.write(checkpoint.path, checkpoint.config, weights, shards)
    return weights


@pytest.fixture
def wide(tiny, tmp_path):
    """A checkpoint whose every matrix and vector is a multiple of 64 bytes, and its banks."""
    rng = np.random.default_rng(2)
    config = tiny.qwen3_config(num_hidden_layers=3, hidden_size=64, intermediate_size=96, vocab_size=160, head_dim=32)
    q, kv = 128, 64
    shapes = {"model.embed_tokens.weight": (160, 64), "model.norm.weight": (64,), "lm_head.weight": (160, 64)}
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (64,),
                "post_attention_layernorm.weight": (64,),
                "self_attn.q_proj.weight": (q, 64),
                "self_attn.k_proj.weight": (kv, 64),
                "self_attn.v_proj.weight": (kv, 64),
                "self_attn.o_proj.weight": (64, q),
                "self_attn.q_norm.weight": (32,),
                "self_attn.k_norm.weight": (32,),
                "mlp.gate_proj.weight": (96, 64),
                "mlp.up_proj.weight": (96, 64),
                "mlp.down_proj.weight": (64, 96),
            }.items()
        }
    weights = {name: rng.normal(0, 1, shape).astype(BF16) for name, shape in shapes.items()}
    path = tiny.write(tmp_path / "wide", config, weights)
    import_checkpoint(open_source(path), tmp_path / "wide-banks")
    return SimpleNamespace(path=path, banks=tmp_path / "wide-banks", weights=weights)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_arrays_alias_the_bank_files(wide, scan_layers):
    model, variables = load(wide.banks, scan_layers=scan_layers)
    assert model.scan_layers is scan_layers
    held = leaves(variables)
    maps = []
    with open("/proc/self/maps") as file:
        for line in file:
            if str(wide.banks) in line:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                maps.append((low, high))
    assert maps
    for path, array in held.items():
        at = array.unsafe_buffer_pointer()
        assert any(low <= at < high for low, high in maps), f"{path} was copied"
    expected = (
        {"layers_0_2/mlp/up_proj/kernel"} if scan_layers else {f"layers_{i}/mlp/up_proj/kernel" for i in range(3)}
    )
    assert {path for path in held if path.endswith("up_proj/kernel")} == expected


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_banks_and_directory_load_the_same_values(tiny, tmp_path, scan_layers, shards):
    checkpoint = tiny.qwen3(shards=shards, num_hidden_layers=12)
    banks = import_checkpoint(open_source(checkpoint.path), tmp_path / "banks", bank_layers=5)
    _, one = load(banks.path, scan_layers=scan_layers)
    _, other = load(checkpoint.path, scan_layers=False)
    one = {path: np.asarray(array) for path, array in leaves(one).items()}
    if scan_layers:
        assert {path.split("/")[0] for path in one} >= {"layers_0_4", "layers_5_9", "layers_10_11"}
        rows = {}
        for path, array in one.items():
            name, _, below = path.partition("/")
            first, _, last = name.removeprefix("layers_").partition("_")
            if name.startswith("layers_"):
                rows |= {f"layers_{i}/{below}": array[i - int(first)] for i in range(int(first), int(last) + 1)}
            else:
                rows[path] = array
        one = rows
    held = leaves(other)
    assert set(held) == set(one)
    for path, array in one.items():
        assert np.asarray(held[path]).tobytes() == array.tobytes(), path
    for layer in range(12):
        kernel = one[f"layers_{layer}/mlp/down_proj/kernel"]
        assert kernel.tobytes() == checkpoint.weights[f"model.layers.{layer}.mlp.down_proj.weight"].T.tobytes()


def test_the_loaded_decoder_runs_and_both_layouts_agree(wide):
    tokens = jnp.arange(9)[None]
    results = []
    for scan_layers in (True, False):
        model, variables = load(wide.banks, dtype="float32", scan_layers=scan_layers)
        results.append(np.asarray(model.apply(variables, tokens)))
        assert results[-1].shape == (1, 9, 160)
        assert np.isfinite(results[-1]).all()
    assert np.abs(results[0] - results[1]).max() < 1e-5 * np.abs(results[0]).max()


def test_a_leaf_of_differing_dtypes_loads_by_layer_in_its_own(tiny, tmp_path):
    checkpoint = tiny.qwen3(float32=("layers.2.input_layernorm.weight",), num_hidden_layers=4)
    weights = ordinary(tiny, checkpoint)
    import_checkpoint(open_source(checkpoint.path), tmp_path / "banks")
    for path in (tmp_path / "banks", checkpoint.path):
        model, variables = load(path)
        held = leaves(variables)
        assert "layers_0_3/input_layernorm/scale" not in held
        for layer in range(4):
            array = np.asarray(held[f"layers_{layer}/input_layernorm/scale"])
            assert array.dtype == (np.float32 if layer == 2 else BF16)
            assert array.tobytes() == weights[f"model.layers.{layer}.input_layernorm.weight"].tobytes()
        assert np.isfinite(np.asarray(model.apply(variables, jnp.arange(7)[None]))).all()
    save(tmp_path / "saved", model, variables, tmp_path / "banks")
    export_checkpoint(open_banks(tmp_path / "saved"), tmp_path / "out")
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(checkpoint.path)


def test_a_dtype_casts_floats_and_never_rounds_a_vector(tiny, tmp_path):
    checkpoint = tiny.qwen3(float32=("input_layernorm.weight", "up_proj.weight"))
    ordinary(tiny, checkpoint)
    _, low = load(checkpoint.path, dtype="bfloat16")
    held = leaves(low)
    assert held["layers_0_2/mlp/up_proj/kernel"].dtype == jnp.bfloat16
    assert held["layers_0_2/input_layernorm/scale"].dtype == jnp.float32
    assert held["layers_0_2/self_attn/q_norm/scale"].dtype == jnp.bfloat16
    _, high = load(checkpoint.path, dtype="float32")
    assert {array.dtype for array in leaves(high).values()} == {np.dtype(np.float32)}
    with pytest.raises(ConversionError, match="int8"):
        load(checkpoint.path, dtype="int8")


def test_a_tree_that_is_not_the_decoders_is_refused_by_path(tiny, tmp_path):
    banks = import_checkpoint(open_source(tiny.qwen3().path), tmp_path / "banks")
    manifest = json.loads((banks.path / "dewconv.json").read_text())
    manifest["decoder"]["mlp_features"] = 30
    manifest["decoder"]["attention_bias"] = True
    (banks.path / "dewconv.json").write_text(json.dumps(manifest))
    with pytest.raises(FindingsError) as caught:
        load(banks.path)
    text = "\n".join(map(str, caught.value.findings))
    assert "parameter layers_2/mlp/up_proj/kernel: found shape [24, 28], needed shape [24, 30]" in text
    assert "parameter layers_0/self_attn/q_proj/bias: found nothing there, needed shape [40]" in text


def test_one_sharding_for_all_a_tree_and_a_function_place_parameters(wide):
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]), ("x",))
    spec = PartitionSpec()
    plain = {path: np.asarray(array) for path, array in leaves(load(wide.banks)[1]).items()}
    forms = [
        {"mesh": mesh},
        {"mesh": mesh, "shardings": spec},
        {"shardings": NamedSharding(mesh, spec)},
        {"mesh": mesh, "shardings": lambda path, shape: spec},
        {"shardings": {"params": nested(dict.fromkeys(plain, NamedSharding(mesh, spec)))}},
    ]
    for form in forms:
        held = leaves(load(wide.banks, **form)[1])
        for path, array in held.items():
            assert array.sharding == NamedSharding(mesh, spec), path
            assert np.asarray(array).tobytes() == plain[path].tobytes()
    with pytest.raises(ConversionError, match="mesh"):
        load(wide.banks, shardings=spec)
    with pytest.raises(ConversionError, match="norm/scale"):
        load(wide.banks, shardings={"embed_tokens": {"embedding": NamedSharding(mesh, spec)}})


EIGHT = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
from dewconv.converters.loading import load
from dewconv.converters.saving import save
from dewconv.converters.exporting import export_checkpoint
banks, saved, out = sys.argv[1:]
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()), ("x",))
def spec(path, shape):
    last = "x" if shape[-1] % 8 == 0 else None
    return PartitionSpec(*(None,) * (len(shape) - 1), last)
model, variables = load(banks, mesh=mesh, shardings=spec)
array = variables["params"]["embed_tokens"]["embedding"]
assert array.addressable_shards[0].data.shape == (160, 8), array.addressable_shards[0].data.shape
export_checkpoint(save(saved, model, variables, banks), out)
"""


def test_parameters_sharded_over_eight_devices_save_and_export_the_same_bytes(wide, tiny, tmp_path):
    arguments = [str(wide.banks), str(tmp_path / "saved"), str(tmp_path / "out")]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", EIGHT, *arguments], check=True, env=environment)
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(wide.path)


class Boxed:
    def __init__(self, value):
        self.value = value


def map_leaves(tree, function):
    return {k: map_leaves(v, function) if isinstance(v, dict) else function(v) for k, v in tree.items()}


def per_layer(tree):
    """The tree with every bank as one subtree a layer."""
    result = {}
    for name, sub in tree.items():
        first, _, last = name.removeprefix("layers_").partition("_")
        if not name.startswith("layers_") or not last:
            result[name] = sub
            continue
        for row in range(int(last) - int(first) + 1):
            result[f"layers_{int(first) + row}"] = map_leaves(sub, lambda leaf, row=row: leaf[row])
    return result


def mixed(tree):
    """The tree with the MLPs by layer and the rest in banks."""
    bank = dict(tree["layers_0_2"])
    mlp = bank.pop("mlp")
    rest = {k: v for k, v in tree.items() if k != "layers_0_2"}
    rows = {f"layers_{i}": {"mlp": map_leaves(mlp, lambda leaf, i=i: leaf[i])} for i in range(3)}
    return rest | {"layers_0_2": bank} | rows


def dotted(tree):
    return {path.replace("/", "."): array for path, array in flatten(tree)}


FORMS = {
    "params": lambda tree: {"params": tree},
    "bare": lambda tree: tree,
    "doubly wrapped": lambda tree: {"params": {"params": tree}},
    "with other collections": lambda tree: {"params": tree, "cache": {"index": np.zeros(3)}},
    "frozen": lambda tree: flax.core.freeze({"params": tree}),
    "value dicts": lambda tree: map_leaves(tree, lambda leaf: {"value": leaf}),
    "boxed": lambda tree: map_leaves(tree, Boxed),
    "partitioned": lambda tree: map_leaves(tree, lambda leaf: flax.linen.Partitioned(leaf, (None,) * leaf.ndim)),
    "nnx": lambda tree: nnx.State(map_leaves(tree, lambda leaf: nnx.Param(jnp.asarray(leaf)))),
    "dotted": dotted,
    "per layer": per_layer,
    "mixed": mixed,
    "jax": lambda tree: map_leaves(tree, jnp.asarray),
    "fortran": lambda tree: map_leaves(tree, np.asfortranarray),
    "negative strides": lambda tree: map_leaves(tree, lambda a: np.ascontiguousarray(a[::-1])[::-1]),
}


def numpy_tree(path):
    from dewconv.converters.loading import read_parameters

    return nested({name: np.array(array) for name, array in read_parameters(path)[1].items()})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tree_saves_the_same_banks(wide, tiny, tmp_path, form):
    save(tmp_path / "saved", None, FORMS[form](numpy_tree(wide.banks)), wide.banks)
    files, original = tiny.files_of(tmp_path / "saved"), tiny.files_of(wide.banks)
    assert set(files) == set(original)
    for name in set(files) - {"dewconv.json"}:
        assert files[name] == original[name], name
    export_checkpoint(open_banks(tmp_path / "saved"), tmp_path / "out")
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(wide.path)


def test_changed_weights_export_under_the_same_names_shapes_and_dtypes(wide, tiny, tmp_path):
    from safetensors import safe_open

    model, variables = load(wide.banks, dtype="float32")
    trained = jax.tree.map(lambda leaf: leaf * 1.5 + 0.25, variables)
    banks = save(tmp_path / "saved", model, trained, wide.path)
    assert banks.manifest.inexact
    assert banks.headers["top.safetensors"].entries["norm/scale"].dtype == "F32"
    plan = export_checkpoint(banks, tmp_path / "out")
    assert not plan.exact
    files = tiny.files_of(tmp_path / "out")
    original = tiny.files_of(wide.path)
    assert {k: v for k, v in files.items() if "safetensors" not in k} == {
        k: v for k, v in original.items() if "safetensors" not in k
    }
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as library:
        assert set(library.keys()) == set(wide.weights)
        assert library.get_slice("model.norm.weight").get_dtype() == "BF16"
    _, again = load(tmp_path / "out")
    for name, kernel in leaves(again).items():
        expected = (np.asarray(leaves(load(wide.banks)[1])[name], np.float32) * 1.5 + 0.25).astype(BF16)
        assert np.array_equal(np.asarray(kernel).view(np.uint16), expected.view(np.uint16)), name


def test_a_broadcast_array_is_written_whole(wide, tmp_path):
    tree = numpy_tree(wide.banks)
    tree["norm"]["scale"] = np.broadcast_to(np.array([1.25], BF16), (64,))
    banks = save(tmp_path / "saved", None, tree, wide.banks)
    assert np.array_equal(banks.array("top", "norm/scale").view(np.uint16), tree["norm"]["scale"].view(np.uint16))


def test_rows_beyond_the_vocabulary_are_left_out(wide, tiny, tmp_path):
    tree = numpy_tree(wide.banks)
    tree["embed_tokens"]["embedding"] = np.pad(tree["embed_tokens"]["embedding"], ((0, 96), (0, 0)))
    tree["lm_head"]["kernel"] = np.pad(tree["lm_head"]["kernel"], ((0, 0), (0, 96)))
    export_checkpoint(save(tmp_path / "saved", None, tree, wide.banks), tmp_path / "out")
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(wide.path)


def test_leaves_that_are_missing_foreign_or_misshapen_are_refused_by_path(wide, tmp_path):
    tree = numpy_tree(wide.banks)
    bank = tree["layers_0_2"]
    bank["self_attn"]["q_proj"]["lora_a"] = np.zeros((3, 64, 4), np.float32)
    del bank["mlp"]["up_proj"]
    bank["mlp"]["down_proj"]["kernel"] = bank["mlp"]["down_proj"]["kernel"].transpose(0, 2, 1)
    tree["norm"]["scale"] = "text"
    tree["layers_1"] = {"mlp": {"gate_proj": {"kernel": np.zeros((64, 96), BF16)}}}
    tree["embed_tokens"]["embedding"] = tree["embed_tokens"]["embedding"][:150]
    with pytest.raises(FindingsError) as caught:
        save(tmp_path / "saved", None, tree, wide.banks)
    text = "\n".join(map(str, caught.value.findings))
    for needed in (
        "parameter layers_1/self_attn/q_proj/lora_a: found a leaf the checkpoint has no tensor for",
        "parameter layers_2/mlp/up_proj/kernel: found nothing, needed shape [64, 96]",
        "parameter layers_0/mlp/down_proj/kernel: found shape [64, 96], needed shape [96, 64]",
        "parameter norm/scale: found str",
        "parameter layers_1/mlp/gate_proj/kernel: found it twice",
        "parameter embed_tokens/embedding: found shape [150, 64], needed shape [160, 64]",
    ):
        assert needed in text, text
    assert not (tmp_path / "saved").exists()


def test_an_array_with_parts_elsewhere_is_refused_by_path(wide, tmp_path):
    tree = numpy_tree(wide.banks)
    array = tree["norm"]["scale"]
    # One process cannot hold a truly remote array: this is its interface.
    tree["norm"]["scale"] = SimpleNamespace(shape=array.shape, dtype=array.dtype, is_fully_addressable=False)
    with pytest.raises(FindingsError, match=r"norm/scale: found an array with parts on other processes"):
        save(tmp_path / "saved", None, tree, wide.banks)


def test_a_model_that_is_not_the_checkpoints_is_refused_by_field(wide, tmp_path):
    model, variables = load(wide.banks)
    other = model.clone(rope_theta=5e5, max_seq_len=8, dropout_rate=0.1, dtype=jnp.bfloat16)
    with pytest.raises(FindingsError) as caught:
        save(tmp_path / "saved", other, variables, wide.banks)
    assert [finding.what for finding in caught.value.findings] == ["decoder field rope_theta"]
    runtime = model.clone(max_seq_len=8, dropout_rate=0.1, dtype=jnp.bfloat16, scan_layers=False)
    banks = save(tmp_path / "saved", runtime, variables, wide.banks)
    assert banks.manifest.fields.max_seq_len == 1048576


def test_what_is_no_tree_is_refused(wide, tmp_path):
    with pytest.raises(ConversionError, match="not a tree"):
        save(tmp_path / "saved", None, [1, 2], wide.banks)


def test_carried_tensors_and_prefixes_come_from_like(tiny, tmp_path):
    config = tiny.gemma3_wrapper_config()
    weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
    path = tiny.write(tmp_path / "source", config, weights, shards=2)
    banks = import_checkpoint(open_source(path), tmp_path / "banks")
    for number, like in enumerate((banks, banks.path, path, open_source(path))):
        saved = save(tmp_path / f"saved{number}", None, numpy_tree(banks.path), like)
        export_checkpoint(saved, tmp_path / f"out{number}")
        assert tiny.files_of(tmp_path / f"out{number}") == tiny.files_of(path)


def test_saved_banks_take_the_models_bank_size(wide, tmp_path):
    model, variables = load(wide.banks)
    banks = save(tmp_path / "saved", model.clone(bank_layers=2), variables, wide.banks)
    assert set(banks.headers) == {"layers_0_1.safetensors", "layers_2.safetensors", "top.safetensors"}
    again, held = load(banks.path)
    assert again.bank_layers == 2
    assert set(held["params"]) >= {"layers_0_1", "layers_2"}


def test_existing_banks_are_not_overwritten_unasked(wide, tmp_path):
    save(tmp_path / "saved", None, numpy_tree(wide.banks), wide.banks)
    with pytest.raises(ConversionError, match="already exists"):
        save(tmp_path / "saved", None, numpy_tree(wide.banks), wide.banks)
    with pytest.raises(ConversionError, match="overlaps"):
        save(wide.banks, None, numpy_tree(wide.banks), wide.banks, overwrite=True)
    save(tmp_path / "saved", None, numpy_tree(wide.banks), wide.banks, overwrite=True)


class TestShardings:
    """What may be given: as flax and Orbax give it."""

    def place(self, wide, **given):
        return {path: array.sharding for path, array in leaves(load(wide.banks, **given)[1]).items()}

    @pytest.fixture
    def mesh(self):
        return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))

    def test_a_tree_of_specs_as_flax_makes_it(self, wide, mesh):
        model, variables = load(wide.banks)
        abstract = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        specs = jax.tree.map(lambda leaf: PartitionSpec(*("x", "y")[: leaf.ndim]), abstract)
        _, held = load(wide.banks, mesh=mesh, scan_layers=False, shardings=specs)
        for path, array in leaves(held).items():
            assert array.sharding.spec == PartitionSpec(*("x", "y")[: array.ndim]), path
        like = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec("x")), variables)
        assert {s.spec for s in self.place(wide, shardings=flax.core.freeze(like)).values()} == {PartitionSpec("x")}

    def test_a_prefix_holds_for_all_below_and_none_replicates(self, wide, mesh):
        given = {"layers_0_2": {"mlp": PartitionSpec(None, "x"), "": None}, "norm": None, "lm_head/kernel": None}
        given |= {"embed_tokens.embedding": PartitionSpec("y"), "layers_0_2/self_attn": PartitionSpec("x")}
        given["layers_0_2"].pop("")
        given |= {"layers_0_2/input_layernorm/scale": None, "layers_0_2/post_attention_layernorm": None}
        found = self.place(wide, mesh=mesh, shardings=given)
        assert found["layers_0_2/mlp/up_proj/kernel"].spec == PartitionSpec(None, "x")
        assert found["layers_0_2/self_attn/q_norm/scale"].spec == PartitionSpec("x")
        assert found["embed_tokens/embedding"].spec == PartitionSpec("y")
        assert found["norm/scale"].spec == PartitionSpec()

    def test_a_parameter_held_by_layer_has_its_runs_without_the_layer_axis(self, tiny, tmp_path, mesh):
        checkpoint = tiny.qwen3(float32=("layers.2.input_layernorm.weight",), num_hidden_layers=4)
        ordinary(tiny, checkpoint)
        import_checkpoint(open_source(checkpoint.path), tmp_path / "banks")
        tops = dict.fromkeys(("embed_tokens", "norm", "lm_head"))
        given = tops | {"layers_0_3": NamedSharding(mesh, PartitionSpec("x", "y"))}
        held = leaves(load(tmp_path / "banks", mesh=mesh, shardings=given)[1])
        assert held["layers_2/input_layernorm/scale"].sharding.spec == PartitionSpec("y")
        assert held["layers_0_3/mlp/up_proj/kernel"].sharding.spec == PartitionSpec("x", "y")

    def test_what_does_not_fit_is_told_by_name_and_at_once(self, wide, mesh):
        with pytest.raises(FindingsError) as caught:
            load(wide.banks, mesh=mesh, shardings={"norm": None, "layer_0": None})
        found = {finding.what for finding in caught.value.findings}
        assert found >= {"parameter lm_head/kernel", "shardings entry layer_0"}
        with pytest.raises(ConversionError, match="no_axis"):
            load(wide.banks, mesh=mesh, shardings=PartitionSpec("no_axis"))
        with pytest.raises(ConversionError, match="a str is given"):
            load(wide.banks, mesh=mesh, shardings="x")
        with pytest.raises(FindingsError, match="norm/scale"):
            load(wide.banks, mesh=mesh, shardings=PartitionSpec("x", "y"))


INDIVISIBLE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
import dewconv
try:
    dewconv.load(sys.argv[1], mesh=Mesh(np.array(jax.devices()), ("x",)), shardings=PartitionSpec("x"))
except dewconv.FindingsError as error:
    print(*(finding.what for finding in error.findings), sep="\\n")
"""


def test_an_axis_that_the_devices_do_not_divide_is_told(wide):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", INDIVISIBLE, str(wide.banks)],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
    )
    told = done.stdout.split("\n")
    assert "parameter layers_0_2/mlp/up_proj/kernel" in told
    assert "parameter norm/scale" not in told


def test_layers_of_several_specs_are_checked_against_the_decoder(tiny, tmp_path):
    """The first layers stand for the others of their kind: a wrong shape far down is found all the same."""
    config = tiny.gemma3_config(num_hidden_layers=14)
    path = tiny.write(tmp_path / "source", config, tiny.weights_of(config, head=None))
    banks = import_checkpoint(open_source(path), tmp_path / "banks", bank_layers=1)
    load(banks.path)
    file = tmp_path / "banks" / "layers_12.safetensors"
    text = file.read_bytes()
    assert text.count(b'"mlp/up_proj/kernel":{"dtype":"BF16","shape":[24,28]') == 1
    file.write_bytes(
        text.replace(
            b'"mlp/up_proj/kernel":{"dtype":"BF16","shape":[24,28]',
            b'"mlp/up_proj/kernel":{"dtype":"BF16","shape":[28,24]',
        )
    )
    with pytest.raises(FindingsError, match=r"parameter layers_12/mlp/up_proj/kernel: found shape \[28, 24\]"):
        load(banks.path)


def test_layers_of_equal_specs_are_traced_once(tiny, tmp_path):
    """Dense layers before sparse ones: the first of each kind stands for the rest, experts and all."""
    config = tiny.qwen3_config(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=9,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[0, 1],
    )
    plan = plan_import(source_of_experts(tiny, tmp_path, config))
    model = CausalTransformer(**plan.fields.kwargs())
    expected = loading.init_shapes(model)
    traced = []
    original = loading.init_shapes

    def init(model):
        traced.append(model.num_layers)
        return original(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "init_shapes", init)
        loading.check_leaves(model, expected, "x")
        wrong = expected | {"layers_8/mlp/experts/up_proj/kernel": (4, 12, 24)}
        with pytest.raises(FindingsError, match="layers_8/mlp/experts/up_proj/kernel"):
            loading.check_leaves(model, wrong, "x")
    assert traced == [3, 3, 9]


def source_of_experts(tiny, tmp_path, config):
    weights = tiny.weights_of(config)
    for layer in range(2, config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (24, 12) if name == "down_proj" else (12, 24)
            del weights[f"{at}{name}.weight"]
            weights |= {f"{at}experts.{e}.{name}.weight": tiny.random_bits(shape, BF16, e) for e in range(4)}
        weights[f"{at}gate.weight"] = tiny.random_bits((4, 24), BF16, layer)
    return open_source(tiny.write(tmp_path / "source", config, weights))
