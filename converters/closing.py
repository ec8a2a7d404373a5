"""Closing names: every tensor of a source against every statement of a family, before a byte of weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..families.errors import Finding, FindingsError
from ..families.family import Family, Spelling
from ..families.rules import (
    Alias,
    Carried,
    OneOf,
    Placement,
    Rule,
    Statement,
    View,
    Zeros,
    leaf_findings,
    settle,
    source_findings,
)
from .codecs import Logical, is_value

MOST_TENSORS = 10_000_000
"""More tensors than this are a damaged config: the largest releases have some hundred thousand."""
_SHOWN = 4


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor kept verbatim for export; `wrapper` says it belongs to what is beside the decoder."""

    name: str
    why: str
    wrapper: bool


@dataclass(frozen=True)
class Closing:
    """What the statements make of a source's tensors, in the source's own names.

    placements: the rules at every index. aliases: those whose tensor is present. zeros: (tensor, view, ...) to be
    checked. carried: kept verbatim. findings: what does not close; when there are any, nothing else is complete.
    misshapen: a tensor is of another shape than its rule needs. notices: what is carried of the decoder's own.
    """

    placements: tuple[Placement, ...]
    aliases: tuple[Alias, ...]
    zeros: tuple[tuple[str, View], ...]
    carried: tuple[CarriedTensor, ...]
    findings: tuple[Finding, ...]
    misshapen: bool = False
    notices: tuple[str, ...] = ()


def choose_spelling(
    family: Family, statements: Sequence[Statement], names: Iterable[str]
) -> tuple[Spelling, list[Finding]]:
    """The one spelling of `family` that the tensors `names` follow, and findings when they follow several or none.

    Each spelling is tried against the names the rules expect; a name that two spellings share decides nothing.
    """
    present = set(names)
    expected = [name for rule in _every_rule(statements) for name in rule.sources()]
    met = {spelling: {spelling.of(name) for name in expected} & present for spelling in family.spellings}
    best = max(family.spellings, key=lambda spelling: len(met[spelling]))
    findings = []
    for other in family.spellings:
        own = sorted(met[other] - {best.of(name) for name in expected})
        if own:
            findings.append(
                Finding(
                    f"tensor {own[0]}{_more(len(own))}",
                    f"the prefix {other.body!r} beside {best.body!r}",
                    "one prefix for all text tensors",
                    "rename the tensors that were added",
                )
            )
    if not met[best] and present:
        begins = sorted({name.split(".")[0] + "." for name in present})
        findings.append(
            Finding(
                "tensor names",
                f"names that begin with {', '.join(begins[:_SHOWN])}",
                f"one of the prefixes {', '.join(repr(s.body) for s in family.spellings)}",
                "no text tensor is where the family looks for it",
            )
        )
    return best, findings


def refuse_too_many(statements: Sequence[Statement], where: str) -> None:
    """Raises FindingsError for statements on more than `MOST_TENSORS` tensors, before a name is made for each."""
    count = sum(prod(map(len, rule.over.values())) for rule in _every_rule(statements))
    if count > MOST_TENSORS:
        found = Finding("config.json", f"a decoder of {count} tensors", f"at most {MOST_TENSORS}", "correct its counts")
        raise FindingsError(where, [found])


def _every_rule(statements: Iterable[Statement]) -> Iterator[Rule]:
    """Every rule, those of every form included."""
    for item in statements:
        if isinstance(item, Rule):
            yield item
        elif isinstance(item, OneOf):
            for rules in item.forms.values():
                yield from rules


def respell_statements(statements: Iterable[Statement], spelling: Spelling) -> list[Statement]:
    """The statements with tensor names in `spelling`."""

    def rule(item: Rule) -> Rule:
        return replace(item, source=spelling.of(item.source))

    result: list[Statement] = []
    for item in statements:
        match item:
            case Rule():
                result.append(rule(item))
            case OneOf():
                forms = {name: tuple(map(rule, rules)) for name, rules in item.forms.items()}
                result.append(replace(item, forms=forms))
            case Zeros():
                result.append(replace(item, source=spelling.of(item.source)))
            case Alias():
                result.append(replace(item, name=spelling.of(item.name), of=spelling.of(item.of)))
            case Carried():
                result.append(replace(item, prefix=spelling.of(item.prefix)))
    return result


def close(statements: Sequence[Statement], beside: Sequence[Carried], tensors: Mapping[str, Logical]) -> Closing:
    """Holds `statements` (already in the source's spelling) and a wrapper's `beside` against `tensors`.

    Every tensor must be claimed, every rule must find its tensor with the shape it needs and a dtype a parameter
    can hold, the views must tile each tensor and fill each leaf once, and the tensors that fill one leaf must be of
    one dtype.
    """
    statements, findings = settle(statements, tensors)
    placements: list[Placement] = []
    aliases = [item for item in statements if isinstance(item, Alias) and item.name in tensors]
    zeros = [item for item in statements if isinstance(item, Zeros)]
    for item in statements:
        if isinstance(item, Rule):
            places = list(item.placements())
            placements += places
            findings += _unmet(item, places, tensors)
    regions = [(name, view) for item in zeros for name, view in item.regions()]
    claimed = {place.source for place in placements} | {alias.name for alias in aliases}
    claimed |= {name for name, _ in regions}
    carried = _carried(statements, beside, [name for name in tensors if name not in claimed])
    unclaimed = [name for name in tensors if name not in claimed and name not in {c.name for c in carried}]
    findings += _unclaimed(unclaimed)
    findings += leaf_findings(placements)
    findings += source_findings(placements, zeros)
    if not findings:
        findings += _mixed_leaves(placements, tensors)
    shapes = ((tensors[place.source].shape, place.source_view.base) for place in placements if place.source in tensors)
    misshapen = any(found != needed for found, needed in shapes)
    return Closing(
        tuple(placements),
        tuple(aliases),
        tuple(regions),
        tuple(carried),
        tuple(findings),
        misshapen,
        _carried_notices(statements, [item.name for item in carried]),
    )


def _unmet(rule: Rule, places: Sequence[Placement], tensors: Mapping[str, Logical]) -> list[Finding]:
    findings = []
    absent = [place.source for place in places if place.source not in tensors]
    if absent:
        fix = "the checkpoint is incomplete, or is not the one its config.json describes"
        needed = f"shape {list(rule.source_view.base)}"
        findings += [Finding(f"tensor {name}", "nothing", needed, fix) for name in absent]
    for place in places:
        tensor = tensors.get(place.source)
        if tensor is None:
            continue
        needed = place.source_view.base
        if tensor.shape != needed:
            fix = "config.json and the weights disagree"
            findings.append(
                Finding(f"tensor {place.source}", f"shape {list(tensor.shape)}", f"shape {list(needed)}", fix)
            )
        if not is_value(tensor.dtype):
            findings.append(
                Finding(
                    f"tensor {place.source}",
                    f"dtype {tensor.dtype}",
                    "a floating dtype",
                    "parameters are floating; codes need the quantization_config that says how to read them",
                )
            )
    return findings


def _carried(statements: Sequence[Statement], beside: Sequence[Carried], names: Iterable[str]) -> list[CarriedTensor]:
    own = [item for item in statements if isinstance(item, Carried)]
    carried = []
    for name in names:
        for item, wrapper in [*((item, False) for item in own), *((item, True) for item in beside)]:
            if name.startswith(item.prefix):
                carried.append(CarriedTensor(name, item.why, wrapper))
                break
    return carried


def _carried_notices(statements: Iterable[Statement], names: Sequence[str]) -> tuple[str, ...]:
    met: dict[str, int] = {}
    for item in statements:
        if isinstance(item, Carried) and item.told and any(name.startswith(item.prefix) for name in names):
            met[item.told] = met.get(item.told, 0) + 1
    return tuple(f"{count} {told} are carried for export and not computed" for told, count in met.items())


def _unclaimed(names: Sequence[str]) -> list[Finding]:
    return [
        Finding(
            f"tensor {name}",
            "a tensor that no rule reads",
            "only tensors the family knows",
            "remove it if it is not the model's; it is never dropped silently",
        )
        for name in names
    ]


def _mixed_leaves(placements: Sequence[Placement], tensors: Mapping[str, Logical]) -> list[Finding]:
    dtypes: dict[str, dict[str, str]] = {}
    for place in placements:
        dtypes.setdefault(place.leaf, {}).setdefault(tensors[place.source].dtype, place.source)
    return [
        Finding(
            f"parameter {leaf}",
            " and ".join(f"{dtype} ({name})" for dtype, name in found.items()),
            "one dtype for the tensors of one parameter",
            "store them in one dtype",
        )
        for leaf, found in dtypes.items()
        if len(found) > 1
    ]


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
