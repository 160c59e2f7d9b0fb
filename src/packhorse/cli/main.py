"""The `packhorse` command: one subcommand per question, and the exit codes.

In: arguments. Out: an exit code: 0 done, 1 our bug, 2 bad input, 3 does not fit or a rule rejects,
4 the run failed, 75 stopped by a signal and resumable; 130 after Ctrl-C where there is nothing to
resume, 141 when the reader of our output went away.
Always: no torch is loaded before a command needs it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final

import typer

from packhorse import __version__
from packhorse.cli.check import check_file
from packhorse.cli.clean import clean_folder
from packhorse.cli.compare import compare_runs
from packhorse.cli.data import show_data
from packhorse.cli.doctor import report_health
from packhorse.cli.explain import explain
from packhorse.cli.failures import (
    BAD_INPUT,
    BROKEN_PIPE,
    INTERRUPTED,
    explain_missing_module,
    report_bug,
    report_error,
    report_usage,
)
from packhorse.cli.init import write_recipe
from packhorse.cli.lower import lower
from packhorse.cli.plan import make_plan
from packhorse.cli.probe import probe
from packhorse.cli.schedule import show_schedule
from packhorse.cli.schema import print_schema
from packhorse.cli.seats import speaks_for_host
from packhorse.cli.simulate import simulate
from packhorse.cli.train import NEWEST, train_recipe
from packhorse.errors import PackhorseError

RECIPE_ENDINGS: Final = (".yaml", ".yml", ".json")

app = typer.Typer(
    name="packhorse",
    help="Train models that do not fit the machine: plan, prove, show, run.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"packhorse {__version__}\n")
        raise typer.Exit


@app.callback()
def take_common_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Train models that do not fit the machine: plan, prove, show, run."""
    assert not version


app.command("init")(write_recipe)
app.command("doctor")(report_health)
app.command("probe")(probe)
app.command("data")(show_data)
app.command("plan")(make_plan)
app.command("explain")(explain)
app.command("lower")(lower)
app.command("check")(check_file)
app.command("simulate")(simulate)
app.command("schedule")(show_schedule)
app.command("train")(train_recipe)
app.command("compare")(compare_runs)
app.command("clean")(clean_folder)
app.command("schema")(print_schema)


def main() -> None:
    """Run the command that the process was started with and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or pipe that cannot show a character shows a question mark.
            stream.reconfigure(errors="replace")
    raise SystemExit(run_arguments(sys.argv[1:]))


def run_arguments(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(app)
        spelled = spell_resume(arguments) or ["--help"]
        try:
            # typer's own runner would end the process itself, with codes of its own.
            with command.make_context("packhorse", spelled) as context:
                command.invoke(context)
        finally:
            sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        place = "packhorse" if context is None else str(context.command_path)
        if speaks_for_host():
            report_usage(error.format_message(), place, as_json=as_json)
        return BAD_INPUT
    except PackhorseError as error:
        return report_error(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\nstopped\n")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except Exception as error:
        missing = explain_missing_module(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            raise SystemExit(report_error(missing, as_json=as_json)) from error
        raise SystemExit(report_bug(error, arguments, as_json=as_json)) from error
    return 0


def spell_resume(arguments: Sequence[str]) -> list[str]:
    """Give `--resume` without a path the value that means the newest state.

    Options have a value or they have none; this one may have one. A recipe is never its value.
    """
    spelled = list(arguments)
    for at, (word, after) in enumerate(pairwise([*arguments, "--"])):
        if word == "--resume" and (after.startswith("-") or after.endswith(RECIPE_ENDINGS)):
            spelled[at] = f"--resume={NEWEST}"
    return spelled


def _drop_output() -> None:
    # The interpreter flushes stdout once more when it ends, which would complain again.
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  a file descriptor is wanted
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
