"""The real command sent signals at chosen moments: it ends by them, quietly, and tidies up first where it must."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import TINY, as_json

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

IN_AN_IMPORT = """
import os, signal, sys
class Ending:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Ending())
signal.signal(signal.SIGINT, signal.default_int_handler)
from dewconv.__main__ import main
main()
"""
"""Python imports under locks of its own, in callbacks too: an exception raised there is lost, or becomes another."""

IN_A_CALLBACK = """
import os, pathlib, signal, sys, weakref
original = pathlib.Path.mkdir
class Thing: pass
sent = []
def mkdir(self, *given, **more):
    original(self, *given, **more)
    if not sent:
        sent.append(weakref.ref(Thing(), lambda reference: os.kill(os.getpid(), {number})))
pathlib.Path.mkdir = mkdir
{before}
from dewconv.__main__ import main
main()
"""
"""What a callback raises Python tells of on stderr and forgets. Python's handlers run in the main thread, which makes
the directories."""

IN_A_WRITE = """
import os, signal, sys
from dewconv.converters import safetensors_files
original = safetensors_files.FileWriter.write_at
def write_at(self, *given):
    os.kill(os.getpid(), {number})
    original(self, *given)
safetensors_files.FileWriter.write_at = write_at
{before}
from dewconv.__main__ import main
main()
"""


def run(program: str, *arguments: str | Path, cwd: Path) -> tuple[int, str, str]:
    """(how it ended, stdout, stderr) of a program that runs the command."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("module", ["click", "dewconv.console", "numpy.lib", "dewconv.converters.staging"])
def test_before_there_is_anything_to_tidy_up(number: signal.Signals, module: str, tmp_path: Path) -> None:
    program = IN_AN_IMPORT.format(module=module, number=int(number))
    assert run(program, "import", TINY, "out", "--unverified", cwd=tmp_path) == (-number, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("program", [IN_A_CALLBACK, IN_A_WRITE])
def test_while_writing(program: str, number: signal.Signals, tmp_path: Path) -> None:
    before = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = program.format(number=int(number), before=before)
    given = ("import", TINY, "out", "--unverified")
    assert run(program, *given, cwd=tmp_path) == (-number, "", "dewconv: interrupted\n")
    code, out, said = run(program, *given, "--json", cwd=tmp_path)
    assert (code, said) == (-number, "dewconv: interrupted\n")
    assert json.loads(out) == {"error": {"message": "dewconv: interrupted", "findings": []}}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ENDING)
def test_what_the_caller_has_ignored_stays_so(number: signal.Signals, tmp_path: Path) -> None:
    program = IN_A_WRITE.format(number=int(number), before=f"signal.signal({int(number)}, signal.SIG_IGN)")
    code, _, said = run(program, "import", TINY, "out", "--unverified", cwd=tmp_path)
    assert (code, said) == (0, "")
    assert as_json("diff", TINY, "out", cwd=tmp_path)["equal"] is True
