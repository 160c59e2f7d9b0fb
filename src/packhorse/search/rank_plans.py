"""Which plans are best for ranks that share a model: the fastest that fit, together.

In: candidates (the whole model at each micro-batch, timed on every rank), the machines of the
ranks, the optimizer, pins. Out: `RankPlans`: one pipeline, and a `Plan` for each rank;
and the joint step that they promise.

    for every candidate: its fastest pipeline (schedule and cuts)
    of the quickest: find each rank's plan for its own part, under its own budgets
        one does not fit after all: all of this again, as if that rank had less
    once all ranks fit: prove all programs together, time them together

A pipeline is chosen with estimates of what ranks hold; what is promised comes from the lowered
programs of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from packhorse.compiler.ranks import cut_stages, lower_ranks
from packhorse.errors import DoesNotFitError, MismatchError, RecipeError
from packhorse.machine.cluster import Cluster
from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.pins import Pins
from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import OptimizerPlan, PipelinePlan, Plan
from packhorse.profile.spec import Profile
from packhorse.program.program import ProgramKind
from packhorse.schedule.finding import NAMES
from packhorse.search.pipeline import Pipeline, find_pipeline
from packhorse.search.prediction import predict_plan
from packhorse.search.ranks import RankSpec
from packhorse.search.search import find_plan
from packhorse.search.settings import filter_candidates
from packhorse.search.space import AWAY, Arithmetic, Candidate
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.joint import simulate_ranks
from packhorse.timeline.spec import Timeline
from packhorse.units import format_bytes
from packhorse.verifier.joint import verify_ranks

# A rank whose plan needs more than its cut promised is cut for so much less, a few times.
TIGHTER: Final = 0.85
MAX_TIGHTENINGS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCandidate:
    """A whole model at one micro-batch size and loss setting; what bodies take on each rank."""

    model: Model
    profiles: tuple[Profile, ...]
    loss_chunk_tokens: int | None

    def of_rank(self, rank: int, part: Model) -> Candidate:
        """The candidate of one rank, for its part of the model."""
        return Candidate(
            model=part, profile=self.profiles[rank], loss_chunk_tokens=self.loss_chunk_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """Plans of all ranks with what they promise together, and the step that says so, by rank."""

    plans: RankPlans
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    cluster: Cluster
    optimizer: OptimizerPlan
    arithmetic: Arithmetic
    global_batch_rows: int
    pins: Pins

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES if self.pins.schedule is None else (self.pins.schedule,)


def find_rank_plans(
    candidates: Sequence[RankCandidate],
    cluster: Cluster,
    *,
    optimizer: OptimizerPlan,
    arithmetic: Arithmetic,
    global_batch_rows: int,
    pins: Pins = Pins(),  # noqa: B008 a frozen value
) -> Promised:
    """Find the fastest plans that fit the budgets of all ranks.

    Args:
        candidates: the model at each micro-batch size and loss setting that may be taken; with the
            halves of its backwards, where schedules that split them may be taken.
        cluster: the ranks' machines, whose tiers' `budget_bytes` are the limits, and their links.

    Raises:
        RecipeError: a pin or the batch cannot be met.
        InputError: there are more ranks than blocks, or a link is missing.
        DoesNotFitError: no plans fit; says of each schedule, or of each rank, why.
    """
    request = _Request(
        cluster=cluster,
        optimizer=optimizer,
        arithmetic=arithmetic,
        global_batch_rows=global_batch_rows,
        pins=pins,
    )
    if pins.order is not None:
        raise RecipeError(
            f"order is pinned to {pins.order}, but ranks that share a model take the order of their"
            " schedule",
            where="recipe: plan.order",
            fix="leave it out; pin a schedule instead, such as schedule: 1f1b",
        )
    usable = filter_candidates(pins, global_batch_rows, candidates)
    scale = [1.0] * len(cluster.ranks)
    refusal: DoesNotFitError | None = None
    for _ in range(MAX_TIGHTENINGS):
        found: list[tuple[int, int, Pipeline]] = []
        for index, candidate in enumerate(usable):
            try:
                pipeline = _find_pipeline(request, candidate, scale)
            except DoesNotFitError as error:
                refusal = refusal or error
            else:
                found.append((pipeline.step_ns, index, pipeline))
        if not found:
            break
        _, index, pipeline = min(found, key=lambda each: each[:2])
        plans, short = _plan_ranks(request, usable[index], pipeline)
        if not short:
            found_plans = RankPlans(
                ranks=tuple(plans), step_ns=None, compute_ns=(), rejected=pipeline.rejected
            )
            candidate = usable[index]
            parts = cut_stages(found_plans.pipeline, candidate.model)
            return promise(found_plans, parts, candidate.profiles, cluster.ranks)
        refusal = next(iter(short.values()))
        for rank in short:
            scale[rank] *= TIGHTER
    assert refusal is not None
    raise refusal


def predict_ranks(
    plans: Sequence[Plan],
    parts: Sequence[Model],
    profiles: Sequence[Profile],
    machines: Sequence[Machine],
    *,
    kind: ProgramKind = "train_step",
) -> tuple[Timeline, ...]:
    """Predict a step, or an evaluation of a batch, of all ranks together, on one clock.

    Raises:
        RuleError: a program breaks a rule, alone or with the others.
        MismatchError: a plan, part or profile belongs to another model.
        InputError: a machine lacks a rate or a link.
    """
    programs = lower_ranks(plans, parts, (kind,))[kind]
    verify_ranks(programs, parts)
    return simulate_ranks(
        programs,
        [
            TaskCosts(
                machine=machine,
                profile=profile,
                model=part,
                program=program,
                heap=plan.heap.value,
            )
            for plan, part, profile, machine, program in zip(
                plans, parts, profiles, machines, programs, strict=True
            )
        ],
    )


def fit_budgets(
    plans: RankPlans,
    parts: Sequence[Model],
    profiles: Sequence[Profile],
    cluster: Cluster,
    *,
    where: str,
) -> Promised:
    """Predict given plans anew, under the budgets that the ranks' machines now have.

    Args:
        where: what errors name as the place of the plans.

    Raises:
        DoesNotFitError: a rank needs more than its machine's budgets.
        MismatchError: the blocks of a rank's plan are not its own.
        RuleError: as `predict_ranks`.
    """
    _check_parts(plans, parts, where)
    fitted: list[Plan] = []
    for rank, (plan, machine) in enumerate(zip(plans.ranks, cluster.ranks, strict=True)):
        prediction = predict_plan(plan, parts[rank], profiles[rank], machine)
        have_bytes: dict[TierName, int] = {t.name: t.budget_bytes for t in machine.tiers}
        excess = [
            f"{tier}: need {format_bytes(need)}, have {format_bytes(have_bytes.get(tier, 0))}"
            for tier, causes in prediction.peak_bytes.items()
            if (need := sum(causes.values())) > have_bytes.get(tier, 0)
        ]
        if excess:
            raise DoesNotFitError(
                f"rank {rank} needs more than its budget allows: {', '.join(excess)}",
                where=where,
                fix="raise the budget, or leave --plan out: new plans are made for these budgets",
            )
        fitted.append(replace(plan, prediction=prediction, budget_bytes=have_bytes))
    return promise(replace(plans, ranks=tuple(fitted)), parts, profiles, cluster.ranks)


def _check_parts(plans: RankPlans, parts: Sequence[Model], where: str) -> None:
    """Refuse plans whose blocks are not those that the bounds of the stages give to their ranks."""
    for rank, (plan, part) in enumerate(zip(plans.ranks, parts, strict=True)):
        planned = [block.name for block in plan.blocks]
        given = [block.name for block in part.blocks]
        if planned != given:
            raise MismatchError(
                f"rank {rank} is given {', '.join(given)} by the bounds of the stages, and its plan"
                f" is for {', '.join(planned)}",
                where=f"{where}: bounds and ranks[{rank}].blocks",
                fix="where bounds were moved, move the blocks and chunks of the ranks along; or"
                " leave --plan out: a new plan is made",
            )


def promise(
    plans: RankPlans,
    parts: Sequence[Model],
    profiles: Sequence[Profile],
    machines: Sequence[Machine],
) -> Promised:
    """Say how long a step of all ranks takes, in each of their plans and for all together."""
    timelines = predict_ranks(plans.ranks, parts, profiles, machines)
    step_ns = max(timeline.step_ns for timeline in timelines)
    promised = replace(
        plans,
        ranks=tuple(_with_step(plan, step_ns) for plan in plans.ranks),
        step_ns=step_ns,
        compute_ns=tuple(timeline.busy_ns("compute") for timeline in timelines),
    )
    return Promised(plans=promised, timelines=timelines)


def merge_predictions(plans: RankPlans) -> Plan:
    """The first rank's plan, with the traffic and the scratch space of all ranks in its promise."""
    found = [plan.prediction for plan in plans.ranks if plan.prediction is not None]
    first = plans.ranks[0]
    if len(found) != len(plans.ranks):
        return replace(first, prediction=None)
    return replace(
        first,
        prediction=replace(
            found[0],
            disk_read_bytes=sum(each.disk_read_bytes for each in found),
            disk_written_bytes=sum(each.disk_written_bytes for each in found),
            scratch_bytes=sum(each.scratch_bytes for each in found),
        ),
    )


def _with_step(plan: Plan, step_ns: int) -> Plan:
    assert plan.prediction is not None
    return replace(plan, prediction=replace(plan.prediction, step_ns=step_ns))


def _find_pipeline(request: _Request, candidate: RankCandidate, scale: Sequence[float]) -> Pipeline:
    machines = request.cluster.ranks
    return find_pipeline(
        candidate.model,
        [
            _specify(machine, profile, part)
            for machine, profile, part in zip(machines, candidate.profiles, scale, strict=True)
        ],
        request.cluster.links,
        num_microbatches=request.global_batch_rows // candidate.model.rows,
        optimizer=request.optimizer,
        names=request.names,
    )


def _specify(machine: Machine, profile: Profile, scale: float) -> RankSpec:
    device = machine.tier("device")
    # What the process holds anyway, the profile's base, is part of what a rank needs.
    budget_bytes = 0 if device is None else device.budget_bytes
    return RankSpec(
        profile=profile,
        budget_bytes=round(budget_bytes * scale),
        time_factor=machine.compute_scale,
        away_bytes_per_s=_find_away_rate(machine),
    )


def _find_away_rate(machine: Machine) -> float | None:
    """How fast states come and go that lie in the nearest tier beside the device."""
    for name in AWAY:
        tier = machine.tier(name)
        links = machine.link(name, "device"), machine.link("device", name)
        if tier is None or not tier.budget_bytes or None in links:
            continue
        return min(link.mixed_bytes_per_s or link.bytes_per_s for link in links if link is not None)
    return None


def _plan_ranks(
    request: _Request, candidate: RankCandidate, pipeline: Pipeline
) -> tuple[list[Plan], Mapping[int, DoesNotFitError]]:
    """Find the plan of each rank, or why it does not fit."""
    shared = PipelinePlan(
        name=pipeline.schedule_name, schedule=pipeline.schedule, bounds=pipeline.bounds
    )
    parts = cut_stages(shared, candidate.model)
    plans: list[Plan] = []
    short: dict[int, DoesNotFitError] = {}
    for rank, (part, machine) in enumerate(zip(parts, request.cluster.ranks, strict=True)):
        try:
            plan = find_plan(
                [candidate.of_rank(rank, part)],
                machine,
                optimizer=request.optimizer,
                arithmetic=request.arithmetic,
                global_batch_rows=request.global_batch_rows,
                pins=request.pins,
                pipeline=shared,
            )
        except DoesNotFitError as error:
            short[rank] = DoesNotFitError(
                f"rank {rank} of {len(parts)}: {error.what}",
                where=error.where,
                fix=error.fix,
                least_bytes=error.least_bytes,
            )
        else:
            plans.append(plan)
    return plans, short
