"""What a plan that keeps finished steps asks of the disk: two slots for whatever steps change.

In: a plan and its layout. Out: the states that have slots, which of them are written behind, and
the disk space beyond what the programs themselves hold there.

A state at home on the disk has its home and a second slot. A state at home in memory is written
behind every so many steps, to one of two slots that no program counts. Frozen parameters never
change: those on the disk have their home alone, those in memory come from the weights again.
"""

from __future__ import annotations

from collections.abc import Mapping

from packhorse.compiler.buffers import name_states
from packhorse.compiler.layout import lay_out_chunks
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.program.buffers import Buffer, BufferId, Layout, split_state
from packhorse.program.program import ProgramKind


def list_kinds(plan: Plan, *, trains: bool = True) -> tuple[ProgramKind, ...]:
    """The kinds of programs that a plan needs; `trains` is False when all is frozen."""
    steps: tuple[ProgramKind, ...] = ("train_step",) if trains else ()
    behind: tuple[ProgramKind, ...] = ()
    if keeps_steps(plan) and not _is_all_on_disk(plan):
        behind = ("persist", "restore")
    return (*steps, "evaluate", "load", "save", *behind)


def keeps_steps(plan: Plan) -> bool:
    """Whether finished steps are kept on the disk."""
    return plan.durable.value != "off"


def states_with_slots(plan: Plan, layout: Layout) -> Mapping[BufferId, Buffer]:
    """The states that steps change, in order."""
    trained = {chunk.id for chunk in layout.chunks if chunk.trainable}
    return {
        name: buffer
        for name, buffer in name_states(plan, layout).items()
        if split_state(name)[1] in trained
    }


def states_written_behind(plan: Plan, layout: Layout) -> tuple[BufferId, ...]:
    """The states that steps change in memory."""
    states = states_with_slots(plan, layout)
    return tuple(name for name, buffer in states.items() if buffer.home != "disk")


def slot_bytes(plan: Plan, layout: Layout) -> int:
    """Disk space that a plan takes for slots, beyond what its programs hold there."""
    if not keeps_steps(plan):
        return 0
    return sum(
        buffer.size_bytes * (1 if buffer.home == "disk" else 2)
        for buffer in states_with_slots(plan, layout).values()
    )


def kept_bytes_per_step(plan: Plan, model: Model) -> int:
    """What is written behind, spread over the steps of an interval."""
    every = plan.durable.value
    if every == "off":
        return 0
    layout = lay_out_chunks(plan, model)
    states = states_with_slots(plan, layout)
    behind = states_written_behind(plan, layout)
    return sum(states[name].size_bytes for name in behind) // every


def _is_all_on_disk(plan: Plan) -> bool:
    return all(
        chunk.parameters.value == "disk"
        and (not chunk.trainable or chunk.optimizer.value == "disk" or not _has_states(plan))
        for chunk in plan.chunks
    )


def _has_states(plan: Plan) -> bool:
    return bool(plan.optimizer.states) or plan.optimizer.master
