"""The pace of a machine that is only acted: how long each task takes there.

In: the machine of a rank, the times of its blocks, its plan and its part of the model. Out: a
`Pace`, or None where the machine is a real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.machine.spec import Machine
    from packhorse.model.spec import Model
    from packhorse.plan.spec import Plan
    from packhorse.profile.spec import Profile
    from packhorse.program.program import Program
    from packhorse.runtime.emulation import Pace


def find_pace(machine: Machine, profile: Profile, plan: Plan, model: Model) -> Pace | None:
    """Give the pace of an emulated machine, by the rates that its file declares."""
    from packhorse.simulator.costs import TaskCosts

    if machine.emulation is None:
        return None

    def durations_ns(program: Program) -> list[int]:
        costs = TaskCosts(
            machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
        )
        return [costs.duration_ns(task) for task in program.tasks]

    return durations_ns
