"""Families by `model_type`, through the entry-point group `dewconv.families`.

The families here and anyone's plugin come by the same route: an entry point per model_type whose value is a
`Family`. Resolving one imports one file.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .errors import ConversionError
from .family import Family

GROUP = "dewconv.families"


@cache
def _owners() -> dict[str, tuple[EntryPoint, ...]]:
    owners: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        owners.setdefault(point.name, {})[point.value] = point
    return {name: tuple(points.values()) for name, points in sorted(owners.items())}


def model_types() -> tuple[str, ...]:
    """Every model_type that a family is registered for, sorted."""
    return tuple(_owners())


def find(name: str) -> Family:
    """The family that owns a model_type (or is called `name`).

    Raises ConversionError when none or more than one does, or when the owner cannot be imported.
    """
    owners = _owners()
    points = list(owners.get(name, ()))
    if not points:
        close = get_close_matches(name, owners, n=1, cutoff=0.6)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConversionError(f"No family is registered for {name!r}.{hint} Known: {', '.join(owners)}.")
    if len(points) > 1:
        names = " and ".join(sorted(f"{p.value} ({p.dist.name if p.dist else 'unknown'})" for p in points))
        raise ConversionError(f"model_type {name!r} has two owners: {names}. Uninstall one of them.")
    try:
        family = points[0].load()
    except Exception as error:
        raise ConversionError(f"The family for {name!r} ({points[0].value}) cannot be imported: {error}") from error
    if not isinstance(family, Family):
        raise ConversionError(f"The entry point {points[0].value} for {name!r} is not a Family.")
    return family


def families() -> tuple[Family, ...]:
    """Every registered family once, by name. Imports all of them."""
    found = {family.name: family for family in map(find, model_types())}
    return tuple(found[name] for name in sorted(found))
