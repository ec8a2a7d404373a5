"""The checks of choices: which experts a token takes, which keys a query attends, on both sides."""

from __future__ import annotations

import numpy as np

from . import selection as keys
from .checks import Comparison
from .results import CheckResult
from .routing import CLEAR, margins, same_choice, score_bound, tie_bound


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
    total, same, unclear = 0, 0, 0
    narrowest, worst = float("inf"), None
    agreed = {layer: same_choice(c.ours.routed[layer], reference) for layer, reference in theirs.items()}
    measured = c.dtype != "float32" and not all(agree.all() for agree in agreed.values())
    for layer, reference in sorted(theirs.items()):
        agree = agreed[layer]
        if measured:
            unit = tie_bound(mixture, reference, c.wide_forward.routed[layer], c.dtype, layer + 1)
        else:
            unit = score_bound(mixture, reference, c.dtype, layer + 1)
        clear = margins(mixture, reference) / max(unit, 1e-30)
        total, same = total + agree.size, same + int(agree.sum())
        unclear += int((clear <= CLEAR).sum())
        narrowest = min(narrowest, float(clear.min()))
        wrong = ~agree if c.dtype == "float32" else ~agree & (clear > CLEAR)
        if worst is None and wrong.any():
            row, position = (int(i) for i in np.argwhere(wrong)[0])
            worst = {
                "layer": layer,
                "row": row,
                "position": position,
                "torch": sorted(map(int, reference.experts[row, position])),
                "jax": sorted(map(int, c.ours.routed[layer].experts[row, position])),
                "margin": float(clear[row, position]),
            }
    figures: dict[str, float | int | str] = {
        "choices": total,
        "same": same,
        "agreement": same / total,
        "smallest_margin": narrowest,
        "near_ties": unclear,
    }
    taken = "would take" if c.repeats else "took"
    note = f"{same} of {total} tokens {taken} the same experts in both" + (
        "" if same == total or worst is not None else "; the others' choices tie within the bound"
    )
    return CheckResult("routing", c.dtype, worst is None, figures, None, None, worst, note)


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
    total, same, unclear, cut = 0, 0, 0, 0
    narrowest, worst, furthest = float("inf"), None, 0.0
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
        total, same, cut = total + agree.size, same + int(agree.sum()), cut + int(np.isfinite(gaps).sum())
        unclear += int((clear <= CLEAR).sum())
        narrowest = min(narrowest, float(clear.min()))
        wrong = ~agree & (gaps > 0 if c.dtype == "float32" else clear > CLEAR)
        if worst is None and wrong.any():
            row, position = (int(i) for i in np.argwhere(wrong)[0])
            worst = {
                "layer": layer,
                "row": row,
                "position": position,
                "torch": np.flatnonzero(reference.keys[row, position]).tolist(),
                "jax": np.flatnonzero(ours.keys[row, position]).tolist() if agree.shape == ours.keys.shape[:2] else [],
                "margin": float(clear[row, position]),
            }
    figures: dict[str, float | int | str] = {
        "choices": total,
        "choices_that_leave_keys_out": cut,
        "same": same,
        "agreement": same / total,
        "score_error": furthest,
        "near_ties": unclear,
    }
    if np.isfinite(narrowest):
        figures["smallest_margin"] = narrowest
    taken = "would attend" if c.repeats else "attended"
    note = f"{same} of {total} tokens {taken} the same keys in both, {cut} of them not all they see"
    note += "" if same == total or worst is not None else "; the others' choices tie within the bound"
    return CheckResult("selection", c.dtype, worst is None, figures, None, None, worst, note)
