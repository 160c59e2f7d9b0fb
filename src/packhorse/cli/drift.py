"""One line, once in a run: which lanes are not as fast as planned, and what a new plan would give.

In: what was planned, and the timeline of each step. Out: the line, when enough steps say so. The
new plan is searched with the numerics, chunks and heap of the one that runs, so that it is found
within seconds and its curve would go on in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from packhorse.errors import PackhorseError
from packhorse.units import format_ns

if TYPE_CHECKING:
    from packhorse.cli.planning import Joint, Planned
    from packhorse.machine.spec import Machine
    from packhorse.plan.spec import Plan
    from packhorse.program.program import Program
    from packhorse.timeline.drift import LaneDrift
    from packhorse.timeline.spec import Timeline

# A new plan that gains less is not worth stopping for.
_WORTH_IT: Final = 0.02


def watch_drift(
    planned: Planned, program: Program, predicted: Timeline
) -> Callable[[Timeline], str | None]:
    """Give what looks at each measured step of a run, and has something to say at most once.

    Args:
        program: of the training step.
        predicted: its timeline, as simulated.
    """
    from packhorse.timeline.drift import DriftWatch, moved_bytes, say_drift

    watch = DriftWatch(predicted, moved_bytes(program))

    def look(timeline: Timeline) -> str | None:
        drifts = watch.add(timeline)
        return f"{say_drift(drifts)}: {_say_replanning(planned, drifts)}" if drifts else None

    return look


def machine_as_measured(machine: Machine, drifts: Sequence[LaneDrift]) -> Machine:
    """Give a machine the rates that its lanes showed."""
    from packhorse.machine.rescale import RateFactors, rescale_machine

    factors = {drift.lane: drift.factor for drift in drifts}
    compute = factors.get("compute", 1.0)
    rescaled = rescale_machine(
        machine,
        RateFactors(
            disk_read=factors.get("disk_read", 1.0),
            disk_write=factors.get("disk_write", 1.0),
            compute=compute,
        ),
    )
    # Updates in the device run on the compute lane, whose time is that of both.
    updates = tuple(
        replace(each, parameters_per_s=each.parameters_per_s * compute)
        if each.tier == "device"
        else each
        for each in rescaled.updates
    )
    return replace(rescaled, updates=updates)


def _say_replanning(planned: Planned, drifts: Sequence[LaneDrift]) -> str:
    machine = machine_as_measured(planned.machine, drifts)
    if planned.joint is not None:
        # Other plans would move blocks from rank to rank, which only a new start can do.
        now_ns = _predict_ranks(planned.joint, machine)
        return f"with the first rank as it is, a step of all ranks takes {format_ns(now_ns)}"
    now_ns = _simulate_step(planned, planned.plan, machine)
    now = f"at these rates this plan takes {format_ns(now_ns)} a step"
    try:
        new = _replan(planned, machine)
    except PackhorseError:
        # What the recipe pins may leave nothing else: the line says how slow it is, all the same.
        return f"{now}, and no other fits"
    new_ns = _simulate_step(planned, new, machine)
    if new_ns > now_ns * (1 - _WORTH_IT):
        return f"{now}, and a new one would not be faster"
    return (
        f"{now}, a new one would take {format_ns(new_ns)}"
        " (stop, `packhorse compare RUN --machine-out FILE`, then train on with --machine FILE)"
    )


def _predict_ranks(joint: Joint, first: Machine) -> int:
    """How long a step of all ranks takes with another machine for the first one."""
    from packhorse.compiler.ranks import cut_stages
    from packhorse.search.rank_plans import predict_ranks

    parts = cut_stages(joint.plans.pipeline, joint.whole.model)
    machines = (first, *joint.cluster.ranks[1:])
    timelines = predict_ranks(joint.plans.ranks, parts, joint.profiles, machines)
    return max(timeline.step_ns for timeline in timelines)


def _simulate_step(planned: Planned, plan: Plan, machine: Machine) -> int:
    """How long a step takes by a plan on a machine, lanes beside each other as in the run."""
    from packhorse.compiler.lower import lower_plan
    from packhorse.simulator.costs import TaskCosts
    from packhorse.simulator.engine import simulate_run

    program = lower_plan(plan, planned.traced.model, "train_step")
    costs = TaskCosts(
        machine=machine,
        profile=planned.profile,
        model=planned.traced.model,
        program=program,
        heap=plan.heap.value,
    )
    return simulate_run(program, costs=costs).step_ns


def _replan(planned: Planned, machine: Machine) -> Plan:
    from packhorse.plan.pins import WHOLE
    from packhorse.search.search import find_plan
    from packhorse.search.space import Arithmetic, Candidate

    plan, numerics = planned.plan, planned.plan.numerics
    chunk_tokens = numerics.loss_chunk_tokens.value
    return find_plan(
        [
            Candidate(
                model=planned.traced.model, profile=planned.profile, loss_chunk_tokens=chunk_tokens
            )
        ],
        machine,
        optimizer=plan.optimizer,
        arithmetic=Arithmetic(
            compute_dtype=numerics.compute_dtype,
            tied_sum=numerics.tied_sum,
            attention=numerics.attention,
            num_threads=numerics.num_threads,
            device=numerics.device,
            num_workers=numerics.num_workers,
            instructions=numerics.instructions,
        ),
        global_batch_rows=numerics.microbatch_rows.value * numerics.num_microbatches,
        pins=replace(
            planned.prepared.recipe.pins,
            microbatch_rows=numerics.microbatch_rows.value,
            loss_chunk_tokens=WHOLE if chunk_tokens is None else chunk_tokens,
            heap=plan.heap.value,
            chunk_bytes=plan.chunk_bytes.value,
        ),
    )
