"""`packhorse lower`: the program text of a plan, task by task."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.options import AsJson, ModelPath


class ProgramPurpose(StrEnum):
    """What a program is for."""

    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"
    LOAD = "load"
    SAVE = "save"
    PERSIST = "persist"
    RESTORE = "restore"


def lower(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json or a run folder.")],
    rank: Annotated[int, typer.Option(min=0, help="Whose program.")] = 0,
    kind: Annotated[
        ProgramPurpose, typer.Option(help="What the program is for.")
    ] = ProgramPurpose.TRAIN_STEP,
    model: ModelPath = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here instead of to stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the program of a plan: every task, in order."""
    from packhorse.cli.companions import plan_path, read_plan_model
    from packhorse.cli.outputs import write_output
    from packhorse.cli.rank_reading import check_rank, read_any_plan, read_rank_set
    from packhorse.cli.screen import Screen
    from packhorse.compiler.lower import lower_plan
    from packhorse.plan.ranks import RankPlans
    from packhorse.program.digest import digest_program
    from packhorse.program.text import format_program

    screen = Screen(as_json=as_json)
    path = plan_path(plan)
    found = read_any_plan(path)
    check_rank(found, rank)
    if isinstance(found, RankPlans):
        own, part = found.ranks[rank], read_rank_set(path, found, model).parts[rank]
    else:
        own, part = found, read_plan_model(path, model)
    program = lower_plan(own, part, kind.value)
    text = format_program(program)
    if out is None:
        screen.show_text(text)
    else:
        write_output(out, text)
        screen.wrote(out)
    screen.answer(
        {
            "kind": program.kind,
            "rank": program.rank,
            "model": program.model,
            "digest": digest_program(program),
            "tasks": len(program.tasks),
            "buffers": len(program.buffers),
            "pools": {pool.id: pool.capacity_bytes for pool in program.pools},
            "text": text if out is None else None,
            "file": None if out is None else str(out),
        }
    )
