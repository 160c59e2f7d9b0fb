"""The machines of all ranks that were started together, with their budgets.

In: what was typed, the same on every rank, and the meeting of the ranks. Out: a `Cluster`, the same
on every rank: of a file that was named, or of hosts and links that are measured now. Budgets that
are typed, or that the recipe grants, are each rank's. Ranks of one host keep their scratch files
apart: each has a folder of its own in the one that is named.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.cli.machines import MachineChoice
    from packhorse.cli.screen import Screen, Tell
    from packhorse.machine.cluster import Cluster
    from packhorse.machine.spec import Machine
    from packhorse.runtime.transport.meeting import Meeting
    from packhorse.trainer.recipe import Recipe

MEASURE_WAIT: Final = timedelta(minutes=15)
_PAIR_LIMIT_NS: Final = 1_000_000_000


def gather_cluster(
    choice: MachineChoice, meeting: Meeting, screen: Screen, recipe: Recipe
) -> Cluster:
    """Find the machines of all ranks.

    Raises:
        InputError: a budget is wrong or more than there is, or the file is of another number of
            ranks.
        FileFormatError: the machine file is damaged.
        PeerLostError: another rank has failed, or is silent.
    """
    from packhorse.cli.machines import check_device, find_cluster, grant_typed, merge_budgets
    from packhorse.cli.probe_ranks import RanksProbe, probe_ranks
    from packhorse.machine.budget import Budget, parse_budget
    from packhorse.machine.probe import probe_machine

    granted, threads = recipe.granted, recipe.pins.num_threads
    cluster = find_cluster(choice, granted=granted, threads=threads)
    if cluster is not None:
        if cluster.num_ranks != meeting.num_ranks:
            raise InputError(
                f"{choice.name} has {cluster.num_ranks} ranks, and {meeting.num_ranks} were"
                " started",
                where="--machine",
                fix=f"start {cluster.num_ranks} ranks, or leave --machine out: they are measured",
            )
        check_device(cluster.ranks[meeting.rank])
        return _spread_scratch(_refuse_devices(cluster))
    if choice.name is not None:
        raise InputError(
            f"{choice.name} is one machine, and {meeting.num_ranks} ranks were started",
            where="--machine",
            fix="leave it out: the ranks are measured; or name a file of all ranks, as"
            " `torchrun ... -m packhorse probe` writes it",
        )
    budget = merge_budgets(parse_budget(choice.budget), granted or Budget())

    def measure(num_threads: int, tell: Tell | None) -> Machine:
        return probe_machine(
            budget=Budget(disks=budget.disks), threads=threads or num_threads, progress=tell
        )

    probe = RanksProbe(measure=measure, measure_wait=MEASURE_WAIT, pair_limit_ns=_PAIR_LIMIT_NS)
    found = probe_ranks(meeting, probe, screen)

    ranks = tuple(grant_typed(machine, choice, granted) for machine in found.ranks)
    return _spread_scratch(_refuse_devices(replace(found, ranks=ranks)))


def _refuse_devices(cluster: Cluster) -> Cluster:
    """Refuse ranks that compute on a GPU: messages go from memory to memory so far."""
    for rank, machine in enumerate(cluster.ranks):
        if not machine.device.startswith("cpu"):
            raise InputError(
                f"rank {rank} computes on {machine.device}, and ranks exchange messages from the"
                " memory of CPUs only, so far",
                where=machine.name,
                fix="train on one GPU without torchrun; `packhorse plan --machine` plans for such"
                " ranks",
            )
    return cluster


def _spread_scratch(cluster: Cluster) -> Cluster:
    """Give each rank a scratch folder of its own in the one that its machine names."""
    return replace(
        cluster,
        ranks=tuple(_move_scratch(machine, rank) for rank, machine in enumerate(cluster.ranks)),
    )


def _move_scratch(machine: Machine, rank: int) -> Machine:
    def own(path: str) -> str:
        # The machine file of a run has them already.
        name = f"rank-{rank}"
        return path if Path(path).name == name else str(Path(path) / name)

    tiers = tuple(
        replace(
            tier,
            path=None if tier.path is None else own(tier.path),
            drives=tuple(replace(drive, path=own(drive.path)) for drive in tier.drives),
        )
        if tier.name == "disk"
        else tier
        for tier in machine.tiers
    )
    return replace(machine, tiers=tiers)
