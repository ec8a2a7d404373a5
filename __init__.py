"""dewconv: decoder checkpoints between Hugging Face safetensors and JAX parameter banks.

    model, variables = dewconv.load(path)        banks, a checkpoint directory or a hub id
    dewconv.save(path, model, variables, like)   banks of changed weights
    plan = dewconv.plan_import(source)           what an import will do, as a value; plan.run(out) does it
    report = dewconv.verify(target)              torch beside JAX on the same weights
    family = dewconv.families.find("qwen3")      a family's two tables

Everything is reached on first use (PEP 562): importing dewconv imports neither JAX nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import families
    from .api import export_checkpoint, import_checkpoint, plan_import, verify
    from .converters.banks import open_banks
    from .converters.loading import load
    from .converters.saving import save
    from .converters.source import open_source
    from .families.errors import ConversionError, FindingsError

__version__ = "0.1.0"

_HOMES = {
    "ConversionError": "families.errors",
    "FindingsError": "families.errors",
    "export_checkpoint": "api",
    "import_checkpoint": "api",
    "load": "converters.loading",
    "open_banks": "converters.banks",
    "open_source": "converters.source",
    "plan_import": "api",
    "save": "converters.saving",
    "verify": "api",
}
__all__ = [
    "ConversionError",
    "FindingsError",
    "__version__",
    "export_checkpoint",
    "families",
    "import_checkpoint",
    "load",
    "open_banks",
    "open_source",
    "plan_import",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name == "families":
        return import_module(".families", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "families"])
