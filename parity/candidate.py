"""A candidate decoder against a reference that has been computed: what fault injection calls for every fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import flax.errors
import numpy as np

from ..converters.closing import close, respell_statements
from ..converters.parts import decode_whole
from ..converters.plan import ImportPlan, plan_import
from ..converters.source import open_source
from ..dew_core.fields import DecoderFields
from ..families.errors import ConversionError, FindingsError
from ..families.rules import Statement, assign_leaves, leaf_shapes
from .bounds import rounding_bound
from .choices import Choices
from .decoders import JaxDecoder, from_leaves, leaf_differences
from .probes import Probe, make_probe
from .references import Forward, TorchReference, load_reference


@dataclass(frozen=True)
class ReferenceRun:
    """A checkpoint's torch results, computed once, and its tensors in memory.

    plan: the honest import plan (`plan.family`, `plan.fields`, `plan.spelling`). tensors: the source's, by its own
    names. probe: the tokens. forward: logits and streams of torch in `dtype`.
    """

    plan: ImportPlan
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    probe: Probe
    forward: Forward = field(repr=False)
    dtype: str
    torch: TorchReference = field(repr=False)

    @property
    def fields(self) -> DecoderFields:
        """The honest decoder fields."""
        return self.plan.fields

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The family's own statements for this checkpoint, in the rules' spelling (`model.…`)."""
        return tuple(self.plan.family.weights(self.plan.fields))

    def routes(self, fields: DecoderFields) -> Choices | None:
        """The experts and keys that a candidate with `fields` takes: the reference's below float32 (docs/parity.md),
        its own (None) in float32 and when it cannot take those."""
        return None if self.dtype == "float32" else self.forward.routes_for(fields)

    @property
    def logits_bound(self) -> float:
        return rounding_bound(self.dtype, self.fields.num_layers, float(np.abs(self.forward.logits).max()))


@dataclass(frozen=True)
class CandidateResult:
    """What became of a candidate.

    refused: why it was refused before anything was computed, None when it was computed. error: the largest logits
    error against the reference, inf for values that are not finite. bound: what rounding explains.
    """

    refused: str | None
    error: float | None
    bound: float
    decoder: JaxDecoder | None = field(default=None, repr=False)

    @property
    def ratio(self) -> float:
        """error / bound; inf when refused."""
        return float("inf") if self.error is None else self.error / self.bound

    @property
    def caught(self) -> bool:
        """Whether the candidate was refused or moved the logits beyond the bound."""
        return self.refused is not None or not self.ratio <= 1.0


def reference_run(
    directory: str | Path, *, dtype: str = "float32", shortest: int = 24, seed: int = 0, probe: Probe | None = None
) -> ReferenceRun:
    """Read, plan and run the checkpoint in `directory` through torch in `dtype`."""
    plan = plan_import(open_source(directory))
    torch_side = load_reference(directory, plan.family, plan.source.config, dtype)
    if probe is None:
        probe = make_probe(plan.fields, plan.source.config, shortest=shortest, seed=seed)
    forward = torch_side.forward(probe.tokens, streams=True)
    return ReferenceRun(plan, source_tensors(plan), probe, forward, dtype, torch_side)


def source_tensors(plan: ImportPlan) -> dict[str, np.ndarray]:
    """The logical tensors of a plan's source by its own names, decoded in memory; what aliases as it lies aliases."""
    source = plan.source
    shards = {name: source.open_shard(name) for name in source.headers}
    wanted = {place.source for place in plan.placements}

    def read(name: str) -> np.ndarray:
        return shards[source.tensors[name].file].view(name)

    return {name: decode_whole(plan.tensors[name], read) for name in wanted}


def evaluate_candidate(
    reference: ReferenceRun,
    fields: DecoderFields,
    statements: Iterable[Statement],
    *,
    scan: bool = True,
) -> CandidateResult:
    """Build the decoder that (fields, statements) make of the reference's checkpoint, and hold its logits against
    the reference's.

    statements are in the rules' spelling. The candidate is closed as an import would close it (names, shapes,
    tiling, the decoder's own tree), so that what import refuses is refused here.
    """
    bound = reference.logits_bound
    try:
        decoder = build_candidate(reference, fields, tuple(statements), scan)
        logits = decoder.forward(reference.probe.tokens, routes=reference.routes(fields)).logits
    except (ConversionError, ValueError, TypeError, KeyError, IndexError, flax.errors.FlaxError) as error:
        return CandidateResult(f"{type(error).__name__}: {error}".splitlines()[0][:300], None, bound)
    if logits.shape != reference.forward.logits.shape:
        return CandidateResult(f"logits of shape {logits.shape}", None, bound)
    error = np.abs(logits - reference.forward.logits)
    largest = float(error.max()) if np.isfinite(error).all() else float("inf")
    return CandidateResult(None, largest, bound, decoder)


def build_candidate(
    reference: ReferenceRun, fields: DecoderFields, statements: tuple[Statement, ...], scan: bool = True
) -> JaxDecoder:
    """The decoder of (fields, statements) with the reference's weights.

    Raises FindingsError when names do not close, ConversionError when the leaves are not the decoder's own.
    """
    plan = reference.plan
    config = plan.source.config
    own = [*statements, *plan.family.carried(plan.family.canonical(config).text)]
    wrapper = plan.family.wrapper
    beside = wrapper.carried if wrapper is not None and "text_config" in config else ()
    closing = close(respell_statements(own, plan.spelling), beside, plan.codec.group(plan.source.stored).tensors)
    if closing.findings:
        raise FindingsError(plan.source.label, closing.findings)
    differences = tuple(leaf_differences(fields, leaf_shapes(closing.placements)))
    if differences:
        raise ConversionError("; ".join(differences))
    return from_leaves(fields, assign_leaves(closing.placements, reference.tensors), reference.dtype, scan, quick=True)
