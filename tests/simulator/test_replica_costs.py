"""Summing gradients over replicas: what it costs, and where it is on a timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.machine.catalogue import load_known_machine
from packhorse.profile.analytic import estimate_profile
from packhorse.program.tasks import BlockTask, SegmentNorm
from packhorse.simulator.costs import ADD_PASSES, TaskCosts
from packhorse.simulator.engine import simulate_program
from packhorse.simulator.replicas import ReplicaCosts, show_reductions
from packhorse.timeline.names import ALL_REDUCE
from tests.support.models import make_model, make_plan

MACHINE = replace(load_known_machine("laptop-16gb"), memory_bytes_per_s=3e9)


def make_costs(num_replicas):
    model = make_model(num_layers=3)
    plan = make_plan(model)
    program = lower_plan(plan, model, "train_step")
    costs = TaskCosts(
        machine=MACHINE,
        profile=estimate_profile(model, MACHINE),
        model=model,
        program=program,
        heap=plan.heap.value,
    )
    return costs, ReplicaCosts(costs, num_replicas=num_replicas, bytes_per_s=1e9, latency_ns=100)


@pytest.mark.parametrize("num_replicas", [2, 4, 16])
def test_a_step_is_longer_by_moving_and_adding_all_gradients(num_replicas):
    alone, costs = make_costs(num_replicas)
    gradients = [b for name, b in alone.program.buffers.items() if name.startswith("grad/")]
    total_bytes = sum(buffer.size_bytes for buffer in gradients)
    moved_bytes = total_bytes * (num_replicas - 1) / num_replicas
    wanted_ns = 2 * (100 * len(gradients) + moved_bytes) + ADD_PASSES * moved_bytes / 3
    before, after = (simulate_program(alone.program, costs=each) for each in (alone, costs))
    longer_ns = after.makespan_ns - before.makespan_ns
    assert longer_ns == pytest.approx(wanted_ns, abs=len(gradients))


def test_it_lies_behind_the_last_backward_and_before_the_first_norm_there():
    alone, costs = make_costs(4)
    shown = show_reductions(simulate_program(alone.program, costs=costs), costs)
    (found,) = [span for span in shown.spans if span.kind == ALL_REDUCE]
    tasks = alone.program.tasks
    last = max(at for at, task in enumerate(tasks) if isinstance(task, BlockTask))
    assert isinstance(tasks[found.index], SegmentNorm)
    assert found.index > last
    assert not any(isinstance(task, SegmentNorm) for task in tasks[last : found.index])
    norm = next(s for s in shown.spans if s.index == found.index and s.kind == "norm")
    assert (found.end_ns, norm.duration_ns) == (norm.start_ns, alone.duration_ns(tasks[norm.index]))
    assert shown.busy_ns("compute") == sum(map(alone.duration_ns, tasks))


def test_one_replica_sums_nothing():
    alone, costs = make_costs(1)
    tasks = alone.program.tasks
    assert list(map(costs.duration_ns, tasks)) == list(map(alone.duration_ns, tasks))
