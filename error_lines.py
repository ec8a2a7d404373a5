"""An error as the line or two the command prints of it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

import click

from . import console
from .streams import OutputError, drop_output


def error_lines(error: BaseException, arguments: Sequence[str], cli: click.Group) -> list[str]:
    """What, where and what to do. `cli` parsed `arguments`; its commands are named in hints."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return [error.format_message()]
    if isinstance(error, click.UsageError):
        return _usage(error, arguments, cli)
    if isinstance(error, click.ClickException):
        return [f"dewconv: {error.format_message()}"]
    if isinstance(error, KeyboardInterrupt):
        return ["dewconv: interrupted"]
    if _is_ours(error):
        return [f"dewconv: {error}"]
    if isinstance(error, OutputError):
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        return [f"dewconv: standard output cannot be written: {why}"]
    if isinstance(error, MemoryError) or (
        type(error).__name__ == "JaxRuntimeError" and str(error).startswith("RESOURCE_EXHAUSTED")
    ):
        return ["dewconv: out of memory"]
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers", "jinja2", "matplotlib"):
        extra = "verify" if error.name in ("torch", "transformers") else "report"
        return [f"dewconv: {error.name} is not installed; install dewconv[{extra}]"]
    if isinstance(error, OSError) and error.filename is not None:
        return [f"dewconv: {error.filename}: {error.strerror}"]
    reason = str(error).strip().partition("\n")[0][:200]
    return [f"dewconv: {type(error).__name__}: {reason} (run again with --debug to see where)"]


def document_error(error: BaseException, lines: Sequence[str]) -> None:
    """The same under `--json`, with every finding on its own."""
    found = [vars(finding) for finding in getattr(error, "findings", ())] if _is_ours(error) else []
    try:
        console.document({"error": {"message": "\n".join(lines), "findings": found}})
    except (OutputError, BrokenPipeError):
        drop_output()


def _usage(error: click.UsageError, arguments: Sequence[str], cli: click.Group) -> list[str]:
    """What is wrong with the arguments, and whose help to see."""
    context, name = error.ctx, next((item for item in arguments if item in cli.commands), None)
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and context is not None and context.command is cli:
        having = [key for key, item in cli.commands.items() if any(error.option_name in p.opts for p in item.params)]
        if having:
            option, after = error.option_name, name if name in having else "COMMAND"
            message = f"No such option {option!r} before the command; give it after: dewconv {after} {option}"
            return [f"dewconv: {message}", "see dewconv --help"]
    # click tells not where an option lacks its value.
    where = context.command_path if context is not None else f"dewconv {name}" if name else "dewconv"
    return [f"{where}: {message}", f"see {where} --help"]


def _is_ours(error: BaseException) -> bool:
    """Whether it is a ConversionError. Nothing is imported to tell: what was raised in the middle of an import
    (numpy's, which cannot be begun again) would be raised anew."""
    errors = sys.modules.get(f"{__package__}.families.errors")
    return errors is not None and isinstance(error, errors.ConversionError)
