"""What moving bytes and issuing tasks take from computing on a CPU's cores.

In: a machine, tasks of a program. Out: nanoseconds of a core that each task keeps busy beside what
computes. Where a team of threads computes on every core, it waits for its slowest one, so that time
is lost to all of them; and what moves waits for its turn on a core. A device with processors of its
own loses nothing, nor does a machine whose times are only acted, nor one with a core to spare.
"""

from __future__ import annotations

from typing import Final

from packhorse.machine.spec import Link, Machine
from packhorse.program.buffers import TierName
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Forward,
    Free,
    InputGrad,
    Recompute,
    SegmentNorm,
    Task,
    Update,
    WeightGrad,
)

# For machines on which it was not measured. A read lands in pages that were given back, so the
# kernel makes and clears them first: with direct I/O 0.31 ns a byte in huge pages, 0.66 ns in small
# ones. A write finds its pages there.
READ_NS_PER_BYTE: Final = 0.5
WRITE_NS_PER_BYTE: Final = 0.0

# Issuing, booking and recording a task beside a lane that computes.
ISSUE_NS: Final = 100_000

MOST_CROWDING: Final = 2.0
"""A thread beside the team takes no more than half of its core: the kernel shares it fairly."""


def computes_here(machine: Machine) -> bool:
    """Whether bodies really run on a CPU's cores and in its memory, where lanes run too."""
    return machine.device.startswith("cpu") and machine.emulation is None


def is_crowded(machine: Machine) -> bool:
    """Whether computing uses every core that lanes and the issuing thread run on."""
    return computes_here(machine) and machine.num_threads >= machine.num_cores


def core_ns(task: Task, program: Program, machine: Machine) -> int:
    """How long a task keeps a core busy beside what computes."""
    if not isinstance(task, Copy):
        return ISSUE_NS
    return ISSUE_NS + round(_moving_ns(task, program, machine))


def total_core_ns(program: Program, machine: Machine) -> int:
    """How long all tasks of a program do so."""
    rates: dict[tuple[TierName, TierName], float] = {}
    total_ns = ISSUE_NS * len(program.tasks)
    for task in program.tasks:
        if isinstance(task, Copy):
            way = (task.source, task.target)
            if way not in rates:
                link = machine.link(*way)
                rates[way] = 0.0 if link is None else core_ns_per_byte(link)
            total_ns += round(program.buffers[task.buffer].size_bytes * rates[way])
    return total_ns


def waiting_ns(task: Copy, program: Program, machine: Machine) -> int:
    """How long a transfer waits for a core, beside a team that computes on all of them.

    The kernel lets all threads of a core take turns, so what takes a core's time takes that much
    longer as there are more threads than cores.
    """
    more = (machine.num_threads + 1) / machine.num_cores - 1
    return round(_moving_ns(task, program, machine) * more)


def _moving_ns(task: Copy, program: Program, machine: Machine) -> float:
    # What the bytes alone take of a core.
    link = machine.link(task.source, task.target)
    rate = 0.0 if link is None else core_ns_per_byte(link)
    return program.buffers[task.buffer].size_bytes * rate


def core_ns_per_byte(link: Link) -> float:
    """A core's time for a byte over a link, measured or usual."""
    if link.core_ns_per_byte is not None:
        return link.core_ns_per_byte
    return READ_NS_PER_BYTE if link.source == "disk" else WRITE_NS_PER_BYTE


def is_team_work(task: Task) -> bool:
    """Whether a task computes in the device with all of its threads."""
    match task:
        case Free() | Copy():
            return False
        case Forward() | Backward() | Recompute() | InputGrad() | WeightGrad() | SegmentNorm():
            return True
        case Update():
            return task.where == "device"
        case _:
            return False
