"""What lanes take from each other where computing uses all cores.

In: a program, a machine, costs. Out: how many times as long computing takes because reads and the
issuing thread need a core too. The team of a computation waits for its slowest thread, so each
nanosecond that another thread takes from one core is lost to all of them.
"""

from __future__ import annotations

from typing import Final

from packhorse.machine.spec import Machine
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, lane_of
from packhorse.simulator.costs import CostModel

# A read lands in pages that were given back: the kernel makes and clears them first. Measured with
# direct I/O: 0.31 ns of a core for a byte in huge pages, 0.66 ns in small ones. Writes take none.
READ_NS_PER_BYTE: Final = 0.5

# Issuing, booking and recording a task beside a lane that computes.
ISSUE_NS: Final = 100_000


def crowding_of(program: Program, machine: Machine, costs: CostModel) -> float:
    """Tell how much longer the compute lane's tasks take than alone; 1 where a core is left."""
    if machine.num_threads < machine.num_cores or not has_transfers(program.tasks):
        return 1.0
    others_ns = ISSUE_NS * len(program.tasks)
    compute_ns = 0
    for task in program.tasks:
        if isinstance(task, Copy):
            if task.source == "disk":
                others_ns += int(program.buffers[task.buffer].size_bytes * READ_NS_PER_BYTE)
        elif lane_of(task) == "compute":
            compute_ns += costs.duration_ns(task)
    # Another thread can take no more than its core.
    return 1 + min(others_ns / compute_ns, 1.0) if compute_ns else 1.0
