"""`packhorse train` started by torchrun: several ranks that share a model.

In: what was typed, the same on every rank. Out: a trained model in the run folder of the first
rank. Every rank prepares and proves the same; the first one plans for all, and speaks for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.cli.machines import MachineChoice
from packhorse.errors import DoesNotFitError, MismatchError, PackhorseError

if TYPE_CHECKING:
    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.machine.cluster import Cluster
    from packhorse.runtime.transport.meeting import Meeting
    from packhorse.trainer.crew import Crew
    from packhorse.trainer.recipe import Recipe
    from packhorse.trainer.recipe_files import LoadedRecipe
    from packhorse.trainer.run_folder import Resume

END_WAIT: Final = timedelta(minutes=30)
"""How long the first rank may take to save the model, with all others done."""


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


def train_seated(request: TrainRequest, screen: Screen) -> None:
    """Meet the other ranks that torchrun has started, and train with them.

    Raises:
        as `train_on_ranks`.
    """
    from packhorse.runtime.transport.meeting import join_meeting

    meeting = join_meeting()
    try:
        train_on_ranks(request, meeting, screen)
        meeting.barrier(wait=END_WAIT)
    except PackhorseError as error:
        meeting.abort(error.what)
        raise
    finally:
        meeting.close()


def train_on_ranks(request: TrainRequest, meeting: Meeting, screen: Screen) -> None:
    """Plan on the first rank, and train on all.

    Args:
        screen: silent on all ranks but the first.

    Raises:
        MismatchError: ranks have different versions, recipes or models; names the difference.
        PeerLostError: another rank has failed, or is gone.
        and what `packhorse train` of one rank raises, on the rank where it went wrong.
    """
    from packhorse.cli.planning import load_libraries
    from packhorse.cli.rank_machines import gather_cluster
    from packhorse.trainer.crew import MetCrew
    from packhorse.trainer.stop_signals import stop_at_once

    crew = MetCrew(meeting)
    recipe = request.loaded.recipe
    with stop_at_once():
        check_alike(meeting, describe_rank(recipe))
        baseline_bytes = load_libraries(screen)
        cluster = gather_cluster(request.choice, meeting, screen, recipe)
        if crew.rank:
            _follow(request, crew, cluster, baseline_bytes)
        else:
            _lead(request, crew, cluster, baseline_bytes, screen)


def describe_rank(recipe: Recipe) -> dict[str, str]:
    """What has to be the same on every rank before anything is done together."""
    import torch

    from packhorse import __version__
    from packhorse.trainer.recipe_files import format_recipe

    return {
        "packhorse": __version__,
        "torch": torch.__version__,
        "recipe": sha256(format_recipe(recipe).encode()).hexdigest()[:16],
    }


def check_alike(meeting: Meeting, facts: dict[str, str]) -> None:
    """Compare facts over ranks.

    Raises:
        MismatchError: names the first that differs, and the ranks.
    """
    found = [json.loads(text) for text in meeting.gather(json.dumps(facts))]
    for name, value in found[0].items():
        others = [rank for rank, each in enumerate(found) if each.get(name) != value]
        if others:
            rank = others[0]
            raise MismatchError(
                f"{name} is {value} on rank 0 and {found[rank].get(name)} on rank {rank}"
                + (f" and {len(others) - 1} more" if len(others) > 1 else ""),
                where=f"hosts {meeting.hosts[0]} and {meeting.hosts[rank]}",
                fix="give every rank the same versions, recipe and settings",
            )


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

    crew.lead(plan)
    planned = found[0]
    joint = planned.joint
    assert joint is not None
    for note in planned.notes:
        screen.note(note)
    screen.show(rank_plans_table(joint.plans, planned.run, joint.timelines), "")
    program = lower_plan(planned.plan, planned.traced.model, "train_step")
    watch = watch_drift(planned, program, joint.timelines[0])
    del program
    summary = run_planned(
        planned,
        joint.timelines,
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
    from packhorse.cli.earlier_plans import pin_numerics
    from packhorse.cli.rank_planning import trace_for_ranks
    from packhorse.plan.rank_files import parse_rank_plans
    from packhorse.trainer.preparation import prepare_run
    from packhorse.trainer.training import train

    # The first rank has prepared the data by then: it is read, not made again.
    plans = parse_rank_plans(crew.lead(str), where="rank 0")
    # What the recipe leaves open is decided once: this rank's machine may differ from the first's.
    recipe, _ = pin_numerics(request.loaded.recipe, plans)
    prepared = prepare_run(recipe, cluster.ranks[crew.rank])
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
