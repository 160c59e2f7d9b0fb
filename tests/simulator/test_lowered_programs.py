from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.program.tasks import Copy, Emit
from packhorse.simulator.engine import INLINE, OVERLAPPED, simulate_program
from packhorse.verifier.rules import verify_program
from tests.support.models import make_model, make_plan

KINDS = ("train_step", "evaluate", "load", "save")
TIERS = ("device", "disk")


class Steady:
    """Every task takes the same time."""

    def duration_ns(self, _task):
        return 7


class SlowDisk:
    """What goes to the disk or comes from it takes its time."""

    def duration_ns(self, task):
        return 40 if isinstance(task, Copy) else 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_inline_peaks_are_the_proofs(kind, tier, activations):
    model = make_model(num_layers=4, skips=((1, 3),), tied_head=True)
    plan = make_plan(
        model,
        parameters=tier,
        gradients=tier,
        optimizer=tier,
        activations=activations,
        num_microbatches=2,
        budget_bytes={"device": 1 << 26, "disk": 1 << 30},
    )
    program = lower_plan(plan, model, kind)
    proof = verify_program(program, model)
    inline = simulate_program(program, costs=Steady(), workers=INLINE)
    assert dict(inline.peak_bytes) == dict(proof.peak_bytes)
    assert inline.makespan_ns == 7 * len(program.tasks)
    last = {pool: points[-1].used_bytes for pool, points in inline.memory.items()}
    assert last == dict(proof.entries[-1].used_bytes)


def make_away_plan(model, **options):
    """Two micro-batches, recomputed, with every state on the disk."""
    return make_plan(
        model,
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        activations="recompute",
        num_microbatches=2,
        budget_bytes={"device": 1 << 26, "disk": 1 << 30},
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_that_run_ahead_stay_within_what_the_program_needs(kind):
    model = make_model(num_layers=4)
    plan = make_away_plan(model)
    roomy = lower_plan(plan, model, kind)
    needs = verify_program(roomy, model).peak_bytes
    # No byte more than the sequential replay needs: still no deadlock, and never above it.
    tight = replace(
        roomy, pools=tuple(replace(pool, capacity_bytes=needs[pool.id]) for pool in roomy.pools)
    )
    slow = simulate_program(tight, costs=Steady(), workers=OVERLAPPED)
    assert dict(slow.peak_bytes) == dict(needs)
    fast = simulate_program(roomy, costs=Steady(), workers=OVERLAPPED)
    assert fast.makespan_ns <= slow.makespan_ns <= 7 * len(tight.tasks)


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_behind_another_takes_as_long_as_each_of_many(clips):
    model = make_model(num_layers=4)
    plan = make_away_plan(model, clips=clips)
    program = lower_plan(plan, model, "train_step")
    alone, second, third, fourth = (
        simulate_program(program, costs=SlowDisk(), workers=OVERLAPPED, rounds=rounds)
        for rounds in (1, 2, 3, 4)
    )
    assert alone.since_ns == 0
    assert alone.step_ns == alone.makespan_ns
    # The next step starts before the last task of the one before ends, and so takes less.
    assert second.since_ns > 0
    assert second.step_ns == second.makespan_ns - second.since_ns < alone.step_ns
    assert second.step_ns == third.step_ns == fourth.step_ns
    assert min(span.start_ns for span in second.spans) == 0
    assert second.step_ns >= max(second.busy_ns(lane) for lane in OVERLAPPED)
    # One after another, steps only add up.
    inline = simulate_program(program, costs=SlowDisk(), workers=INLINE, rounds=3)
    assert inline.since_ns == 0
    assert inline.step_ns == sum(SlowDisk().duration_ns(task) for task in program.tasks)


def test_steps_that_hand_out_nothing_run_into_each_other_too():
    """A program that was changed by hand is still simulated."""
    plan = make_plan(
        make_model(),
        parameters="disk",
        optimizer="disk",
        budget_bytes={"device": 1 << 26, "disk": 1 << 30},
    )
    program = lower_plan(plan, make_model(), "train_step")
    silent = tuple(task for task in program.tasks if not isinstance(task, Emit))
    program = replace(program, tasks=silent)
    timeline = simulate_program(program, costs=SlowDisk(), workers=OVERLAPPED, rounds=2)
    assert len(timeline.spans) == len(silent)
