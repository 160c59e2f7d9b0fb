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
from typing import TYPE_CHECKING, Final, NoReturn

from packhorse.cli.machines import MachineChoice
from packhorse.errors import DoesNotFitError, InputError, MismatchError, PackhorseError

if TYPE_CHECKING:
    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.machine.cluster import Cluster
    from packhorse.plan.ranks import RankPlans
    from packhorse.profile.spec import Profile
    from packhorse.runtime.transport.meeting import Meeting
    from packhorse.trainer.crew import Crew
    from packhorse.trainer.recipe import Recipe
    from packhorse.trainer.recipe_files import LoadedRecipe
    from packhorse.trainer.run_folder import Resume

END_WAIT: Final = timedelta(minutes=30)
"""How far ranks may be apart: the first one saves the model, others load libraries more slowly."""


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
        fix=f"start them: torchrun --nproc-per-node {num_ranks} -m packhorse train ...",
    )


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
    from packhorse.trainer.starting import refuse_early
    from packhorse.trainer.stop_signals import stop_at_once

    crew = MetCrew(meeting)
    recipe = request.loaded.recipe

    def look() -> str:
        refuse_early(recipe.run_folder, request.beginning)
        return ""

    with stop_at_once():
        check_alike(meeting, describe_rank(recipe))
        crew.lead(look)
        baseline_bytes = load_libraries(screen)
        cluster = gather_cluster(request.choice, meeting, screen, recipe)
        check_alike(meeting, describe_machines(cluster), wait=END_WAIT)
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


def describe_machines(cluster: Cluster) -> dict[str, str]:
    """What has to be the same on every rank before plans are made; a file may have copies."""
    from packhorse.machine.cluster_files import format_cluster

    text = format_cluster(cluster)
    return {"the machines of all ranks": sha256(text.encode()).hexdigest()[:16]}


def check_alike(meeting: Meeting, facts: dict[str, str], *, wait: timedelta | None = None) -> None:
    """Compare facts over ranks.

    Args:
        wait: how long others may be behind; None: a moment.

    Raises:
        MismatchError: names the first that differs, and the ranks.
    """
    found = [json.loads(text) for text in meeting.gather(json.dumps(facts), wait=wait)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the first rank tells the others: all plans, and what bodies take on each rank.

    `data` is the digest of the rows that it has prepared.
    """

    plans: RankPlans
    profiles: tuple[Profile, ...]
    data: str


def format_shared(shared: Shared) -> str:
    """Write what the first rank tells as a text."""
    from packhorse.plan.rank_files import format_rank_plans
    from packhorse.profile.files import format_profile

    return json.dumps(
        {
            "plans": format_rank_plans(shared.plans),
            "profiles": [format_profile(profile) for profile in shared.profiles],
            "data": shared.data,
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
        data=content["data"],
    )


def _lead(
    request: TrainRequest, crew: Crew, cluster: Cluster, baseline_bytes: int, screen: Screen
) -> None:
    from packhorse.cli.drift import watch_drift
    from packhorse.cli.train import run_planned
    from packhorse.cli.training_summary import render_summary, say_where, summary_as_dict
    from packhorse.compiler.lower import lower_plan
    from packhorse.report.rank_plans import rank_plans_table

    found: list[Planned] = []

    def plan() -> str:
        found.append(_settle(request, cluster, screen, baseline_bytes))
        joint = found[0].joint
        assert joint is not None
        data = found[0].prepared.data.digest
        return format_shared(Shared(plans=joint.plans, profiles=joint.profiles, data=data))

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
    from packhorse.cli.pace import find_pace
    from packhorse.cli.rank_planning import prepare_for_ranks, trace_for_ranks
    from packhorse.compiler.ranks import cut_stages
    from packhorse.trainer.training import train

    # The first rank has prepared the data by then: where files are shared it is read, not made.
    shared = parse_shared(crew.lead(str))
    plans, machine = shared.plans, cluster.ranks[crew.rank]
    prepared = prepare_for_ranks(request.loaded.recipe, cluster)
    if prepared.data.digest != shared.data:
        raise MismatchError(
            f"the data is {prepared.data.digest[:16]} here and {shared.data[:16]} on rank 0",
            where=f"rank {crew.rank}: {', '.join(request.loaded.recipe.train_data)}",
            fix="give every rank the same files of data, and the same tokenizer",
        )
    traced = trace_for_ranks(prepared, plans)
    part = cut_stages(plans.pipeline, traced.model)[crew.rank]
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
