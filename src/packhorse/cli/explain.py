"""`packhorse explain`: why these choices, what is the peak made of, what would relieve it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson

if TYPE_CHECKING:
    from packhorse.plan.ranks import RankPlans
    from packhorse.plan.spec import Plan
    from packhorse.report.explain import Advice
    from packhorse.timeline.spec import Timeline


def explain(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN | RUN", help="A plan.json or a run folder.")
    ],
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Whose plan, of several; absent: what they are together."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: causes, bottleneck, choices, relief."""
    from packhorse.cli.companions import companion_path, plan_path
    from packhorse.cli.rank_reading import check_rank, read_any_plan
    from packhorse.cli.screen import Screen
    from packhorse.plan.ranks import RankPlans
    from packhorse.report.explain import explain_plan, explanation_as_dict
    from packhorse.report.rank_explain import explain_rank_plans
    from packhorse.report.rank_plans import rank_plans_as_dict
    from packhorse.report.run_files import read_run

    screen = Screen(as_json=as_json)
    path = plan_path(plan)
    found = read_any_plan(path)
    if rank is not None:
        check_rank(found, rank)
    run_file = companion_path(path, "run")
    run = read_run(run_file) if run_file.is_file() else None
    if isinstance(found, RankPlans):
        if rank is None:
            timelines = _predict(path, found)
            screen.show(explain_rank_plans(found, run, timelines))
            screen.answer(rank_plans_as_dict(found, run, timelines))
        else:
            screen.show(explain_plan(found.ranks[rank]))
            screen.answer(explanation_as_dict(found.ranks[rank]))
        return
    advice = _advise(path, found)
    screen.show(explain_plan(found, run, advice))
    screen.answer(explanation_as_dict(found, run, advice))


def _advise(path: Path, plan: Plan) -> Advice | None:
    """Work out what would make the plan faster, from what lies beside it; None without that."""
    from packhorse.cli.companions import companion_path
    from packhorse.cli.planning import advise
    from packhorse.machine.files import read_machine
    from packhorse.model.files import read_model
    from packhorse.plan.identity import check_plan
    from packhorse.profile.files import read_profile
    from packhorse.profile.identity import fits_model

    files = [companion_path(path, name) for name in ("model", "profile", "machine")]
    if plan.prediction is None or not all(file.is_file() for file in files):
        return None
    model, profile, machine = read_model(files[0]), read_profile(files[1]), read_machine(files[2])
    check_plan(plan, model)
    return advise(plan, model, profile, machine) if fits_model(profile, model) else None


def _predict(path: Path, plans: RankPlans) -> tuple[Timeline, ...] | None:
    """Time a step of all ranks, from what lies beside their plans; None without that."""
    from packhorse.cli.companions import companion_path
    from packhorse.cli.rank_reading import choose_cluster, read_rank_set, simulate_rank_set

    files = [companion_path(path, name) for name in ("model", "profile", "machine")]
    if not all(file.is_file() for file in files):
        return None
    found = read_rank_set(path, plans, None)
    return simulate_rank_set(found, choose_cluster(found, None), elsewhere=False)
