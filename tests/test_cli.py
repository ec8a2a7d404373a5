"""The real command, in processes of its own: what it prints, what it leaves behind, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16, which load_file asks it for
import numpy as np
import pytest
from hub_server import COMMIT, Hub, Repository, running
from safetensors.numpy import load_file, save_file

import dewconv

ROOT = Path(dewconv.__file__).parent
TINY = ROOT / "examples" / "tiny-qwen3"
TOKEN = "hf_secretsecretsecret"


def dewconv_command(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """`dewconv` with `arguments`, on no terminal and no network."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf-home"), "JAX_PLATFORMS": "cpu", **(env or {})}
    command = [sys.executable, "-m", "dewconv", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=timeout)


def succeeds(*arguments: str | Path, cwd: Path, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = dewconv_command(*arguments, cwd=cwd, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def fails(*arguments: str | Path, cwd: Path, lines: int = 2, **options: Any) -> str:
    """stderr of a command that ends in exit code 2, prints nothing on stdout and at most `lines` on stderr."""
    done = dewconv_command(*arguments, cwd=cwd, **options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= lines, done.stderr
    return done.stderr


def as_json(*arguments: str | Path, cwd: Path, code: int = 0, **options: Any) -> Any:
    return json.loads(succeeds(*arguments, "--json", cwd=cwd, code=code, **options).stdout)


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def changed_copy(to: Path, **keys: Any) -> Path:
    """The tiny checkpoint with keys of config.json changed."""
    shutil.copytree(TINY, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | keys))
    return to


def sparse_copy(to: Path, vocab: int) -> tuple[Path, int]:
    """The tiny checkpoint with an embedding of [vocab, 2560], its tensors a hole in the file; and their bytes."""
    changed_copy(to, vocab_size=vocab, hidden_size=2560, tie_word_embeddings=True)
    header: dict[str, Any] = {}
    at = 0
    for name, array in load_file(to / "model.safetensors").items():
        shape = [{264: vocab, 48: 2560}.get(size, size) for size in array.shape]  # the rest keep their size
        end = at + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (to / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return to, at


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories = {
        "org/tiny": Repository(TINY, revisions=("main", "v1", COMMIT)),
        "org/private": Repository(TINY, token=TOKEN),
        "org/gated": Repository(TINY, token=TOKEN, gated=True),
    }
    with running(repositories) as hub:
        yield hub


class TestUsage:
    def test_help_names_every_command(self, tmp_path: Path) -> None:
        text = succeeds("--help", cwd=tmp_path).stdout
        for name in ("import", "export", "verify", "inspect", "generate", "diff", "families", "matrix"):
            assert f"  {name} " in text

    def test_version(self, tmp_path: Path) -> None:
        assert dewconv.__version__ in succeeds("--version", cwd=tmp_path).stdout

    def test_no_command_shows_the_help_and_fails(self, tmp_path: Path) -> None:
        assert "Usage" in fails(cwd=tmp_path, lines=40)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("imprt", "x"), "'import'"),
            (("import", "x", "--dryrun"), "'--dry-run'"),
            (("verify", "x", "--checks", "logit"), "'logits'"),
            (("verify", "--family", "qwen4"), "qwen3"),
        ],
    )
    def test_a_mistyped_word_is_recognised(self, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
        message = fails(*arguments, cwd=tmp_path)
        assert "Did you mean" in message
        assert said in message

    @pytest.mark.parametrize(
        "arguments",
        [
            ("import",),
            ("export", "x"),
            ("diff", "x"),
            ("verify",),
            ("verify", "x", "--family", "qwen3"),
            ("import", "x", "--dtype", "float8"),
            ("import", "x", "--bank-layers", "0"),
            ("generate", "x"),
            ("matrix", "--format", "yaml"),
        ],
    )
    def test_bad_usage_ends_in_2(self, arguments: tuple[str, ...], tmp_path: Path) -> None:
        fails(*arguments, cwd=tmp_path)

    def test_a_reader_that_leaves_early_sees_no_traceback(self, tmp_path: Path) -> None:
        script = f"set -o pipefail; {sys.executable} -m dewconv inspect {TINY} | head -1"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.stderr == ""
        assert len(done.stdout.splitlines()) == 1


class TestImportAndExport:
    def test_the_round_trip_gives_back_every_byte(self, tmp_path: Path) -> None:
        said = succeeds("import", TINY, "--unverified", cwd=tmp_path)
        assert said.stdout.startswith("tiny-qwen3-banks: 2 files")
        assert said.stderr == ""
        said = succeeds("export", "tiny-qwen3-banks", "out", cwd=tmp_path)
        assert said.stdout.startswith("out: 1 files")
        assert content(tmp_path / "out") == content(TINY)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny-qwen3-banks"]

    def test_json_is_one_document(self, tmp_path: Path) -> None:
        made = as_json("import", TINY, "b", "--unverified", cwd=tmp_path)
        assert made["family"] == "qwen3"
        assert made["exact"] is True
        assert made["bytes"] > 0
        assert made["files"] == 2
        out = as_json("export", "b", "out", cwd=tmp_path)
        assert out["exact"] is True
        assert out["out"] == "out"

    def test_quiet_says_nothing(self, tmp_path: Path) -> None:
        done = succeeds("import", TINY, "b", "--unverified", "--quiet", cwd=tmp_path)
        assert done.stdout + done.stderr == ""
        done = succeeds("export", "b", "out", "-q", cwd=tmp_path)
        assert done.stdout + done.stderr == ""

    def test_the_default_name_of_the_current_directory(self, tmp_path: Path) -> None:
        here = tmp_path / "model"
        shutil.copytree(TINY, here)
        message = fails("import", ".", "--unverified", cwd=here)
        assert "overlaps" in message
        succeeds("import", ".", "../b", "--unverified", cwd=here)

    def test_a_dry_run_prints_the_plan_and_writes_nothing(self, tmp_path: Path) -> None:
        text = succeeds("import", TINY, "--dry-run", "--unverified", cwd=tmp_path).stdout
        assert "self_attn/q_proj/kernel" in text
        assert "nothing was written" in text
        plan = as_json("import", TINY, "--dry-run", "--unverified", cwd=tmp_path)
        assert [row["key"] for row in plan["files"]["top.safetensors"]] == ["embed_tokens/embedding", "norm/scale"]
        assert list(tmp_path.iterdir()) == []

    def test_bank_layers(self, tmp_path: Path) -> None:
        succeeds("import", TINY, "b", "--unverified", "--bank-layers", "3", cwd=tmp_path)
        assert {path.name for path in (tmp_path / "b").glob("layers*")} == {
            "layers_0_2.safetensors",
            "layers_3.safetensors",
        }

    def test_dtype_casts_and_says_so(self, tmp_path: Path) -> None:
        made = as_json("import", TINY, "b", "--unverified", "--dtype", "float32", cwd=tmp_path)
        assert made["exact"] is False
        assert "float32" in made["inexact"][0]
        succeeds("export", "b", "out", cwd=tmp_path)
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"

    def test_shards(self, banks: Path, tmp_path: Path) -> None:
        made = as_json("export", banks, "out", "--max-shard-size", "100kB", cwd=tmp_path)
        assert made["files"] > 1
        assert made["exact"] is False
        assert (tmp_path / "out/model.safetensors.index.json").is_file()
        assert as_json("diff", TINY, "out", cwd=tmp_path)["equal"] is True
        assert "5 apples" in fails("export", banks, "o2", "--max-shard-size", "5 apples", cwd=tmp_path)

    def test_what_exists_is_kept_unless_asked(self, tmp_path: Path) -> None:
        succeeds("import", TINY, "b", "--unverified", cwd=tmp_path)
        before = content(tmp_path / "b")
        assert "already exists" in fails("import", TINY, "b", "--unverified", cwd=tmp_path)
        assert content(tmp_path / "b") == before
        succeeds("import", TINY, "b", "--unverified", "--overwrite", cwd=tmp_path)
        assert "overlaps" in fails("export", "b", "b", cwd=tmp_path)

    def test_a_directory_that_is_not_there_is_not_taken_for_a_hub_id(self, tmp_path: Path) -> None:
        assert "no such directory" in fails("import", "./tiny-qwen", cwd=tmp_path)
        assert "no such directory" in fails("import", TINY.parent / "tiny-qwen", cwd=tmp_path)
        assert "not a bank directory" in fails("export", TINY, "out", cwd=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_every_finding_is_told_and_nothing_is_written(self, tmp_path: Path) -> None:
        source = changed_copy(tmp_path / "source", surprise=1, hidden_act="relu7")
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.0.surprise.weight"] = np.zeros(3, np.float32)
        del tensors["model.norm.weight"]
        save_file(tensors, source / "model.safetensors")
        message = fails("import", source, "out", "--unverified", cwd=tmp_path, lines=6)
        assert "'surprise'" in message
        assert "'hidden_act'" in message
        document = json.loads(dewconv_command("import", source, "out", "--unverified", "--json", cwd=tmp_path).stdout)
        assert {finding["what"] for finding in document["error"]["findings"]} >= {
            "config key 'surprise'",
            "config key 'hidden_act'",
        }
        config = json.loads((TINY / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config))
        message = fails("import", source, "out", "--unverified", cwd=tmp_path, lines=6)
        assert "model.layers.0.surprise.weight" in message
        assert "model.norm.weight" in message
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    def test_an_unknown_family_names_the_nearest(self, tmp_path: Path) -> None:
        source = changed_copy(tmp_path / "source", model_type="qwen3_5")
        message = fails("import", source, cwd=tmp_path)
        assert "'qwen3_5'" in message
        assert "Did you mean qwen3?" in message

    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        shutil.copy(TINY / "config.json", source)
        (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        assert "pickled" in fails("import", source, cwd=tmp_path)

    def test_names_from_files_cannot_reach_the_terminal(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(TINY, source)
        tensors = load_file(source / "model.safetensors")
        tensors["model.\x1b[31mred\nline"] = np.zeros(3, np.float32)
        save_file(tensors, source / "model.safetensors")
        message = fails("import", source, "out", "--unverified", cwd=tmp_path, lines=4)
        assert "\x1b" not in message
        done = dewconv_command("inspect", source, cwd=tmp_path)
        assert "\x1b" not in done.stdout + done.stderr
        assert done.returncode == 2

    def test_the_traceback_is_shown_on_request(self, tmp_path: Path) -> None:
        done = dewconv_command("import", "./nowhere", "--debug", cwd=tmp_path)
        assert done.returncode == 2
        assert "Traceback" in done.stderr

    def test_a_terminated_import_leaves_nothing(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(TINY, source)
        process = subprocess.Popen(
            [sys.executable, "-m", "dewconv", "import", str(source), "out", "--unverified"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.2)
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        left = {path.name for path in tmp_path.iterdir()}
        # Terminated while Python starts, while importing, or too late: OUT is whole or absent, and nothing else is.
        assert left in ({"source"}, {"source", "out"})
        if "out" in left:
            assert as_json("diff", source, "out", cwd=tmp_path)["equal"] is True


MEASURED = """
import sys, time
from dewconv.cli import run
code = run(sys.argv[1:])
with open("/proc/self/status") as file:
    peak = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
print(time.process_time(), peak, file=sys.stderr)
sys.exit(code)
"""


class TestInspect:
    def test_what_it_says(self, tmp_path: Path) -> None:
        text = succeeds("inspect", TINY, cwd=tmp_path).stdout
        for said in (
            "qwen3",
            "114,608",
            "layers_0_3  4 x full_attention",
            "self_attn.q_proj.weight [64, 48].T == layers_{l}/self_attn/q_proj/kernel [48, 64]  l=0..3",
        ):
            assert said in text

    def test_json(self, tmp_path: Path) -> None:
        found = as_json("inspect", TINY, "--bank-layers", "2", cwd=tmp_path)
        assert [run["bank"] for run in found["runs"]] == ["layers_0_1", "layers_2_3"]
        assert found["parameters"] == 114608
        assert found["parameter_bytes"] == 2 * 114608
        assert found["problems"] == found["unmapped"] == []
        assert len(found["rules"]) == 13

    def test_a_config_alone_is_enough(self, tmp_path: Path) -> None:
        (tmp_path / "only").mkdir()
        shutil.copy(TINY / "config.json", tmp_path / "only")
        found = as_json("inspect", "only", cwd=tmp_path)
        assert found["parameters"] == 114608
        assert found["parameter_bytes"] == 2 * 114608
        assert found["source"]["tensors"] == 0

    def test_what_does_not_fit_is_listed_and_ends_in_2(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(TINY, source)
        tensors = load_file(source / "model.safetensors")
        for layer in range(3):
            tensors[f"model.layers.{layer}.surprise.weight"] = np.zeros(3, np.float32)
        save_file(tensors, source / "model.safetensors")
        done = succeeds("inspect", source, cwd=tmp_path, code=2)
        assert "model.layers.#.surprise.weight (3 tensors)" in done.stdout
        assert len(done.stderr.splitlines()) == 1
        found = as_json("inspect", source, cwd=tmp_path, code=2)
        assert len(found["unmapped"]) == 3

    def test_banks(self, banks: Path, tmp_path: Path) -> None:
        assert "byte-exact" in succeeds("inspect", banks, cwd=tmp_path).stdout
        assert as_json("inspect", banks, cwd=tmp_path)["family"] == "qwen3"

    def test_a_terabyte_of_headers(self, tmp_path: Path) -> None:
        """A sparse file whose header describes a model of a terabyte is looked at, not read: in a second of the
        processor's time and in 200 MB."""
        source, size = sparse_copy(tmp_path / "huge", 2 * 10**8)
        assert size > 10**12
        command = [sys.executable, "-c", MEASURED, "inspect", str(source), "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        found, (seconds, resident) = json.loads(done.stdout), map(float, done.stderr.splitlines()[-1].split())
        assert seconds < 1
        assert resident < 200e6
        assert found["source"]["bytes"] == size
        assert found["problems"] == []


class TestDiff:
    def test_equal(self, banks: Path, tmp_path: Path) -> None:
        assert succeeds("diff", TINY, banks, cwd=tmp_path).stdout == "46 tensors: 46 equal\n"
        whole = {"equal": True, "counts": {"equal": 46}, "by_checksums": 0, "tensors": []}
        assert as_json("diff", banks, banks, cwd=tmp_path) == whole | {"by_checksums": 46}
        assert as_json("diff", banks, banks, "--read-all", cwd=tmp_path) == whole
        said = "46 equal by recorded checksums and not read; --read-all reads every byte\n"
        assert succeeds("diff", banks, banks, cwd=tmp_path).stdout == "46 tensors: 46 equal\n" + said
        assert succeeds("diff", banks, banks, "--read-all", cwd=tmp_path).stdout == "46 tensors: 46 equal\n"

    @pytest.mark.parametrize("first", [True, False])
    def test_a_config_without_weights_is_no_side(self, tmp_path: Path, first: bool) -> None:
        (tmp_path / "bare").mkdir()
        shutil.copy(TINY / "config.json", tmp_path / "bare")
        sides = ("bare", TINY) if first else (TINY, "bare")
        assert "bare: holds a config.json and no weights" in fails("diff", *sides, cwd=tmp_path)

    def test_every_kind_of_difference(self, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(TINY, other)
        tensors = load_file(other / "model.safetensors")
        norm = tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
        before = float(norm[7])
        norm[7] = 9.0
        tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].astype("f4")
        tensors["model.layers.1.self_attn.q_norm.weight"] = np.zeros(5, np.float32)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["added"] = np.zeros(2, np.float32)
        save_file(tensors, other / "model.safetensors")
        found = as_json("diff", TINY, other, cwd=tmp_path, code=1)
        rows = {row["tensor"]: row for row in found["tensors"]}
        assert {name: row["kind"] for name, row in rows.items()} == {
            "added": "only in B",
            "model.layers.0.input_layernorm.weight": "dtype",
            "model.layers.1.self_attn.q_norm.weight": "shape",
            "model.layers.2.mlp.up_proj.weight": "only in A",
            "model.norm.weight": "values",
        }
        row = rows["model.norm.weight"]
        assert (row["differing"], row["at"]) == (1, [7])
        assert row["max_error"] == pytest.approx(abs(9.0 - before))
        assert rows["model.layers.0.input_layernorm.weight"]["max_error"] == 0.0
        text = succeeds("diff", TINY, other, cwd=tmp_path, code=1).stdout
        assert "model.norm.weight" in text
        assert "42 equal" in text

    def test_nothing_to_compare(self, tmp_path: Path) -> None:
        fails("diff", TINY, "nowhere", cwd=tmp_path)


class TestGenerate:
    def test_text(self, banks: Path, tmp_path: Path) -> None:
        done = succeeds("generate", banks, "--prompt", "Import", "--max-new-tokens", "80", cwd=tmp_path)
        assert done.stdout == "Import moves elements and never does arithmetic on them.\n"
        assert "tokens/s" in done.stderr

    def test_json_ends_at_eos_and_begins_with_bos(self, banks: Path, tmp_path: Path) -> None:
        made = as_json("generate", banks, "--prompt", "Export", "--max-new-tokens", "80", cwd=tmp_path)
        assert made["text"] == " gives back every tensor, name, dtype and byte."
        assert made["finished"] == "eos"
        assert made["prompt_tokens"][0] == 256
        assert made["tokens"][-1] == 257
        assert made["decode_tokens_per_second"] > 0
        assert made["prefill_tokens_per_second"] > 0

    def test_a_stop_text_ends_before_it(self, banks: Path, tmp_path: Path) -> None:
        arguments = ("generate", banks, "--prompt", "Import", "--stop", "never", "--stop", "neves", "-q")
        done = succeeds(*arguments, cwd=tmp_path)
        assert done.stdout == "Import moves elements and \n"
        assert done.stderr == ""

    def test_draws_repeat_with_their_seed(self, banks: Path, tmp_path: Path) -> None:
        drawn = ("--prompt", "A", "--temperature", "3", "--top-k", "40", "--top-p", "0.95", "--max-new-tokens", "24")
        one, two, other = (
            as_json("generate", banks, *drawn, "--seed", seed, cwd=tmp_path)["tokens"] for seed in ("1", "1", "2")
        )
        assert one == two
        assert one != other

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(TINY, source, ignore=shutil.ignore_patterns("tokenizer*"))
        assert "has no tokenizer" in fails("generate", source, "--prompt", "A", cwd=tmp_path)

    def test_options_out_of_range(self, banks: Path, tmp_path: Path) -> None:
        for option, value in (("--max-new-tokens", "0"), ("--top-p", "1.5"), ("--temperature", "-1"), ("--top-k", "0")):
            assert option in fails("generate", banks, "--prompt", "A", option, value, cwd=tmp_path)


class TestVerify:
    def test_equal_with_reports(self, banks: Path, tmp_path: Path) -> None:
        arguments = ("verify", banks, "--checks", "logits,round_trip", "--dtype", "float32", "--report", "report")
        report = as_json(*arguments, cwd=tmp_path)
        assert report["passed"] is True
        assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.json", "report.md", "report.html"}
        assert json.loads((tmp_path / "report/report.json").read_text())["passed"] is True

    def test_different(self, banks: Path, tmp_path: Path) -> None:
        """Banks against a checkpoint in which one norm of one layer is another."""
        other = tmp_path / "other"
        shutil.copytree(TINY, other)
        tensors = load_file(other / "model.safetensors")
        weight = tensors["model.layers.2.input_layernorm.weight"].copy()
        weight[3] *= 2
        tensors["model.layers.2.input_layernorm.weight"] = weight
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        arguments = ("verify", banks, "--against", "other", "--checks", "logits,layers", "--dtype", "float32")
        done = succeeds(*arguments, cwd=tmp_path, code=1)
        assert "different" in done.stdout
        assert "layer 2" in done.stdout

    def test_a_variant(self, tmp_path: Path) -> None:
        arguments = ("verify", "--family", "qwen3", "--variant", "tied", "--checks", "logits")
        assert "Equal" in succeeds(*arguments, cwd=tmp_path).stdout

    def test_an_unknown_variant(self, tmp_path: Path) -> None:
        assert "'tide'" in fails("verify", "--family", "qwen3", "--variant", "tide", cwd=tmp_path)


class TestHub:
    def online(self, hub: Hub) -> dict[str, str]:
        return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}

    def test_an_import_names_itself_and_remembers_the_commit(self, hub: Hub, tmp_path: Path) -> None:
        made = as_json("import", "org/tiny", "--unverified", cwd=tmp_path, env=self.online(hub))
        assert made["out"] == "tiny-banks"
        assert made["source"] == {"name": "org/tiny", "repo": "org/tiny", "revision": COMMIT}
        manifest = json.loads((tmp_path / "tiny-banks/dewconv.json").read_text())
        assert manifest["source"]["revision"] == COMMIT
        succeeds("export", "tiny-banks", "out", cwd=tmp_path)
        assert content(tmp_path / "out") == content(TINY)
        # What is in the cache needs no hub.
        succeeds("import", "org/tiny", "again", "--unverified", "--offline", cwd=tmp_path)

    def test_a_revision(self, hub: Hub, tmp_path: Path) -> None:
        found = as_json("inspect", "org/tiny", "--revision", "v1", cwd=tmp_path, env=self.online(hub))
        assert found["source"]["revision"] == COMMIT
        message = fails("inspect", "org/tiny", "--revision", "v9", cwd=tmp_path, env=self.online(hub))
        assert "no revision 'v9'" in message

    @pytest.mark.parametrize(
        ("repository", "said"), [("org/nothing", "knows no such"), ("org/private", "private"), ("org/gated", "gated")]
    )
    def test_refusals(self, repository: str, said: str, hub: Hub, tmp_path: Path) -> None:
        for arguments in ((), ("--token", "hf_wrong")):
            message = fails("import", repository, *arguments, cwd=tmp_path, env=self.online(hub))
            assert said in message
            assert "hf_wrong" not in message

    @pytest.mark.parametrize("repository", ["org/private", "org/gated"])
    def test_a_token_opens_and_is_never_shown(self, repository: str, hub: Hub, tmp_path: Path) -> None:
        by_option = ("--token", TOKEN)
        done = succeeds("import", repository, "a", "--unverified", *by_option, cwd=tmp_path, env=self.online(hub))
        env = {**self.online(hub), "HF_TOKEN": TOKEN}
        again = succeeds("import", repository, "b", "--unverified", "--json", cwd=tmp_path, env=env)
        for text in (done.stdout, done.stderr, again.stdout, again.stderr):
            assert TOKEN not in text
        written = b"".join({**content(tmp_path / "a"), **content(tmp_path / "b")}.values())
        assert TOKEN.encode() not in written

    def test_a_local_directory_is_never_looked_up(self, hub: Hub, tmp_path: Path) -> None:
        shutil.copytree(TINY, tmp_path / "org" / "tiny")
        before = len(hub.requests)
        made = as_json("import", "org/tiny", "--unverified", cwd=tmp_path, env=self.online(hub))
        assert made["source"]["repo"] is None
        assert len(hub.requests) == before

    def test_offline_with_a_cold_cache_fails_at_once(self, tmp_path: Path) -> None:
        started = time.monotonic()
        message = fails("import", "Qwen/Qwen3-0.6B", cwd=tmp_path)
        assert "not in the local cache" in message
        assert time.monotonic() - started < 15
        assert "not in the local cache" in fails("import", "Qwen/Qwen3-0.6B", "--offline", cwd=tmp_path)

    def test_an_unreachable_hub(self, tmp_path: Path) -> None:
        env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
        message = fails("import", "Qwen/Qwen3-0.6B", cwd=tmp_path, env=env)
        assert "cannot be reached" in message


class TestTerminal:
    def run(self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Everything the command writes to a terminal."""
        import pty

        master, slave = pty.openpty()
        settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "HF_HUB_OFFLINE": "1", **(env or {})}
        command = [sys.executable, "-m", "dewconv", *map(str, arguments)]
        process = subprocess.Popen(command, cwd=cwd, env=settings, stdout=slave, stderr=slave, stdin=slave)
        os.close(slave)
        said = b""
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            said += chunk
        os.close(master)
        assert process.wait(timeout=60) == 0, said.decode()
        return said.decode()

    def test_progress_and_a_summary(self, tmp_path: Path) -> None:
        said = self.run("import", TINY, "b", "--unverified", cwd=tmp_path)
        assert "files" in said
        assert "\x1b[" in said
        assert "b: 2 files" in said

    def test_no_color(self, tmp_path: Path) -> None:
        said = self.run("families", cwd=tmp_path, env={"NO_COLOR": "1"})
        assert "\x1b[3" not in said
        assert "qwen3" in said


class TestFamilies:
    def test_the_table(self, tmp_path: Path) -> None:
        text = succeeds("families", cwd=tmp_path).stdout
        assert "qwen3" in text
        assert "gemma3" in text

    def test_json_and_markdown(self, tmp_path: Path) -> None:
        rows = as_json("families", cwd=tmp_path)
        assert {row["family"] for row in rows} >= {"qwen3", "gemma3"}
        text = succeeds("families", "--markdown", cwd=tmp_path).stdout
        assert text in (ROOT / "docs" / "families.md").read_text()

    def test_the_matrix(self, tmp_path: Path) -> None:
        matrix = json.loads(succeeds("matrix", "--format", "github", cwd=tmp_path).stdout)
        assert {"family": "qwen3", "variant": "tied"} in matrix["include"]
        rows = json.loads(succeeds("matrix", cwd=tmp_path).stdout)
        assert len(rows) == len(matrix["include"])
        assert json.loads(succeeds("matrix", "--json", cwd=tmp_path).stdout) == rows
