"""`packhorse compare`: how far was what was predicted from what was measured?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from packhorse.cli.options import AsJson
from packhorse.errors import InputError

_PREDICTED: Final = "timeline-predicted.json"
_MEASURED: Final = "timeline-measured.json"


def compare_runs(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN | PREDICTED MEASURED", help="A run folder, or two timelines."),
    ],
    tasks: Annotated[
        int, typer.Option(min=0, help="How many of the tasks that differ most are listed.")
    ] = 5,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write both timelines side by side, for Perfetto."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lay predicted beside measured."""
    from packhorse.cli.outputs import write_output
    from packhorse.cli.screen import Screen
    from packhorse.report.compare import compare_timelines, comparison_as_dict
    from packhorse.report.tables import comparison_table
    from packhorse.timeline.files import read_timeline
    from packhorse.timeline.perfetto import format_trace

    screen = Screen(as_json=as_json)
    first, second = _find_pair(paths)
    predicted, measured = read_timeline(first), read_timeline(second)
    comparison = compare_timelines(predicted, measured, num_tasks=tasks)
    screen.show(comparison_table(comparison))
    if trace is not None:
        write_output(trace, format_trace(predicted, measured))
        screen.wrote(trace)
    screen.answer(
        {"predicted": str(first), "measured": str(second)} | comparison_as_dict(comparison)
    )


def _find_pair(paths: list[Path]) -> tuple[Path, Path]:
    match paths:
        case [folder] if folder.is_dir():
            pair = folder / _PREDICTED, folder / _MEASURED
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
