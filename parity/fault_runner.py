"""Every seeded fault against a family's variants: which are caught, how, and by what margin.

An instance of a fault runs in the cheapest variant that has it, then in the next, until one catches it. What the
catalogue holds to be out of reach runs in a float32 and in a bfloat16 variant, and must not be caught.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np

from ..dew_core.fields import DecoderFields
from ..families.errors import ConversionError
from ..families.family import Family, Spelling
from ..families.rules import settle
from .candidate import ReferenceRun, build_candidate, reference_run
from .choices import Choices
from .decoders import PRECISION, JaxDecoder
from .edits import merged
from .faults import CATALOGUE
from .fixtures import write_checkpoint
from .seeding import Fault, Model, Seeded, Statements

KEPT = 100
"""Instances between which compiled programs are kept: each program takes memory maps, of which a process may have few
(65530 on Linux), and running out of them is no fault of a candidate's."""
REFUSALS = (ConversionError, ValueError, TypeError, KeyError, IndexError, flax.errors.FlaxError)
"""What a candidate that cannot be built raises."""


@dataclass(frozen=True)
class Attempt:
    """One candidate in one variant and compute dtype.

    refused: why it was not computed, else None. ratio: the logits' error over the bound, inf for what is not finite.
    entering: where the logits are within the bound, the largest difference of what enters layer 0 over its largest
    value; both sides make it by the same operations on the same numbers, so that rounding explains none. equal:
    whether the logits are the honest candidate's, bit for bit.
    """

    variant: str
    dtype: str
    refused: str | None = None
    ratio: float | None = None
    entering: float | None = None
    equal: bool = False

    @property
    def how(self) -> str | None:
        """ "refused", "logits" or "embeddings", whichever caught it; None when nothing did."""
        if self.refused is not None:
            return "refused"
        if self.ratio is not None and not self.ratio <= 1.0:
            return "logits"
        return "embeddings" if self.entering else None


@dataclass(frozen=True)
class Outcome:
    """What became of one instance of a fault.

    attempts: in order, the last one decides. good: whether the catalogue's expectation holds.
    """

    fault: str
    label: str
    expect: str
    attempts: tuple[Attempt, ...]

    @property
    def caught(self) -> bool:
        return any(attempt.how for attempt in self.attempts)

    @property
    def good(self) -> bool:
        """Whether it came out as the catalogue says."""
        hows = [attempt.how for attempt in self.attempts]
        match self.expect:
            case "refused":
                return hows[-1] == "refused"
            case "numbers":
                return hows[-1] in ("logits", "embeddings")
            case "caught":
                return hows[-1] is not None
            case "equal":
                return all(attempt.equal and attempt.how is None for attempt in self.attempts)
            case _:
                return all(how is None for how in hows)

    @property
    def margin(self) -> float | None:
        """Error over bound of the attempt that caught it by its logits."""
        last = self.attempts[-1]
        return last.ratio if last.how == "logits" else None


@dataclass(frozen=True)
class FaultReport:
    """All faults of a catalogue in one family.

    outcomes: one an instance. absent: kinds that no variant has -> what a model would need. honest: the honest
    candidate in every variant and dtype used, which nothing may catch.
    """

    family: str
    outcomes: tuple[Outcome, ...]
    absent: Mapping[str, str]
    honest: tuple[Attempt, ...]

    @property
    def uncaught(self) -> tuple[Outcome, ...]:
        """Instances that did not come out as the catalogue says."""
        return tuple(outcome for outcome in self.outcomes if not outcome.good)

    @property
    def passed(self) -> bool:
        """Whether every fault that applies came out as the catalogue says, and no honest candidate was flagged."""
        return bool(self.outcomes) and not self.uncaught and not any(attempt.how for attempt in self.honest)

    @property
    def narrowest(self) -> Outcome | None:
        """The instance caught by the smallest error over its bound."""
        measured = [outcome for outcome in self.outcomes if outcome.margin is not None]
        return min(measured, key=lambda outcome: outcome.margin or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The card's record: counts, the narrowest margin, and every kind with how it was caught."""
        kinds: dict[str, dict[str, Any]] = {}
        for outcome in self.outcomes:
            kind = kinds.setdefault(outcome.fault, {"expect": outcome.expect, "instances": 0, "caught": 0, "by": []})
            kind["instances"] += 1
            kind["caught"] += outcome.caught
            last = outcome.attempts[-1]
            if last.how and last.how not in kind["by"]:
                kind["by"].append(last.how)
            if outcome.margin is not None and np.isfinite(outcome.margin):
                kind["margin"] = min(kind.get("margin", float("inf")), outcome.margin)
        narrowest = self.narrowest
        return {
            "kinds": kinds,
            "instances": len(self.outcomes),
            "caught": sum(outcome.caught for outcome in self.outcomes),
            "uncaught": [f"{outcome.fault}: {outcome.label}" for outcome in self.uncaught],
            "out_of_reach": sorted({o.fault for o in self.outcomes if o.expect in ("equal", "within")}),
            "absent": dict(self.absent),
            "narrowest": None
            if narrowest is None
            else {
                "fault": f"{narrowest.fault}: {narrowest.label}",
                "variant": narrowest.attempts[-1].variant,
                "margin": narrowest.margin,
            },
            "honest": {f"{attempt.variant}, {attempt.dtype}": attempt.ratio for attempt in self.honest},
            "passed": self.passed,
        }


class Bench:
    """A family's variants, each written, read and run through torch once, when it is first needed."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family = family
        self.directory = directory
        self._stands: dict[tuple[str, str], Stand] = {}

    def stand(self, variant: str, dtype: str = "float32") -> Stand:
        """One variant in one compute dtype."""
        if (variant, dtype) not in self._stands:
            self._stands[variant, dtype] = Stand(self._reference(variant, dtype), variant)
        return self._stands[variant, dtype]

    def _reference(self, variant: str, dtype: str) -> ReferenceRun:
        spec, where = self.family.variants[variant], self.directory / f"{self.family.name}-{variant}"
        if not where.exists():
            write_checkpoint(where, spec, self.family)
        return reference_run(where, dtype=dtype, shortest=spec.length)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants' names, cheapest first."""
        return tuple(sorted(self.family.variants, key=self._cost))

    def _cost(self, variant: str) -> int:
        config = self.family.variants[variant].config
        text = config.get("text_config", config)
        return int(text["num_hidden_layers"]) * self.family.variants[variant].length


@dataclass(frozen=True)
class Present:
    """The tensors of a source as the rules name them: whether `name` is there in the source's spelling."""

    spelling: Spelling
    tensors: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.spelling.of(name) in self.tensors


class Stand:
    """One variant's reference beside the honest candidate."""

    def __init__(self, reference: ReferenceRun, variant: str) -> None:
        self.reference = reference
        self.variant = variant
        self._honest: dict[bool, np.ndarray] = {}

    @property
    def model(self) -> Model:
        """What faults are seeded into."""
        plan = self.reference.plan
        statements, _ = settle(self.reference.statements, Present(plan.spelling, frozenset(plan.source.tensors)))
        return Model(plan.family, self.variant, plan.fields, merged(statements))

    def honest(self, compiled: bool) -> np.ndarray:
        """The honest candidate's logits, computed the one way or the other."""
        if compiled not in self._honest:
            reference = self.reference
            decoder = build_candidate(reference, reference.fields, reference.statements, False)
            routes = reference.routes(reference.fields)
            self._honest[compiled] = logits(decoder, reference.probe.tokens, compiled, routes)
        return self._honest[compiled]

    @cached_property
    def honest_attempt(self) -> Attempt:
        """The honest candidate, held as faults are: nothing may catch it."""
        return self.attempt(lambda: (self.reference.fields, self.reference.statements))

    def attempt(self, build: Callable[[], tuple[DecoderFields, Statements]]) -> Attempt:
        """The candidate that `build` makes, against the reference."""
        reference = self.reference
        tokens, dtype = reference.probe.tokens, reference.dtype
        try:
            decoder = build_candidate(reference, *build(), False)
            compiled = decoder.fields == reference.fields
            computed = logits(decoder, tokens, compiled, reference.routes(decoder.fields))
        except REFUSALS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return Attempt(self.variant, dtype, refused=reason)
        ratio, equal = self._ratio(computed), np.array_equal(computed, self.honest(compiled))
        if not ratio <= 1.0:
            return Attempt(self.variant, dtype, None, ratio, None, equal)
        mine, theirs = scaled_embeddings(decoder, tokens), reference.forward.streams[0]
        entering = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
        return Attempt(self.variant, dtype, None, ratio, entering, equal)

    def _ratio(self, computed: np.ndarray) -> float:
        error = np.abs(computed - self.reference.forward.logits)
        return float(error.max()) / self.reference.logits_bound if np.isfinite(error).all() else float("inf")


def logits(decoder: JaxDecoder, tokens: np.ndarray, compiled: bool, routes: Choices | None = None) -> np.ndarray:
    """The decoder's logits of tokens [B, S], with routes taking the experts and keys they record.

    compiled: for decoders of the same fields, which share the program. Others run operation by operation: each is
    run once, and compiling it would take ten times as long as running it.
    """
    if compiled:
        return decoder.forward(tokens, routes=routes).logits
    with jax.default_matmul_precision(PRECISION):
        return np.asarray(
            decoder.model.apply(decoder.variables, jnp.asarray(tokens), **Choices.of(routes).call()), np.float32
        )


def scaled_embeddings(decoder: JaxDecoder, tokens: np.ndarray) -> np.ndarray:
    """What enters layer 0 for tokens [B, S]."""

    def entering(model: Any, ids: jax.Array) -> jax.Array:
        return model.scaled_embeddings(model.token_embeddings(ids))

    return np.asarray(decoder.model.apply(decoder.variables, jnp.asarray(tokens), method=entering), np.float32)


def run_faults(
    family: Family,
    *,
    faults: Iterable[Fault] = CATALOGUE,
    directory: Path | None = None,
    bench: Bench | None = None,
) -> FaultReport:
    """Every instance of `faults` against `family`'s variants.

    directory: where the variants' checkpoints are written, a temporary one when unset. bench: one that was used
    before, whose references are computed.
    """
    if bench is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run_faults(family, faults=faults, bench=Bench(family, Path(directory or temporary)))
    outcomes: list[Outcome] = []
    absent: dict[str, str] = {}
    jax.clear_caches()
    for fault in faults:
        instances = instances_of(fault, bench)
        if not instances:
            absent[fault.name] = fault.needs
        for label, seeded in instances.items():
            if len(outcomes) % KEPT == KEPT - 1:
                jax.clear_caches()
            outcomes.append(Outcome(fault.name, label, fault.expect, tuple(_attempts(fault, seeded, bench))))
    used = sorted({(a.variant, a.dtype) for outcome in outcomes for a in outcome.attempts if a.refused is None})
    honest = tuple(bench.stand(variant, dtype).honest_attempt for variant, dtype in used)
    return FaultReport(family.name, tuple(outcomes), absent, honest)


def instances_of(fault: Fault, bench: Bench) -> dict[str, dict[str, Seeded]]:
    """Label -> variant -> the instance there, variants cheapest first."""
    found: dict[str, dict[str, Seeded]] = {}
    for variant in bench.variants:
        for seeded in fault.seeds(bench.stand(variant).model):
            found.setdefault(seeded.label, {})[variant] = seeded
    return found


def _attempts(fault: Fault, seeded: Mapping[str, Seeded], bench: Bench) -> Iterator[Attempt]:
    if fault.out_of_reach:
        yield from _held(fault, seeded, bench)
        return
    for variant, instance in seeded.items():
        attempt = bench.stand(variant).attempt(instance.build)
        yield attempt
        if attempt.how:
            return
        if fault.shows_in != "float32":
            break
    for variant, instance in seeded.items():
        if bench.family.variants[variant].storage == "bfloat16":
            attempt = bench.stand(variant, "bfloat16").attempt(instance.build)
            yield attempt
            if attempt.how:
                return


def _held(fault: Fault, seeded: Mapping[str, Seeded], bench: Bench) -> Iterator[Attempt]:
    """What is out of reach, in the cheapest float32 variant, and in the cheapest bfloat16 one when it may move."""
    storage = {variant: bench.family.variants[variant].storage for variant in seeded}
    first = next(iter(seeded))
    yield bench.stand(first).attempt(seeded[first].build)
    low = next((variant for variant in seeded if storage[variant] == "bfloat16"), None)
    if low is not None and fault.expect == "within":
        yield bench.stand(low, "bfloat16").attempt(seeded[low].build)
