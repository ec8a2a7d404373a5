"""What a verification found: plain frozen values that go to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .bounds import relative

FORMAT = 1
"""The version of a report's JSON form."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check in one compute dtype.

    name: one of `CHECKS`, with the layout it ran in after a colon where there are two ("logits:unrolled"). dtype: the
    compute dtype of both sides, "float32" or "bfloat16". passed: None when the check does not apply here, and `note`
    says why. error and bound: the deciding pair, error <= bound exactly when passed (None for a check that counts:
    greedy tokens, bytes). figures: everything else measured. worst: where the error is largest (row, position, token
    for logits; layer; leaf and tensor for gradients).
    """

    name: str
    dtype: str
    passed: bool | None
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    bound: float | None = None
    error: float | None = None
    worst: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """error / bound; None when the check has no such pair."""
        return None if self.error is None or self.bound is None else relative(self.error, self.bound)


@dataclass(frozen=True)
class LayerError:
    """How far one layer's output lies from the reference's.

    layer: index from 0, -1 for the scaled embeddings that enter layer 0. kind: its layer type. max_error,
    mean_error: absolute, over the probe's real positions. scale: the largest reference value. bound: for max_error.
    """

    layer: int
    kind: str
    max_error: float
    mean_error: float
    scale: float
    bound: float

    @property
    def ratio(self) -> float:
        """max_error / bound."""
        return relative(self.max_error, self.bound)


@dataclass(frozen=True)
class Report:
    """One verification: what was compared, with what, and what came of it.

    target: what the user named. family, variant: None where there is none. model: a summary of the decoder
    (parameters, layers, kinds, dtypes, source). layers: compute dtype -> a LayerError a layer. versions: package ->
    version. probe: tokens, rows, lengths, seed. notices: what the reading of the config and the reference's known
    differences have to say. seconds: wall time.
    """

    target: str
    family: str
    variant: str | None
    model: Mapping[str, Any]
    checks: tuple[CheckResult, ...]
    layers: Mapping[str, tuple[LayerError, ...]]
    versions: Mapping[str, str]
    probe: Mapping[str, Any]
    notices: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and every check that applies passed."""
        ran = [check.passed for check in self.checks if check.passed is not None]
        return bool(ran) and all(ran)

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that ran and did not pass, in order."""
        return tuple(check for check in self.checks if check.passed is False)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; `passed` and the ratios are written for readers and not read back."""
        value = asdict(self)
        for check, item in zip(self.checks, value["checks"], strict=True):
            item["ratio"] = check.ratio
        value["checks"] = list(value["checks"])
        value["layers"] = {dtype: list(rows) for dtype, rows in value["layers"].items()}
        return {"format": FORMAT, "passed": self.passed, **value, "notices": list(self.notices)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`. Raises ValueError for another format."""
        if value.get("format") != FORMAT:
            raise ValueError(f"a report of format {value.get('format')!r}; this version reads format {FORMAT}")
        members = {f.name: value[f.name] for f in fields(cls)}
        members["checks"] = tuple(_record(CheckResult, item) for item in value["checks"])
        members["layers"] = {
            dtype: tuple(_record(LayerError, item) for item in rows) for dtype, rows in value["layers"].items()
        }
        members["notices"] = tuple(value["notices"])
        return cls(**members)

    def to_json(self) -> str:
        """`to_dict` as text. Numbers that JSON has not (inf, nan) are written as strings."""
        from .report import to_json

        return to_json(self)

    def to_markdown(self) -> str:
        """The report for a terminal or an issue."""
        from .report import to_markdown

        return to_markdown(self)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from .report import to_html

        return to_html(self)


def _record(kind: type[Any], value: Mapping[str, Any]) -> Any:
    return kind(**{f.name: value[f.name] for f in fields(kind) if f.name in value})
