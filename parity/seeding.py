"""What a seeded fault is: a way to break a family's two tables, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..dew_core.fields import DecoderFields
from ..families.family import Family
from ..families.rules import Statement

Statements = tuple[Statement, ...]

Outcome = Literal["refused", "numbers", "caught", "equal", "within"]
"""What is expected of a fault.

refused: the names, views or shapes do not close, before any weight is read. numbers: it closes, and the outputs move
beyond the bound. caught: either, by what the variant's shapes allow. equal: it cannot be caught, since no number
moves; within: it cannot be caught, since the numbers move by rounding alone. The last two are checked like the
others: a fault listed as out of reach that is caught, or moves a number, is listed wrongly.
"""


@dataclass(frozen=True)
class Model:
    """What a fault is seeded into: an honest reading of one variant.

    family: its tables. variant: its name. fields and statements: what the family makes of it, names as the rules
    have them (`model.…`).
    """

    family: Family
    variant: str
    fields: DecoderFields
    statements: Statements


@dataclass(frozen=True)
class Seeded:
    """One instance of a fault in one model. label: which instance, the same in every variant that has it.

    build makes the broken pair; a ValueError from it is a refusal (the rules language cannot express the fault).
    """

    label: str
    build: Callable[[], tuple[DecoderFields, Statements]]


Seeds = Callable[[Model], Iterator[Seeded]]
"""Every instance of a fault in a model."""


@dataclass(frozen=True)
class Fault:
    """A kind of translator or decoder fault.

    name: in a few words, with underscores. imitates: the mistake it stands for. needs: what a model must have for
    the fault to exist, so that "does not apply" has its reason. seeds: every instance in a model, none when it does
    not apply. why: for what cannot be caught, the reason. shows_in: the compute dtype in which the numbers move.
    """

    name: str
    imitates: str
    needs: str
    seeds: Seeds
    expect: Outcome = "caught"
    why: str = ""
    shows_in: Literal["float32", "bfloat16"] = "float32"

    def applies(self, model: Model) -> bool:
        """Whether the fault can be seeded in `model`."""
        return next(iter(self.seeds(model)), None) is not None

    @property
    def out_of_reach(self) -> bool:
        """Whether the catalogue says that no check can catch it."""
        return self.expect in ("equal", "within")
