"""`packhorse train` started by torchrun: several ranks that share a model.

In: what was typed, the same on every rank. Out: a trained model in the run folder of the first
rank. Every rank prepares and proves the same; the first one plans for all, and speaks for all.
"""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from packhorse.cli.machines import MachineChoice
from packhorse.cli.seated import meet_ranks
from packhorse.cli.seats import spell_start
from packhorse.errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.machine.cluster import Cluster
    from packhorse.plan.ranks import RankPlans
    from packhorse.profile.spec import Profile
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


def note_finished(request: TrainRequest, screen: Screen) -> None:
    """Say how far the run is that goes on: a complete one need not be planned first to be known."""
    from packhorse.trainer.run_folder import StartFresh, say_finished

    if isinstance(request.beginning, StartFresh):
        return
    finished = say_finished(request.loaded.recipe.run_folder)
    if finished is not None:
        screen.note(finished)


def refuse_alone(machine: str | None, plan: Path | None) -> None:
    """Refuse to train in one process by files of several ranks.

    Raises:
        InputError: says which file it is, and how its ranks are started.
        FileFormatError: a file is missing or damaged.
    """
    from packhorse.cli.kinds import detect_kind
    from packhorse.machine.cluster_files import read_cluster
    from packhorse.plan.rank_files import read_rank_plans

    if machine is not None and Path(machine).is_file() and detect_kind(Path(machine)) == "cluster":
        _refuse_alone(machine, read_cluster(machine).num_ranks, "--machine")
    if plan is not None and plan.is_file() and detect_kind(plan) == "rank plans":
        _refuse_alone(str(plan), len(read_rank_plans(plan).ranks), "--plan")


def _refuse_alone(name: str, num_ranks: int, where: str) -> NoReturn:
    raise InputError(
        f"{name} is for {num_ranks} ranks, and one process was started",
        where=where,
        fix=f"start them: {spell_start(num_ranks)} train RECIPE {where} {name}",
    )


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
    from packhorse.trainer.starting import refuse_early

    recipe = request.loaded.recipe

    def look() -> str:
        refuse_early(recipe.run_folder, request.beginning)
        note_finished(request, screen)
        return ""

    ends.whereabouts.tell("comparing the ranks")
    meeting.compare(describe_rank(recipe), "give every rank the same versions, recipe and settings")
    check_shared(recipe.run_folder, meeting)
    crew = MetCrew(meeting, ends.whereabouts)
    crew.lead(look)
    baseline_bytes = load_libraries(screen)
    ends.whereabouts.tell("measuring the ranks")
    cluster = gather_cluster(request.choice, meeting, screen, recipe)
    crew.compare(describe_machines(cluster), "give every rank the same machine file")
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


def describe_machines(cluster: Cluster) -> dict[str, str]:
    """What has to be the same on every rank before plans are made; a file may have copies."""
    from packhorse.machine.cluster_files import format_cluster

    text = format_cluster(cluster)
    return {"the machines of all ranks": sha256(text.encode()).hexdigest()[:16]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the first rank tells the others: all plans, and what bodies take on each rank."""

    plans: RankPlans
    profiles: tuple[Profile, ...]


def format_shared(shared: Shared) -> str:
    """Write what the first rank tells as a text."""
    from packhorse.plan.rank_files import format_rank_plans
    from packhorse.profile.files import format_profile

    return json.dumps(
        {
            "plans": format_rank_plans(shared.plans),
            "profiles": [format_profile(profile) for profile in shared.profiles],
        }
    )


def parse_shared(text: str) -> Shared:
    """Read what `format_shared` has written."""
    from packhorse.plan.rank_files import parse_rank_plans
    from packhorse.profile.files import parse_profile

    content = json.loads(text)
    return Shared(
        plans=parse_rank_plans(content["plans"], where="rank 0"),
        profiles=tuple(parse_profile(each, where="rank 0") for each in content["profiles"]),
    )


def _lead(
    request: TrainRequest, crew: Crew, cluster: Cluster, baseline_bytes: int, screen: Screen
) -> None:
    from packhorse.cli.drift import watch_drift
    from packhorse.cli.earlier_plans import read_earlier
    from packhorse.cli.measured_steps import read_measured_steps
    from packhorse.cli.train import run_planned
    from packhorse.cli.training_summary import render_summary, say_where, summary_as_dict
    from packhorse.compiler.lower import lower_plan
    from packhorse.report.rank_plans import rank_plans_table
    from packhorse.trainer.run_folder import StartFresh

    found: list[Planned] = []

    def plan() -> str:
        found.append(_settle(request, cluster, screen, baseline_bytes))
        joint = found[0].joint
        assert joint is not None
        return format_shared(Shared(plans=joint.plans, profiles=joint.profiles))

    crew.tell("planning")
    crew.lead(plan)
    planned = found[0]
    joint = planned.joint
    assert joint is not None
    for note in planned.notes:
        screen.note(note)
    recipe = planned.prepared.recipe
    so_far = None
    if not isinstance(request.beginning, StartFresh):
        earlier = read_earlier(recipe)
        so_far = read_measured_steps(recipe.run_folder, joint.plans, earlier, planned.run)
    screen.show(rank_plans_table(joint.plans, planned.run, joint.timelines, so_far), "")
    program = lower_plan(planned.plan, planned.traced.model, "train_step")
    watch = watch_drift(planned, program, joint.timelines[0])
    del program
    # Traced graphs refer to themselves: those that were not chosen must go before training.
    gc.collect()
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
    from packhorse.cli.pace import find_pace
    from packhorse.cli.rank_planning import prepare_for_ranks, trace_for_ranks
    from packhorse.compiler.ranks import cut_stages
    from packhorse.trainer.training import train

    # The first rank has prepared the data by then: where files are shared it is read, not made.
    crew.tell("waiting for the plans of rank 0")
    shared = parse_shared(crew.lead(str))
    plans, machine = shared.plans, cluster.ranks[crew.rank]
    crew.tell("tracing the model")
    prepared = prepare_for_ranks(request.loaded.recipe, cluster)
    traced = trace_for_ranks(prepared, plans)
    part = cut_stages(plans.pipeline, traced.model)[crew.rank]
    gc.collect()
    train(
        prepared,
        plan=plans,
        machine=cluster,
        traced=traced,
        resume=request.beginning,
        baseline_bytes=baseline_bytes,
        pace=find_pace(machine, shared.profiles[crew.rank], plans.ranks[crew.rank], part),
        audit=request.audit,
        go_on=request.go_on,
        crew=crew,
    )


def _settle(
    request: TrainRequest, cluster: Cluster, screen: Screen, baseline_bytes: int
) -> Planned:
    """Take the plans that were named, or those of the run that is resumed, or make some."""
    from packhorse.cli.earlier_plans import plan_alike, read_earlier
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

    def plan(pinned: Recipe, threads: int | None) -> Planned:
        machines = tuple(replace(m, num_threads=threads or m.num_threads) for m in cluster.ranks)
        own = replace(cluster, ranks=machines)
        return plan_rank_recipe(pinned, own, screen, baseline_bytes=baseline_bytes)

    return plan_alike(recipe, earlier, screen, plan)
