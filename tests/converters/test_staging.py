"""Several writers of one output: one wins, the others say so, and nothing that appeared meanwhile is replaced."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from dewconv.converters import banks as banks_module
from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.exporting import export_checkpoint, plan_export, run_export
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.plan import plan_import
from dewconv.converters.source import open_source
from dewconv.families import ConversionError, FindingsError


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def meanwhile(appear):
    """A progress callback that calls `appear` once, in the middle of the copy."""
    done = []

    def progress(*event):
        if not done:
            done.append(event)
            appear()

    return progress


def make_file(out):
    out.write_text("mine")


def make_directory(out):
    out.mkdir()
    (out / "thesis.txt").write_text("mine")


def make_link(out):
    out.symlink_to("nowhere")


@pytest.mark.parametrize("appear", [make_file, make_directory, make_link])
@pytest.mark.parametrize("verb", ["import", "export"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appeared_meanwhile_is_left_as_it_is(tiny, tmp_path, appear, verb, overwrite):
    source = open_source(tiny.qwen3().path)
    banks = import_checkpoint(source, tmp_path / "banks")
    out = tmp_path / "out"
    run, given = (import_checkpoint, source) if verb == "import" else (export_checkpoint, banks)
    with pytest.raises(
        ConversionError,
        match=r"out: (appeared while this ran|exists and is not|is a symbolic link|replacing it would lose thesis)",
    ):
        run(given, out, overwrite=overwrite, progress=meanwhile(lambda: appear(out)))
    if appear is make_link:
        assert os.readlink(out) == "nowhere"
    else:
        assert (out if appear is make_file else out / "thesis.txt").read_text() == "mine"
    assert names(tmp_path) == ["banks", "out", "source"]


def test_without_overwrite_a_finished_import_is_not_replaced_by_a_later_one(tiny, tmp_path):
    first, second = open_source(tiny.qwen3("one").path), open_source(tiny.qwen3("two", num_hidden_layers=2).path)
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match="written by another process; it is left as it is"):
        import_checkpoint(second, out, progress=meanwhile(lambda: import_checkpoint(first, out)))
    assert open_banks(out).manifest.fields.num_layers == 3
    assert check_banks(open_banks(out)) == []
    assert names(tmp_path) == ["one", "out", "two"]


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_processes_that_race_to_one_output(tiny, tmp_path, overwrite):
    sources = [tiny.qwen3(f"s{layers}", num_hidden_layers=layers).path for layers in (2, 3, 4)]
    command = [sys.executable, "-m", "dewconv", "import"]
    running = [
        subprocess.Popen([*command, str(path), "out", "--unverified", *overwrite], cwd=tmp_path, stderr=subprocess.PIPE)
        for path in sources
    ]
    ended = [(process.communicate(timeout=120)[1].decode(), process.returncode) for process in running]
    won = [index for index, (_, code) in enumerate(ended) if code == 0]
    for said, code in ended:
        assert code in (0, 2)
        assert "Traceback" not in said
        assert code == 0 or said.startswith("dewconv: out: "), said
    assert len(won) == 1 or (overwrite and won)
    banks = open_banks(tmp_path / "out")
    assert check_banks(banks) == []
    assert banks.manifest.fields.num_layers in [(2, 3, 4)[index] for index in won]
    assert names(tmp_path) == ["out", "s2", "s3", "s4"]


def test_an_output_without_a_name_is_not_the_current_directory(tiny):
    with pytest.raises(ConversionError, match="empty name"):
        import_checkpoint(open_source(tiny.qwen3().path), "")


class TestChecksumsInPassing:
    """An export takes the checksums of what it copies: every byte of the banks once, in any order of threads."""

    def flip(self, banks, name, key, at):
        entry = banks.headers[name].entries[key]
        with (banks.path / name).open("r+b") as file:
            file.seek(banks.headers[name].data_start + entry.begin + at)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    @pytest.mark.parametrize("at", [0, -1])
    def test_every_altered_tensor_is_named_at_once_and_nothing_is_left(self, tiny, tmp_path, at):
        checkpoint = tiny.qwen3(num_hidden_layers=12)
        banks = import_checkpoint(open_source(checkpoint.path), tmp_path / "banks")
        hit = [("layers_0_11.safetensors", "self_attn/k_proj/kernel"), ("top.safetensors", "norm/scale")]
        for name, key in hit:
            self.flip(banks, name, key, at % banks.headers[name].entries[key].nbytes)
        with pytest.raises(FindingsError) as caught:
            export_checkpoint(open_banks(tmp_path / "banks"), tmp_path / "out", threads=3)
        assert {finding.what for finding in caught.value.findings} == {f"{name}: {key}" for name, key in hit}
        assert all(finding.found.startswith("checksum ") for finding in caught.value.findings)
        assert names(tmp_path) == ["banks", "source"]

    def test_what_an_export_leaves_out_is_checked_too(self, tiny, tmp_path):
        config = tiny.gemma3_wrapper_config()
        weights = tiny.weights_of(config, "language_model.model.", None) | tiny.vision_weights()
        path = tiny.write(tmp_path / "source", config, weights)
        banks = import_checkpoint(open_source(path), tmp_path / "banks")
        key = next(iter(banks.headers["carried.safetensors"].entries))
        self.flip(banks, "carried.safetensors", key, 1)
        with pytest.raises(FindingsError, match=r"carried\.safetensors: .*checksum"):
            export_checkpoint(open_banks(tmp_path / "banks"), tmp_path / "out", text_only=True)

    def test_every_byte_is_taken_once_and_before_it_is_copied(self, tiny, tmp_path, monkeypatch):
        banks = import_checkpoint(open_source(tiny.qwen3(num_hidden_layers=12).path), tmp_path / "banks")
        total = sum(header.data_bytes for header in banks.headers.values())
        taken, lock = [], threading.Lock()

        class Counting(banks_module.Digest):
            def update(self, data):
                with lock:
                    taken.append(memoryview(data).nbytes)
                super().update(data)

        seen = []
        monkeypatch.setattr(banks_module, "Digest", Counting)
        run_export(plan_export(banks), tmp_path / "out", threads=1, progress=lambda *e: seen.append((e[1], sum(taken))))
        assert sum(taken) == total
        assert all(taken_by_then >= copied for copied, taken_by_then in seen)
        # What is taken runs ahead of what is copied by a layer, not by the banks.
        assert seen[0][1] < total // 2


def test_a_cast_is_told(tiny, tmp_path):
    checkpoint = tiny.qwen3()
    weights = {name: np.ones_like(array) for name, array in checkpoint.weights.items()}
    tiny.write(checkpoint.path, checkpoint.config, weights)
    banks = import_checkpoint(open_source(checkpoint.path), tmp_path / "banks")
    matrices = sum(array.ndim == 2 for array in weights.values())
    assert plan_export(banks, dtype="float32").notices == (f"{matrices} matrices are cast to float32",)
    assert plan_export(banks).notices == plan_export(banks, dtype="bfloat16").notices == ()


def test_what_is_left_behind_is_told(tiny):
    path = tiny.qwen3(shards=2).path
    (path / "model2.safetensors").write_bytes(b"stray")
    (path / "modeling.py").write_text("pass")
    plan = plan_import(open_source(path))
    assert "left behind: model2.safetensors (weights that are not part of this checkpoint)" in plan.notices
    assert "left behind: modeling.py (code, which is never run or passed on)" in plan.notices
    assert json.loads(json.dumps(plan.to_json()))["skipped"]
