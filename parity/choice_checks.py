"""The checks of choices: which experts a token takes, which keys a query attends, on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import selection as keys
from .checks import Comparison
from .results import CheckResult
from .routing import CLEAR, margins, same_choice, score_bound, tie_bound


class _Tally:
    """Choices counted layer by layer: how many agree, how near to another the reference's lie, the first that is
    wrong."""

    def __init__(self) -> None:
        self.choices = self.same = self.near_ties = 0
        self.narrowest = float("inf")
        self.worst: dict[str, Any] | None = None

    def add(self, agree: np.ndarray, clear: np.ndarray, wrong: np.ndarray) -> tuple[int, int] | None:
        """Counts a layer. agree, wrong: bool [B, S]. clear [B, S]: margins in bounds. The place (row, position) of the
        first wrong choice when no layer before had one."""
        self.choices, self.same = self.choices + agree.size, self.same + int(agree.sum())
        self.near_ties += int((clear <= CLEAR).sum())
        self.narrowest = min(self.narrowest, float(clear.min()))
        if self.worst is not None or not wrong.any():
            return None
        row, position = (int(i) for i in np.argwhere(wrong)[0])
        return row, position

    @property
    def ties(self) -> str:
        """What a note adds about choices that differ and are not wrong."""
        differ = self.same != self.choices and self.worst is None
        return "; the others' choices tie within the bound" if differ else ""


def routing(c: Comparison) -> CheckResult:
    """The experts every token takes in every sparse layer, against torch's.

    In float32 all must be the same. In a lower dtype a token may go another way where torch's own choice lies within
    rounding of another (`routing.CLEAR` bounds). There JAX is given torch's choices, so that every choice is made from
    the numbers of equal choices before it; when one differs, a score's bound is what torch's own scores move by one
    precision up (`routing.tie_bound`).
    """
    mixture = c.jax.fields.mixture
    theirs = c.reference.routed
    if mixture is None or not theirs:
        return CheckResult("routing", c.dtype, None, note="no layer routes to experts")
    if theirs.keys() != c.ours.routed.keys():
        return CheckResult(
            "routing",
            c.dtype,
            False,
            note=f"torch routes in layers {sorted(theirs)}, jax in {sorted(c.ours.routed)}",
        )
    tally = _Tally()
    agreed = {layer: same_choice(c.ours.routed[layer], reference) for layer, reference in theirs.items()}
    measured = c.dtype != "float32" and not all(agree.all() for agree in agreed.values())
    for layer, reference in sorted(theirs.items()):
        agree = agreed[layer]
        if measured:
            unit = tie_bound(mixture, reference, c.wide_forward.routed[layer], c.dtype, layer + 1)
        else:
            unit = score_bound(mixture, reference, c.dtype, layer + 1)
        clear = margins(mixture, reference) / max(unit, 1e-30)
        wrong = ~agree if c.dtype == "float32" else ~agree & (clear > CLEAR)
        at = tally.add(agree, clear, wrong)
        if at is not None:
            tally.worst = {
                "layer": layer,
                "row": at[0],
                "position": at[1],
                "torch": sorted(map(int, reference.experts[at])),
                "jax": sorted(map(int, c.ours.routed[layer].experts[at])),
                "margin": float(clear[at]),
            }
    figures: dict[str, float | int | str] = {
        "choices": tally.choices,
        "same": tally.same,
        "agreement": tally.same / tally.choices,
        "smallest_margin": tally.narrowest,
        "near_ties": tally.near_ties,
    }
    taken = "would take" if c.repeats else "took"
    note = f"{tally.same} of {tally.choices} tokens {taken} the same experts in both{tally.ties}"
    return CheckResult("routing", c.dtype, tally.worst is None, figures, None, None, tally.worst, note)


def selection(c: Comparison) -> CheckResult:
    """The keys every token attends in every layer with an indexer, against torch's: `routing`, of keys.

    In float32 all must be the same, save where torch's own scores tie to the last bit at the cut: which of two equal
    keys `torch.topk` takes is undefined. In a lower dtype a token may attend others where torch's own choice lies
    within rounding of another; the dtype's numbers are those of repeated choices.
    """
    theirs = c.reference.selected
    if not theirs and not c.ours.selected:
        return CheckResult("selection", c.dtype, None, note="no layer chooses keys")
    if theirs.keys() != c.ours.selected.keys():
        note = f"torch chooses keys in layers {sorted(theirs)}, jax in {sorted(c.ours.selected)}"
        return CheckResult("selection", c.dtype, False, note=note)
    tally, cut, furthest = _Tally(), 0, 0.0
    for layer, reference in sorted(theirs.items()):
        ours = c.ours.selected[layer]
        agree = keys.same_keys(ours, reference)
        unit = keys.score_bound(reference, c.dtype, layer + 1)
        if ours.scores.shape == reference.scores.shape:
            apart = np.abs(ours.scores - reference.scores)[reference.seen]
            furthest = max(furthest, float(apart.max(initial=0.0)) / max(unit, 1e-30))
        if c.dtype != "float32" and not agree.all():
            unit = keys.tie_bound(reference, c.wide_forward.selected[layer], c.dtype, layer + 1)
        gaps = keys.margins(reference)
        clear = gaps / max(unit, 1e-30)
        cut += int(np.isfinite(gaps).sum())
        wrong = ~agree & (gaps > 0 if c.dtype == "float32" else clear > CLEAR)
        at = tally.add(agree, clear, wrong)
        if at is not None:
            tally.worst = {
                "layer": layer,
                "row": at[0],
                "position": at[1],
                "torch": np.flatnonzero(reference.keys[at]).tolist(),
                "jax": np.flatnonzero(ours.keys[at]).tolist() if agree.shape == ours.keys.shape[:2] else [],
                "margin": float(clear[at]),
            }
    figures: dict[str, float | int | str] = {
        "choices": tally.choices,
        "choices_that_leave_keys_out": cut,
        "same": tally.same,
        "agreement": tally.same / tally.choices,
        "score_error": furthest,
        "near_ties": tally.near_ties,
    }
    if np.isfinite(tally.narrowest):
        figures["smallest_margin"] = tally.narrowest
    taken = "would attend" if c.repeats else "attended"
    note = f"{tally.same} of {tally.choices} tokens {taken} the same keys in both, {cut} of them not all they see"
    return CheckResult("selection", c.dtype, tally.worst is None, figures, None, None, tally.worst, note + tally.ties)
