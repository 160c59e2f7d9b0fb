from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import RuleError
from packhorse.program.lanes import assign_lanes
from packhorse.program.tasks import Copy, Forward, Free, reads_of, writes_of
from packhorse.simulator.engine import INLINE, ISSUER, OVERLAPPED, simulate_program
from packhorse.timeline.spec import MemoryPoint
from tests.simulator.random_programs import (
    DEVICE,
    TableCosts,
    draw_program,
    make_program,
    simulate_slowly,
)

COMPUTE_INLINE = {**OVERLAPPED, "compute": ISSUER}
ONE_IO_WORKER = {lane: "compute" if lane in ("compute", "update") else "io" for lane in OVERLAPPED}
ALL_WORKERS = (INLINE, OVERLAPPED, COMPUTE_INLINE, ONE_IO_WORKER)


def forward(block, *, reads=(), writes=(), workspace=0):
    return Forward(block=block, microbatch=0, reads=reads, writes=writes, workspace_bytes=workspace)


class Steady:
    """Every task takes the same time."""

    def __init__(self, duration_ns):
        self.duration = duration_ns

    def duration_ns(self, _task):
        return self.duration


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), workers=st.sampled_from(ALL_WORKERS))
def test_equals_the_slow_simulator(seed, workers):
    program, costs = draw_program(Random(seed), 14)
    timeline = simulate_program(program, costs=costs, workers=workers)
    times, peak = simulate_slowly(program, costs, workers, ISSUER)
    assert [(span.start_ns, span.end_ns) for span in timeline.spans] == times
    assert timeline.peak_bytes[DEVICE] == peak


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), workers=st.sampled_from(ALL_WORKERS))
def test_bounds_hold(seed, workers):
    program, costs = draw_program(Random(seed), 60)
    timeline = simulate_program(program, costs=costs, workers=workers)
    assert timeline == simulate_program(program, costs=costs, workers=workers)
    assert timeline.peak_bytes[DEVICE] <= program.pools[0].capacity_bytes
    busy = {}
    for task, lane in zip(program.tasks, assign_lanes(program.tasks), strict=True):
        worker = workers[lane]
        busy[worker] = busy.get(worker, 0) + costs.duration_ns(task)
    assert timeline.makespan_ns >= max(busy.values())
    assert timeline.makespan_ns >= critical_path(program, costs)
    assert timeline.makespan_ns <= sum(busy.values())
    for points in timeline.memory.values():
        assert [p.at_ns for p in points] == sorted(p.at_ns for p in points)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_inline_is_the_sequential_replay(seed):
    program, costs = draw_program(Random(seed), 40)
    timeline = simulate_program(program, costs=costs, workers=INLINE)
    assert timeline.makespan_ns == sum(costs.duration_ns(task) for task in program.tasks)
    for earlier, later in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert earlier.end_ns == later.start_ns


def critical_path(program, costs):
    """The longest chain of producers and consumers, memory and lanes aside."""
    ready = {}
    longest = 0
    for task in program.tasks:
        places = reads_of(task)
        end = max((ready.get(place, 0) for place in places), default=0) + costs.duration_ns(task)
        for place in writes_of(task):
            ready[place] = max(end, ready.get(place, 0))
        longest = max(longest, end)
    return longest


def test_reads_overlap_compute_as_far_as_memory_lasts():
    names = ["p0", "p1", "p2", "p3"]
    tasks = []
    for block, name in enumerate(names):
        tasks += [
            Copy(buffer=name, source="disk", target="device"),
            forward(block, reads=(name,)),
            Free(buffer=name, tier="device"),
        ]
    sizes = dict.fromkeys(names, 10)
    homes = dict.fromkeys(names, "disk")
    durations = {Copy: 5, Forward: 10, Free: 1}
    table = TableCosts(table={task: durations[type(task)] for task in tasks})

    def run(capacity):
        program = make_program(tasks, sizes, homes=homes, capacity=capacity)
        return simulate_program(program, costs=table, workers=OVERLAPPED)

    # One slot: read, compute and free follow one another. Two slots: reads hide behind compute.
    assert run(10).makespan_ns == 4 * (5 + 10 + 1)
    assert run(20).makespan_ns == 5 + 4 * (10 + 1)
    assert run(20).peak_bytes[DEVICE] == 20
    assert run(40).peak_bytes[DEVICE] == 40


def test_the_curve_is_recorded_task_by_task():
    tasks = [forward(0, writes=("a",), workspace=3), Free(buffer="a", tier="device")]
    program = make_program(tasks, {"a": 10}, homes={}, capacity=20)
    timeline = simulate_program(program, costs=Steady(5))
    assert timeline.memory[DEVICE] == (
        MemoryPoint(at_ns=0, used_bytes=0),
        MemoryPoint(at_ns=0, used_bytes=13),
        MemoryPoint(at_ns=5, used_bytes=10),
        MemoryPoint(at_ns=10, used_bytes=0),
    )


def test_a_task_that_takes_no_time_still_counts_in_the_peak():
    tasks = [forward(0, workspace=7), forward(1, workspace=9)]
    program = make_program(tasks, {}, homes={}, capacity=20)
    assert simulate_program(program, costs=Steady(0)).peak_bytes[DEVICE] == 9


def test_refuses_what_can_never_fit():
    tasks = [forward(n, workspace=1) for n in range(4)] + [forward(4, writes=("a",), workspace=5)]
    program = make_program(tasks, {"a": 10, "b": 8}, homes={"b": "device"}, capacity=20)
    with pytest.raises(RuleError) as caught:
        simulate_program(program, costs=Steady(1), workers=OVERLAPPED)
    assert str(caught.value) == (
        "rule capacity: forward 4@0 needs 15 B of pool device, where 12 B of 20 B are free and no"
        " earlier task will release more\n"
        "  where:   1 forward 1@0\n"
        "           2 forward 2@0\n"
        "           3 forward 3@0\n"
        "         > 4 forward 4@0\n"
        "  fix:   plan again with a larger budget, or free a buffer before this task"
    )


def test_refuses_homes_beyond_the_capacity():
    program = make_program([], {"a": 10}, homes={"a": "device"}, capacity=9)
    with pytest.raises(RuleError, match="pool device starts with 10 B and holds 9 B"):
        simulate_program(program, costs=Steady(1))


@pytest.mark.parametrize(
    "task",
    [
        forward(0, reads=("a",)),
        Free(buffer="a", tier="device"),
        Copy(buffer="a", source="disk", target="device"),
    ],
)
def test_refuses_absent_buffers(task):
    program = make_program([task], {"a": 10}, homes={}, capacity=90)
    with pytest.raises(RuleError, match="needs a, which is not in the tier"):
        simulate_program(program, costs=Steady(1))


def test_refuses_unknown_buffers_lanes_and_negative_costs():
    program = make_program([forward(0, writes=("x",))], {}, homes={}, capacity=90)
    with pytest.raises(RuleError, match="x has no place in the tier device"):
        simulate_program(program, costs=Steady(1))
    program = make_program([forward(0)], {}, homes={}, capacity=90)
    with pytest.raises(ValueError, match="lane compute has no worker"):
        simulate_program(program, costs=Steady(1), workers={})
    with pytest.raises(ValueError, match="the cost of forward 0@0 is negative: -1 ns"):
        simulate_program(program, costs=Steady(-1))
