"""A text continued in JAX: the tokenizer of the checkpoint, the decoder of the banks, the two rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .console import Clock
from .converters.banks import is_bank_directory, open_banks
from .converters.layout import SOURCE
from .converters.source import open_source, refuse_without_weights
from .converters.tokenizer import TOKENIZER, FastTokenizer, TextStream, Tokenizer, stop_ids
from .families.errors import ConversionError


@dataclass(frozen=True)
class Completion:
    """A continuation.

    prompt_tokens, tokens: ids. text: the continuation's. finished: "eos", "stop" or "length". prefill_seconds: to the
    first token, compilation included. decode_seconds: from the second token to the last, both of compiled steps.
    """

    prompt: str
    prompt_tokens: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    finished: str
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, compilation included."""
        return len(self.prompt_tokens) / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second; None when fewer than three were drawn."""
        return (len(self.tokens) - 2) / self.decode_seconds if len(self.tokens) > 2 else None

    def __str__(self) -> str:
        rate = self.decode_rate
        decode = "" if rate is None else f", {rate:.1f} tokens/s"
        return (
            f"{len(self.prompt_tokens)} prompt tokens in {self.prefill_seconds:.2f} s (compilation included); "
            f"{len(self.tokens)} new tokens{decode}; ended by {self.finished}"
        )

    def to_json(self) -> dict[str, Any]:
        rate = self.decode_rate
        return {
            "prompt": self.prompt,
            "prompt_tokens": list(self.prompt_tokens),
            "text": self.text,
            "tokens": list(self.tokens),
            "finished": self.finished,
            "load_seconds": round(self.load_seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "prefill_tokens_per_second": round(self.prefill_rate, 2),
            "decode_seconds": round(self.decode_seconds, 4),
            "decode_tokens_per_second": None if rate is None else round(rate, 2),
        }


def complete(
    target: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    dtype: str | None = None,
    write: Callable[[str], None] | None = None,
    tell: Callable[[str], None] | None = None,
    **hub: Any,
) -> Completion:
    """Continue `prompt` with `target`, handing the prompt and then the text to `write` as it comes, and what is worth
    saying about it to `tell`.

    target: a bank directory, a checkpoint directory or a hub id (`hub`: `open_source`'s options). The text ends at
    an id that the checkpoint's generation config names, before one of `stop`, or after `max_new_tokens`. Raises
    ConversionError when there is no tokenizer, the prompt gives no token the decoder knows, or logits are not finite.
    """
    root, beside = _opened(target, **hub)
    tokenizer = open_tokenizer(beside)
    ends = stop_ids(beside)
    ids = tokenizer.encode(prompt)

    import jax
    import jax.numpy as jnp

    from .converters.loading import load
    from .dew_core.generate import decoding_variables, stream

    clock = Clock()
    model, variables = load(root)
    _refuse_foreign(ids, model.vocab_size, beside)
    reach = len(ids) + max_new_tokens
    if tell is not None and reach > model.max_seq_len:
        tell(
            f"the prompt and {max_new_tokens} new tokens come to {reach}; the config states {model.max_seq_len} "
            "(max_position_embeddings), and past that the text may get worse"
        )
    model, variables = decoding_variables(model, variables, None if dtype is None else jnp.dtype(dtype))
    load_seconds = clock.seconds
    if write is not None:
        write(prompt)
    text = TextStream(tokenizer, ids, stop)
    tokens: list[int] = []
    times: list[float] = []
    finished = "length"
    clock = Clock()
    chunks = stream(
        model,
        variables,
        np.asarray([ids], np.int32),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=ends,
        rng=jax.random.key(seed),
    )
    try:
        for chunk in chunks:
            times.append(clock.seconds)
            tokens += chunk[0].tolist()
            if tokens[-1] in ends:
                finished = "eos"
            settled = text.feed(chunk[0].tolist())
            if write is not None and settled:
                write(settled)
            if text.stopped:
                finished = "stop"
                break
    except FloatingPointError as error:
        narrow = "" if dtype in (None, "float32") else f", or {dtype} is too narrow for them"
        raise ConversionError(f"{target}: {error}; the weights hold NaN or infinities{narrow}") from None
    rest = text.close()
    if write is not None and rest:
        write(rest)
    return Completion(
        prompt=prompt,
        prompt_tokens=tuple(ids),
        text=text.text,
        tokens=tuple(tokens),
        finished=finished,
        load_seconds=load_seconds,
        prefill_seconds=times[0],
        decode_seconds=times[-1] - times[1] if len(times) > 1 else 0.0,
    )


def _opened(target: str, **hub: Any) -> tuple[Path, Path]:
    """(directory of the weights, directory of the tokenizer). What is wrong with the weights is said before what is
    wrong with the tokenizer."""
    directory = Path(target).expanduser()
    if is_bank_directory(directory):
        open_banks(directory)
        return directory, directory / SOURCE
    source = open_source(target, **hub)
    refuse_without_weights(source)
    return source.root, source.root


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's directory. Raises ConversionError when none can be read."""
    if (directory / TOKENIZER).is_file():
        return FastTokenizer(directory / TOKENIZER)
    from .parity.slow_tokenizer import SlowTokenizer

    return SlowTokenizer(directory)


def _refuse_foreign(ids: Sequence[int], vocab: int, where: Path) -> None:
    if not ids:
        raise ConversionError("the prompt is no token; give some text")
    foreign = [token for token in ids if not 0 <= token < vocab]
    if foreign:
        raise ConversionError(
            f"{where}: the tokenizer gives token {foreign[0]}, the model knows {vocab}; it is another model's tokenizer"
        )
