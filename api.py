"""What `import dewconv` offers for whole checkpoints: the converters' functions, taking paths and hub ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .converters.banks import Banks, open_banks
from .converters.exporting import ExportPlan, plan_export, run_export
from .converters.importing import refuse_unproven, run_import
from .converters.plan import ImportPlan
from .converters.plan import plan_import as plan_source
from .converters.source import Source, open_source

if TYPE_CHECKING:
    from .converters.writing import Progress
    from .parity.results import Report


def plan_import(
    source: str | Path | Source,
    *,
    dtype: str = "keep",
    bank_layers: int | None = None,
    text_only: bool = False,
    quantized: str = "keep",
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    stream: bool = False,
    all_files: bool = False,
) -> ImportPlan:
    """What an import of `source` (a directory, a hub id, an opened source) will do; `plan.run(out)` does it.

    dtype, bank_layers, text_only, quantized: `converters.plan.plan_import`. The rest: `converters.source.open_source`.
    Raises ConversionError, or FindingsError with everything that does not fit.
    """
    if not isinstance(source, Source):
        source = open_source(source, revision, token, cache_dir, offline, stream, all_files)
    return plan_source(source, dtype=dtype, bank_layers=bank_layers, text_only=text_only, quantized=quantized)


def refuse_below_gate(plan: ImportPlan) -> None:
    """Raises ConversionError when the card of the plan's family does not show a byte-exact export (G3)."""
    from .parity.cards import status

    refuse_unproven(plan.family.name, status(plan.family.name))


def import_checkpoint(
    source: str | Path | Source,
    out: str | Path,
    *,
    overwrite: bool = False,
    unverified: bool = False,
    sha256: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Banks:
    """Writes the banks of `source` at `out`, which exists whole afterwards or not at all.

    unverified: import a family whose card does not show G3. sha256: record the SHA-256 of every tensor beside its xxh3.
    resume: keep what this import fails to finish, and go on from what an earlier one left. progress: called as
    progress(file, bytes done, bytes in all). options: `plan_import`'s. Raises ConversionError.
    """
    plan = plan_import(source, **options)
    if not unverified:
        refuse_below_gate(plan)
    return run_import(plan, out, overwrite=overwrite, sha256=sha256, resume=resume, progress=progress)


def export_checkpoint(
    banks: str | Path | Banks,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    text_only: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> ExportPlan:
    """Writes the checkpoint that `banks` (a bank directory) were imported from at `out`, and returns what was planned.

    The arguments are `converters.exporting.plan_export`'s and `run_export`'s. Raises ConversionError.
    """
    opened = banks if isinstance(banks, Banks) else open_banks(banks)
    plan = plan_export(opened, dtype=dtype, max_shard_size=max_shard_size, text_only=text_only)
    run_export(plan, out, overwrite=overwrite, resume=resume, progress=progress)
    return plan


def verify(target: str | Path | None = None, **options: Any) -> Report:
    """torch beside JAX on the same weights: `parity.verification.verify`. Needs the extra `verify`."""
    from .parity.verification import verify as verify_target

    return verify_target(target, **options)
