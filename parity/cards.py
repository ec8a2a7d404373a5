"""Cards: the recorded outcome of a family's gates. Reading them needs neither torch nor JAX.

`parity/cards/<family>.json` is written by `write_card` and by nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..families.errors import ConversionError
from .results import CheckResult, Report

FORMAT = 1
CARDS = Path(__file__).parent / "cards"
GATES = {
    "G0": "released configs close: every key read, fields written back equal",
    "G1": "released tensor-name lists close against the rules and the decoder's own tree",
    "G2": "every variant, every check, within the derived bound",
    "G3": "export is byte-exact, and transformers reloads it with nothing missing or unexpected",
    "G4": "seeded faults are refused or move the numbers beyond the bound",
    "G5": "a real released checkpoint",
}


def read_card(family: str, directory: Path = CARDS) -> dict[str, Any] | None:
    """A family's card, None when it has none. Raises ConversionError for a damaged one."""
    path = directory / f"{family}.json"
    if not path.is_file():
        return None
    try:
        card = json.loads(path.read_text())
    except ValueError as error:
        raise ConversionError(f"{path.name}: is not valid JSON ({error}); measure the family again") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT or card.get("family") != family:
        raise ConversionError(f"{path.name}: is not a card of {family} in format {FORMAT}; measure the family again")
    return card


def read_cards(directory: Path = CARDS) -> dict[str, dict[str, Any]]:
    """Every card by family name, sorted."""
    cards = {path.stem: read_card(path.stem, directory) for path in sorted(directory.glob("*.json"))}
    return {name: card for name, card in cards.items() if card is not None}


def status(family: str, directory: Path = CARDS) -> int | None:
    """The highest gate that a family has passed with every gate below it; None without a card or with none passed."""
    card = read_card(family, directory)
    if card is None:
        return None
    reached = None
    for number, gate in enumerate(GATES):
        if not card["gates"].get(gate, {}).get("passed"):
            break
        reached = number
    return reached


def write_card(
    family: str,
    *,
    configs: Mapping[str, Sequence[str]],
    names: Mapping[str, Sequence[str]],
    reports: Mapping[str, Report],
    variants: Sequence[str],
    faults: Mapping[str, Any] | None = None,
    real: Sequence[Mapping[str, Any]] = (),
    directory: Path = CARDS,
) -> Path:
    """Write a family's card from what was measured.

    configs, names: released checkpoint -> findings, none when it closes (G0, G1). reports: variant -> report (G2,
    G3), which must cover `variants`, the family's own. faults: the fault runner's record (G4). real: records of real
    checkpoints, each with `name`, `revision`, `command` and `passed` (G5). Returns the card's path.
    """
    card = {
        "format": FORMAT,
        "family": family,
        "gates": {
            "G0": _closing(configs),
            "G1": _closing(names),
            "G2": _numbers(reports, variants),
            "G3": _round_trips(reports, variants),
            "G4": {"passed": bool(faults and faults.get("passed"))},
            "G5": {"passed": bool(real) and all(item["passed"] for item in real)},
        },
        "versions": dict(next(iter(reports.values())).versions) if reports else {},
        "variants": {name: _variant(report) for name, report in reports.items()},
        "faults": dict(faults) if faults else None,
        "real": [dict(item) for item in real],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{family}.json"
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(_plain(card), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(scratch, path)
    return path


def _closing(found: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    closes = {name: list(findings) for name, findings in found.items()}
    return {"passed": bool(closes) and not any(closes.values()), "releases": closes}


def _is_round_trip(check: CheckResult) -> bool:
    return check.name == "round_trip"


def _numbers(reports: Mapping[str, Report], variants: Sequence[str]) -> dict[str, Any]:
    ran = {
        name: [c for c in report.checks if not _is_round_trip(c) and c.passed is not None]
        for name, report in reports.items()
    }
    complete = set(variants) <= set(reports) and all(ran.values())
    measured = [(c.ratio, name, c) for name, checks in ran.items() for c in checks if c.ratio is not None]
    gate: dict[str, Any] = {
        "passed": bool(reports) and complete and all(c.passed for checks in ran.values() for c in checks),
        "variants": len(reports),
        "failed": [f"{name}: {c.name} {c.dtype}" for name, checks in ran.items() for c in checks if not c.passed],
    }
    if measured:
        ratio, name, check = max(measured, key=lambda item: item[0])
        gate["largest_ratio"] = {"ratio": ratio, "variant": name, "check": check.name, "dtype": check.dtype}
    return gate


def _round_trips(reports: Mapping[str, Report], variants: Sequence[str]) -> dict[str, Any]:
    trips = {name: [c for c in report.checks if _is_round_trip(c)] for name, report in reports.items()}
    complete = set(variants) <= set(reports) and all(trips.values())
    failed = [name for name, checks in trips.items() if not all(c.passed for c in checks)]
    return {"passed": bool(trips) and complete and not failed, "variants": len(trips), "failed": failed}


def _variant(report: Report) -> dict[str, Any]:
    checks = {}
    for check in report.checks:
        record: dict[str, Any] = {"passed": check.passed}
        if check.error is not None:
            record |= {"error": check.error, "bound": check.bound, "ratio": check.ratio}
        if check.note:
            record["note"] = check.note
        checks[f"{check.name} {check.dtype}"] = record
    return {"passed": report.passed, "probe": dict(report.probe), "checks": checks}


def _plain(value: Any) -> Any:
    """JSON values of numpy scalars and of what JSON has no number for; floats to four digits, which is what a
    measurement of rounding is good for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.4g}") if value == value and abs(value) != float("inf") else str(value)
    return value
