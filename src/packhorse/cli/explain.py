"""`packhorse explain`: why these choices, what is the peak made of, what would relieve it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson

if TYPE_CHECKING:
    from packhorse.plan.spec import Plan
    from packhorse.report.run import RunEstimate


def explain(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN | RUN", help="A plan.json or a run folder.")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a plan: causes, bottleneck, choices, relief."""
    from packhorse.cli.companions import plan_path
    from packhorse.cli.screen import Screen
    from packhorse.plan.files import read_plan
    from packhorse.report.explain import explain_plan, explanation_as_dict

    screen = Screen(as_json=as_json)
    path = plan_path(plan)
    found = read_plan(path)
    run = _estimate(path, found)
    screen.show(explain_plan(found, run))
    screen.answer(explanation_as_dict(found, run))


def _estimate(path: Path, plan: Plan) -> RunEstimate | None:
    """Estimate the run of a plan in a run folder, whose recipe says how many steps it has."""
    from packhorse.cli.companions import companion_path
    from packhorse.machine.files import read_machine
    from packhorse.report.run import estimate_run
    from packhorse.trainer.recipe_files import load_recipe

    recipe_file, machine_file = path.with_name("recipe.yaml"), companion_path(path, "machine")
    if plan.prediction is None or not (recipe_file.is_file() and machine_file.is_file()):
        return None
    recipe = load_recipe(recipe_file).recipe
    if recipe.max_steps is None:
        # Epochs are steps only once the data has been tokenised.
        return None
    num_saves = -(-recipe.max_steps // recipe.save_steps) if recipe.save_steps else 0
    return estimate_run(
        plan,
        read_machine(machine_file),
        num_steps=recipe.max_steps,
        num_saves=num_saves,
        num_kept=recipe.save_total_limit or num_saves,
    )
