"""Measure a family and write its card: `python -m dewconv.parity.measure qwen3 --released tests/data`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

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
    kept: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Run every gate of a family and write its card, whose path is returned.

    released: a directory with `configs/` and `released_names.json`. faults: inject the catalogue (G4). real: records
    of real checkpoints (G5). reports: variants measured already. kept: a directory where each variant's report and
    the faults' record are written as they come and taken from when they are there, so that a measurement can be
    resumed; it must not outlive a change of the code.
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
            measured[variant] = Report.from_dict(
                _kept(kept, f"{family.name}-{variant}", lambda v=variant: json.loads(_verified(family.name, v)))
            )
        report = measured[variant]
        worst = max((check.ratio or 0.0 for check in report.checks), default=0.0)
        progress(f"{variant}: {'passed' if report.passed else 'FAILED'}, largest error {worst:.3f} of the bound")
    record = None
    if faults:
        from .fault_runner import run_faults

        record = _kept(kept, f"{family.name}-faults", lambda: run_faults(family).to_dict())
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


def _verified(family: str, variant: str) -> str:
    jax.clear_caches()  # a variant's programs are of no use to the next, and a process may hold only so many
    return verify(family=family, variant=variant).to_json()


def _kept(directory: Path | None, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` makes, written to `directory` under `name`, or what was written there before."""
    if directory is None:
        return make()
    path = directory / f"{name}.json"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        made = make()
        path.with_suffix(".part").write_text(json.dumps(made))
        path.with_suffix(".part").rename(path)
    return json.loads(path.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dewconv.parity.measure", description=__doc__)
    parser.add_argument("family", nargs="+")
    parser.add_argument("--released", type=Path, required=True, help="directory of configs/ and released_names.json")
    parser.add_argument("--no-faults", action="store_true", help="leave G4 out")
    parser.add_argument("--real", type=Path, help="a JSON list of records of real checkpoints")
    parser.add_argument("--kept", type=Path, help="directory of reports to resume from, of this very code")
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
            kept=options.kept,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
