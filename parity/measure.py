"""Measure a family and write its card: `python -m dewconv.parity.measure qwen3 --released tests/data`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..families.registry import find
from .cards import CARDS, write_card
from .gates import close_config, close_names, released_configs, released_names
from .results import Report
from .verification import verify


def measure(
    name: str,
    released: Path,
    *,
    faults: bool = True,
    real: Sequence[Mapping[str, Any]] = (),
    reports: Mapping[str, Report] | None = None,
    directory: Path = CARDS,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Run every gate of a family and write its card, whose path is returned.

    released: a directory with `configs/` and `released_names.json`. faults: inject the catalogue (G4). real: records
    of real checkpoints (G5). reports: variants measured already.
    """
    family = find(name)
    configs = released_configs(family, released)
    known = released_names(family, released)
    names = {}
    for release, tensors in known.items():
        progress(f"names of {release}")
        names[release] = close_names(family, configs[release], tensors)
    measured = dict(reports or {})
    for variant in family.variants:
        if variant not in measured:
            measured[variant] = verify(family=name, variant=variant)
        report = measured[variant]
        worst = max((check.ratio or 0.0 for check in report.checks), default=0.0)
        progress(f"{variant}: {'passed' if report.passed else 'FAILED'}, largest error {worst:.3f} of the bound")
    record = None
    if faults:
        from .fault_runner import run_faults

        record = run_faults(family).to_dict()
    return write_card(
        family.name,
        configs={release: close_config(family, config) for release, config in configs.items()},
        names=names,
        reports={variant: measured[variant] for variant in family.variants},
        variants=tuple(family.variants),
        faults=record,
        real=real,
        directory=directory,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dewconv.parity.measure", description=__doc__)
    parser.add_argument("family", nargs="+")
    parser.add_argument("--released", type=Path, required=True, help="directory of configs/ and released_names.json")
    parser.add_argument("--no-faults", action="store_true", help="leave G4 out")
    parser.add_argument("--real", type=Path, help="a JSON list of records of real checkpoints")
    parser.add_argument("--cards", type=Path, default=CARDS)
    options = parser.parse_args(arguments)
    real = json.loads(options.real.read_text()) if options.real else ()
    for name in options.family:
        mine = [record for record in real if record.get("family", name) == name]
        path = measure(
            name,
            options.released,
            faults=not options.no_faults,
            real=mine,
            directory=options.cards,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
