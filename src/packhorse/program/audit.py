"""The audit of a run against its proof: a task that is not the proved one ends the run.

In: the proof, and what the executor is about to call done: index, task and ledgers. Out: nothing,
or an AuditError. Two neighbours that touch different buffers may be swapped without breaking a
rule; only this check tells such a run from the proved one.
"""

from __future__ import annotations

from collections.abc import Mapping

from packhorse.errors import AuditError
from packhorse.program.buffers import PoolId
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Task
from packhorse.program.text import format_task


def check_against_proof(
    proof: Proof, index: int, task: Task, used_bytes: Mapping[PoolId, int]
) -> None:
    """Check that task number `index` is the proved one and left every pool as proved.

    `used_bytes` is each pool's ledger after the task; a pool that it leaves out is empty.

    Raises:
        AuditError: names index, task, what was proved and what was found.
    """
    if not 0 <= index < len(proof.entries):
        raise AuditError(
            f"task {index} ran, but the proved program has {len(proof.entries)} tasks",
            where=f"task {index}: {format_task(task)}",
            fix="this is a bug in the executor, or the program was changed after its proof",
        )
    entry = proof.entries[index]
    if task is not entry.task and task != entry.task:
        raise AuditError(
            f"task {index} is not the task that was proved",
            where=f"expected: {format_task(entry.task)}\nactual:   {format_task(task)}",
            fix="run the program that was verified, in its order",
        )
    pools = sorted({*entry.used_bytes, *used_bytes})
    wrong = [p for p in pools if used_bytes.get(p, 0) != entry.used_bytes.get(p, 0)]
    if wrong:
        sums = (
            f"pool {pool}: expected {entry.used_bytes.get(pool, 0)} bytes,"
            f" actual {used_bytes.get(pool, 0)} bytes"
            for pool in wrong
        )
        raise AuditError(
            f"task {index} left the memory otherwise than was proved",
            where="\n".join((f"task {index}: {format_task(task)}", *sums)),
            fix="the task kept or dropped a buffer that its program does not declare",
        )


def check_same_tasks(proof: Proof, program: Program) -> None:
    """Check that a proof is of this program: the same tasks in the same order.

    Raises:
        AuditError: names the first task that differs.
    """
    for index, (entry, task) in enumerate(zip(proof.entries, program.tasks, strict=False)):
        if task is not entry.task and task != entry.task:
            raise AuditError(
                f"task {index} is not the task that was proved",
                where=f"expected: {format_task(entry.task)}\nactual:   {format_task(task)}",
                fix="verify the program that is to run",
            )
    if len(proof.entries) != len(program.tasks):
        last = min(len(proof.entries), len(program.tasks))
        raise AuditError(
            f"{len(proof.entries)} tasks were proved, the program has {len(program.tasks)}",
            where=f"from task {last} on",
            fix="verify the program that is to run",
        )
