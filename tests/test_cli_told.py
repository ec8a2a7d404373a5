"""The real command says what it takes and what it leaves: nothing is accepted, ignored or claimed silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from test_cli import TINY, as_json, dewconv_command, fails, succeeds

from dewconv import console
from dewconv.families.registry import find
from dewconv.parity import write_checkpoint

CONFIG = json.loads((TINY / "config.json").read_text())


def tiny(to: Path, **changes: Any) -> Path:
    shutil.copytree(TINY, to)
    (to / "config.json").write_text(json.dumps(CONFIG | changes))
    return to


class TestConfigs:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"text_config": {"a": 1}}, "config key 'text_config': found {\"a\": 1}, needed no such key"),
            ({"architectures": "Foo"}, "config key 'architectures': found 'Foo', needed a list of Qwen3ForCausalLM"),
            (
                {"architectures": ["Foo"]},
                "config key 'architectures': found [\"Foo\"], needed a list of Qwen3ForCausalLM",
            ),
            ({"architectures": [None]}, "config key 'architectures': found [null], needed"),
            (
                {"architectures": ["Qwen3ForSequenceClassification"]},
                "config key 'architectures': found [\"Qwen3ForSequenceClassification\"], needed",
            ),
            ({"hidden_size": None}, "config key 'hidden_size': found null, needed a whole number"),
            ({"hidden_size": True}, "config key 'hidden_size': found true, needed a whole number"),
            ({"is_decoder": True}, "config key 'is_decoder': found true, needed false"),
        ],
    )
    def test_one_plain_line(self, tmp_path, changes, told) -> None:
        done = dewconv_command("import", tiny(tmp_path / "t", **changes), "out", "--unverified", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.splitlines()[1].startswith(f"  {told}")
        assert "found 'qwen3', needed qwen3" not in done.stderr

    @pytest.mark.parametrize("stated", [None, [], ["Qwen3ForCausalLM"]])
    def test_no_architecture_is_fine(self, tmp_path, stated) -> None:
        succeeds("inspect", tiny(tmp_path / "s", architectures=stated), cwd=tmp_path)

    def test_a_rope_type_that_is_not_supported_is_told_beside_a_conflict(self, tmp_path) -> None:
        kept = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rope_scaling")}
        path = tiny(tmp_path / "s")
        ropes = {
            "rope_scaling": {"rope_type": "foo"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        (path / "config.json").write_text(json.dumps(kept | ropes))
        said = dewconv_command("import", path, "out", "--unverified", cwd=tmp_path).stderr
        assert "config key 'rope_scaling.rope_type': found 'foo', needed one of default, linear" in said


class TestBankDirectories:
    def test_are_no_source(self, banks, tmp_path) -> None:
        assert f"dewconv: {banks}: is a bank directory; give a" in fails("import", banks, "o", cwd=tmp_path)
        said = fails("verify", TINY, "--against", banks, cwd=tmp_path)
        assert f"{banks}: is a bank directory; give a" in said

    @pytest.mark.parametrize("option", [("--bank-layers", "2"), ("--revision", "main"), ("--stream",)])
    def test_are_laid_out_as_they_are(self, banks, tmp_path, option) -> None:
        assert f"{option[0]} is for a checkpoint" in fails("inspect", banks, *option, cwd=tmp_path)

    def test_without_checksums_of_side_files_are_not_called_exact(self, banks, tmp_path) -> None:
        shutil.copytree(banks, tmp_path / "b")
        manifest = json.loads((tmp_path / "b" / "dewconv.json").read_text())
        del manifest["beside"]
        (tmp_path / "b" / "dewconv.json").write_text(json.dumps(manifest))
        done = succeeds("export", "b", "out", cwd=tmp_path)
        assert "own bytes" not in done.stdout
        assert "no checksums of the files beside the weights" in done.stderr
        assert as_json("export", "b", "again", cwd=tmp_path)["exact"] is False
        assert "the source's own bytes" in succeeds("export", banks, "whole", cwd=tmp_path).stdout


class TestOptions:
    def test_a_quiet_dry_run_says_nothing(self, tmp_path) -> None:
        done = succeeds("import", TINY, "o", "--dry-run", "--resume", "--overwrite", "-q", cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("", "")
        assert as_json("import", TINY, "o", "--dry-run", "-q", cwd=tmp_path)["files"]

    @pytest.mark.parametrize("run", [("--dry-run",), ()])
    def test_what_changes_nothing_is_noted(self, tmp_path, run) -> None:
        arguments = ("import", TINY, "o", "--unverified", *run)
        done = succeeds(*arguments, "--text-only", "--quantized", "decode", cwd=tmp_path)
        assert "note: --text-only changes nothing: the checkpoint is a decoder alone" in done.stderr
        assert "note: --quantized decode changes nothing: no tensor of the checkpoint is quantised" in done.stderr
        told = as_json("import", TINY, "p", "--unverified", "--text-only", *run, cwd=tmp_path)["notices"]
        assert "--text-only changes nothing: the checkpoint is a decoder alone" in told
        assert "changes nothing" not in succeeds("import", TINY, "q", "--unverified", *run, cwd=tmp_path).stderr


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"])
def test_prediction_depths_are_carried_where_there_are_any(name, tmp_path) -> None:
    family = find(name)
    variant = next(item for item in family.variants.values() if item.depths > 1)
    path = write_checkpoint(tmp_path / "s", variant, family)
    told = f"{variant.depths} prediction-depth layer(s) are carried for export and not computed"
    for command in (("import", path, "with", "--unverified"), ("inspect", path)):
        assert told in as_json(*command, cwd=tmp_path)["notices"]
    last = variant.config["num_hidden_layers"]
    weights = {}
    for shard in sorted(path.glob("*.safetensors*")):
        weights |= load_file(shard) if shard.suffix == ".safetensors" else {}
        shard.unlink()
    kept = {
        key: value
        for key, value in weights.items()
        if not any(key.startswith(f"model.layers.{last + depth}.") for depth in range(variant.depths))
    }
    assert len(kept) < len(weights)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    for command in (("import", path, "without", "--unverified"), ("inspect", path)):
        assert not any("prediction-depth" in notice for notice in as_json(*command, cwd=tmp_path)["notices"])


def test_progress_counts_files_that_are_whole(monkeypatch) -> None:
    """Two files copied in turns, as the threads of an import do: neither is counted before its last byte."""
    import rich.progress

    seen: list[tuple[int, int]] = []
    real = rich.progress.Progress.update

    def update(self: Any, task: Any, **values: Any) -> None:
        seen.append((values["whole"], values["completed"]))
        real(self, task, **values)

    monkeypatch.setattr(rich.progress.Progress, "update", update)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with console.progress("import", {"a": 10, "b": 6, "empty": 0}, quiet=False) as advance:
        assert advance is not None
        for name, done in (("a", 4), ("b", 8), ("a", 10), ("b", 12), ("a", 16)):
            advance(name, done, 16)
    assert seen == [(1, 4), (1, 8), (1, 10), (2, 12), (3, 16)]
