"""Exports with options: dtypes, shard sizes, the text half; and what writing leaves behind when it fails."""

import json
import os
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from dewconv.converters import exporting, importing
from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.exporting import export_checkpoint, plan_export, shard_bytes
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families.errors import ConversionError, FindingsError

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"BF16": BF16, "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "I64": np.dtype(np.int64)}


def read_file(path):
    """(header, tensors) of a safetensors file, by a reader of the test's own."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, item in header.items():
        begin, end = item["data_offsets"]
        raw = np.frombuffer(data[8 + length + begin : 8 + length + end], DTYPES[item["dtype"]])
        tensors[name] = raw.reshape(item["shape"])
    return header, tensors


def read_checkpoint(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        _, held = read_file(file)
        assert not set(held) & set(tensors)
        tensors |= held
    return tensors


def banks_of(checkpoint, tmp_path, **options):
    return import_checkpoint(open_source(checkpoint.path), tmp_path / "banks", **options)


def finite(checkpoint, tiny, dtype=BF16):
    """The checkpoint with ordinary values, for casts."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 1, array.shape).astype(array.dtype) for name, array in checkpoint.weights.items()}
    tiny.write(checkpoint.path, checkpoint.config, weights)
    return weights


def test_max_shard_size_divides_and_numbers_as_the_hub_does(tiny, tmp_path):
    checkpoint = tiny.qwen3(num_hidden_layers=4)
    banks = banks_of(checkpoint, tmp_path)
    export_checkpoint(banks, tmp_path / "out", max_shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {}
    total = 0
    for file in files:
        header, tensors = read_file(tmp_path / "out" / file)
        size = sum(array.nbytes for array in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        total += size
        held |= dict.fromkeys(header, file)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == total
    tensors = read_checkpoint(tmp_path / "out")
    assert {name: array.tobytes() for name, array in tensors.items()} == {
        name: array.tobytes() for name, array in checkpoint.weights.items()
    }


def test_a_shard_size_above_everything_makes_one_file_without_an_index(tiny, tmp_path):
    checkpoint = tiny.qwen3(shards=3)
    export_checkpoint(banks_of(checkpoint, tmp_path), tmp_path / "out", max_shard_size="1GB")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert set(read_checkpoint(tmp_path / "out")) == set(checkpoint.weights)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("10", 10), (7, 7), ("2kb", 2000)]
)
def test_shard_sizes_are_read_as_transformers_reads_them(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-1", 0, True, "0KB"])
def test_what_is_no_shard_size_is_refused(text):
    with pytest.raises(ConversionError):
        shard_bytes(text)


@pytest.mark.parametrize("where", ["import", "export"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_dtype_casts_matrices_alone_and_says_so_in_the_config(tiny, tmp_path, where, shards):
    checkpoint = tiny.qwen3(shards=shards, float32=("k_norm.weight",))
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 1, array.shape).astype(array.dtype) for name, array in checkpoint.weights.items()}
    tiny.write(checkpoint.path, checkpoint.config, weights, shards)
    first, second = ({"dtype": "float32"}, {}) if where == "import" else ({}, {"dtype": "float32"})
    banks = banks_of(checkpoint, tmp_path, **first)
    assert bool(banks.manifest.inexact) == (where == "import")
    plan = export_checkpoint(banks, tmp_path / "out", **second)
    assert not plan.exact
    tensors = read_checkpoint(tmp_path / "out")
    for name, array in weights.items():
        wanted = np.dtype(np.float32) if array.ndim == 2 else array.dtype
        assert tensors[name].dtype == wanted, name
        assert np.array_equal(tensors[name], array.astype(wanted)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**checkpoint.config, "torch_dtype": "float32"}
    if shards == 2:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())


def test_a_cast_changes_the_dtype_key_of_the_config_and_nothing_else(tiny, tmp_path):
    """Under either spelling, in a wrapper too; order, floats, nulls and long numbers stay."""
    plain = tiny.qwen3_config(initializer_range=0.02, pad_token_id=None, rms_norm_eps=1e-06)
    wrapper = tiny.gemma3_wrapper_config()
    wrapper["dtype"] = wrapper.pop("torch_dtype")
    wrapper["text_config"]["dtype"] = "bfloat16"
    newer = {**{key: value for key, value in plain.items() if key != "torch_dtype"}, "dtype": "bfloat16"}
    for name, config in {"plain": plain, "newer": newer, "wrapper": wrapper}.items():
        body = "language_model.model." if name == "wrapper" else "model."
        weights = tiny.weights_of(config, body, None if name == "wrapper" else "lm_head.")
        rng = np.random.default_rng(0)
        weights = {key: rng.normal(0, 1, array.shape).astype(array.dtype) for key, array in weights.items()}
        path = tiny.write(tmp_path / name, config, weights | (tiny.vision_weights() if name == "wrapper" else {}))
        banks = import_checkpoint(open_source(path), tmp_path / f"{name}-banks")
        export_checkpoint(banks, tmp_path / f"{name}-out", dtype="float32")
        before, after = ((one / "config.json").read_text() for one in (path, tmp_path / f"{name}-out"))
        assert json.loads(after) == json.loads(before.replace('"bfloat16"', '"float32"')), name
        assert after.split() == before.replace('"bfloat16"', '"float32"').split(), name


def test_an_index_written_anew_is_what_the_files_hold(tiny, tmp_path):
    """Whatever the source's index said: a tensor it forgot, a total of its own."""
    checkpoint = tiny.qwen3(shards=2)
    tiny.write(checkpoint.path, checkpoint.config, finite(checkpoint, tiny), shards=2)
    (checkpoint.path / "model.safetensors").unlink()
    path = checkpoint.path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    index["metadata"]["total_size"] = 7
    path.write_text(json.dumps(index))
    banks = banks_of(checkpoint, tmp_path)
    for number, options in enumerate(({"dtype": "float32"}, {"max_shard_size": "20KB"})):
        out = tmp_path / f"out{number}"
        export_checkpoint(banks, out, **options)
        held = {name: file.name for file in out.glob("*.safetensors") for name in read_file(file)[0]}
        written = json.loads((out / path.name).read_text())
        assert set(held) == set(checkpoint.weights)
        assert written["weight_map"] == held
        assert written["metadata"]["total_size"] == sum(array.nbytes for array in read_checkpoint(out).values())


def test_widening_keeps_the_ends_of_the_range(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    weights = finite(checkpoint, tiny)
    ends = np.array([3e38, 1e-40, -0.0, -3e38], np.float32).astype(BF16)
    weights["lm_head.weight"][0, :4] = ends
    tiny.write(checkpoint.path, checkpoint.config, weights)
    export_checkpoint(banks_of(checkpoint, tmp_path), tmp_path / "out", dtype="float32")
    written = read_checkpoint(tmp_path / "out")["lm_head.weight"][0, :4]
    assert written.tobytes() == ends.astype(np.float32).tobytes()


def test_float16_that_cannot_hold_a_value_is_refused_and_leaves_nothing(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    weights = finite(checkpoint, tiny)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 3e38
    tiny.write(checkpoint.path, checkpoint.config, weights)
    banks = banks_of(checkpoint, tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj.*float16"):
        export_checkpoint(banks, tmp_path / "out", dtype="float16")
    assert set(tmp_path.iterdir()) == before


def test_an_unknown_dtype_is_refused(tiny, tmp_path):
    source = open_source(tiny.qwen3().path)
    with pytest.raises(ConversionError, match="float8"):
        plan_import(source, dtype="float8")


class TestTextHalf:
    """A wrapper, whole and by its text half."""

    @pytest.mark.parametrize("body", ["language_model.model.", "model.language_model."])
    def test_text_only_is_a_checkpoint_of_its_own(self, tiny, tmp_path, body):
        config = tiny.gemma3_wrapper_config()
        prefix = "model." if body == "model.language_model." else ""
        text = tiny.weights_of(config, body, None)
        path = tiny.write(tmp_path / "source", config, text | tiny.vision_weights(prefix), shards=2)
        (path / "preprocessor_config.json").write_text("{}")
        banks = import_checkpoint(open_source(path), tmp_path / "banks")
        export_checkpoint(banks, tmp_path / "out", text_only=True)
        written = read_checkpoint(tmp_path / "out")
        assert {name: array.tobytes() for name, array in written.items()} == {
            name.replace(body, "model."): array.tobytes() for name, array in text.items()
        }
        result = json.loads((tmp_path / "out" / "config.json").read_text())
        # The text config as it was, and what the wrapper states for it: nothing else is added, lost or changed.
        told = {key: config[key] for key in ("torch_dtype", "transformers_version", "eos_token_id")}
        assert result == {**config["text_config"], "architectures": ["Gemma3ForCausalLM"], **told}
        assert not (tmp_path / "out" / "preprocessor_config.json").exists()
        again = plan_import(open_source(tmp_path / "out"))
        assert again.fields == banks.manifest.fields

    def test_a_text_config_cannot_be_halved(self, tiny, tmp_path):
        with pytest.raises(ConversionError, match="text-only"):
            plan_export(banks_of(tiny.qwen3(), tmp_path), text_only=True)

    def test_a_wrapper_without_its_vision_tensors_is_refused_unless_asked(self, tiny, tmp_path):
        config = tiny.gemma3_wrapper_config()
        weights = tiny.weights_of(config, "language_model.model.", None)
        path = tiny.write(tmp_path / "source", config, weights)
        with pytest.raises(FindingsError, match=r"'vision_config'.*--text-only"):
            import_checkpoint(open_source(path), tmp_path / "banks")
        banks = import_checkpoint(open_source(path), tmp_path / "banks", text_only=True)
        assert banks.manifest.inexact
        export_checkpoint(banks, tmp_path / "out")
        assert "vision_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
        assert "model.norm.weight" in read_checkpoint(tmp_path / "out")

    def test_a_text_only_import_leaves_the_rest_behind_and_says_so(self, tiny, tmp_path):
        config = tiny.gemma3_wrapper_config()
        weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
        path = tiny.write(tmp_path / "source", config, weights)
        plan = plan_import(open_source(path), text_only=True)
        assert set(plan.left) == set(tiny.vision_weights())
        banks = plan.run(tmp_path / "banks")
        assert "carried.safetensors" not in banks.headers
        export_checkpoint(banks, tmp_path / "out")
        assert not any("vision" in name for name in read_checkpoint(tmp_path / "out"))


class TestAtomic:
    """An output exists whole or not at all."""

    def fail_late(self, monkeypatch, module):
        def fail(*args, **kwargs):
            raise RuntimeError("late")

        monkeypatch.setattr(module, "write_bytes", fail)

    def test_an_import_that_fails_midway_leaves_nothing(self, tiny, tmp_path):
        source = open_source(tiny.qwen3().path)
        calls = []

        def progress(file, done, total):
            calls.append(done)
            if len(calls) == 3:
                raise RuntimeError("the third block")

        before = set(tmp_path.iterdir())
        with pytest.raises(RuntimeError, match="the third block"):
            import_checkpoint(source, tmp_path / "banks", progress=progress)
        assert set(tmp_path.iterdir()) == before

    def test_what_stood_there_stays_until_the_new_one_is_complete(self, tiny, tmp_path, monkeypatch):
        one = tiny.qwen3("one")
        banks = banks_of(one, tmp_path)
        export_checkpoint(banks, tmp_path / "out")
        old_banks, old_out = tiny.files_of(tmp_path / "banks"), tiny.files_of(tmp_path / "out")
        other = open_source(tiny.qwen3("other", num_hidden_layers=2).path)
        with monkeypatch.context() as patch:
            self.fail_late(patch, importing)
            with pytest.raises(RuntimeError):
                import_checkpoint(other, tmp_path / "banks", overwrite=True)
        with monkeypatch.context() as patch:
            self.fail_late(patch, exporting)
            with pytest.raises(RuntimeError):
                export_checkpoint(banks, tmp_path / "out", overwrite=True, dtype="float32")
        assert tiny.files_of(tmp_path / "banks") == old_banks
        assert tiny.files_of(tmp_path / "out") == old_out
        assert {path.name for path in tmp_path.iterdir()} == {"one", "other", "banks", "out"}
        new = import_checkpoint(other, tmp_path / "banks", overwrite=True)
        assert new.manifest.fields.num_layers == 2
        assert {path.name for path in tmp_path.iterdir()} == {"one", "other", "banks", "out"}

    def test_an_existing_output_is_refused_without_overwrite(self, tiny, tmp_path):
        checkpoint = tiny.qwen3()
        banks = banks_of(checkpoint, tmp_path)
        before = tiny.files_of(tmp_path)
        with pytest.raises(ConversionError, match="already exists"):
            banks_of(checkpoint, tmp_path)
        with pytest.raises(ConversionError, match="overlaps"):
            export_checkpoint(banks, tmp_path / "banks" / "inside", overwrite=True)
        with pytest.raises(ConversionError, match="overlaps"):
            import_checkpoint(open_source(checkpoint.path), checkpoint.path, overwrite=True)
        (tmp_path / "file").write_text("kept")
        with pytest.raises(ConversionError, match="not a directory"):
            export_checkpoint(banks, tmp_path / "file", overwrite=True)
        (tmp_path / "file").unlink()
        assert tiny.files_of(tmp_path) == before

    def test_an_empty_directory_may_be_filled(self, tiny, tmp_path):
        (tmp_path / "banks").mkdir()
        assert banks_of(tiny.qwen3(), tmp_path).manifest.family == "qwen3"

    def test_a_shard_that_changes_under_an_import_is_refused(self, tiny, tmp_path):
        checkpoint = tiny.qwen3()
        plan = plan_import(open_source(checkpoint.path))
        file = checkpoint.path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-2])
        with pytest.raises(ConversionError, match="changed"):
            plan.run(tmp_path / "banks")
        assert not (tmp_path / "banks").exists()

    def test_a_killed_import_leaves_no_output(self, tiny, tmp_path):
        checkpoint = tiny.qwen3()
        code = (
            "import os, sys\n"
            "from dewconv.converters.source import open_source\n"
            "from dewconv.converters.importing import import_checkpoint\n"
            "import_checkpoint(open_source(sys.argv[1]), sys.argv[2], progress=lambda *a: os.kill(os.getpid(), 9))\n"
        )
        result = subprocess.run([sys.executable, "-c", code, str(checkpoint.path), str(tmp_path / "banks")])
        assert result.returncode == -9
        assert not (tmp_path / "banks").exists()
        assert banks_of(checkpoint, tmp_path)

    def test_a_disk_that_takes_no_more_leaves_nothing(self, tiny, tmp_path):
        checkpoint = tiny.qwen3()
        code = (
            "import resource, signal, sys\n"
            "from dewconv.converters.source import open_source\n"
            "from dewconv.converters.importing import import_checkpoint\n"
            "from dewconv.families.errors import ConversionError\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
            "try:\n"
            "    import_checkpoint(open_source(sys.argv[1]), sys.argv[2])\n"
            "except ConversionError as error:\n"
            "    print(error)\n"
        )
        before = set(tmp_path.iterdir())
        command = [sys.executable, "-c", code, str(checkpoint.path), str(tmp_path / "banks")]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "cannot be written" in result.stdout
        assert "File too large" in result.stdout
        assert set(tmp_path.iterdir()) == before

    def test_what_is_written_is_read_again_before_it_is_there(self, tiny, tmp_path, monkeypatch):
        """A shard that is gone, or holds another tensor than the plan says, when all is written."""
        banks = banks_of(tiny.qwen3(shards=2), tmp_path)
        before = set(tmp_path.iterdir())
        original, name = exporting.write_files, b".layers.1.mlp.up_proj.weight"

        def lose(path):
            path.unlink()

        def rename(path):
            path.write_bytes(path.read_bytes().replace(name, name.replace(b"1", b"9")))

        for spoil, said in ((lose, "cannot be written"), (rename, "differs from the plan")):

            def write(stage, *args, spoil=spoil, **options):
                original(stage, *args, **options)
                (shard,) = (path for path in stage.glob("*.safetensors") if name in path.read_bytes())
                spoil(shard)

            monkeypatch.setattr(exporting, "write_files", write)
            with pytest.raises(ConversionError, match=said):
                export_checkpoint(banks, tmp_path / "out")
            assert set(tmp_path.iterdir()) == before


class TestBankDirectory:
    """What does not agree with its manifest is not opened."""

    def test_not_a_bank_directory(self, tiny):
        with pytest.raises(ConversionError, match="not a bank directory"):
            open_banks(tiny.qwen3().path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: m.update(version=99), "version 99"),
            (lambda m: m.update(version=None), "version null"),
            (lambda m: m.update(format="other"), "format is 'other'"),
            (lambda m: m.pop("decoder"), "field decoder: found nothing"),
            (lambda m: m["decoder"].update(no_such_field=1), "no_such_field"),
            (lambda m: m["source"].update(shards=["../x.safetensors"]), "leads out"),
            (lambda m: m.update(side_files=["/etc/passwd"]), "leads out"),
            (lambda m: m["files"].update({"more.safetensors": {}}), "more.safetensors: found no such file"),
            (lambda m: m["files"]["top.safetensors"].update({"ghost": {"xxh3": "0"}}), "ghost"),
            (lambda m: m["files"]["top.safetensors"].pop("norm/scale"), "norm/scale: found a tensor"),
        ],
    )
    def test_a_manifest_that_was_altered(self, tiny, tmp_path, change, message):
        banks_of(tiny.qwen3(), tmp_path)
        path = tmp_path / "banks" / "dewconv.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ConversionError) as caught:
            open_banks(tmp_path / "banks")
        assert message in str(caught.value)

    def test_a_manifest_that_is_no_json(self, tiny, tmp_path):
        banks_of(tiny.qwen3(), tmp_path)
        (tmp_path / "banks" / "dewconv.json").write_text("{")
        with pytest.raises(ConversionError, match="not valid JSON"):
            open_banks(tmp_path / "banks")

    def test_a_missing_or_cut_file(self, tiny, tmp_path):
        banks_of(tiny.qwen3(), tmp_path)
        (tmp_path / "banks" / "source" / "config.json").unlink()
        top = tmp_path / "banks" / "top.safetensors"
        top.write_bytes(top.read_bytes()[:-4])
        with pytest.raises(FindingsError) as caught:
            open_banks(tmp_path / "banks")
        assert "top.safetensors: found a damaged header" in str(caught.value)
        assert "source/config.json: found no such file" in str(caught.value)

    def test_checksums_name_the_tensor_that_was_altered(self, tiny, tmp_path):
        banks = banks_of(tiny.qwen3(), tmp_path)
        assert check_banks(banks) == []
        entry = banks.headers["top.safetensors"].entries["norm/scale"]
        with (tmp_path / "banks" / "top.safetensors").open("r+b") as file:
            file.seek(banks.headers["top.safetensors"].data_start + entry.begin + 3)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        (finding,) = check_banks(open_banks(tmp_path / "banks"))
        assert finding.what == "top.safetensors: norm/scale"


class TestGate:
    """A family whose export is not proven byte-exact is imported on request only."""

    @pytest.mark.parametrize("gate", [None, 0, 2])
    def test_below_g3_is_refused(self, tiny, tmp_path, gate):
        source = open_source(tiny.qwen3().path)
        with pytest.raises(ConversionError, match=r"qwen3.*unverified"):
            import_checkpoint(source, tmp_path / "banks", gate_of=lambda family: gate)
        assert not (tmp_path / "banks").exists()
        assert import_checkpoint(source, tmp_path / "banks", gate_of=lambda family: gate, unverified=True)

    def test_g3_is_enough(self, tiny, tmp_path):
        assert import_checkpoint(open_source(tiny.qwen3().path), tmp_path / "banks", gate_of=lambda family: 3)


def test_progress_counts_every_byte_once(tiny, tmp_path):
    source = open_source(tiny.qwen3(shards=2).path)
    seen = []
    import_checkpoint(source, tmp_path / "banks", progress=lambda *event: seen.append(event))
    total = source.weight_bytes
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total
    assert {event[2] for event in seen} == {total}
    assert {event[0] for event in seen} == {"top.safetensors", "layers_0_2.safetensors"}


def test_a_plan_lists_every_copy_and_reads_no_weight(tiny):
    checkpoint = tiny.qwen3(num_hidden_layers=4)
    plan = plan_import(open_source(checkpoint.path))
    value = json.loads(json.dumps(plan.to_json()))
    rows = {row["key"]: row for row in value["files"]["layers_0_3.safetensors"]}
    up = rows["mlp/up_proj/kernel"]
    assert (up["dtype"], up["shape"]) == ("BF16", [4, 24, 28])
    assert [item["tensor"] for item in up["from"]] == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
    assert [item["at"] for item in up["from"]] == [i * 24 * 28 for i in range(4)]
    assert all(item["strides"] == [1, 24] for item in up["from"])
    named = {item["tensor"] for file in value["files"].values() for row in file for item in row["from"]}
    assert named == set(checkpoint.weights)
    assert value["bytes"] == sum(array.nbytes for array in checkpoint.weights.values())


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "jax", "jaxlib", "flax", "transformers"}:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Blocker())
from dewconv.converters.source import open_source
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.saving import save
from dewconv.converters.loading import read_parameters
source, banks, out, again = sys.argv[1:]
export_checkpoint(import_checkpoint(open_source(source), banks), out)
_, leaves = read_parameters(banks)
save(again, None, leaves, banks)
"""


def test_conversion_needs_neither_torch_nor_jax(tiny, tmp_path):
    checkpoint = tiny.qwen3(shards=2)
    paths = [str(tmp_path / name) for name in ("banks", "out", "again")]
    subprocess.run([sys.executable, "-c", BLOCKED, str(checkpoint.path), *paths], check=True)
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(checkpoint.path)


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
source, banks, out = sys.argv[1:]
export_checkpoint(import_checkpoint(open_source(source), banks, progress=watch), out, progress=watch)
print(peak)
"""


def test_anonymous_memory_does_not_grow_with_the_checkpoint(tiny, tmp_path):
    peaks = []
    for layers in (2, 12):
        config = tiny.qwen3_config(
            num_hidden_layers=layers, hidden_size=640, intermediate_size=2304, vocab_size=4096, head_dim=64
        )
        shapes = {
            "self_attn.q_proj.weight": (256, 640),
            "self_attn.k_proj.weight": (128, 640),
            "self_attn.v_proj.weight": (128, 640),
            "self_attn.o_proj.weight": (640, 256),
            "mlp.gate_proj.weight": (2304, 640),
            "mlp.up_proj.weight": (2304, 640),
            "mlp.down_proj.weight": (640, 2304),
            "input_layernorm.weight": (640,),
            "post_attention_layernorm.weight": (640,),
            "self_attn.q_norm.weight": (64,),
            "self_attn.k_norm.weight": (64,),
        }
        weights = {
            "model.embed_tokens.weight": np.zeros((4096, 640), BF16),
            "lm_head.weight": np.ones((4096, 640), BF16),
            "model.norm.weight": np.ones(640, BF16),
        }
        for layer in range(layers):
            weights |= {f"model.layers.{layer}.{name}": np.ones(shape, BF16) for name, shape in shapes.items()}
        path = tiny.write(tmp_path / str(layers), config, weights)
        arguments = [str(path), str(tmp_path / f"{layers}-banks"), str(tmp_path / f"{layers}-out")]
        result = subprocess.run([sys.executable, "-c", MEMORY, *arguments], check=True, capture_output=True, text=True)
        peaks.append(int(result.stdout))
    checkpoint_bytes = sum(array.nbytes for array in weights.values())
    assert checkpoint_bytes > 100 << 20
    assert max(peaks) < 40 << 20
    assert peaks[1] < peaks[0] + (8 << 20)
