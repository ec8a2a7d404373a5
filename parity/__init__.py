"""Torch beside JAX: references, probes, bounds, checks, seeded faults, reports and cards.

Importing this package imports neither torch nor JAX: names are reached on first use (PEP 562). Reading cards and
listing the matrix needs neither at any time.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CHECKS": "verification",
    "verify": "verification",
    "versions": "verification",
    "CheckResult": "results",
    "LayerError": "results",
    "Report": "results",
    "CandidateResult": "candidate",
    "ReferenceRun": "candidate",
    "build_candidate": "candidate",
    "evaluate_candidate": "candidate",
    "reference_run": "candidate",
    "rounding_bound": "bounds",
    "write_checkpoint": "fixtures",
    "read_card": "cards",
    "read_cards": "cards",
    "status": "cards",
    "write_card": "cards",
    "matrix": "matrices",
    "render_matrix": "matrices",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
