"""The tokenizer of a checkpoint that has no tokenizer.json, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..families.errors import ConversionError


class SlowTokenizer:
    """`AutoTokenizer` of a directory; never runs the checkpoint's code."""

    def __init__(self, directory: Path) -> None:
        """Raises ConversionError when transformers is not installed or finds no tokenizer it can build."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConversionError(
                f"{directory}: has no tokenizer.json, and other tokenizers need transformers; "
                "install dewconv[verify], or give a checkpoint with a tokenizer.json"
            ) from None
        try:
            self._library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # a missing or foreign tokenizer raises whatever its class does
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
