"""A model on ranks that nobody has: cut into stages, planned and lowered, one replica of many.

In: a model, a `Fleet` of equal machines, a schedule or the wish to search for one. Out: where the
model is cut, and each rank's part, plan, program and costs, for the verifier and the simulator.
Everything is on paper: block times are estimates, and all states of a rank stay in its device.

Replicas are alike, so programs are those of the first one. They sum their gradients over the
replicas behind the last one of each chunk: no task of a program says so, its cost does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.passes.exchange import find_concerned
from packhorse.compiler.runs import Run, run_pipelined
from packhorse.errors import InputError
from packhorse.machine.cluster import link_all
from packhorse.machine.spec import Machine, PeerLink
from packhorse.model.parts import cut_model
from packhorse.model.spec import Model
from packhorse.plan.pins import Pins
from packhorse.plan.spec import (
    SCHEDULED,
    ActivationChoice,
    BlockPlan,
    Choice,
    OptimizerPlan,
    PipelinePlan,
    Plan,
)
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.spec import Profile
from packhorse.program.program import Program
from packhorse.schedule.costs import Costs
from packhorse.schedule.finding import SEARCHED
from packhorse.schedule.spec import Schedule
from packhorse.search.pipeline import find_pipeline
from packhorse.search.ranks import RankSpec
from packhorse.search.space import Arithmetic, Candidate, Problem, build_plan, make_setting
from packhorse.search.stage_costs import cost_stages
from packhorse.search.stages import RankShare, StageCuts, cut_stages, make_cutter
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.replicas import ReplicaCosts
from packhorse.units import MIB, format_part

CHUNK_BYTES = 256 * MIB
"""Chunks that never move may be long; the norms of one are summed behind its last gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """So many replicas of so many ranks, all like `machine`, with a like link between any two."""

    machine: Machine
    link: PeerLink
    num_ranks: int
    num_replicas: int

    @property
    def budget_bytes(self) -> int:
        """What each rank may use of its device tier."""
        tier = self.machine.tier("device")
        return 0 if tier is None else tier.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut for a schedule, and what it is timed with."""

    model: Model
    profile: Profile
    schedule: Schedule
    cuts: StageCuts
    costs: Costs

    @property
    def pipeline(self) -> PipelinePlan:
        """How the ranks of a replica share the model."""
        return PipelinePlan(
            name=Choice(value="on paper", because="asked for"),
            schedule=self.schedule,
            bounds=Choice(value=self.cuts.bounds, because="the smallest bottleneck that fits"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One rank: its part of the model, its plan, and what follows from both."""

    part: Model
    plan: Plan
    program: Program
    costs: ReplicaCosts


def cut_for(
    model: Model, fleet: Fleet, schedule: Schedule, *, optimizer: OptimizerPlan
) -> CutModel:
    """Cut a model into the stages of a schedule.

    Raises:
        InputError: there are more stages than blocks, a stage has several ranks, or the machine
            has no matmul curve for a dtype of the model.
        DoesNotFitError: no cut keeps every rank within its budget.
    """
    profile, ranks = _specify(model, fleet)
    links = link_all(fleet.num_ranks, fleet.link)
    cutter = make_cutter(model, ranks, links, optimizer=optimizer)
    cuts = cut_stages(cutter, schedule)
    return CutModel(
        model=model,
        profile=profile,
        schedule=schedule,
        cuts=cuts,
        costs=cost_stages(cutter, schedule, cuts),
    )


def cut_and_search(
    model: Model, fleet: Fleet, num_microbatches: int, *, optimizer: OptimizerPlan
) -> CutModel:
    """Search for a schedule of a model, and where it is cut.

    Raises:
        InputError, DoesNotFitError: as `cut_for`.
    """
    profile, ranks = _specify(model, fleet)
    found = find_pipeline(
        model,
        ranks,
        link_all(fleet.num_ranks, fleet.link),
        num_microbatches=num_microbatches,
        optimizer=optimizer,
        names=(SEARCHED,),
    )
    return CutModel(
        model=model, profile=profile, schedule=found.schedule, cuts=found.cuts, costs=found.costs
    )


def lower_cut(cut: CutModel, fleet: Fleet, *, optimizer: OptimizerPlan) -> Iterator[RankProgram]:
    """Plan and lower the part of each rank of one replica, in order.

    Raises:
        DoesNotFitError: a rank's values alone fill its budget.
    """
    peers = tuple(replace(fleet.link, peer=rank) for rank in range(fleet.num_ranks))
    machine = replace(fleet.machine, peers=peers)
    pipeline = cut.pipeline
    parts = cut_model(cut.model, pipeline.owners)
    # A rank's program follows from the runs that concern it: of many ranks' runs, a few.
    runs_of: list[list[Run]] = [[] for _ in parts]
    concerned = find_concerned(parts[0])
    for run in run_pipelined(cut.model, pipeline):
        for rank in concerned[run.block]:
            runs_of[rank].append(run)
    for runs, part, share in zip(runs_of, parts, cut.cuts.shares, strict=True):
        plan = plan_rank(
            part,
            share,
            cut.profile,
            fleet,
            optimizer=optimizer,
            num_microbatches=cut.schedule.num_microbatches,
        )
        plan = replace(plan, order=SCHEDULED, pipeline=pipeline)
        program = lower_plan(plan, part, "train_step", runs=runs)
        costs = TaskCosts(
            machine=machine,
            profile=cut.profile,
            model=part,
            program=program,
            heap=plan.heap.value,
        )
        yield RankProgram(
            part=part,
            plan=plan,
            program=program,
            costs=ReplicaCosts(
                costs,
                num_replicas=fleet.num_replicas,
                bytes_per_s=fleet.link.bytes_per_s,
                latency_ns=fleet.link.latency_ns,
            ),
        )


def plan_rank(
    part: Model,
    share: RankShare,
    profile: Profile,
    fleet: Fleet,
    *,
    optimizer: OptimizerPlan,
    num_microbatches: int,
) -> Plan:
    """Plan one rank's part: everything stays in the device, blocks recompute where the cuts say."""
    machine = fleet.machine
    problem = Problem(
        machine=machine,
        optimizer=optimizer,
        arithmetic=Arithmetic(
            compute_dtype=find_dtype(part),
            tied_sum="per_step",
            attention="causal",
            num_threads=machine.num_threads,
            device=machine.device,
            # Each replica is a worker of its own, and this is the plan of one.
            num_workers=1,
        ),
        pins=Pins(),
        global_batch_rows=num_microbatches * part.rows,
        resumable=False,
    )
    setting = make_setting(
        problem,
        Candidate(model=part, profile=profile, loss_chunk_tokens=None),
        heap="keep",
        chunk_bytes=CHUNK_BYTES,
    )
    plan = build_plan(
        problem,
        setting,
        [False] * len(setting.moves),
        budget_bytes={"device": fleet.budget_bytes, "host": 0, "disk": 0},
        reason=lambda kind, index, value: "planned on paper",  # noqa: ARG005 the signature is `Reason`'s
    )
    value: ActivationChoice = "recompute" if share.recomputes else "keep"
    needed = format_part(share.need_bytes, fleet.budget_bytes)
    activations: Choice[ActivationChoice] = Choice(value=value, because=f"{needed} are needed")
    kept: Choice[ActivationChoice] = Choice(value="keep", because="nothing is saved")
    return replace(
        plan,
        blocks=tuple(
            BlockPlan(
                name=block.name,
                activations=activations
                if block.has_backward and part.body_of(block.id).saved_bytes
                else kept,
            )
            for block in part.blocks
        ),
    )


def find_dtype(model: Model) -> str:
    """Tell the dtype that a model computes in: that of most of its scalars."""
    counts: dict[str, int] = {}
    for parameter in model.parameters.values():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default="float32")


def _specify(model: Model, fleet: Fleet) -> tuple[Profile, tuple[RankSpec, ...]]:
    if not fleet.budget_bytes:
        raise InputError(
            f"{fleet.machine.name} grants its device no memory",
            where="the machine of a rank",
            fix="take a machine with a budget for its tier `device`",
        )
    profile = estimate_profile(model, fleet.machine)
    # Plans keep their heap, and give it more than what lives; cuts know what lives alone.
    slack = 1 + fleet.machine.heap.keep_slack
    spec = RankSpec(
        profile=profile,
        budget_bytes=int(fleet.budget_bytes / slack),
        time_factor=fleet.machine.compute_scale,
    )
    return profile, (spec,) * fleet.num_ranks
