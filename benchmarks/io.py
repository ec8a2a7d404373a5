"""Import and export beside a file copy, and the time a plan takes.

    python benchmarks/io.py [dense] [routed] [fp8] [int4] [plan] [--mb 500] [--repeats 5] [--at DIR]

Makes its own checkpoints of random bits below DIR (a temporary directory by default, removed at the end): a dense one
of Qwen3's shape, a routed one of Qwen3-MoE's with three tensors an expert (thousands of them from 3 GB on, or with
more --experts), the first with its projections in FP8 blocks, one with experts of Kimi K2.5's width in packed int4,
both kept as they are (`--quantized keep`, the default), and one of 50,000 tensors whose data are a hole (sparse
files), for plans.

One turn is `cp` of the checkpoint's files and an fsync of each, `dewconv import` and `dewconv export`, as whole
processes that make their output durable, in an order that changes from turn to turn, each begun with nothing left for
the disk to write (a disk that has just taken much takes the next slower). Turns repeat, and what is printed are
medians, and the median of the turns' own ratios to the copy. Modules are compiled once, as installing does. Anonymous
memory is `RssAnon` of the process, sampled every few milliseconds, less the peak of an interpreter that does nothing.
The load of the machine is printed, since it decides what seconds mean. `dewconv.load` is timed inside a process on a
CPU, the first time and as the median of later ones, with what anonymous memory a later one adds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from io_checkpoints import FP8, dense_config, fitting, int4_config, routed_config, write_checkpoint
from rich.console import Console
from rich.table import Table

SAMPLE_SECONDS = 0.004
PLANNED_TENSORS = 50_000


@dataclass(frozen=True)
class Run:
    """One process: wall seconds, and the peak of its anonymous memory in MB."""

    seconds: float
    anonymous: float


def copy_durably(source: Path, target: Path) -> float:
    """Seconds of `cp` and an fsync of every file."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def measured(arguments: Sequence[str | Path]) -> Run:
    """The interpreter run on `arguments`. Raises CalledProcessError when it fails."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=compiled)
    with ThreadPoolExecutor(1) as pool:
        peak = pool.submit(_peak_anonymous, process.pid)
        code = process.wait()
        seconds = time.perf_counter() - start
        anonymous = peak.result()
    if code:
        raise subprocess.CalledProcessError(code, [str(item) for item in arguments])
    return Run(seconds, anonymous / 1000)


def _peak_anonymous(pid: int) -> int:
    """The largest RssAnon of a process in kB, until it has ended."""
    peak = 0
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return peak
        line = next((line for line in status.splitlines() if line.startswith("RssAnon")), None)
        if line is None:
            return peak
        peak = max(peak, int(line.split()[1]))
        time.sleep(SAMPLE_SECONDS)


def command(*arguments: str | Path) -> list[str | Path]:
    return ["-m", "dewconv", *arguments, "--quiet"]


def turns(name: str, source: Path, scratch: Path, repeats: int, idle: float) -> Iterable[tuple[str, ...]]:
    """Rows for the copy, the import, the export and the loading of `source`."""
    copies, runs = [], {"import": [], "export": []}
    kept = scratch / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    measured(command("import", source, kept, "--unverified"))
    steps: list[Callable[[], None]] = [
        lambda: copies.append(copy_durably(source, scratch / "copy")),
        lambda: runs["import"].append(measured(command("import", source, scratch / "banks", "--unverified"))),
        lambda: runs["export"].append(measured(command("export", kept, scratch / "back"))),
    ]
    for turn in range(repeats + 1):
        for path in (scratch / "copy", scratch / "banks", scratch / "back"):
            shutil.rmtree(path, ignore_errors=True)
        for step in (*steps[turn % 3 :], *steps[: turn % 3]):
            os.sync()
            step()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            subprocess.run(["cmp", file, scratch / "back" / file.name], check=True)
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
    # The first turn filled the page cache.
    yield f"{name}, {size:.0f} MB", "cp + fsync", f"{statistics.median(copies[1:]):.2f}", "", ""
    for verb, found in runs.items():
        ratios = [run.seconds / copy for run, copy in zip(found[1:], copies[1:], strict=True)]
        seconds = statistics.median(run.seconds for run in found[1:])
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield "", verb, f"{seconds:.2f}", ratio, f"{max(run.anonymous for run in found) - idle:.0f}"
    yield from loads(kept)


LOADS = """
import json, statistics, sys, time
import jax
jax.devices()
import dewconv

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1000

def load():
    held.clear()
    before, start = anonymous(), time.perf_counter()
    held.append(dewconv.load(sys.argv[1]))
    return time.perf_counter() - start, anonymous() - before

held = []
first, *later = [load() for _ in range(6)]
print(json.dumps([first[0], *map(statistics.median, zip(*later))]))
"""


def loads(banks: Path) -> Iterable[tuple[str, ...]]:
    """Rows for the first load of a process and for later ones."""
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", LOADS, banks], env=settings, check=True, capture_output=True)
    first, later, anonymous = json.loads(done.stdout)
    yield "", "load, first", f"{first:.2f}", "", ""
    yield "", "load, later", f"{later:.3f}", "", f"{anonymous:.1f}"


def plans(source: Path, repeats: int, idle: float) -> Iterable[tuple[str, ...]]:
    """A row for the plan and the inspection of `source`."""
    count = len(json.loads((source / "model.safetensors.index.json").read_text())["weight_map"])
    for verb, options in (("import --dry-run", ("x", "--dry-run", "--unverified", "--quiet")), ("inspect", ())):
        arguments = ["-m", "dewconv", verb.split()[0], source, *options]
        found = [measured(arguments) for _ in range(repeats)]
        seconds = statistics.median(run.seconds for run in found)
        yield f"plan, {count} tensors", verb, f"{seconds:.2f}", "", f"{max(r.anonymous for r in found) - idle:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="dense|routed|fp8|int4|plan", help="which (default: all)")
    parser.add_argument("--mb", type=int, default=500, help="size of the dense and the routed checkpoint (500)")
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer of the routed one (128)")
    parser.add_argument("--repeats", type=int, default=5, help="turns, after one that is not counted (5)")
    parser.add_argument("--at", type=Path, help="where checkpoints are made, kept and found again")
    options = parser.parse_args()
    table = Table("checkpoint", "", "seconds", "ratio to the copy", "anonymous MB")
    before = os.getloadavg()[0]
    if options.at:
        options.at.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dewconv-io-", dir=options.at) as scratch:
        room = options.at or Path(scratch)
        idle = measured(["-c", "import time; time.sleep(0.2)"]).anonymous
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "dense": lambda: fitting(dense_config, options.mb),
            "routed": lambda: fitting(lambda layers: routed_config(layers, options.experts), options.mb),
            "fp8": lambda: fitting(lambda layers: dense_config(layers) | {"quantization_config": FP8}, options.mb),
            "int4": lambda: fitting(int4_config, options.mb),
            "plan": lambda: routed_config(PLANNED_TENSORS // (3 * 128 + 9) + 1, 128),
        }
        what = options.what or list(makers)
        if unknown := set(what) - makers.keys():
            parser.error(f"no checkpoint is called {', '.join(sorted(unknown))}")
        for name in what:
            source = room / (name if name == "plan" else f"{name}-{options.mb}")
            if not source.exists():
                write_checkpoint(source, makers[name](), sparse=name == "plan")
            rows = (
                plans(source, options.repeats, idle)
                if name == "plan"
                else turns(name, source, Path(scratch), options.repeats, idle)
            )
            for row in rows:
                table.add_row(*row)
    Console().print(table)
    print(f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
