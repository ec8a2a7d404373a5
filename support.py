"""The support table: what each family's card shows. `dewconv families` prints it, docs/families.md is made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .families.family import Family
from .families.registry import families
from .parity.cards import GATES, read_card, status


@dataclass(frozen=True)
class Support:
    """A family's standing.

    gate: the highest gate passed with all below it ("G4"), None without a card. variants: of the family now.
    variants_passed: of those, how many the card shows passed. largest_ratio: the largest error of any check as a
    part of its bound. faults, faults_caught: seeded and caught, without those that cannot show. versions: of torch,
    transformers and jax. real: the released checkpoints measured.
    """

    family: str
    model_types: tuple[str, ...]
    reference: str
    gate: str | None
    variants: int
    variants_passed: int
    largest_ratio: float | None
    faults: int
    faults_caught: int
    versions: dict[str, str]
    real: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def support() -> tuple[Support, ...]:
    """Every registered family's standing, by name. Raises ConversionError for a damaged card."""
    return tuple(map(_support, families()))


def _support(family: Family) -> Support:
    card = read_card(family.name) or {}
    gate = status(family.name)
    gates, faults = card.get("gates", {}), card.get("faults") or {}
    kinds = (*family.model_types, *(family.wrapper.model_types if family.wrapper is not None else ()))
    measured = card.get("variants", {})
    reachable = [k for name, k in faults.get("kinds", {}).items() if name not in faults.get("out_of_reach", ())]
    return Support(
        family=family.name,
        model_types=kinds,
        reference=family.reference.partition(":")[2],
        gate=None if gate is None else f"G{gate}",
        variants=len(family.variants),
        variants_passed=sum(bool(measured.get(name, {}).get("passed")) for name in family.variants),
        largest_ratio=gates.get("G2", {}).get("largest_ratio", {}).get("ratio"),
        faults=sum(kind["instances"] for kind in reachable),
        faults_caught=sum(kind["caught"] for kind in reachable),
        versions={k: v for k, v in card.get("versions", {}).items() if k in ("torch", "transformers", "jax")},
        real=tuple(str(item["name"]) for item in card.get("real", ())),
    )


COLUMNS = ("family", "model_type", "reference", "gate", "variants", "largest error", "faults caught", "released")
FIGURES = ("variants", "largest error", "faults caught")


def row(item: Support) -> tuple[str, ...]:
    """A family as text, by `COLUMNS`."""
    return (
        item.family,
        ", ".join(item.model_types),
        item.reference,
        item.gate or "-",
        f"{item.variants_passed}/{item.variants}",
        "-" if item.largest_ratio is None else f"{item.largest_ratio:.2f} of bound",
        f"{item.faults_caught}/{item.faults}" if item.faults else "-",
        ", ".join(item.real) or "-",
    )


def markdown(items: Iterable[Support]) -> str:
    """The table and what its gates mean, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'|'.join(' --: ' if c in FIGURES else ' --- ' for c in COLUMNS)}|"]
    for item in items:
        cells = [
            f"`{cell}`" if name in ("family", "model_type", "reference") else cell
            for name, cell in zip(COLUMNS, row(item), strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| gate | shows |", "| --- | --- |"]
    lines += [f"| {gate} | {shows} |" for gate, shows in GATES.items()]
    return "\n".join(lines) + "\n"


def document() -> str:
    """docs/families.md."""
    return (
        "# Families\n\n"
        "Made by `python -m dewconv.support > docs/families.md` from the cards in `parity/cards/`, which only the "
        "parity harness writes. A family's gate is the highest it has passed with every gate below it; `dewconv "
        "import` asks for `--unverified` below G3.\n\n" + markdown(support())
    )


if __name__ == "__main__":
    print(document(), end="")
