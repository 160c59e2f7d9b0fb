"""What a task needs before it can begin.

In: a task, the number of stages, and a container of all tasks of the schedule (a stage's backward
may be whole or in halves). Out: the tasks that must have ended.
"""

from __future__ import annotations

from collections.abc import Container

from packhorse.schedule.spec import Backward, Forward, InputGrad, Task, WeightGrad


def list_needs(task: Task, num_stages: int, tasks: Container[Task]) -> tuple[Task, ...]:
    """List what must have ended; where `tasks` lacks both forms of a backward, the whole one."""
    stage, microbatch = task.stage, task.microbatch
    match task:
        case Forward():
            return (Forward(stage=stage - 1, microbatch=microbatch),) if stage else ()
        case Backward() | InputGrad():
            own = Forward(stage=stage, microbatch=microbatch)
            if stage + 1 == num_stages:
                return (own,)
            return own, find_gradient(stage + 1, microbatch, tasks)
        case WeightGrad():
            return (InputGrad(stage=stage, microbatch=microbatch),)


def find_gradient(stage: int, microbatch: int, tasks: Container[Task]) -> Task:
    """Give the task that hands a stage's input gradient back."""
    half = InputGrad(stage=stage, microbatch=microbatch)
    return half if half in tasks else Backward(stage=stage, microbatch=microbatch)
