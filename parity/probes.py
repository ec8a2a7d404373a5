"""Token probes: rows long enough to pass every threshold of a decoder, and the documents cut from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dew_core.fields import DecoderFields
from ..dew_core.layers import layer_plan
from ..dew_core.records import MLA
from ..families.errors import ConversionError
from .choices import Choices

SHORTEST = 24
ROWS = 3
LOGITS_BUDGET = 200_000_000
"""Elements of one side's logits that a probe may ask for; fewer rows, then fewer tokens, keep to it."""


@dataclass(frozen=True)
class Probe:
    """tokens [B, S] int32, and what they leave untested.

    notices: the thresholds of the decoder that S does not pass. seed: None for a given prompt.
    """

    tokens: np.ndarray
    seed: int | None
    notices: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """(row, length) of the documents that padded and packed rows are made of. A document is the beginning of a
        row, so that causality makes the row's own logits its reference."""
        shares = (1.0, 0.6, 0.25)
        lengths = [max(2, round(self.length * share)) for share in shares]
        return tuple((row, lengths[row % len(lengths)]) for row in range(self.rows))

    def summary(self) -> dict[str, Any]:
        """The probe as a report states it."""
        return {
            "tokens": int(self.tokens.size),
            "rows": self.rows,
            "lengths": [self.length] * self.rows,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Arranged:
    """Documents arranged in rows: tokens, positions, mask and segments [B, S], and where each document lies.

    places: (probe row a document was cut from, row it lies in, first column, length) for each.
    """

    tokens: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    segments: np.ndarray
    places: tuple[tuple[int, int, int, int], ...]

    def routes(self, routes: Choices | None) -> Choices | None:
        """The probe rows' choices where their tokens lie now."""
        return None if routes is None else routes.arranged(self.places)


def thresholds(fields: DecoderFields) -> dict[str, int]:
    """What the decoder does only past some position: name -> that position."""
    found: dict[str, int] = {}
    for name, kind in layer_plan(fields).kinds.items():
        if kind.window is not None:
            found[f"window of {name}"] = kind.window
        if kind.chunk is not None:
            found[f"chunk of {name}"] = kind.chunk
        if kind.yarn is not None:
            found[f"YaRN's original length of {name}"] = kind.yarn.original_max_position_embeddings
        if kind.rope_scaling is not None and kind.rope_scaling.rope_type == "llama3":
            found[f"llama3's original length of {name}"] = kind.rope_scaling.original_max_position_embeddings
        if kind.rope_scaling is not None and kind.rope_scaling.rope_type == "linear":
            found[f"linear rope of {name}"] = round(8 * kind.rope_scaling.factor)
        if isinstance(kind.mixer, MLA) and kind.mixer.indexer is not None:
            found[f"number of keys that {name} attends"] = kind.mixer.indexer.index_topk
    return found


def passing(position: int) -> int:
    """Tokens that go clearly past `position`: a quarter more, and 8 at least."""
    return position + max(8, position // 4)


def make_probe(
    fields: DecoderFields,
    config: Mapping[str, Any],
    *,
    tokens: int | None = None,
    rows: int | None = None,
    shortest: int = SHORTEST,
    seed: int = 0,
) -> Probe:
    """Random rows for a decoder: as long as its thresholds ask, or `tokens`.

    shortest: the least length when `tokens` is unset (a variant's own). Special ids of the config (padding, image
    placeholders) are not drawn: a padding row of torch's embedding has no gradient, and placeholders await images.
    Raises ConversionError when `tokens` is below 2.
    """
    if tokens is not None and tokens < 2:
        raise ConversionError(f"tokens is {tokens}; a probe has at least 2")
    limits = thresholds(fields)
    length = max([shortest, *map(passing, limits.values())]) if tokens is None else tokens
    if tokens is None:
        length = min(length, max(SHORTEST, LOGITS_BUDGET // fields.vocab_size))
    if rows is None:
        rows = min(ROWS, max(1, LOGITS_BUDGET // (length * fields.vocab_size)))
    notices = tuple(
        f"the probe's {length} tokens do not pass the {name} ({position})"
        for name, position in limits.items()
        if length <= position
    )
    special = set(special_ids(config))
    allowed = np.array([i for i in range(min(fields.vocab_size, 1 << 20)) if i not in special], np.int32)
    drawn = np.random.default_rng([seed, 7]).choice(allowed, (rows, length))
    return Probe(drawn.astype(np.int32), seed, notices)


def prompt_probe(fields: DecoderFields, ids: Iterable[int]) -> Probe:
    """A given prompt as one row. Raises ConversionError when it is shorter than 2 tokens or beyond the vocabulary."""
    row = np.asarray(list(ids), np.int32)[None]
    if row.shape[1] < 2:
        raise ConversionError("the prompt is shorter than two tokens")
    if row.max() >= fields.vocab_size:
        raise ConversionError(f"the prompt has token {row.max()}, the vocabulary {fields.vocab_size}")
    notices = tuple(
        f"the prompt's {row.shape[1]} tokens do not pass the {name} ({position})"
        for name, position in thresholds(fields).items()
        if row.shape[1] <= position
    )
    return Probe(row, None, notices)


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """The ids of a config's `…_token_id` and `…_token_index` keys, the text config's included."""
    for key, value in config.items():
        if key.endswith(("_token_id", "_token_index")):
            yield from (i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    if isinstance(config.get("text_config"), Mapping):
        yield from special_ids(config["text_config"])


def padded(probe: Probe, side: str) -> Arranged:
    """Each document alone in its row, padded on the "left" or the "right" to the probe's length."""
    shape = probe.tokens.shape
    tokens, positions = np.ones(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    places = []
    for row, length in probe.documents:
        start = shape[1] - length if side == "left" else 0
        tokens[row, start : start + length] = probe.tokens[row, :length]
        positions[row, start : start + length] = np.arange(length)
        mask[row, start : start + length] = True
        places.append((row, row, start, length))
    return Arranged(tokens, positions, mask, np.zeros(shape, np.int32), tuple(places))


def packed(probe: Probe) -> Arranged:
    """Documents end to end in every row, positions restarting: each row holds the short documents, in an order of
    its own, and fills up to the probe's length with the beginning of a third."""
    documents = list(probe.documents)
    short = [document for document in documents if document[1] < probe.length]
    if not short:
        short = [(0, max(2, round(probe.length * 0.6)))]
    shape = probe.tokens.shape
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    places = []
    for row in range(probe.rows):
        order = short[row % len(short) :] + short[: row % len(short)]
        column, number = 0, 0
        while column < probe.length:
            source, length = order[number] if number < len(order) else (documents[0][0], probe.length)
            length = min(length, probe.length - column)
            tokens[row, column : column + length] = probe.tokens[source, :length]
            positions[row, column : column + length] = np.arange(length)
            segments[row, column : column + length] = number
            places.append((source, row, column, length))
            column, number = column + length, number + 1
    return Arranged(tokens, positions, np.ones(shape, bool), segments, tuple(places))
