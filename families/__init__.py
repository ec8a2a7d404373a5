"""One file per model family, and the language families are written in.

Needs no torch, no jax and no file access.
"""

from .errors import ConversionError, Finding, FindingsError
from .family import Family, Spelling, Variant, Wrapper
from .registry import GROUP, families, find, model_types

__all__ = [
    "GROUP",
    "ConversionError",
    "Family",
    "Finding",
    "FindingsError",
    "Spelling",
    "Variant",
    "Wrapper",
    "families",
    "find",
    "model_types",
]
