"""The options that commands share, and the types and checks of options: what does not fit is refused in a sentence."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import click

SEEDS = 2**32
"""How many seeds tell apart: jax.random.key takes the low 32 bits of a number where JAX has no 64-bit integers."""


class Whole(click.IntRange):
    """A whole number of a range."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A number of a range, neither NaN nor infinite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            self.fail(f"{value!r} is not a number.", param, ctx)
        if not finite:
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return super().convert(value, param, ctx)


def text(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A text, or several. Bytes of the command line that the locale does not know are read as UTF-8. Raises
    BadParameter for what is no text."""
    if isinstance(value, tuple):
        return tuple(text(context, parameter, item) for item in value)
    if value is None or not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise click.BadParameter("It is not UTF-8 text.") from None


def known_checks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """`--checks a,b` as names. Raises BadParameter for one that does not exist, with the nearest that does."""
    from difflib import get_close_matches

    from .parity.render_text import CHECKS

    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    for name in names:
        if name not in CHECKS:
            close = get_close_matches(name, CHECKS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.BadParameter(f"No check is called {name!r}.{hint} The checks are {', '.join(CHECKS)}.")
    if not names:
        raise click.BadParameter(f"Name at least one of {', '.join(CHECKS)}.")
    return names


def hub_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how a hub id is fetched."""
    for option in (
        click.option("--offline", is_flag=True, help="Use the local cache alone."),
        click.option("--cache-dir", type=click.Path(file_okay=False), help="The hub cache (default: HF_HOME's)."),
        click.option(
            "--token",
            metavar="TOKEN",
            callback=text,
            help="A hub token (default: HF_TOKEN, or the one logged in with).",
        ),
        click.option("--revision", metavar="REV", callback=text, help="A branch, tag or commit of a hub id."),
    ):
        function = option(function)
    return function


def without_bars(
    context: click.Context | None = None, parameter: click.Parameter | None = None, on: bool = True
) -> bool:
    """Keeps the progress bars of huggingface_hub and transformers, and transformers' advice, off stderr."""
    if on:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return on


def without_blas_threads() -> None:
    """Keeps numpy's BLAS from starting threads when numpy is imported: copying multiplies nothing."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def named(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A path or a hub id. Raises BadParameter for an empty one, which a path takes for the current directory."""
    if value == "":
        hub = "" if parameter.name in ("out", "against", "report") else ", or a hub id (org/name) where one is read"
        raise click.BadParameter(f"The name is empty. Name a directory{hub}.")
    return value


quiet_option = click.option("--quiet", "-q", is_flag=True, callback=without_bars, help="No progress, notes or summary.")
stream_option = click.option(
    "--stream", is_flag=True, help="Read a hub id's weights by ranges as they are needed; none are stored."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace OUT, once the new one is complete.")
resume_option = click.option("--resume", is_flag=True, help="Keep what is done when interrupted, and go on from it.")


def seed_option(of: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--seed`, the same wherever something is drawn; `of` says what is."""
    return click.option("--seed", type=Whole(0, SEEDS - 1), default=0, show_default=True, metavar="N", help=of)


def typed(context: click.Context, *names: str) -> list[str]:
    """Those of the options `names` (parameters) that the command line has, as it spells them."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]
