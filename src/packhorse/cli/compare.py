"""`packhorse compare`: how far was what was predicted from what was measured?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.machine.rescale import RateFactors
    from packhorse.report.compare import Comparison


def compare_runs(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN | PREDICTED MEASURED", help="A run folder, or two timelines."),
    ],
    tasks: Annotated[
        int, typer.Option(min=0, help="How many of the tasks that differ most are listed.")
    ] = 5,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Of a run of several ranks: whose step is shown in full."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write both timelines side by side, for Perfetto."),
    ] = None,
    machine_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the run's machine with the rates that it showed, for --machine.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lay predicted beside measured."""
    from packhorse.cli.compare_ranks import CompareRequest, compare_ranks, count_ranks
    from packhorse.cli.outputs import check_output, write_output
    from packhorse.cli.run_timelines import find_process, say_unfinished
    from packhorse.cli.screen import Screen
    from packhorse.report.compare import compare_timelines, comparison_as_dict
    from packhorse.report.measured_rates import factors_as_dict, say_factors
    from packhorse.report.tables import comparison_table
    from packhorse.timeline.files import read_timeline
    from packhorse.timeline.perfetto import format_trace

    screen = Screen(as_json=as_json)
    if machine_out is not None:
        check_output(machine_out)
    num_ranks = count_ranks(paths[0]) if len(paths) == 1 else 1
    unfinished = say_unfinished(paths[0]) if len(paths) == 1 else None
    if unfinished is not None:
        screen.note(unfinished)
    if num_ranks > 1:
        request = CompareRequest(
            folder=paths[0],
            num_ranks=num_ranks,
            rank=rank,
            num_tasks=tasks,
            trace=trace,
            machine_out=machine_out,
        )
        compare_ranks(request, screen)
        return
    if rank:
        raise InputError(
            f"there is no rank {rank}: this is of one rank", where="--rank", fix="leave it out"
        )
    first, second = _find_pair(paths)
    predicted, measured = read_timeline(first), read_timeline(second)
    process = find_process(paths[0]) if len(paths) == 1 else None
    comparison = compare_timelines(predicted, measured, num_tasks=tasks, process=process)
    screen.show(comparison_table(comparison))
    if trace is not None:
        write_output(trace, format_trace(predicted, measured))
        screen.wrote(trace)
    factors = None if machine_out is None else _write_machine(paths, comparison, machine_out)
    if factors is not None:
        screen.show(say_factors(factors))
        screen.wrote(machine_out)
    screen.answer(
        {"predicted": str(first), "measured": str(second)}
        | comparison_as_dict(comparison)
        | ({} if factors is None else {"machine_factors": factors_as_dict(factors)})
    )


def _write_machine(paths: list[Path], comparison: Comparison, out: Path) -> RateFactors:
    """Write the machine of a run with the rates that the run showed."""
    from packhorse.cli.outputs import write_output
    from packhorse.machine.files import format_machine, read_machine
    from packhorse.machine.rescale import rescale_machine
    from packhorse.report.measured_rates import find_factors
    from packhorse.trainer.run_folder import MACHINE_NAME

    file = paths[0] / MACHINE_NAME
    if len(paths) > 1 or not file.is_file():
        raise InputError(
            "two timelines do not say on which machine they were measured"
            if len(paths) > 1
            else f"the run folder has no {MACHINE_NAME}, whose rates would be corrected",
            where="--machine-out",
            fix="name the folder of a run that was trained",
        )
    if not comparison.same_tasks:
        raise InputError(
            "the predicted and the measured step have other tasks, so their rates cannot be told",
            where=str(paths[0]),
            fix="name the folder of a run whose plan.json was not changed after it was trained",
        )
    factors = find_factors(comparison)
    write_output(out, format_machine(rescale_machine(read_machine(file), factors)))
    return factors


def _find_pair(paths: list[Path]) -> tuple[Path, Path]:
    from packhorse.timeline.files import MEASURED_NAME, PREDICTED_NAME

    match paths:
        case [folder] if folder.is_dir():
            pair = folder / PREDICTED_NAME, folder / MEASURED_NAME
            missing = [path.name for path in pair if not path.is_file()]
            if missing:
                raise InputError(
                    f"the run folder has no {' and no '.join(missing)}",
                    where=str(folder),
                    fix="a run writes both after its first steps: train it, or name two timelines",
                )
            return pair
        case [single]:
            raise InputError(
                "one timeline has nothing to be compared with"
                if single.is_file()
                else "there is no such run folder",
                where=str(single),
                fix="name a run folder, or two timelines: predicted, then measured",
            )
        case [first, second]:
            return first, second
        case _:
            raise InputError(
                f"{len(paths)} paths were given",
                fix="name a run folder, or two timelines: predicted, then measured",
            )
