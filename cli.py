"""The `dewconv` command: parses, calls, prints. Imports what a command needs when it runs."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from . import console
from .error_lines import document_error, error_lines
from .options import (
    Finite,
    Whole,
    hub_options,
    known_checks,
    named,
    overwrite_option,
    quiet_option,
    resume_option,
    seed_option,
    stream_option,
    text,
    typed,
    without_bars,
    without_blas_threads,
)
from .signals import Ended, end_by
from .streams import ERRORS, OutputError, drop_output

DONE, DIFFERENT, IMPOSSIBLE = 0, 1, 2
"""Exit codes: done and equal; verified and different; could not be done."""
CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit code of a command whose reader went away."""
STORED_DTYPES = ("keep", "bfloat16", "float16", "float32")
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
MOST_TOKENS = 2**30
"""The most tokens a generation may be asked for: positions are 32-bit integers."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="dewconv", prog_name="dewconv")
def cli() -> None:
    """Decoder checkpoints between Hugging Face safetensors and JAX banks, and the proof that both compute the same."""


def command(name: str) -> Callable[[Callable[..., int]], click.Command]:
    """A command with the options that all have. Its function returns an exit code."""

    def note(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
        def keep(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
            context.find_root().meta[f"dewconv.{key}"] = value
            return value

        return keep

    def decorate(function: Callable[..., int]) -> click.Command:
        for key, flag, says in (
            ("debug", "--debug", "Show the traceback of an error."),
            ("json", "--json", "Print one JSON document and nothing else on stdout."),
        ):
            option = click.option(
                flag,
                f"as_{key}",
                is_flag=True,
                is_eager=True,
                expose_value=key == "json",
                callback=note(key),
                help=says,
            )
            function = option(function)
        return cli.command(name)(function)

    return decorate


@command("import")
@click.argument("source", callback=named)
@click.argument("out", required=False, type=click.Path(), callback=named)
@hub_options
@click.option("--dtype", type=click.Choice(STORED_DTYPES), default="keep", help="Cast matrices (default: keep).")
@click.option("--bank-layers", type=Whole(min=1), metavar="N", help="The most layers of one bank.")
@click.option("--text-only", is_flag=True, help="Leave what is beside a wrapper's decoder behind.")
@click.option(
    "--quantized",
    type=click.Choice(("keep", "decode")),
    default="keep",
    help="Quantised weights as codes and scales, or as values (default: keep).",
)
@stream_option
@click.option("--all-files", is_flag=True, help="Take other weights along (GGUF, ONNX); never code or pickles.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--sha256", is_flag=True, help="Record the SHA-256 of every tensor beside its xxh3.")
@resume_option
@overwrite_option
@click.option("--unverified", is_flag=True, help="Import a family whose byte-exact export is not proven (below G3).")
@quiet_option
def import_command(
    source: str,
    out: str | None,
    dtype: str,
    bank_layers: int | None,
    text_only: bool,
    quantized: str,
    dry_run: bool,
    sha256: bool,
    resume: bool,
    overwrite: bool,
    unverified: bool,
    quiet: bool,
    as_json: bool,
    **hub: Any,
) -> int:
    """Turn a checkpoint into banks.

    SOURCE is a directory or a hub id (org/name). OUT defaults to ./NAME-banks.
    """
    without_blas_threads()
    from .api import plan_import, refuse_below_gate

    plan = plan_import(source, dtype=dtype, bank_layers=bank_layers, text_only=text_only, quantized=quantized, **hub)
    if not unverified:
        refuse_below_gate(plan)
    name = (plan.source.repo or plan.source.root.resolve().name).rpartition("/")[2]
    target = out if out is not None else f"{name}-banks"
    idle = without_effect(plan, text_only, quantized)
    if dry_run:
        return show_plan(plan, target, idle, quiet, as_json)
    inexact = [f"the export will not be byte-exact: {reason}" for reason in plan.inexact]
    tell(plan.warnings, () if quiet else [*plan.notices, *idle, *inexact, *unfinished(target, resume)])
    clock = console.Clock()
    with console.progress("import", plan.file_bytes, quiet) as progress:
        banks = plan.run(target, overwrite=overwrite, sha256=sha256, resume=resume, progress=progress)
    copied = console.Copied(plan.bank_bytes, len(banks.headers), clock.seconds)
    if as_json:
        console.document(
            {
                "out": str(Path(target)),
                "family": plan.family.name,
                "model_type": plan.model_type,
                "source": {"name": plan.source.label, "repo": plan.source.repo, "revision": plan.source.commit},
                **copied.to_json(),
                "exact": not plan.inexact,
                "inexact": list(plan.inexact),
                "carried": len(plan.carried),
                "side_files": [item.path for item in plan.source.side_files],
                "warnings": list(plan.warnings),
                "notices": [*plan.notices, *idle],
            }
        )
    elif not quiet:
        console.say(f"{console.printable(target)}: {copied}")
    return DONE


def without_effect(plan: Any, text_only: bool, quantized: str) -> list[str]:
    """A line for each option that changes nothing about this checkpoint."""
    lines = []
    if text_only and not plan.wrapped:
        lines.append("--text-only changes nothing: the checkpoint is a decoder alone")
    if quantized == "decode" and plan.quantized is None:
        lines.append("--quantized decode changes nothing: no tensor of the checkpoint is quantised")
    return lines


def show_plan(plan: Any, target: str, idle: Sequence[str], quiet: bool, as_json: bool) -> int:
    """The import plan: a row per stored tensor; quiet, its warnings alone."""
    if as_json:
        known = plan.to_json()
        console.document({"out": target, **known, "notices": [*known["notices"], *idle]})
        return DONE
    if quiet:
        tell(plan.warnings, ())
        return DONE
    rows = []
    for tensor in plan.layout.tensors:
        copies = plan.copies[tensor.bank, tensor.key]
        source = copies[0].source if len(copies) == 1 else f"{copies[0].source} and {len(copies) - 1} more"
        rows.append((tensor.bank, tensor.key, tensor.dtype, str(list(tensor.shape)), source))
    rows += [("carried", item.name, "", "", item.why) for item in plan.carried]
    rows += [("alias", item.name, "", "", f"equal to {item.of}") for item in plan.aliases]
    rows += [("left", name, "", "", "beside the decoder") for name in plan.left]
    console.table(("bank", "key", "dtype", "shape", "from"), rows)
    tell(plan.warnings, [*plan.notices, *idle])
    for reason in plan.inexact:
        console.say(f"the export will not be byte-exact: {reason}")
    files = len(plan.layout.banks()) + bool(plan.carried)
    console.say(f"{console.printable(target)}: {files} files, {console.size(plan.bank_bytes)}; nothing was written")
    return DONE


def unfinished(out: str, resume: bool) -> list[str]:
    """What unfinished runs left beside `out`, a line each, where this run does not go on from it."""
    from .converters.resuming import leftovers

    return [
        f"{path.name} was left beside {out} by a run that did not finish; --resume goes on from it, or remove it"
        for path in (() if resume else leftovers(Path(out)))
    ]


def tell(warnings: Sequence[str], notices: Sequence[str]) -> None:
    """Warnings and notices on stderr."""
    for kind, lines in (("warning", warnings), ("note", notices)):
        for line in lines:
            console.note(f"{kind}: {console.printable(line)}")


@command("export")
@click.argument("banks", type=click.Path(), callback=named)
@click.argument("out", type=click.Path(), callback=named)
@click.option("--dtype", type=click.Choice(STORED_DTYPES), help="Cast matrices (default: what each tensor was).")
@click.option("--max-shard-size", metavar="SIZE", help="Divide the tensors anew, 5GB or 5GiB say.")
@click.option("--text-only", is_flag=True, help="The text half of a wrapper, as a checkpoint of its own.")
@resume_option
@overwrite_option
@quiet_option
def export_command(
    banks: str,
    out: str,
    dtype: str | None,
    max_shard_size: str | None,
    text_only: bool,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Turn banks back into a checkpoint: the source's own bytes, or the changed weights under its names."""
    without_blas_threads()
    from .converters.banks import open_banks
    from .converters.exporting import plan_export, run_export

    plan = plan_export(open_banks(banks), dtype=dtype, max_shard_size=max_shard_size, text_only=text_only)
    if not quiet:
        tell((), [*plan.notices, *unfinished(out, resume)])
    clock = console.Clock()
    sizes = {name: header.data_bytes for name, header in plan.headers.items()}
    with console.progress("export", sizes, quiet) as progress:
        run_export(plan, out, overwrite=overwrite, resume=resume, progress=progress)
    copied = console.Copied(plan.weight_bytes, len(plan.headers), clock.seconds)
    if as_json:
        console.document({"out": str(Path(out)), **copied.to_json(), **plan.to_json()})
    elif not quiet:
        exact = "; the source's own bytes" if plan.exact else ""
        console.say(f"{console.printable(out)}: {copied}{exact}")
    return DONE


@command("verify")
@click.argument("target", required=False, callback=named)
@hub_options
@click.option("--against", metavar="DIR", help="The checkpoint torch runs (default: the source of the banks).")
@click.option("--family", metavar="NAME", help="Verify a tiny variant of a family, in place of a TARGET.")
@click.option("--variant", metavar="V", help="Which variant (default: the family's first).")
@click.option("--checks", metavar="LIST", callback=known_checks, help="Some of the checks, separated by commas.")
@click.option("--tokens", type=Whole(min=1), metavar="N", help="Length of the probe.")
@click.option("--prompt", metavar="TEXT", callback=text, help="Probe with a text in place of drawn tokens.")
@seed_option("Of the drawn tokens and weights.")
@click.option("--dtype", type=click.Choice(COMPUTE_DTYPES), help="Compare in this dtype alone.")
@click.option("--report", metavar="DIR", type=click.Path(file_okay=False), help="Write report.json, .md and .html.")
@quiet_option
def verify_command(
    target: str | None, checks: tuple[str, ...] | None, report: str | None, quiet: bool, as_json: bool, **options: Any
) -> int:
    """Run torch and JAX on the same weights and compare. Exit code 1 when they differ.

    TARGET is a bank directory, a checkpoint directory or a hub id.
    """
    from .families.registry import find
    from .show import show_report, write_report

    if options["family"] is not None:
        find(options["family"])
    if target is None and options["family"] is None:
        raise click.UsageError("Name a TARGET, or --family NAME.")
    if target is not None and (options["family"] is not None or options["variant"] is not None):
        raise click.UsageError("A TARGET and --family or --variant exclude each other.")
    without_bars()
    from .api import verify

    with console.steps("verify", quiet) as progress:
        outcome = verify(target, checks=checks, progress=progress, **options)
    if report is not None:
        write_report(outcome, Path(report))
    if as_json:
        console.say(outcome.to_json(), end="")
    else:
        show_report(outcome, Path(report) if report is not None else None)
    if outcome.failures:
        return DIFFERENT
    return DONE if outcome.passed else IMPOSSIBLE


@command("inspect")
@click.argument("source", callback=named)
@hub_options
@stream_option
@click.option("--bank-layers", type=Whole(min=1), metavar="N", help="The most layers of one bank.")
def inspect_command(source: str, bank_layers: int | None, as_json: bool, **hub: Any) -> int:
    """Say what a checkpoint is: family, decoder, layer runs, rules, sizes. Reads headers alone.

    SOURCE is a directory (config.json is enough), a hub id or a bank directory.
    """
    from .converters.banks import is_bank_directory, open_banks
    from .converters.inspection import inspect_source
    from .converters.source import open_source
    from .show import show_banks, show_inspection

    if is_bank_directory(Path(source).expanduser()):
        for name, given in (("bank-layers", bank_layers), ("revision", hub["revision"]), ("stream", hub["stream"])):
            if given:
                raise click.UsageError(f"--{name} is for a checkpoint; {source} holds banks, laid out as they are.")
        show_banks(open_banks(source), as_json)
        return DONE
    found = inspect_source(open_source(source, **hub), bank_layers)
    if as_json:
        console.document(found.to_json())
    else:
        show_inspection(found)
    if found.problems:
        count = len(found.problems)
        console.note(f"dewconv: {console.printable(source)} cannot be imported: {count} problem(s), listed above")
    return IMPOSSIBLE if found.problems else DONE


@command("diff")
@click.argument("a", callback=named)
@click.argument("b", callback=named)
@hub_options
@click.option("--all", "show_all", is_flag=True, help="List equal tensors too.")
@click.option("--read-all", is_flag=True, help="Read every tensor, those of equal checksums too.")
def diff_command(a: str, b: str, show_all: bool, read_all: bool, as_json: bool, **hub: Any) -> int:
    """Compare two checkpoints or bank directories, tensor by tensor. Exit code 1 when they differ.

    Between two bank directories, what their manifests give equal checksums is equal and not read.
    """
    from .converters.differences import differences, open_tensors
    from .show import show_differences

    found = list(differences(open_tensors(a, **hub), open_tensors(b, **hub), believe=not read_all))
    equal = all(item.kind == "equal" for item in found)
    if as_json:
        counts = {kind: sum(item.kind == kind for item in found) for kind in sorted({item.kind for item in found})}
        rows = [item.to_json() for item in found if show_all or item.kind != "equal"]
        believed = sum(item.kind == "equal" and not item.read for item in found)
        console.document({"equal": equal, "counts": counts, "by_checksums": believed, "tensors": rows})
    else:
        show_differences(found, show_all)
    return DONE if equal else DIFFERENT


@command("generate")
@click.argument("banks", callback=named)
@hub_options
@click.option("--prompt", required=True, metavar="TEXT", callback=text, help="The text to go on from.")
@click.option("--max-new-tokens", type=Whole(1, MOST_TOKENS), default=64, show_default=True, metavar="N")
@click.option("--temperature", type=Finite(min=0), default=0.0, metavar="T", help="0 takes the likeliest token.")
@click.option("--top-k", type=Whole(min=1), metavar="K", help="Draw from the K likeliest tokens.")
@click.option("--top-p", type=Finite(0, 1, min_open=True), metavar="P", help="Draw from the likeliest P.")
@seed_option("Of the draws.")
@click.option("--stop", multiple=True, metavar="TEXT", callback=text, help="End before this text; may be given again.")
@click.option("--dtype", type=click.Choice(COMPUTE_DTYPES), help="Compute dtype (default: float32 on a CPU).")
@quiet_option
def generate_command(
    banks: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stop: tuple[str, ...],
    dtype: str | None,
    quiet: bool,
    as_json: bool,
    **hub: Any,
) -> int:
    """Generate text in JAX.

    BANKS is a bank directory, a checkpoint directory or a hub id. Ends at the checkpoint's end-of-text ids.
    """
    from .completion import complete

    idle = typed(click.get_current_context(), "top_k", "top_p", "seed") if temperature == 0 else []
    if idle and not quiet:
        console.note(f"note: no effect at temperature 0, which takes the likeliest token: {', '.join(idle)}")
    write = None if as_json else lambda piece: console.say(console.shown(piece), end="")
    done = complete(
        banks,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        dtype=dtype,
        write=write,
        tell=None if quiet else lambda line: console.note(f"note: {line}"),
        **hub,
    )
    if as_json:
        console.document(done.to_json())
    else:
        console.say()
        if not quiet:
            console.note(str(done))
    return DONE


@command("families")
@click.option("--markdown", is_flag=True, help="As Markdown.")
def families_command(markdown: bool, as_json: bool) -> int:
    """What each family's card shows: gates, variants, faults caught."""
    from . import support

    if markdown and as_json:
        raise click.UsageError("--markdown and --json exclude each other.")
    items = support.support()
    if as_json:
        console.document([item.to_json() for item in items])
    elif markdown:
        console.say(support.markdown(items), end="")
    else:
        console.table(support.COLUMNS, [support.row(item) for item in items], support.FIGURES)
    return DONE


@command("matrix")
@click.option("--format", "form", type=click.Choice(("github", "json")), default="json", show_default=True)
def matrix_command(form: str, as_json: bool) -> int:
    """The CI matrix: an entry per family and variant."""
    from .parity.matrices import matrix, render_matrix

    if as_json and form != "json":
        raise click.UsageError(f"--format {form} and --json exclude each other.")
    console.say(render_matrix(matrix(), form))
    return DONE


def run(arguments: Sequence[str]) -> int:
    """The command on `arguments`; returns the exit code. Errors are a line or two on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)
    without_bars(on=not sys.stderr.isatty())
    # Else JAX adds a note about its traceback to every error.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    # A plan is hundreds of thousands of small values that stay; looking for garbage among them finds none.
    gc.set_threshold(50_000, 20, 100)
    meta: dict[str, Any] = {}
    try:
        with cli.make_context("dewconv", list(arguments)) as context:
            meta = context.meta
            return cli.invoke(context) or DONE
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except BrokenPipeError:
        # The reader has what it wanted.
        drop_output()
        return CLOSED_PIPE
    except BaseException as error:
        if isinstance(error, OutputError):
            drop_output()
        # What is no usage never got as far as the options that were given with it.
        given = arguments[: arguments.index("--")] if "--" in arguments else arguments
        if meta.get("dewconv.debug") or "--debug" in given:
            import traceback

            traceback.print_exc()
        lines = [*error_lines(error, given, cli), *(f"dewconv: {note}" for note in getattr(error, "__notes__", ()))]
        if meta.get("dewconv.json") or "--json" in given:
            document_error(error, lines)
        for line in lines:
            console.note("\n".join(console.printable(part) for part in line.split("\n")))
        if isinstance(error, KeyboardInterrupt):
            end_by(error.number if isinstance(error, Ended) else signal.SIGINT)
        return IMPOSSIBLE
