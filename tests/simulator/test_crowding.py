"""Computing on all cores of a CPU is slowed by what copies and the issuing thread take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.machine.spec import Emulation
from packhorse.plan.pins import read_pins
from packhorse.program.tasks import Backward, Copy, Forward, Recompute, SegmentNorm, Update
from packhorse.search.evaluation import Evaluator
from packhorse.search.settings import list_settings
from packhorse.search.sketch import make_sketch
from packhorse.search.space import Problem
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.crowding import (
    ISSUE_NS,
    MOST_CROWDING,
    READ_NS_PER_BYTE,
    waiting_ns,
)
from packhorse.simulator.engine import simulate_run
from tests.search.toy_search import ADAMW, ARITHMETIC, SMALL_CHUNKS, make_candidates, make_machine
from tests.support.models import make_model, make_plan

TEAM = (Forward, Recompute, Backward, SegmentNorm, Update)
SPARE = make_machine()
CROWDED = replace(SPARE, num_threads=2)
# Blocks so slow that all else beside them is less than one core's work.
SLOW = 1000


def make_costs(machine, tier="disk"):
    model = make_model(num_layers=4, hidden=64)
    plan = make_plan(
        model,
        parameters=tier,
        optimizer=tier,
        num_microbatches=2,
        budget_bytes={"device": 1 << 30, "disk": 1 << 30},
    )
    (candidate,) = make_candidates(num_layers=4, hidden=64)
    machine = replace(machine, compute_scale=SLOW)
    return TaskCosts(
        machine=machine,
        profile=candidate.profile,
        model=model,
        program=lower_plan(plan, model, "train_step"),
        heap="keep",
    )


def with_core_times(machine, read, write):
    rates = {"disk": read, "device": write}
    links = tuple(replace(link, core_ns_per_byte=rates[link.source]) for link in machine.links)
    return replace(machine, links=links)


def moved_bytes(program, source):
    return sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Copy) and task.source == source
    )


def team_ns(costs):
    return sum(costs.alone_ns(task) for task in costs.program.tasks if isinstance(task, TEAM))


@pytest.mark.parametrize(
    "machine",
    [
        SPARE,
        replace(CROWDED, device="cuda"),
        replace(CROWDED, emulation=Emulation(of="another", slowdown=2.0)),
    ],
)
def test_computing_that_takes_no_shared_cores_is_not_slowed(machine):
    costs = make_costs(machine)
    assert all(costs.duration_ns(task) == costs.alone_ns(task) for task in costs.program.tasks)
    assert not any(costs.core_ns(task) for task in costs.program.tasks)


def test_where_lanes_take_turns_nothing_is_beside_computing():
    costs = make_costs(CROWDED, tier="device")
    assert all(costs.duration_ns(task) == costs.alone_ns(task) for task in costs.program.tasks)


@pytest.mark.parametrize(("read", "write"), [(None, None), (0.0, 0.0), (0.9, 0.0), (0.25, 0.75)])
def test_reads_writes_and_issuing_take_from_computing_at_the_machines_rates(read, write):
    costs = make_costs(with_core_times(CROWDED, read, write))
    program = costs.program
    others_ns = ISSUE_NS * len(program.tasks)
    others_ns += moved_bytes(program, "disk") * (READ_NS_PER_BYTE if read is None else read)
    others_ns += moved_bytes(program, "device") * (write or 0.0)
    slowed_ns = sum(costs.duration_ns(task) for task in program.tasks if isinstance(task, TEAM))
    assert slowed_ns - team_ns(costs) == pytest.approx(others_ns, abs=len(program.tasks))
    for task in program.tasks:
        if not isinstance(task, TEAM):
            moved = waiting_ns(task, program, costs.machine) if isinstance(task, Copy) else 0
            assert costs.duration_ns(task) == costs.alone_ns(task) + moved


def test_a_transfer_waits_for_a_core_as_long_as_threads_outnumber_them():
    # Three threads on two cores: half as long again for what a core does of it.
    costs = make_costs(with_core_times(replace(CROWDED, num_cores=2), 0.5, 0.0))
    copies = [task for task in costs.program.tasks if isinstance(task, Copy)]
    assert {task.source for task in copies} == {"disk", "device"}
    for task in copies:
        size_bytes = costs.program.buffers[task.buffer].size_bytes
        waits_ns = size_bytes // 4 if task.source == "disk" else 0
        assert costs.duration_ns(task) - costs.alone_ns(task) == waits_ns


def test_a_thread_beside_the_team_takes_no_more_than_half_of_its_core():
    costs = make_costs(with_core_times(CROWDED, 1e6, 0.0))
    assert costs.crowding == MOST_CROWDING


def test_the_simulated_lane_is_as_busy_as_the_tasks_cost():
    costs = make_costs(CROWDED)
    timeline = simulate_run(costs.program, costs=costs)
    for span, task in zip(timeline.spans, costs.program.tasks, strict=True):
        if isinstance(task, TEAM):
            assert span.end_ns - span.start_ns == costs.duration_ns(task)
    assert timeline.busy_ns("compute") > team_ns(costs)


def test_the_knapsack_weighs_what_a_move_takes_from_computing():
    def sketch_on(machine):
        problem = Problem(
            machine=machine,
            optimizer=ADAMW,
            arithmetic=ARITHMETIC,
            pins=read_pins(SMALL_CHUNKS),
            global_batch_rows=2,
        )
        (setting, *_) = list_settings(problem, make_candidates())
        return make_sketch(Evaluator(problem), setting)

    spare = sketch_on(SPARE)
    crowded = sketch_on(with_core_times(CROWDED, 3.0, 1.0))
    for column, move in enumerate(spare.setting.moves):
        if move.kind == "recompute":
            continue
        more_ns = crowded.cost_ns[column] - spare.cost_ns[column]
        loads = crowded.load_ns[:, column] - spare.load_ns[:, column]
        # What it costs more is work of the compute lane, at least a read of all its bytes.
        assert more_ns >= 3.0 * spare.saved_bytes[:, :, column].max()
        assert loads[loads != 0].sum() == pytest.approx(more_ns)
