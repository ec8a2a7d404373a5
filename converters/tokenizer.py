"""Text to tokens and back, and where a model stops: the tokenizer and generation config beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ..families.errors import ConversionError

TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARIES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""What other tokenizers of decoders are read from, by transformers 5.24 (the classes' `vocab_files_names`) and by
mistral_common and tiktoken through it."""
UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that do not make a character yet."""


class Tokenizer(Protocol):
    """Text to token ids, with the special tokens the checkpoint's tokenizer adds, and back without them."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FastTokenizer:
    """A `tokenizer.json`, read by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        """Raises ConversionError when the file is not a tokenizer."""
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions for any fault of the file
            raise ConversionError(f"{path}: is not a tokenizer the tokenizers library can read ({error})") from None
        self._library.no_padding()
        self._library.no_truncation()

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=True)


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint's directory holds a file that a tokenizer is read from."""
    return any((directory / name).is_file() for name in (TOKENIZER, *VOCABULARIES))


def needs_code(directory: Path) -> bool:
    """Whether the checkpoint names a tokenizer class of its own, which is code that is never run."""
    classes = _object(directory / TOKENIZER_CONFIG).get("auto_map")
    return isinstance(classes, dict) and "AutoTokenizer" in classes


def stop_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end a text: `eos_token_id` of generation_config.json, else of config.json (its `text_config` for a
    wrapper); one or a list. Raises ConversionError when it is neither."""
    for name in (GENERATION_CONFIG, CONFIG):
        config = _object(directory / name)
        for part in (config, config.get("text_config")):
            stated = part.get("eos_token_id") if isinstance(part, dict) else None
            if stated is not None:
                ids = stated if isinstance(stated, list) else [stated]
                if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                    raise ConversionError(f"{directory / name}: eos_token_id {stated!r} is not an id or a list of them")
                return tuple(ids)
    return ()


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise ConversionError(f"{path}: is not valid JSON") from None
    return value if isinstance(value, dict) else {}


class TextStream:
    """The text of a generation as it grows: `feed` tokens and print what comes back.

    Text is held back while a character is unfinished or it may turn out to begin one of the `stops`; the text ends
    before a stop. A continuation is decoded together with its prompt, as decoders treat the start of a text apart.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._skip = len(tokenizer.decode(prompt))
        self._stops = [stop for stop in stops if stop]
        self._printed = 0
        self.text = ""
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` settle."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)[self._skip :]
        ends = [text.index(stop) for stop in self._stops if stop in text]
        if ends:
            self.stopped, self.text = True, text[: min(ends)]
            return self._new(self.text)
        self.text = text
        settled = text.rstrip(UNFINISHED)
        held = max((n for stop in self._stops for n in range(len(stop)) if settled.endswith(stop[:n])), default=0)
        return self._new(settled[: len(settled) - held])

    def close(self) -> str:
        """What was held back, when no more tokens come."""
        return self._new(self.text)

    def _new(self, text: str) -> str:
        new = text[self._printed :]
        self._printed += len(new)
        return new
