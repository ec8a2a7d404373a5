"""The checks of numbers: each takes a comparison and returns what it found. `choice_checks` has those of choices,
`round_trip` that of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..dew_core.layers import layer_plan
from ..families.rules import Placement, assign_leaves
from .bounds import amplified_bound, likeness_bound, relative, rounding_bound
from .choices import Choices, stacked_keys, stacked_routes
from .decoders import JaxDecoder
from .probes import Arranged, Probe, packed, padded
from .references import Forward, TorchReference, chooses_keys
from .replay import choosing
from .results import CheckResult, LayerError

GREEDY_TOKENS = 12
GREEDY_PROMPT = 8
DECODE_STEPS = 96
"""The most single-token steps of a decode check; what lies before them is prefilled at once."""
GRADIENT_BUDGET = 50_000_000
"""Elements of logits that a gradient may go through."""


@dataclass(frozen=True)
class Comparison:
    """Both sides of one checkpoint in one dtype, and what they are asked.

    placements: the rules, in the rules' spelling or the source's, with `spelled` turning the first into the second.
    """

    torch: TorchReference
    jax: JaxDecoder
    probe: Probe
    placements: tuple[Placement, ...]
    spelled: Callable[[str], str]

    @property
    def dtype(self) -> str:
        return self.jax.dtype

    @cached_property
    def reference(self) -> Forward:
        """Torch's logits and streams of the probe."""
        return self.torch.forward(self.probe.tokens, streams=True)

    @property
    def repeats(self) -> bool:
        """Whether both sides take the experts and keys the reference chose: below float32, where a choice within
        rounding of another makes the numbers after it another text's (docs/parity.md). `routing` and `selection` judge
        the choices."""
        return self.routes is not None

    @cached_property
    def routes(self) -> Choices | None:
        """The experts and keys both sides take for the probe, None when each chooses for itself."""
        # Asked before any check: a decoder that chooses nothing, and float32, need no forward to answer.
        fields = self.jax.fields
        if self.dtype == "float32" or (fields.mixture is None and not chooses_keys(fields)):
            return None
        return self.reference.routes_for(self.jax.fields)

    @cached_property
    def ours(self) -> Forward:
        """JAX's, in the layout `load` gives; `routed` and `selected` have what it would have chosen."""
        return self.jax.forward(self.probe.tokens, streams=True, routes=self.routes)

    @property
    def slots(self) -> int:
        """Slots of every decode cache, so that the checks that decode share one compiled step."""
        return max(self.probe.length, GREEDY_PROMPT + GREEDY_TOKENS)

    @cached_property
    def bound(self) -> float:
        """The bound of every check of logits, before weights that amplify rounding are looked at."""
        return rounding_bound(self.dtype, self.jax.fields.num_layers, float(np.abs(self.reference.logits).max()))

    @cached_property
    def wide(self) -> TorchReference:
        """The reference one precision up. Made only when a bound is passed: it measures what rounding does here."""
        return self.torch.widened()

    @cached_property
    def wide_forward(self) -> Forward:
        """Its logits and streams of the probe, given the choices of the narrower one: another expert's output is no
        rounding."""
        return self.wide.forward(self.probe.tokens, streams=True, routes=self.reference.choices)

    def tie(self, error: float) -> float:
        """How far a logit of one side may lie from the other's for two tokens to be equally right: the bound that an
        error is held to, and below float32, where that is as large as logits are, no more than the reference's own
        rounding explains."""
        if self.dtype == "float32":
            return self.logits_bound(error)[0]
        own = largest(self.reference.logits - self.wide_forward.logits)
        return min(self.bound, amplified_bound(0.0, own, self.dtype))

    def logits_bound(self, error: float) -> tuple[float, str]:
        """The bound that an error of logits is held to, and a note when the error passes only because weights amplify
        rounding beyond `bound`."""
        if error <= self.bound:
            return self.bound, ""
        bound, note = judged(self.bound, self.dtype, largest(self.reference.logits - self.wide_forward.logits))
        return bound, note if error <= bound else ""


def judged(bound: float, dtype: str, own: float, head: float = 0.0) -> tuple[float, str]:
    """The bound given the reference's own rounding, and that of JAX's head where it is measured, and a note when they
    set it."""
    wide = amplified_bound(bound, own, dtype, head)
    note = f"these weights amplify rounding: the reference itself moves by {own:.2e} one precision up"
    if head:
        note += f", JAX by {head:.2e} with its head so"
    return wide, note if wide > bound else ""


def largest(difference: np.ndarray) -> float:
    """The largest absolute value; inf when a value is not finite."""
    return float(np.abs(difference).max()) if np.isfinite(difference).all() else float("inf")


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The largest absolute difference and where it is; inf, at the first such place, when one is not finite."""
    error = np.abs(one - other)
    bad = ~np.isfinite(error)
    at = np.unravel_index(int(bad.argmax() if bad.any() else error.argmax()), error.shape)
    return float("inf") if bad.any() else float(error[at]), tuple(int(i) for i in at)


def logits(c: Comparison) -> CheckResult:
    """Every position's logits against torch's."""
    return _logits(c, "logits", c.ours.logits)


def logits_unrolled(c: Comparison) -> CheckResult:
    """The same with one subtree a layer and no scan."""
    return _logits(c, "logits:unrolled", c.jax.unrolled().forward(c.probe.tokens, routes=c.routes).logits)


def _logits(c: Comparison, name: str, ours: np.ndarray) -> CheckResult:
    theirs = c.reference.logits
    error, (row, position, token) = difference(ours, theirs)
    divergence = kl(theirs, ours)
    figures = {
        "mean_error": float(np.abs(ours - theirs).mean()),
        "largest": float(np.abs(theirs).max()),
        "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "positions": int(theirs.shape[0] * theirs.shape[1]),
    }
    worst = {
        "row": row,
        "position": position,
        "token": int(c.probe.tokens[row, position]),
        "logit": token,
        "torch": float(theirs[row, position, token]),
        "jax": float(ours[row, position, token]),
    }
    bound, note = c.logits_bound(error)
    return CheckResult(name, c.dtype, error <= bound, figures, bound, error, worst, note)


def rounding(c: Comparison) -> CheckResult:
    """Below float32, whether JAX lies no further from torch than two roundings of one model do: their difference over
    every logit against that of torch and torch one precision up, in the root mean square and at its largest. The pair
    nearer its bound decides."""
    if c.dtype == "float32":
        return CheckResult("rounding", c.dtype, None, note="asked below float32, where the bound of logits is wide")
    apart = c.ours.logits.astype(np.float64) - c.reference.logits
    own = c.reference.logits.astype(np.float64) - c.wide_forward.logits
    pairs = {
        "root mean square": (root_mean_square(apart), likeness_bound(root_mean_square(own))),
        "largest": (largest(apart), amplified_bound(0.0, largest(own), c.dtype)),
    }
    which = max(pairs, key=lambda name: relative(*pairs[name]))
    error, bound = pairs[which]
    figures = {
        "rms_error": pairs["root mean square"][0],
        "reference_rms": root_mean_square(own),
        "largest_error": pairs["largest"][0],
        "reference_largest": largest(own),
    }
    _, (row, position, token) = difference(c.ours.logits, c.reference.logits)
    worst = {"row": row, "position": position, "logit": token, "decided by": which}
    return CheckResult("rounding", c.dtype, error <= bound, figures, bound, error, worst)


def root_mean_square(values: np.ndarray) -> float:
    """The root mean square; inf when a value is not finite."""
    return float(np.sqrt((values**2).mean())) if np.isfinite(values).all() else float("inf")


def kl(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) of softmaxed logits [B, S, vocab] in nats, float64: [B, S]."""
    out = np.empty(reference.shape[:2])
    for at in np.ndindex(*reference.shape[:2]):
        p, q = (side[at].astype(np.float64) for side in (reference, other))
        p, q = (side - side.max() for side in (p, q))
        p, q = (side - np.log(np.exp(side).sum()) for side in (p, q))
        out[at] = max(0.0, float((np.exp(p) * (p - q)).sum()))
    return out


def layers(c: Comparison) -> tuple[CheckResult, tuple[LayerError, ...]]:
    """The residual stream as it enters layer 0 and leaves each layer, against torch's.

    A position's scale is the largest value its stream has held so far: released models carry values of 1e4 at a few
    positions, which would hide the others, and what cancels later keeps the rounding it had.
    """
    specs = layer_plan(c.jax.fields).specs
    found: list[LayerError] = []
    peak = np.zeros(c.probe.tokens.shape, np.float32)
    for index, (ours, theirs) in enumerate(zip(c.ours.streams, c.reference.streams, strict=True)):
        peak = np.maximum(peak, np.abs(theirs).max(-1))
        errors = np.abs(ours - theirs)
        per_position = np.where(np.isfinite(errors).all(-1), errors.max(-1), np.inf)
        at = np.unravel_index(int((per_position / np.maximum(peak, 1e-30)).argmax()), per_position.shape)
        scale = float(peak[at])
        found.append(
            LayerError(
                layer=index - 1,
                kind="embedding" if index == 0 else specs[index - 1].layer_type,
                max_error=float(per_position[at]),
                mean_error=float(errors.mean()),
                scale=scale,
                bound=rounding_bound(c.dtype, index, scale),
            )
        )
    widened = ""
    if any(not layer.max_error <= layer.bound for layer in found):
        found, widened = _amplified_layers(c, found)
    departed = next((layer for layer in found if not layer.max_error <= layer.bound), None)
    deciding = departed or max(found, key=lambda layer: layer.ratio)
    worst = {"layer": deciding.layer, "kind": deciding.kind}
    note = ""
    if departed is not None:
        name = "the embeddings" if departed.layer < 0 else f"layer {departed.layer} ({departed.kind})"
        note = f"{name} departs first"
    elif widened:
        note = widened
    figures = {"layers": len(found) - 1, "mean_error": found[-1].mean_error, "largest": float(peak.max())}
    result = CheckResult("layers", c.dtype, departed is None, figures, deciding.bound, deciding.max_error, worst, note)
    return result, tuple(found)


def _amplified_layers(c: Comparison, found: list[LayerError]) -> tuple[list[LayerError], str]:
    """The layers held to what the reference's own rounding does to them. What enters layer 0 is no sum and keeps its
    bound."""
    peak = np.zeros(c.probe.tokens.shape, np.float32)
    result, note = [], ""
    for layer, theirs, wide in zip(found, c.reference.streams, c.wide_forward.streams, strict=True):
        peak = np.maximum(peak, np.abs(theirs).max(-1))
        own = float((np.abs(theirs - wide).max(-1) / np.maximum(peak, 1e-30)).max()) * layer.scale
        bound, said = (layer.bound, "") if layer.layer < 0 else judged(layer.bound, c.dtype, own)
        note = note or (f"layer {layer.layer}: {said}" if said and layer.max_error > layer.bound else "")
        result.append(replace(layer, bound=bound))
    return result, note


def decode(c: Comparison) -> CheckResult:
    """Logits through the cache, a token a step, against JAX's own full forward and against torch's cache."""
    prefill = max(1, c.probe.length - DECODE_STEPS)
    ours = c.jax.cached(c.probe.tokens, prefill, c.slots, c.routes)
    theirs = c.torch.cached(c.probe.tokens, prefill, c.routes)
    sides = {
        "against_full_forward": difference(ours, c.ours.logits),
        "against_torch_cache": difference(ours, theirs),
        "against_torch_forward": difference(ours, c.reference.logits),
    }
    which = max(sides, key=lambda side: sides[side][0])
    error, (row, position, token) = sides[which]
    figures: dict[str, float | int | str] = {side: value for side, (value, _) in sides.items()}
    figures |= {"steps": c.probe.length - prefill + 1, "torch_cache_error": largest(theirs - c.reference.logits)}
    worst = {"row": row, "position": position, "token": int(c.probe.tokens[row, position]), "logit": token}
    bound, note = c.logits_bound(error)
    return CheckResult("decode", c.dtype, error <= bound, figures, bound, error, {**worst, "side": which}, note)


def padding(c: Comparison) -> CheckResult:
    """Left-padded, right-padded and packed rows against the unpadded rows' logits, on both sides.

    A document is the beginning of a probe row, whose own logits are its reference.
    """
    figures: dict[str, float | int | str] = {"documents": len(c.probe.documents)}
    worst: dict[str, Any] = {}
    error = -1.0
    for name, rows in (
        ("left", padded(c.probe, "left")),
        ("right", padded(c.probe, "right")),
        ("packed", packed(c.probe)),
    ):
        routes, together = rows.routes(c.routes), name == "packed"
        ours = c.jax.forward(rows.tokens, rows.positions, rows.mask, rows.segments if together else None, routes=routes)
        theirs = c.torch.forward(
            rows.tokens, rows.positions, None if together else rows.mask, packed=together, routes=routes
        )
        sides = {"torch": _departure(c, rows, c.reference.logits, ours.logits)}
        sides["own"] = _departure(c, rows, c.ours.logits, ours.logits)
        figures[f"{name}_error"] = max(value for value, _ in sides.values())
        figures[f"{name}_torch_own_error"] = _departure(c, rows, c.reference.logits, theirs.logits)[0]
        for value, place in sides.values():
            if value > error:
                error, worst = value, {"arrangement": name, **place}
    bound, note = c.logits_bound(error)
    return CheckResult("padding", c.dtype, error <= bound, figures, bound, error, worst, note)


def _departure(
    c: Comparison, rows: Arranged, unpadded: np.ndarray, arranged: np.ndarray
) -> tuple[float, dict[str, int]]:
    """The largest error of arranged documents' logits against the rows they were cut from, and where it is."""
    error, worst = -1.0, {}
    for source, row, start, length in rows.places:
        value, (position, token) = difference(arranged[row, start : start + length], unpadded[source, :length])
        if value > error:
            error, worst = value, {"row": source, "position": position, "logit": token}
    return error, worst


def greedy(c: Comparison) -> CheckResult:
    """Greedy continuations token for token. Where torch's two logits lie within twice the bound of each other either
    token is right, and what follows in that row is another text: the comparison of the row ends there. Where choices
    are repeated, they are those of torch's continuation."""
    prompt = c.probe.tokens[:, : min(GREEDY_PROMPT, max(1, c.probe.length // 2))]
    with c.torch.watching_routers() as routed, choosing(c.torch.indexers, None) as selected:
        theirs, scores = c.torch.greedy(prompt, GREEDY_TOKENS)
    chosen = {
        layer: np.concatenate([one.experts.reshape(len(prompt), -1, one.experts.shape[-1]) for one in steps], axis=1)
        for layer, steps in routed.items()
    }
    taken = {layer: [one.keys for one in steps] for layer, steps in selected.items()}
    routes = Choices(stacked_routes(chosen, c.torch.layers), stacked_keys(taken, c.torch.layers))
    routes = routes if c.repeats else None
    ours, _ = c.jax.greedy(prompt, GREEDY_TOKENS, c.slots, routes)
    equal, ties, worst = 0, 0, None
    for row in range(len(prompt)):
        apart = np.nonzero(ours[row] != theirs[row])[0]
        if not apart.size:
            equal += GREEDY_TOKENS
            continue
        at = int(apart[0])
        equal += at
        chosen, other = int(theirs[row, at]), int(ours[row, at])
        gap = float(scores[row, at, chosen] - scores[row, at, other])
        if gap <= 2 * c.tie(gap / 2):
            ties += 1
        elif worst is None:
            worst = {"row": row, "position": at, "token": chosen, "jax": other, "gap": gap}
    figures = {"rows": len(prompt), "tokens": GREEDY_TOKENS * len(prompt), "equal": equal, "ties": ties}
    note = f"{ties} of {len(prompt)} rows end at logits that tie within the bound" if ties else ""
    return CheckResult("greedy", c.dtype, worst is None, figures, None, None, worst, note)


def gradients(c: Comparison) -> CheckResult:
    """d mean next-token cross entropy / d every weight, torch's mapped through the import rules.

    Each parameter is held against its own largest gradient; the bound counts the path twice, there and back.
    """
    vocab = c.jax.fields.vocab_size
    length = max(2, min(c.probe.length, GRADIENT_BUDGET // (vocab * c.probe.rows)))
    tokens = c.probe.tokens[:, :length]
    loss, by_name = c.torch.gradients(tokens)
    our_loss, ours = c.jax.gradients(tokens)
    theirs = assign_leaves(c.placements, {c.spelled(name): value for name, value in by_name.items()})
    if theirs.keys() != ours.keys():
        odd = sorted(theirs.keys() ^ ours.keys())
        return CheckResult("gradients", c.dtype, False, {"parameters": len(ours)}, note=f"on one side only: {odd[0]}")
    tensors = {place.leaf: place.source for place in c.placements}
    deciding, ratio = ("", 0.0, 0.0, 1.0, ()), -1.0
    smallest = float("inf")
    for leaf, gradient in ours.items():
        error, at = difference(gradient, theirs[leaf])
        scale = float(np.abs(theirs[leaf]).max())
        bound = rounding_bound(c.dtype, c.jax.fields.num_layers, scale, passes=2)
        if not scale and not error:
            # What the loss does not reach on either side: a router's correction bias.
            continue
        smallest = min(smallest, scale)
        if relative(error, bound) > ratio:
            ratio, deciding = relative(error, bound), (leaf, error, bound, scale, at)
    note = ""
    if ratio > 1:
        wide = c.wide.gradients(tokens)[1]
        own = assign_leaves(c.placements, {c.spelled(name): value for name, value in wide.items()})
        deciding, note = _amplified_gradients(c, (theirs, ours), (own, c.jax.gradients(tokens, wide_head=True)[1]))
    leaf, error, bound, scale, at = deciding
    note = note if error <= bound else ""
    figures = {
        "parameters": len(ours),
        "loss": loss,
        "loss_error": abs(our_loss - loss),
        "largest": scale,
        "smallest_scale": smallest,
        "positions": int(tokens.size),
    }
    worst: Mapping[str, Any] = {"leaf": leaf, "tensor": tensors[leaf], "index": list(at)}
    return CheckResult("gradients", c.dtype, error <= bound, figures, bound, error, worst, note)


def _amplified_gradients(
    c: Comparison, sides: tuple[Mapping[str, Any], Mapping[str, Any]], wide: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[tuple[str, float, float, float, tuple[int, ...]], str]:
    """The parameter furthest from its bound when each is held to what rounding is measured to do to its gradient.

    sides: torch's gradients and JAX's. wide: torch's one precision up, and JAX's with its head one precision up: no
    more of the candidate than the sums over the vocabulary, so that nothing but their length can widen its bound.
    """
    theirs, ours = sides
    deciding, note, ratio = ("", 0.0, 0.0, 1.0, ()), "", -1.0
    for leaf, gradient in ours.items():
        error, at = difference(gradient, theirs[leaf])
        scale = float(np.abs(theirs[leaf]).max())
        plain = rounding_bound(c.dtype, c.jax.fields.num_layers, scale, passes=2)
        own = [largest(side[leaf] - up[leaf]) for side, up in zip(sides, wide, strict=True)]
        bound, said = judged(plain, c.dtype, *own)
        if not scale and not error:
            continue
        found = relative(error, bound)
        if found > ratio:
            ratio, deciding, note = found, (leaf, error, bound, scale, at), said
    return deciding, note
