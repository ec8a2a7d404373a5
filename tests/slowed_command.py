"""The real command in a process of its own, in small blocks, telling of each write and waiting after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import os, signal, sys, time
from dewconv.converters import copying, safetensors_files, writing
from dewconv.cli import run

copying.SCRATCH_BYTES = writing.SCRATCH_BYTES = 512
copying.MIN_PANEL_ROWS = 2
writing.POINT_BYTES = 1024
original = safetensors_files.FileWriter.write_at
pause = float(os.environ["PAUSE"])

def write_at(self, name, offset, data):
    original(self, name, offset, data)
    sys.stdout.write(f"wrote {self.path.name} {name} {offset} {data.nbytes}\\n")
    sys.stdout.flush()
    time.sleep(pause)

safetensors_files.FileWriter.write_at = write_at
# A shell without job control starts what runs in its background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run(sys.argv[1:]))
"""

Write = tuple[str, str, int, int]
"""(file, tensor, offset, bytes) of one write."""


def start(cwd: Path, *arguments: str | Path, pause: float = 0.004) -> subprocess.Popen[str]:
    """The command, begun."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments), "--quiet"],
        cwd=cwd,
        env={**os.environ, "PAUSE": str(pause)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interfere(writes: int, act: Callable[[], None], cwd: Path, *arguments: str | Path) -> tuple[int, str]:
    """The command, with `act` called once it has made so many writes; (exit code, stderr)."""
    process = start(cwd, *arguments, pause=0.002)
    assert process.stdout is not None
    for _ in range(writes):
        if not process.stdout.readline():
            break
    act()
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said, said
    return process.returncode, said


def end_after(writes: int, how: signal.Signals, cwd: Path, *arguments: str | Path) -> tuple[int, str]:
    """The command, sent the signal `how` once it has made so many writes; (exit code, stderr)."""
    process = start(cwd, *arguments)
    assert process.stdout is not None
    for _ in range(writes):
        if not process.stdout.readline():
            break
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said, said
    return process.returncode, said


def finish(cwd: Path, *arguments: str | Path) -> tuple[list[Write], str]:
    """The command, run to its end: (what it wrote, stderr)."""
    process = start(cwd, *arguments, pause=0)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    rows = [line.split() for line in out.splitlines() if line.startswith("wrote ")]
    return [(file, tensor, int(offset), int(size)) for _, file, tensor, offset, size in rows], said


def partial(directory: Path) -> list[str]:
    """What unfinished runs left in a directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.endswith(".partial"))
