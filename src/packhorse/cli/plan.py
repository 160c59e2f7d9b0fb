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
        find_cluster,
        is_this_computer,
    )
    from packhorse.cli.outputs import check_output
    from packhorse.cli.planning import advise, load_libraries, plan_recipe, write_planned
    from packhorse.cli.rank_planning import plan_rank_recipe
    from packhorse.cli.screen import Screen
    from packhorse.cli.seats import spell_start
    from packhorse.report.explain import explanation_as_dict, plan_table
    from packhorse.report.rank_plans import rank_plans_as_dict, rank_plans_table
    from packhorse.trainer.recipe_files import load_recipe

    screen = Screen(as_json=as_json)
    check_output(out)
    loaded = load_recipe(recipe, settings or ())
    for warning in loaded.warnings:
        screen.warn(warning)
    choice = MachineChoice(name=machine, budget=budget, memory=memory)
    granted, threads = loaded.recipe.granted, loaded.recipe.pins.num_threads
    cluster = find_cluster(choice, granted=granted, threads=threads)
    # Before anything is measured or traced: what that leaves in memory counts.
    here = cluster is None and is_this_computer(choice)
    baseline_bytes = load_libraries(screen) if here else None
    with advise_as_typed(choice):
        if cluster is not None:
            planned = plan_rank_recipe(loaded.recipe, cluster, screen, measure=False)
        else:
            planned = plan_recipe(
                loaded.recipe,
                choose_machine(choice, screen, granted=granted, threads=threads),
                screen,
                measure=machine is None,
                baseline_bytes=baseline_bytes,
            )
    for note in planned.notes:
        screen.note(note)
    written = write_planned(planned, out)
    joint = planned.joint
    if joint is None:
        screen.show(plan_table(planned.plan, planned.run))
    else:
        screen.show(rank_plans_table(joint.plans, planned.run, joint.timelines))
    screen.wrote(*written)
    hosts = ("here",) if joint is None else joint.cluster.hosts
    start = spell_start(len(hosts), len(set(hosts)))
    screen.note(
        f"{out.name} was made from the files beside it: `packhorse explain {out}` says why,"
        f" `{start} train {recipe} --plan {out}` trains by it"
    )
    if not as_json:
        return
    if joint is not None:
        explained = rank_plans_as_dict(joint.plans, planned.run, joint.timelines)
        screen.answer({"files": [str(path) for path in written], **explained})
        return
    advice = advise(planned.plan, planned.traced.model, planned.profile, planned.machine)
    screen.answer(
        {
            "files": [str(path) for path in written],
            **explanation_as_dict(planned.plan, planned.run, advice),
        }
    )
