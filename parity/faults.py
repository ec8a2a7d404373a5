"""The catalogue of seeded faults: every kind of mistake that a family's variants must catch.

What cannot be expressed needs no entry: a rule rearranges elements and does no arithmetic, so a norm with 1 added
twice, weights permuted and scaled, or a rounded bias has no rule that says it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .expert_faults import EXPERT_FAULTS
from .field_faults import FIELD_FAULTS
from .indexer_faults import INDEXER_FAULTS
from .kind_faults import KIND_FAULTS
from .latent_faults import LATENT_FAULTS
from .rule_faults import RULE_FAULTS
from .seeding import Fault

CATALOGUE: tuple[Fault, ...] = (
    *RULE_FAULTS,
    *EXPERT_FAULTS,
    *LATENT_FAULTS,
    *INDEXER_FAULTS,
    *KIND_FAULTS,
    *FIELD_FAULTS,
)
"""Every kind of fault, the weights table's first."""

EXPECTED = {
    "refused": "refused",
    "numbers": "the numbers move",
    "caught": "refused, or the numbers move",
}
"""An expectation in the words of the listing."""


def listing(faults: Iterable[Fault] = CATALOGUE) -> str:
    """The kinds as Markdown tables: those that must be caught, and those that cannot be, with the reason."""
    faults = tuple(faults)
    lines = ["| kind | stands for | applies to a model with | must be |", "|---|---|---|---|"]
    lines += [
        f"| `{item.name}` | {item.imitates} | {item.needs} | {EXPECTED[item.expect]} |"
        for item in faults
        if not item.out_of_reach
    ]
    lines += ["", "| kind | stands for | what is checked | why it cannot be caught |", "|---|---|---|---|"]
    checked = {"equal": "no bit of the logits moves", "within": "the logits stay within the bound"}
    lines += [
        f"| `{item.name}` | {item.imitates} | {checked[item.expect]} | {item.why} |"
        for item in faults
        if item.out_of_reach
    ]
    return "\n".join(lines) + "\n"
