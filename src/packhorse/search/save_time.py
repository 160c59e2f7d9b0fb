"""How long a save takes: a checkpoint, or the model at the end.

In: a plan, its model, profile and machine, and how large the files are. Out: ns, predicted by the
program that saves: states come to the device as its lanes bring them, and are handed out there one
after the other. For each byte of a file, by one thread:

    converted in memory, summed by CRC-32, written through the page cache and brought to the disk

and every file and folder is brought to the disk once more at the end. What is written counts at the
slower of two rates: the one that saving was measured at, and the one that the drive is known to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from packhorse.compiler.lower import lower_plan
from packhorse.machine.spec import Link, Machine, Saving
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.profile.spec import Profile
from packhorse.program.tasks import Export, Task
from packhorse.simulator.costs import TASK_NS, TaskCosts
from packhorse.simulator.engine import time_run

# For machines whose saving nobody measured: zlib on one core, and a drive without a cache of its
# own that keeps what it took.
USUAL_CHECKSUM_BYTES_PER_S: Final = 1e9
USUAL_SYNC_NS: Final = 5_000_000

# Tensor files, config, tokenizer and manifest, each when it is complete and once more with the
# folder; the folder's own entries, its rename, and its parent.
NUM_SYNCS: Final = 24

# Converting reads a value and writes it.
_CONVERT_PASSES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveCosts:
    """Tasks as ever, but what is handed out costs what its share of the files costs."""

    tasks: TaskCosts
    ns_per_byte: float

    def duration_ns(self, task: Task) -> int:
        if not isinstance(task, Export):
            return self.tasks.duration_ns(task)
        size_bytes = self.tasks.program.buffers[task.buffer].size_bytes
        return TASK_NS + ceil(size_bytes * self.ns_per_byte)


def predict_save_ns(
    plan: Plan, model: Model, profile: Profile, machine: Machine, *, file_bytes: int
) -> int | None:
    """Predict a save of files of so many bytes; None where no rate of writing is known.

    Raises:
        MismatchError: the plan or profile belongs to another model.
    """
    file_ns_per_byte = save_ns_per_byte(machine)
    if file_ns_per_byte is None:
        return None
    program = lower_plan(plan, model, "save")
    handed_out = sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Export)
    )
    tasks = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    # Files hold the states in dtypes of their own, and some saves leave states out.
    costs = _SaveCosts(tasks=tasks, ns_per_byte=file_ns_per_byte * file_bytes / max(handed_out, 1))
    handing_ns = time_run(program, costs=costs, machine=machine).makespan_ns
    sync_ns = USUAL_SYNC_NS if machine.saving is None else machine.saving.sync_ns
    return handing_ns + NUM_SYNCS * sync_ns


def save_ns_per_byte(machine: Machine) -> float | None:
    """What one thread spends on a byte of a file; None where no rate of writing is known."""
    saving, link = machine.saving, _find_write_link(machine)
    rates = [] if link is None else [link.bytes_per_s]
    rates += [] if saving is None else [saving.write_bytes_per_s]
    if not rates:
        return None
    return (
        1e9 / min(rates)
        + 1e9 / _checksum_rate(saving)
        + _CONVERT_PASSES * 1e9 / machine.memory_bytes_per_s
    )


def _checksum_rate(saving: Saving | None) -> float:
    return USUAL_CHECKSUM_BYTES_PER_S if saving is None else saving.checksum_bytes_per_s


def _find_write_link(machine: Machine) -> Link | None:
    # With a GPU the disk hangs on the host.
    return machine.link("device", "disk") or machine.link("host", "disk")
