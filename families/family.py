"""The family record: two tables, how releases spell names, a reference, and the variants that exercise it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..dew_core.fields import DecoderFields
from ..dew_core.refusals import unbuildable
from .errors import Finding, FindingsError
from .fields import Line, Reading, read_lines, shown, write_lines
from .rules import Carried, Statement
from .spelling import TEXT_CONFIG, Canonical, KindRope, canonical, respell


@dataclass(frozen=True)
class Spelling:
    """How a release names tensors: what stands for `model.` and for `lm_head.` in the rules' names."""

    body: str = "model."
    head: str = "lm_head."

    def of(self, name: str) -> str:
        """The rule's `name` in this spelling."""
        for plain, spelled in (("model.", self.body), ("lm_head.", self.head)):
            if name.startswith(plain):
                return spelled + name[len(plain) :]
        return name


@dataclass(frozen=True)
class Wrapper:
    """A multimodal config whose `text_config` is this family's.

    model_types: the wrapper's. architecture: its class. fields: lines for the wrapper's own top-level keys.
    shared: keys that may stand at the top level or in the text config. carried: the tensors beside the decoder.
    parts: config key -> tensor prefixes it promises (a `vision_config` promises a vision tower).
    """

    model_types: tuple[str, ...]
    architecture: str
    fields: tuple[Line, ...]
    shared: tuple[str, ...] = ()
    carried: tuple[Carried, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A tiny checkpoint that exercises one behaviour of a family.

    config: a whole config.json. why: what it shows. spelling: which of the family's spellings the file uses.
    head: "own" when untied; for a tied config "absent", or an "equal" or "different" `lm_head.weight` on disk.
    float32: name endings stored in float32 in an otherwise bfloat16 file. storage: the file's dtype. length: tokens
    of the longest probe (past every window, chunk and rope threshold of the config). form: which of the forms of a
    `OneOf` the file has, the hub's when empty. correction_bias: mean and spread of a router's correction biases.
    depths: prediction-depth layers in the file past the last layer. coded: a pattern of the tensors that are stored
    as the config's quantization_config says, codes and scales; empty for none.
    """

    config: Mapping[str, Any]
    why: str
    spelling: Spelling = Spelling()
    head: Literal["own", "absent", "equal", "different"] = "own"
    storage: Literal["float32", "bfloat16"] = "float32"
    float32: tuple[str, ...] = ()
    length: int = 48
    form: str = ""
    correction_bias: tuple[float, float] | None = None
    depths: int = 0
    coded: str = ""


@dataclass(frozen=True)
class Family:
    """A model family: config.json <-> decoder fields, tensors <-> parameters.

    fields: the first table. weights: the second, statements from decoder fields. architecture: the class name of a
    text-only config. reference: "transformers:Class" or "dewconv:module.Class", what parity compares with.
    kind_rope: how old rope spellings distribute over layer types (`spelling.KindRope`), None for one rope.
    carried: tensors that a canonical config announces and the decoder does not compute with (prediction depths).
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    fields: tuple[Line, ...]
    weights: Callable[[DecoderFields], Iterable[Statement]]
    reference: str
    variants: Mapping[str, Variant]
    spellings: tuple[Spelling, ...] = (Spelling(),)
    wrapper: Wrapper | None = None
    kind_rope: KindRope | None = None
    carried: Callable[[Mapping[str, Any]], Iterable[Carried]] = lambda config: ()

    def canonical(self, config: Mapping[str, Any]) -> Canonical:
        """`config` in canonical spelling (`spelling.canonical`)."""
        return canonical(config, self.wrapper.shared if self.wrapper else (), self.kind_rope)

    def read(self, config: Mapping[str, Any]) -> tuple[DecoderFields, tuple[str, ...]]:
        """The decoder fields of a config.json, and notices for the user.

        Raises FindingsError with every key that cannot be read or that no line claims.
        """
        reading = self.examine(config)
        if reading.findings:
            raise FindingsError("config.json", reading.findings)
        return DecoderFields(**reading.values), reading.notices

    def examine(self, config: Mapping[str, Any]) -> Reading:
        """What the first table makes of a config.json, findings and all: what `read` does without raising."""
        foreign = self._no_wrapper(config)
        if foreign is not None:
            rest = self.examine({key: value for key, value in config.items() if key != TEXT_CONFIG})
            return replace(rest, findings=(foreign, *rest.findings), complete=False)
        spelled = self.canonical(config)
        reading = read_lines(self.fields, spelled.text)
        findings, notices = [*spelled.conflicts, *reading.findings], list(reading.notices)
        owned = self.model_types
        kind = spelled.text.get("model_type", self.model_types[0])
        if kind not in owned:
            findings.insert(0, _foreign(kind, self))
        if spelled.wrapper and (
            self.wrapper is None or spelled.wrapper.get("model_type") not in self.wrapper.model_types
        ):
            findings.insert(0, _foreign(spelled.wrapper.get("model_type"), self))
        elif self.wrapper is not None and spelled.wrapper:
            outer = read_lines(self.wrapper.fields, spelled.wrapper)
            findings += outer.findings
            notices += outer.notices
        findings += self._other_classes(spelled)
        complete = reading.complete and not spelled.conflicts
        if complete and not findings:
            why = unbuildable(DecoderFields(**reading.values))
            if why is not None:
                complete = False
                findings.append(Finding("the decoder", why, "one that can be built", "correct config.json"))
        return Reading(reading.values, tuple(findings), tuple(notices), complete)

    def _no_wrapper(self, config: Mapping[str, Any]) -> Finding | None:
        """A finding for a `text_config` beside the model_type of a text-only config."""
        if not isinstance(config.get(TEXT_CONFIG), Mapping) or config.get("model_type") not in self.model_types:
            return None
        needed = f"no such key: a config of model_type {shown(config['model_type'])} is no wrapper of another"
        return Finding(f"config key {TEXT_CONFIG!r}", shown(config[TEXT_CONFIG]), needed, "remove it")

    def _other_classes(self, spelled: Canonical) -> list[Finding]:
        """A finding for `architectures` that name another class than the one whose computation this family is: another
        head computes something else from the same decoder. Underscores are spelled either way (Kimi K2.5)."""
        known = [self.architecture, *([self.wrapper.architecture] if self.wrapper is not None else [])]
        names = {name.replace("_", "") for name in known}
        findings = []
        for part in (spelled.wrapper, spelled.text):
            stated = part.get("architectures")
            listed = isinstance(stated, list | tuple) and all(isinstance(name, str) for name in stated)
            if stated is None or (listed and all(name.replace("_", "") in names for name in stated)):
                continue
            needed, fix = f"a list of {' or '.join(known)}", "another class computes something else; not supported"
            findings.append(Finding("config key 'architectures'", shown(stated), needed, fix))
        return findings

    def unstated_sizes(self, config: Mapping[str, Any], fields: DecoderFields) -> dict[str, int]:
        """The whole numbers that `config` does not state, and what was read in their place (`fields` is its reading):
        the class's default, or what follows from other keys. A key whose line has its value from another is left out.
        """
        text = self.canonical(config).text
        sizes = {}
        for line in self.fields:
            stated = [text[key] for key in line.keys if key in text]
            for key, value in line.write(fields).items():
                whole = isinstance(value, int) and not isinstance(value, bool)
                if whole and text.get(key) is None and value not in stated:
                    sizes[key] = value
        return sizes

    def write(self, fields: DecoderFields) -> dict[str, Any]:
        """A text-only config.json for decoder fields, in canonical spelling: what a model that never had one gets."""
        head = {"architectures": [self.architecture], "model_type": self.model_types[0]}
        return head | write_lines(self.fields, fields)

    def rewrite(self, config: Mapping[str, Any], fields: DecoderFields) -> dict[str, Any]:
        """`config` with only those keys changed whose decoder fields differ from what it says, in its spelling."""
        before = write_lines(self.fields, self.read(config)[0])
        after = write_lines(self.fields, fields)
        changes = {key: value for key, value in after.items() if before.get(key) != value}
        return respell(config, changes, self.kind_rope)


def _foreign(model_type: object, family: Family) -> Finding:
    needed = " or ".join((*family.model_types, *(family.wrapper.model_types if family.wrapper else ())))
    return Finding("config key 'model_type'", shown(model_type), needed, f"the {family.name} family reads no other")
