"""Types and checks of the command's options, each refused in a plain sentence."""

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
