"""The tokenizer of a checkpoint that has no tokenizer.json, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..converters.tokenizer import TOKENIZER, has_tokenizer, needs_code
from ..families.errors import ConversionError


class SlowTokenizer:
    """`AutoTokenizer` of a directory; never runs the checkpoint's code, never asks the hub."""

    def __init__(self, directory: Path) -> None:
        """Raises ConversionError when the directory holds no tokenizer, or transformers is not installed or can build
        none of its files."""
        # transformers takes the name of a directory that is not there for a repository's.
        if not has_tokenizer(directory):
            raise ConversionError(
                f"{directory}: has no tokenizer (no {TOKENIZER}, tokenizer.model, vocab.json or the like)"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConversionError(
                f"{directory}: has no tokenizer.json, and other tokenizers need transformers; "
                "install dewconv[verify], or give a checkpoint with a tokenizer.json"
            ) from None
        try:
            self._library = AutoTokenizer.from_pretrained(
                str(directory.absolute()), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a missing or foreign tokenizer raises whatever its class does
            if needs_code(directory):
                raise ConversionError(
                    f"{directory}: its tokenizer is code of the checkpoint, which is never run; "
                    f"put a {TOKENIZER} beside it"
                ) from None
            reason = str(error).strip().split("\n")[0]
            raise ConversionError(f"{directory}: has no tokenizer that can be read ({reason})") from None
        # Without files some classes build a tokenizer of an empty vocabulary.
        files = sorted(set(self._library.vocab_files_names.values()))
        if not any((directory / name).is_file() for name in files):
            raise ConversionError(f"{directory}: has no tokenizer, none of {', '.join(files)}")

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=True))
