"""A coverage-guided search for files that break the readers: headers, indexes, configs, manifests.

    python benchmarks/fuzz.py header [--seconds 60] [--corpus DIR]     (make fuzz: each in turn)

The inputs and what is asked of them are those of `tests/fuzzing.py`; atheris (libFuzzer) draws the bytes and keeps
those that reach lines of dewconv that no other reached. It stops at the first finding, with the bytes that made it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
with atheris.instrument_imports(include=["dewconv.converters", "dewconv.families"]):
    import fuzzing

    from dewconv.converters.importing import run_import
    from dewconv.converters.plan import plan_import
    from dewconv.converters.source import open_source
    from dewconv.families import deepseek_v3, qwen3
from dewconv.parity.fixtures import write_checkpoint

TARGETS = ("header", "index", "config", "manifest")


def target_of(name: str, directory: Path) -> Callable[[bytes], object]:
    """What takes an input, over files made in `directory`."""
    if name == "header":
        return lambda data: fuzzing.fuzz_header(data, directory)
    if name == "config":
        checkpoint = write_checkpoint(directory / "source", deepseek_v3.VARIANTS["untied"], deepseek_v3.FAMILY)
        return lambda data: fuzzing.fuzz_checkpoint(data, checkpoint, "config.json")
    checkpoint = write_checkpoint(directory / "source", qwen3.VARIANTS["untied"], qwen3.FAMILY, shards=2)
    if name == "index":
        return lambda data: fuzzing.fuzz_checkpoint(data, checkpoint, "model.safetensors.index.json")
    banks = run_import(plan_import(open_source(checkpoint)), directory / "banks").path
    return lambda data: fuzzing.fuzz_manifest(data, banks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="a directory of inputs to start from, which new ones are put in")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="dewconv-fuzz-"))
    take = target_of(options.target, directory)

    def once(data: bytes) -> None:
        take(data)

    corpus = [str(options.corpus)] if options.corpus else []
    flags = [f"-max_total_time={options.seconds}", "-max_len=256", "-len_control=0", f"-artifact_prefix={directory}/"]
    atheris.Setup([sys.argv[0], *flags, *corpus], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
