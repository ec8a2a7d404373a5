"""The real command on standard streams that are closed, full or narrow of letters: what is said, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_cli
from test_cli import TINY, as_json, succeeds

FULL = "standard output cannot be written: No space left on device"
CLOSED = "standard output cannot be written: it is closed"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(redirected: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`dewconv` with `arguments` and a shell's redirections."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    command = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-m", "dewconv", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("redirected", "said"), [(">/dev/full", FULL), (">&-", CLOSED)])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("import", "--help"),
        ("families",),
        ("families", "--json"),
        ("inspect", TINY),
        ("import", TINY, "--dry-run"),
        ("diff", TINY, TINY),
    ],
)
def test_an_answer_that_cannot_be_written(redirected: str, said: str, arguments: tuple[str, ...], tmp_path) -> None:
    done = shell(redirected, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"dewconv: {said}\n")
    silent = shell(f"{redirected} 2>&-", *arguments, cwd=tmp_path)
    assert (silent.returncode, silent.stdout) == (2, "")


@pytest.mark.parametrize(("redirected", "said"), [(">/dev/full", FULL), (">&-", CLOSED)])
def test_the_work_is_done_before_its_answer_is_lost(redirected: str, said: str, tmp_path: Path) -> None:
    done = shell(redirected, "import", TINY, "out", "--unverified", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"dewconv: {said}\n")
    assert as_json("diff", TINY, "out", cwd=tmp_path)["equal"] is True
    done = shell(redirected, "generate", "out", "--prompt", "A", "--max-new-tokens", "3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"dewconv: {said}\n")
    done = shell(redirected, "export", "out", "back", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_notes_that_cannot_be_written_stop_nothing(redirected: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "other.safetensors").write_bytes(b"left behind, which is noted")
    done = shell(redirected, "import", source, "out", "--unverified", cwd=tmp_path)
    assert done.returncode == (2 if ">&- " in redirected else 0)
    assert as_json("diff", TINY, "out", cwd=tmp_path)["equal"] is True
    # With fds 0 to 2 free, files would have got them, and what is printed with them.
    assert (tmp_path / "out/source/config.json").read_bytes() == (TINY / "config.json").read_bytes()


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", ">/dev/full", ">&-"])
def test_a_mistyped_command_ends_in_2(redirected: str, tmp_path: Path) -> None:
    for more in ((), ("--json",)):
        done = shell(redirected, "imprt", *more, cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == (2 if redirected[0] == ">" else 0)
        assert len(done.stdout.splitlines()) == 0 or json.loads(done.stdout)


def test_names_beyond_ascii_are_shown_in_ascii(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "café")
    shown = succeeds("inspect", "café", cwd=tmp_path, env=ASCII).stdout.splitlines()[0]
    assert shown == "  checkpoint  caf\\xe9"
    assert as_json("import", "café", "é", "--unverified", cwd=tmp_path, env=ASCII)["out"] == "é"
    done = succeeds("inspect", "nön", cwd=tmp_path, env=ASCII, code=2)
    assert done.stderr == "dewconv: n\\xf6n: no such directory (a hub id looks like org/name)\n"
    command = [sys.executable.encode(), b"-m", b"dewconv", b"inspect", b"n\xffn"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert done.stderr == "dewconv: n\\xffn: no such directory (a hub id looks like org/name)\n"


def test_side_files_whose_names_are_no_text_are_left_and_said(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "source")
    (tmp_path / "source" / os.fsdecode(b"n\xff.txt")).write_text("x")
    done = succeeds("import", "source", "out", "--unverified", cwd=tmp_path)
    assert done.stderr == "note: left behind: n\\xff.txt (its name is no text in the encoding of this locale)\n"
    succeeds("export", "out", "back", cwd=tmp_path)


def terminal(*arguments: str | Path, cwd: Path, columns: int, **env: str) -> str:
    """What the command writes to a terminal of so many columns, without its escapes."""
    settings = {"COLUMNS": str(columns), "NO_COLOR": "1", **env}
    said = test_cli.TestTerminal().run(*arguments, cwd=cwd, env=settings).replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)


def test_a_narrow_terminal_gets_no_table_that_does_not_fit(tmp_path: Path) -> None:
    told = terminal("families", cwd=tmp_path, columns=40)
    assert max(map(len, told.splitlines())) <= 40
    heads = [line for line in told.splitlines() if not line.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == [item["family"] for item in as_json("families", cwd=tmp_path)]
    assert "gate G" in told
    succeeds("import", TINY, "banks", "--unverified", cwd=tmp_path)
    table = terminal("inspect", "banks", cwd=tmp_path, columns=60)
    assert any(line.split() == ["file", "tensors", "bytes"] for line in table.splitlines())
    assert "─" in table


def test_the_progress_of_an_import_stays_on_one_line(tmp_path: Path) -> None:
    said = terminal("import", TINY, "out", "--unverified", cwd=tmp_path, columns=40)
    assert "2/2 files" in said
    shown = [line for line in re.split(r"[\r\n]", said) if "/2 files" in line]
    assert shown
    assert all(len(line) <= 40 and line.startswith("import ") and line.endswith("%") for line in shown)


def test_figures_and_marks_are_ascii_where_the_stream_is(tmp_path: Path) -> None:
    given = ("verify", "--family", "qwen3", "--checks", "logits,padding", "--dtype", "float32")
    done = succeeds(*given, cwd=tmp_path, env=ASCII)
    assert done.stdout.isascii()
    assert "\\u" not in done.stdout
    head, *rows = done.stdout.splitlines()[1:4]
    assert {row.index("equal") for row in rows} == {head.index("result")}
    drawn = terminal(*given, cwd=tmp_path, columns=120, **ASCII)
    assert drawn.isascii()
    assert "\\u" not in drawn
