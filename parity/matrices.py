"""The CI matrix: one entry per family and variant."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..families.errors import ConversionError
from ..families.registry import families, find

FORMATS = ("github", "json")


def matrix(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """An entry per family and variant, in the families' and variants' order: family, variant, why, storage.

    names: some families, all registered ones when unset. Raises ConversionError for a family that is not registered.
    """
    owners = families() if names is None else tuple(map(find, names))
    return [
        {"family": owner.name, "variant": name, "why": variant.why, "storage": variant.storage}
        for owner in owners
        for name, variant in owner.variants.items()
    ]


def render_matrix(entries: Iterable[dict[str, Any]], form: str) -> str:
    """The matrix as text: "json" a list, "github" one line that a workflow's `fromJSON` takes as a strategy matrix.

    Raises ConversionError for another form.
    """
    entries = list(entries)
    if form == "json":
        return json.dumps(entries, indent=2)
    if form == "github":
        named = [{"family": entry["family"], "variant": entry["variant"]} for entry in entries]
        return json.dumps({"include": named}, separators=(",", ":"))
    raise ConversionError(f"a matrix is printed as {' or '.join(FORMATS)}, not {form!r}")
