"""A plan file of one rank or of several, and what lies beside the plans of several ranks.

In: paths. Out: plans, the ranks' parts of the model, their machines, and their timelines as the
simulator tells them, without torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import FileFormatError, InputError, MismatchError
from packhorse.plan.ranks import RankPlans

if TYPE_CHECKING:
    from packhorse.machine.cluster import Cluster
    from packhorse.model.spec import Model
    from packhorse.plan.spec import Plan
    from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """The plans of all ranks, read from `path`, with the whole model and each rank's part of it."""

    path: Path
    plans: RankPlans
    model: Model
    parts: tuple[Model, ...]


def read_any_plan(path: Path) -> Plan | RankPlans:
    """Read a plan.json of one rank or of several.

    Raises:
        FileFormatError: it is missing, damaged, or no plan.
    """
    from packhorse.cli.kinds import detect_kind
    from packhorse.plan.files import read_plan
    from packhorse.plan.rank_files import read_rank_plans

    kind = None
    with suppress(FileFormatError):
        # Of what is neither, whoever reads plans of one rank has the better words.
        kind = detect_kind(path) if path.is_file() else None
    return read_rank_plans(path) if kind == "rank plans" else read_plan(path)


def check_rank(found: Plan | RankPlans, rank: int) -> None:
    """Refuse a rank that a plan is not for.

    Raises:
        InputError: says which ranks there are.
    """
    num_ranks = len(found.ranks) if isinstance(found, RankPlans) else 1
    if rank < num_ranks:
        return
    if num_ranks == 1:
        raise InputError(
            f"there is no rank {rank}: the plan is for one process",
            where="--rank",
            fix="leave it out, or write --rank 0",
        )
    raise InputError(
        f"there is no rank {rank}: the plan is for ranks 0 to {num_ranks - 1}",
        where="--rank",
        fix=f"name one of them, such as --rank {num_ranks - 1}",
    )


def read_rank_set(path: Path, plans: RankPlans, model: Path | None) -> RankSet:
    """Read the model of the plans of several ranks, and cut it as they say.

    Args:
        path: of the plans.
        model: the model's path where a person named one.

    Raises:
        InputError: there is no model.
        MismatchError: the plans are of another one.
        FileFormatError: it cannot be read.
    """
    from packhorse.cli.companions import read_plan_model
    from packhorse.compiler.ranks import cut_stages
    from packhorse.plan.identity import check_plan

    whole = read_plan_model(path, model)
    parts = cut_stages(plans.pipeline, whole)
    for plan, part in zip(plans.ranks, parts, strict=True):
        check_plan(plan, part)
    return RankSet(path=path, plans=plans, model=whole, parts=parts)


def choose_cluster(found: RankSet, name: str | None) -> Cluster:
    """Give the machines of plans: those beside them, or of a file that was named.

    Raises:
        InputError: there are none, or of another number of ranks.
        FileFormatError: the file is damaged or is no cluster.
    """
    from packhorse.cli.companions import companion_path
    from packhorse.machine.cluster_files import read_cluster

    path = companion_path(found.path, "machine") if name is None else Path(name)
    if name is None and not path.is_file():
        raise InputError(
            f"the machines of the ranks are needed, and there is no {path.name} beside the plan",
            where=str(path),
            fix="make the plan again with `packhorse plan RECIPE --machine FILE`, or name the file"
            " of all ranks: --machine FILE",
        )
    cluster = read_cluster(path)
    num_ranks = len(found.plans.ranks)
    if cluster.num_ranks != num_ranks:
        raise MismatchError(
            f"{path} has {cluster.num_ranks} ranks, and the plan is for {num_ranks}",
            where="--machine" if name is not None else str(path),
            fix=f"name a file of {num_ranks} ranks, or plan for these: `packhorse plan RECIPE"
            f" --machine {path}`",
        )
    return cluster


def simulate_rank_set(found: RankSet, cluster: Cluster, *, elsewhere: bool) -> tuple[Timeline, ...]:
    """Predict a step of all ranks together, on one clock.

    Args:
        elsewhere: the machines are not those that the plans were made for, so that the times of
            blocks are estimated from their rates.

    Raises:
        RuleError: a program breaks a rule, alone or with the others.
        InputError: a machine lacks a rate or a link.
    """
    from packhorse.cli.companions import companion_path
    from packhorse.cli.rank_planning import profile_ranks
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.files import read_profile
    from packhorse.profile.identity import fits_model
    from packhorse.search.rank_plans import predict_ranks

    path = companion_path(found.path, "profile")
    profile = read_profile(path) if path.is_file() and not elsewhere else None
    if profile is None or not fits_model(profile, found.model):
        profile = estimate_profile(found.model, cluster.ranks[0])
    profiles = profile_ranks(profile, found.model, cluster)
    return predict_ranks(found.plans.ranks, found.parts, profiles, cluster.ranks)
