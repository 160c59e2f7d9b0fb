"""`packhorse plan`: does it fit, how long does a step take, how long the run?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from packhorse.cli.options import (
    AsJson,
    BudgetText,
    MachineName,
    MemoryText,
    RecipePath,
    Settings,
)

_DEFAULT_OUT: Final = Path("plan.json")


def make_plan(
    recipe: RecipePath,
    machine: MachineName = None,
    budget: BudgetText = None,
    memory: MemoryText = None,
    settings: Settings = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The plan; its model, machine, profile and run are written beside it.",
        ),
    ] = _DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan that fits; write plan.json."""
    from packhorse.cli.machines import (
        MachineChoice,
        advise_as_typed,
        choose_machine,
        is_this_computer,
    )
    from packhorse.cli.outputs import check_output
    from packhorse.cli.planning import advise, load_libraries, plan_recipe, write_planned
    from packhorse.cli.screen import Screen
    from packhorse.report.explain import explanation_as_dict, plan_table
    from packhorse.trainer.recipe_files import load_recipe

    screen = Screen(as_json=as_json)
    check_output(out)
    loaded = load_recipe(recipe, settings or ())
    for warning in loaded.warnings:
        screen.warn(warning)
    choice = MachineChoice(name=machine, budget=budget, memory=memory)
    # Before anything is measured or traced: what that leaves in memory counts.
    baseline_bytes = load_libraries(screen) if is_this_computer(choice) else None
    chosen = choose_machine(
        choice,
        screen,
        granted=loaded.recipe.granted,
        threads=loaded.recipe.pins.num_threads,
    )
    with advise_as_typed(choice):
        planned = plan_recipe(
            loaded.recipe,
            chosen,
            screen,
            measure=machine is None,
            baseline_bytes=baseline_bytes,
        )
    for note in planned.notes:
        screen.note(note)
    written = write_planned(planned, out)
    screen.show(plan_table(planned.plan, planned.run))
    screen.wrote(*written)
    screen.note(
        f"{out.name} was made from the files beside it: `packhorse explain {out}` says why,"
        f" `packhorse train {recipe} --plan {out}` trains by it"
    )
    if not as_json:
        return
    advice = advise(planned.plan, planned.traced.model, planned.profile, planned.machine)
    screen.answer(
        {
            "files": [str(path) for path in written],
            **explanation_as_dict(planned.plan, planned.run, advice),
        }
    )
