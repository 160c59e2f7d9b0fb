"""Computing on all cores is slowed by what reads and the issuing thread take."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from packhorse.program.tasks import Copy, lane_of
from packhorse.simulator.crowding import ISSUE_NS, READ_NS_PER_BYTE, crowding_of
from packhorse.simulator.engine import INLINE, simulate_program
from tests.simulator.random_programs import draw_program
from tests.simulator.test_costs import MACHINE


def test_a_machine_with_a_core_to_spare_is_not_slowed() -> None:
    program, costs = draw_program(Random(3), 60)
    assert crowding_of(program, replace(MACHINE, num_cores=4, num_threads=3), costs) == 1.0


def test_reads_and_issuing_take_from_computing() -> None:
    program, costs = draw_program(Random(3), 60)
    machine = replace(MACHINE, num_cores=2, num_threads=2)
    read = sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Copy) and task.source == "disk"
    )
    computing = sum(
        costs.duration_ns(task)
        for task in program.tasks
        if not isinstance(task, Copy) and lane_of(task) == "compute"
    )
    others = ISSUE_NS * len(program.tasks) + read * READ_NS_PER_BYTE
    found = crowding_of(program, machine, costs)
    assert 1 < found <= 2
    assert found == 1 + min(int(others) / computing, 1.0)


def test_a_slowed_lane_takes_so_many_times_as_long() -> None:
    program, costs = draw_program(Random(5), 40)
    plain = simulate_program(program, costs=costs, workers=INLINE)
    slowed = simulate_program(program, costs=costs, workers=INLINE, slowed={"compute": 2.0})
    assert slowed.busy_ns("compute") == 2 * plain.busy_ns("compute")
    assert slowed.busy_ns("disk_read") == plain.busy_ns("disk_read")
