"""The catalogue of seeded faults: every kind of mistake that a family's variants must catch.

What cannot be expressed needs no entry: a rule rearranges elements and does no arithmetic, so a norm with 1 added
twice, weights permuted and scaled, or a rounded bias has no rule that says it.
"""

from __future__ import annotations

from .field_faults import FIELD_FAULTS
from .rule_faults import RULE_FAULTS
from .seeding import Fault

CATALOGUE: tuple[Fault, ...] = (*RULE_FAULTS, *FIELD_FAULTS)
"""Every kind of fault, the weights table's first."""


def fault(name: str) -> Fault:
    """A kind of fault by name. Raises KeyError."""
    return {item.name: item for item in CATALOGUE}[name]
