"""Every task of a real program deleted, repeated or swapped: verifier or audit name a task.

The bench `bench.audit` goes through all of them; here one of each kind, and every fortieth, of its
program, of one with updates in the host and the device in turns, of one that offloads what blocks
save, and of one that runs backwards in halves.
"""

from __future__ import annotations

import pytest
from halved_orders import after_each

from bench.audit import (
    CHANGES,
    ON_DISK,
    Mutant,
    Range,
    make_mutants,
    make_range,
    name_task,
)
from bench.planned import Ways
from packhorse.errors import AuditError
from packhorse.program.tasks import Task

IN_TURNS = Ways(
    parameters=("host", "device"),
    gradients=("device", "host"),
    optimizer=("host",),
    update=("host",),
    stride=3,
    activations=("recompute",),
)
OFFLOADED = Ways(
    optimizer=("disk",),
    activations=("recompute", "offload"),
    offload="disk",
    prefetch=1,
)


@pytest.fixture(
    scope="module",
    params=[(ON_DISK, None), (IN_TURNS, None), (OFFLOADED, None), (OFFLOADED, after_each)],
    ids=["on disk", "in turns", "offloaded", "in halves"],
)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Range:
    ways, order = request.param
    return make_range(tmp_path_factory.mktemp("scratch"), ways, order)


def describe_kind(task: Task) -> str:
    return f"{type(task).__name__} {getattr(task, 'source', getattr(task, 'tier', ''))}"


def choose_mutants(ground: Range) -> list[Mutant]:
    mutants = list(make_mutants(ground.program))
    one_of_each = {(mutant.change, describe_kind(mutant.task)): mutant for mutant in mutants}
    return [*one_of_each.values(), *mutants[::40]]


def test_the_program_has_every_kind_of_task(ground: Range) -> None:
    kinds = {type(task).__name__ for task in ground.program.tasks}
    backwards = kinds & {"Backward", "InputGrad", "WeightGrad"}
    assert backwards in ({"Backward"}, {"InputGrad", "WeightGrad"})
    assert kinds - backwards == {
        "Feed", "Forward", "Recompute", "SegmentNorm", "GradNorm", "Update", "Copy", "Free", "Emit",
    }  # fmt: skip
    ground.run(ground.program)


def test_every_change_is_seen_and_names_a_task(ground: Range) -> None:
    findings = [ground.judge(mutant) for mutant in choose_mutants(ground)]
    unseen = [
        (finding.mutant.change, name_task(finding.mutant.task), finding.message)
        for finding in findings
        if finding.by is None or not finding.mutant.names_task(finding.message)
    ]
    assert unseen == []
    assert {finding.mutant.change for finding in findings} == set(CHANGES)
    # Both must be at work: some swaps break no rule, and only the audit of the run can tell.
    assert {finding.by == "audit" for finding in findings} == {True, False}


def test_audit_alone_sees_a_run_that_left_the_proved_order(ground: Range) -> None:
    """Without any verifier, the run itself fails at the first task that is another one."""
    swapped = [mutant for mutant in make_mutants(ground.program) if mutant.change == "swapped"]
    mutant = swapped[len(swapped) // 2]
    with pytest.raises(AuditError) as caught:
        ground.run(mutant.program)
    assert mutant.names_task(str(caught.value))
