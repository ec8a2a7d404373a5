"""Checksums: what load(check=True), diff and export make of bytes that are not those that were written."""

import hashlib
import json
import subprocess
import sys

import pytest

from dewconv.converters.banks import open_banks
from dewconv.converters.loading import load

LOAD = """
import sys
import dewconv
try:
    model, variables = dewconv.load(sys.argv[1], check=True)
except dewconv.FindingsError as error:
    for finding in error.findings:
        print(finding.what, finding.found, finding.needed, sep="|")
    sys.exit(1)
except dewconv.ConversionError as error:
    print(error)
    sys.exit(2)
"""


def command(*arguments, cwd, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "dewconv", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def checked_load(path):
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, [tuple(line.split("|")) for line in done.stdout.splitlines()]


def tensor_bytes(path, key):
    """(where a tensor of a safetensors file begins, its bytes), by the format alone."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[key]["data_offsets"]
    return 8 + length + begin, raw[8 + length + begin : 8 + length + end]


def flip(path, key, at=0):
    start, data = tensor_bytes(path, key)
    with path.open("r+b") as file:
        file.seek(start + at)
        file.write(bytes([data[at] ^ 64]))


@pytest.mark.parametrize("options", [(), ("--sha256",)])
def test_every_tensor_and_file_that_differs_is_named(tiny, tmp_path, options):
    command("import", tiny.qwen3().path, "banks", *options, cwd=tmp_path)
    banks = tmp_path / "banks"
    assert checked_load(banks) == (0, [])
    before = json.loads((banks / "dewconv.json").read_text())["files"]
    flip(banks / "layers_0_2.safetensors", "mlp/up_proj/kernel", 999)
    flip(banks / "top.safetensors", "norm/scale", 3)
    (banks / "source" / "merges.txt").write_bytes(b"a c\n")
    code, found = checked_load(banks)
    assert code == 1
    name = "sha256" if options else "xxh3"
    assert {(what, needed) for what, _, needed in found if "/" in what and ":" in what} == {
        ("layers_0_2.safetensors: mlp/up_proj/kernel", before["layers_0_2.safetensors"]["mlp/up_proj/kernel"][name]),
        ("top.safetensors: norm/scale", before["top.safetensors"]["norm/scale"][name]),
    }
    assert {what for what, _, _ in found} >= {"source/merges.txt"}
    assert len(found) == 3
    # Unasked, a load reads no more than it must.
    load(banks)


def test_sha256_is_that_of_the_bytes_and_is_held_to_by_an_export(tiny, tmp_path):
    config = tiny.gemma3_wrapper_config()
    weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
    command("import", tiny.write(tmp_path / "source", config, weights), "banks", "--sha256", cwd=tmp_path)
    manifest = json.loads((tmp_path / "banks" / "dewconv.json").read_text())
    count = 0
    for name, tensors in manifest["files"].items():
        for key, stated in tensors.items():
            _, data = tensor_bytes(tmp_path / "banks" / name, key)
            assert stated["sha256"] == hashlib.sha256(data).hexdigest(), key
            count += 1
    assert count > 20
    assert "carried.safetensors" in manifest["files"]
    for name, stated in manifest["beside"].items():
        assert stated["sha256"] == hashlib.sha256((tmp_path / "banks" / name).read_bytes()).hexdigest()
    # Somebody who makes the xxh3 fit is found out by the other.
    stated = manifest["files"]["top.safetensors"]["norm/scale"]
    flip(tmp_path / "banks" / "top.safetensors", "norm/scale")
    import xxhash

    _, data = tensor_bytes(tmp_path / "banks" / "top.safetensors", "norm/scale")
    stated["xxh3"] = xxhash.xxh3_64_hexdigest(data)
    (tmp_path / "banks" / "dewconv.json").write_text(json.dumps(manifest))
    said = command("export", "banks", "out", cwd=tmp_path, code=2)
    assert "top.safetensors: norm/scale" in said
    assert stated["sha256"] in said
    assert not (tmp_path / "out").exists()
    assert checked_load(tmp_path / "banks")[0] == 1


def test_banks_without_sha256_have_none_and_round_trip_with_it_too(tiny, tmp_path):
    source = tiny.qwen3(shards=2).path
    command("import", source, "plain", cwd=tmp_path)
    command("import", source, "strong", "--sha256", cwd=tmp_path)
    stated = open_banks(tmp_path / "plain").manifest.files["top.safetensors"]["norm/scale"]
    assert set(stated) == {"xxh3"}
    command("export", "strong", "out", cwd=tmp_path)
    assert tiny.files_of(tmp_path / "out") == tiny.files_of(source)


def test_a_checkpoint_has_no_checksums_to_check(tiny):
    code, found = checked_load(tiny.qwen3().path)
    assert code == 2
    assert "has no checksums to check" in found[0][0]


class TestDiff:
    """Between bank directories, checksums decide what has to be read."""

    @pytest.fixture
    def pair(self, tiny, tmp_path):
        source = tiny.qwen3(num_hidden_layers=4).path
        command("import", source, "a", cwd=tmp_path)
        command("import", source, "b", cwd=tmp_path)
        return tmp_path / "a", tmp_path / "b"

    def kinds(self, *arguments, cwd, code):
        found = json.loads(command("diff", *arguments, "--json", cwd=cwd, code=code))
        return found["counts"], {row["tensor"]: row for row in found["tensors"]}

    def test_equal_checksums_are_believed_unless_all_is_to_be_read(self, pair, tmp_path):
        flip(pair[1] / "layers_0_3.safetensors", "mlp/up_proj/kernel")
        assert self.kinds("a", "b", cwd=tmp_path, code=0)[0] == {"equal": 47}
        counts, rows = self.kinds("a", "b", "--read-all", cwd=tmp_path, code=1)
        assert counts == {"equal": 46, "values": 1}
        assert rows["model.layers.0.mlp.up_proj.weight"]["differing"] == 1

    def test_only_what_differs_is_read(self, pair, tmp_path):
        for name in ("a", "b"):
            # A hole of the same size: whatever reads it sees something else than the manifest has.
            path = tmp_path / name / "layers_0_3.safetensors"
            start, data = tensor_bytes(path, "mlp/down_proj/kernel")
            with path.open("r+b") as file:
                file.seek(start)
                file.write(bytes(len(data)) if name == "a" else bytes([255]) * len(data))
        path = pair[1] / "top.safetensors"
        flip(path, "norm/scale", 3)
        manifest = json.loads((pair[1] / "dewconv.json").read_text())
        manifest["files"]["top.safetensors"]["norm/scale"]["xxh3"] = "0" * 16
        (pair[1] / "dewconv.json").write_text(json.dumps(manifest))
        counts, rows = self.kinds("a", "b", cwd=tmp_path, code=1)
        assert counts == {"equal": 46, "values": 1}
        assert rows["model.norm.weight"]["differing"] == 1
        assert rows["model.norm.weight"]["at"] == [1]

    def test_the_layer_that_differs_is_named(self, tiny, tmp_path, pair):
        other = tiny.qwen3("other", num_hidden_layers=4)
        weights = dict(other.weights)
        name = "model.layers.2.self_attn.o_proj.weight"
        weights[name] = weights[name].copy()
        weights[name][3, 5] = 1.0
        tiny.write(other.path, other.config, weights)
        command("import", other.path, "c", cwd=tmp_path)
        counts, rows = self.kinds("a", "c", cwd=tmp_path, code=1)
        assert set(rows) == {name}
        assert (rows[name]["differing"], rows[name]["at"]) == (1, [3, 5])
        assert counts == {"equal": 46, "values": 1}

    def test_banks_of_other_runs_are_read(self, tiny, tmp_path, pair):
        command("import", tmp_path / "source", "c", "--bank-layers", "3", cwd=tmp_path)
        assert self.kinds("a", "c", cwd=tmp_path, code=0)[0] == {"equal": 47}
        flip(tmp_path / "c" / "layers_0_2.safetensors", "mlp/up_proj/kernel")
        assert self.kinds("a", "c", cwd=tmp_path, code=1)[0] == {"equal": 46, "values": 1}

    def test_a_checkpoint_is_read(self, tmp_path, pair):
        flip(pair[1] / "top.safetensors", "norm/scale")
        assert self.kinds("source", "b", cwd=tmp_path, code=1)[0] == {"equal": 46, "values": 1}
