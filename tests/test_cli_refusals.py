"""The real command where it cannot do what was asked: what is said, as which document, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import TINY, content, dewconv_command, fails, sparse_copy, succeeds

ONE, TWO, STRAY = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model2.safetensors"
INDEX = "model.safetensors.index.json"


def sharded(to: Path, **weight_map: str) -> Path:
    """The tiny checkpoint with an index in place of its one file; `weight_map` is the whole map when given."""
    shutil.copytree(TINY, to)
    (to / "model.safetensors").unlink()
    (to / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return to


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("imprt", "x"), "No such command"),
        (("import",), "Missing argument 'SOURCE'"),
        (("import", "x", "--dryrun"), "No such option"),
        (("import", "x", "--dtype", "float8"), "'float8'"),
        (("import", "./nowhere"), "no such directory"),
        (("import", ""), "empty"),
        (("export", "x"), "Missing argument 'OUT'"),
        (("export", "./nowhere", "out"), "not a bank directory"),
        (("verify",), "Name a TARGET"),
        (("verify", "x", "--checks", "logit"), "No check is called"),
        (("generate", "x"), "Missing option '--prompt'"),
        (("diff", "x"), "Missing argument 'B'"),
        (("inspect", "./nowhere"), "no such directory"),
        (("matrix", "--format", "yaml"), "'yaml'"),
        ((), "No such option"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_json_is_one_document_whatever_is_wrong(
    arguments: tuple[str, ...], said: str, first: bool, tmp_path: Path
) -> None:
    given = (*arguments[:1], "--json", *arguments[1:]) if first else (*arguments, "--json")
    done = dewconv_command(*given, cwd=tmp_path)
    assert done.returncode == 2
    document: Any = json.loads(done.stdout)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "findings"}
    assert said in document["error"]["message"]
    assert document["error"]["message"].strip() == done.stderr.strip()
    assert 1 <= len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("command", ["import", "inspect", "export", "diff", "generate", "verify"])
def test_an_empty_name_is_not_the_current_directory(command: str, banks: Path) -> None:
    more = {"export": ("out",), "diff": (".",), "generate": ("--prompt", "x")}.get(command, ())
    assert "empty" in fails(command, "", *more, cwd=banks)
    for verb in ("import", "export"):
        message = fails(verb, banks, "", cwd=banks)
        assert "The name is empty. Name a directory.\n" in message


def test_a_mistyped_path_is_told_apart_from_a_hub_id(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "models" / "tiny-qwen3")
    message = fails("import", "models/tiny-qwn3", cwd=tmp_path)
    assert "models/tiny-qwn3: no such directory, and as a hub id (org/name) not in the local cache" in message
    assert "Did you mean models/tiny-qwen3?" in message
    message = fails("import", "./models/tiny-qwn3", cwd=tmp_path)
    assert "no such directory (a hub id looks like org/name). Did you mean models/tiny-qwen3?" in message


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    assert "link: is a link to gone, which does not exist" in fails("import", "link", cwd=tmp_path)
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    for name in ("model.safetensors", "config.json"):
        (source / name).unlink()
        (source / name).symlink_to("/gone/blob")
        message = fails("inspect", source, cwd=tmp_path)
        assert f"{name} is a link to /gone/blob, which does not exist" in message


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX, ONE])
def test_what_is_no_file_is_refused_and_never_waited_for(kind: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if name == ONE:
        sharded(source, **{"model.norm.weight": ONE})
    else:
        shutil.copytree(TINY, source)
    (source / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(source / name)
    elif kind == "directory":
        (source / name).mkdir()
    else:
        (source / name).symlink_to("/dev/zero")
    for command in ("inspect", "import"):
        message = fails(command, source, cwd=tmp_path, timeout=60)
        assert name in message
        assert any(said in message for said in ("a pipe, a socket or a device", "a directory", "leads out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_pipe_in_place_of_a_directory(banks: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, a socket or a device" in fails("import", "pipe", cwd=tmp_path, timeout=60)
    assert "is a pipe, a socket or a device" in fails("diff", banks, "pipe", cwd=tmp_path, timeout=60)
    assert "not a directory" in fails("export", banks, "pipe", cwd=tmp_path, timeout=60)
    mine = tmp_path / "banks"
    shutil.copytree(banks, mine)
    for name in ("top.safetensors", "source/config.json", "headers/model.safetensors.json"):
        before = (mine / name).read_bytes()
        (mine / name).unlink()
        os.mkfifo(mine / name)
        for arguments in (("export", mine, "out"), ("inspect", mine)):
            message = fails(*arguments, cwd=tmp_path, timeout=60)
            assert f"{name}: found a pipe, a socket or a device" in message
        (mine / name).unlink()
        (mine / name).write_bytes(before)


def test_an_index_that_names_nothing(tmp_path: Path) -> None:
    message = fails("inspect", sharded(tmp_path / "source"), cwd=tmp_path)
    assert "its weight_map is empty, so it names no shard" in message


def test_what_is_left_behind_is_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / STRAY).write_bytes(b"stray")
    done = succeeds("import", source, "b", "--unverified", cwd=tmp_path)
    assert done.stderr == f"note: left behind: {STRAY} (weights that are not part of this checkpoint)\n"
    assert STRAY in succeeds("inspect", source, cwd=tmp_path).stdout
    assert succeeds("import", source, "c", "--unverified", "--quiet", cwd=tmp_path).stderr == ""


def test_casts_are_said(banks: Path, tmp_path: Path) -> None:
    done = succeeds("export", banks, "out", "--dtype", "float32", cwd=tmp_path)
    assert done.stderr.startswith("note: ")
    assert "matrices are cast to float32" in done.stderr
    done = succeeds("import", TINY, "b", "--unverified", "--dtype", "float32", cwd=tmp_path)
    assert "matrices were cast to float32" in done.stderr


NARROW = """
import resource, sys
from dewconv.cli import run
resource.setrlimit(resource.RLIMIT_AS, (600_000_000, 600_000_000))
sys.exit(run(sys.argv[1:]))
"""


def test_a_file_beyond_what_a_process_may_address(tmp_path: Path) -> None:
    """`ulimit -v` below the size of a shard, which is mapped whole: said, and nothing is written."""
    source, size = sparse_copy(tmp_path / "source", 200_000)
    assert size > 10**9
    command = [sys.executable, "-c", NARROW, "import", str(source), "out", "--unverified"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "model.safetensors: cannot be mapped (Cannot allocate memory)" in done.stderr
    assert "ulimit -v" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_damaged_banks_leave_nothing(banks: Path, tmp_path: Path) -> None:
    mine = tmp_path / "banks"
    shutil.copytree(banks, mine)
    whole = content(mine)
    for name in ("layers_0_3.safetensors", "source/tokenizer.json"):
        data = bytearray(whole[name])
        data[-3] ^= 1
        (mine / name).write_bytes(bytes(data))
        message = fails("export", mine, "out", cwd=tmp_path, lines=3)
        assert name in message
        assert "checksum" in message
        assert [path.name for path in tmp_path.iterdir()] == ["banks"]
        (mine / name).write_bytes(whole[name])
    succeeds("export", mine, "out", cwd=tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("family", "qwen9"), ("codec", "fp9"), ("dtype", "bf17"), ("version", 9), ("files", [])]
)
def test_a_manifest_that_cannot_be_is_told_by_every_command(
    field: str, value: Any, banks: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "banks"
    shutil.copytree(banks, mine)
    manifest = json.loads((mine / "dewconv.json").read_text())
    (mine / "dewconv.json").write_text(json.dumps({**manifest, field: value}))
    for arguments in (
        ("export", mine, "out"),
        ("inspect", mine),
        ("diff", mine, TINY),
        ("generate", mine, "--prompt", "x"),
    ):
        message = fails(*arguments, cwd=tmp_path, lines=3)
        assert "dewconv.json" in message
        assert field in message
    assert [path.name for path in tmp_path.iterdir()] == ["banks"]


class TestOverwrite:
    """`--overwrite` replaces OUT only when all of it is known to be of OUT's own kind."""

    def test_a_project_of_the_users_stays(self, banks, tmp_path):
        (tmp_path / "proj" / ".git").mkdir(parents=True)
        (tmp_path / "proj" / "config.json").write_text('{"port": 80}')
        (tmp_path / "proj" / "main.py").write_text("code")
        said = fails("export", banks, "proj", "--overwrite", cwd=tmp_path)
        assert "proj: replacing it would lose config.json, main.py, .git/ (it cannot be read as a checkpoint: " in said
        assert sorted(path.name for path in (tmp_path / "proj").iterdir()) == [".git", "config.json", "main.py"]
        assert (tmp_path / "proj" / "main.py").read_text() == "code"

    @pytest.mark.parametrize("out", ["file/sub", "/proc/foo", "link"])
    def test_where_nothing_can_be_written(self, tmp_path, out):
        (tmp_path / "file").write_text("x")
        (tmp_path / "link").symlink_to("elsewhere")
        said = fails("import", TINY, out, "--unverified", cwd=tmp_path)
        why = {
            "file/sub": f"{tmp_path / 'file'} is not a directory",
            "/proc/foo": "cannot be written (",
            "link": "is a symbolic link (to elsewhere)",
        }
        assert f"dewconv: {out}: {why[out]}" in said
        assert "Errno" not in said


@pytest.mark.parametrize(
    ("arguments", "said", "see"),
    [
        (("--json", "families"), "'--json' before the command; give it after: dewconv families --json", "dewconv"),
        (("--quiet", "import", "x"), "'--quiet' before the command; give it after: dewconv import --quiet", "dewconv"),
        (("--markdown", "import", "x"), "give it after: dewconv COMMAND --markdown", "dewconv"),
        (("--bogus", "import"), "No such option '--bogus'.", "dewconv"),
        (("verify", "x", "--report"), "Option '--report' requires an argument.", "dewconv verify"),
        (("matrix", "--json", "--format", "github"), "--format github and --json exclude each other", "dewconv matrix"),
        (("families", "--markdown", "--json"), "--markdown and --json exclude each other", "dewconv families"),
        (("import", "x", "--bank-layers", "a"), "'a' is not a whole number.", "dewconv import"),
        (("verify", "x", "--tokens", "1.5"), "'1.5' is not a whole number.", "dewconv verify"),
        (("help",), "No such command 'help'.", "dewconv"),
    ],
)
def test_what_to_write_instead_and_whose_help_to_see(
    arguments: tuple[str, ...], said: str, see: str, tmp_path: Path
) -> None:
    done = dewconv_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert said in first
    assert second == f"see {see} --help"
