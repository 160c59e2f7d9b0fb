"""`packhorse train` started by torchrun: several ranks that share a model.

In: what was typed, the same on every rank. Out: a trained model in the run folder of the first
rank. Every rank prepares and proves the same; the first one plans for all, and speaks for all.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.cli.machines import MachineChoice
from packhorse.cli.seated import meet_ranks
from packhorse.errors import DoesNotFitError

if TYPE_CHECKING:
    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.machine.cluster import Cluster
    from packhorse.runtime.transport.meeting import Meeting
    from packhorse.trainer.crew import Crew
    from packhorse.trainer.rank_ends import RankEnds
    from packhorse.trainer.recipe import Recipe
    from packhorse.trainer.recipe_files import LoadedRecipe
    from packhorse.trainer.run_folder import Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What was typed: a recipe, perhaps a plan, how to begin, the machine and its budgets."""

    path: Path
    loaded: LoadedRecipe
    plan: Path | None
    beginning: Resume
    choice: MachineChoice
    audit: bool
    go_on: str


def train_seated(read: Callable[[], TrainRequest], screen: Screen) -> None:
    """Meet the other ranks that torchrun has started, and train with them.

    Args:
        read: reads the recipe and what else was typed.

    Raises:
        as `train_on_ranks` and `meet_ranks`.
    """
    with meet_ranks(as_json=screen.as_json) as (meeting, ends):
        request = read()
        ends.note_run(request.loaded.recipe.run_folder, request.go_on)
        train_on_ranks(request, meeting, ends, screen)


def train_on_ranks(request: TrainRequest, meeting: Meeting, ends: RankEnds, screen: Screen) -> None:
    """Compare the ranks, plan on the first one, and train on all.

    Args:
        screen: silent on all ranks but the first.

    Raises:
        MismatchError: ranks have different versions, recipes or models; names the difference.
        InputError: they do not share the run folder.
        PeerLostError: another rank has failed, or is gone.
        and what `packhorse train` of one rank raises, on the rank where it went wrong.
    """
    from packhorse.cli.planning import load_libraries
    from packhorse.cli.rank_machines import gather_cluster
    from packhorse.trainer.crew import MetCrew
    from packhorse.trainer.shared_folder import check_shared

    recipe = request.loaded.recipe
    ends.whereabouts.tell("comparing the ranks")
    meeting.compare(describe_rank(recipe), "give every rank the same versions, recipe and settings")
    check_shared(recipe.run_folder, meeting)
    crew = MetCrew(meeting, ends.whereabouts)
    baseline_bytes = load_libraries(screen)
    ends.whereabouts.tell("measuring the ranks")
    cluster = gather_cluster(request.choice, meeting, screen, recipe)
    if crew.rank:
        _follow(request, crew, cluster, baseline_bytes)
    else:
        _lead(request, crew, cluster, baseline_bytes, screen)


def describe_rank(recipe: Recipe) -> dict[str, str]:
    """What has to be the same on every rank before anything is done together."""
    from importlib.metadata import PackageNotFoundError, version

    from packhorse import __version__
    from packhorse.trainer.recipe_files import format_recipe

    found = {"packhorse": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["recipe"] = sha256(format_recipe(recipe).encode()).hexdigest()[:16]
    return found


def _lead(
    request: TrainRequest, crew: Crew, cluster: Cluster, baseline_bytes: int, screen: Screen
) -> None:
    from packhorse.cli.drift import watch_drift
    from packhorse.cli.train import run_planned
    from packhorse.cli.training_summary import render_summary, say_where, summary_as_dict
    from packhorse.compiler.lower import lower_plan
    from packhorse.plan.rank_files import format_rank_plans
    from packhorse.report.rank_plans import rank_plans_table

    found: list[Planned] = []

    def plan() -> str:
        found.append(_settle(request, cluster, screen, baseline_bytes))
        joint = found[0].joint
        assert joint is not None
        return format_rank_plans(joint.plans)

    crew.tell("planning")
    crew.lead(plan)
    planned = found[0]
    joint = planned.joint
    assert joint is not None
    for note in planned.notes:
        screen.note(note)
    screen.show(rank_plans_table(joint.plans, planned.run), "")
    program = lower_plan(planned.plan, planned.traced.model, "train_step")
    watch = watch_drift(planned, program, joint.timelines[0])
    del program
    summary = run_planned(
        planned,
        joint.timelines[0],
        request.beginning,
        screen,
        go_on=request.go_on,
        watch=watch,
        baseline_bytes=baseline_bytes,
        audit=request.audit,
        crew=crew,
    )
    screen.show("", render_summary(planned, summary, baseline_bytes=baseline_bytes))
    screen.show_text(say_where(planned.prepared.recipe.run_folder))
    screen.answer(summary_as_dict(planned, summary))


def _follow(request: TrainRequest, crew: Crew, cluster: Cluster, baseline_bytes: int) -> None:
    from packhorse.cli.rank_planning import trace_for_ranks
    from packhorse.plan.rank_files import parse_rank_plans
    from packhorse.trainer.preparation import prepare_run
    from packhorse.trainer.training import train

    # The first rank has prepared the data by then: it is read, not made again.
    crew.tell("waiting for the plans of rank 0")
    plans = parse_rank_plans(crew.lead(str), where="rank 0")
    crew.tell("tracing the model")
    prepared = prepare_run(request.loaded.recipe, cluster.ranks[crew.rank])
    train(
        prepared,
        plan=plans,
        machine=cluster,
        traced=trace_for_ranks(prepared, plans),
        resume=request.beginning,
        baseline_bytes=baseline_bytes,
        audit=request.audit,
        go_on=request.go_on,
        crew=crew,
    )


def _settle(
    request: TrainRequest, cluster: Cluster, screen: Screen, baseline_bytes: int
) -> Planned:
    """Take the plans that were named, or those of the run that is resumed, or make some."""
    from packhorse.cli.earlier_plans import pin_numerics, read_earlier
    from packhorse.cli.rank_planning import plan_rank_recipe, take_rank_plans
    from packhorse.plan.files import PLAN_NAME
    from packhorse.plan.rank_files import read_rank_plans
    from packhorse.plan.ranks import RankPlans
    from packhorse.trainer.run_folder import StartFresh

    recipe = request.loaded.recipe
    if request.plan is not None:
        plans = read_rank_plans(request.plan)
        return take_rank_plans(recipe, cluster, plans, request.plan, screen)
    earlier = None if isinstance(request.beginning, StartFresh) else read_earlier(recipe)
    if isinstance(earlier, RankPlans) and len(earlier.ranks) == cluster.num_ranks:
        path = recipe.run_folder / PLAN_NAME
        try:
            planned = take_rank_plans(recipe, cluster, earlier, path, screen)
        except DoesNotFitError:
            screen.note(f"{path} needs more than the budgets now are, so new plans are made")
        else:
            screen.note(f"by the plan of the run that is resumed: {path}")
            return planned
    if earlier is None:
        return plan_rank_recipe(recipe, cluster, screen, baseline_bytes=baseline_bytes)
    pinned, threads = pin_numerics(recipe, earlier)
    machines = tuple(replace(m, num_threads=threads or m.num_threads) for m in cluster.ranks)
    cluster = replace(cluster, ranks=machines)
    try:
        return plan_rank_recipe(pinned, cluster, screen, baseline_bytes=baseline_bytes)
    except DoesNotFitError:
        screen.warn(
            "the micro-batches of the run so far no longer fit: others are taken, and the curve"
            " goes on with other roundings"
        )
        return plan_rank_recipe(recipe, cluster, screen, baseline_bytes=baseline_bytes)
