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
    return None
