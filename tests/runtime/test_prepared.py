"""Programs made ready to run: what goes to a lane at once, what jobs take and give back."""

from __future__ import annotations

import pytest
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.program.program import Program, ProgramKind, Proof
from packhorse.program.tasks import Free
from packhorse.runtime.dependencies import find_dependencies
from packhorse.runtime.memory.ledger import Ledger
from packhorse.runtime.prepared import Prepared, prepare_program
from packhorse.verifier.rules import verify_program

KINDS: tuple[ProgramKind, ...] = ("train_step", "evaluate", "load", "save")
TIERS = ("device", "disk")


def prepare(kind: ProgramKind, tier: str) -> tuple[Program, Proof, Prepared]:
    model = make_model(num_layers=3, skips=((1, 3),), tied_head=True)
    plan = make_plan(
        model,
        parameters=tier,
        gradients=tier,
        optimizer=tier,
        activations="recompute",
        num_microbatches=2,
        budget_bytes={"device": 1 << 26, "disk": 1 << 30},
    )
    program = lower_plan(plan, model, kind)
    proof = verify_program(program, model)
    return program, proof, prepare_program(program, proof)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", TIERS)
def test_jobs_are_the_program_in_its_order(kind: ProgramKind, tier: str) -> None:
    program, _, prepared = prepare(kind, tier)
    assert tuple(task for job in prepared.jobs for task in job.tasks) == program.tasks
    for job in prepared.jobs:
        assert program.tasks[job.index] is job.task
        members = range(job.index, job.index + len(job.tasks))
        assert {prepared.lanes[index] for index in members} == {job.lane}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", TIERS)
def test_what_jobs_take_and_give_back_is_what_was_proved(kind: ProgramKind, tier: str) -> None:
    program, proof, prepared = prepare(kind, tier)
    ledger = Ledger(program.pools)
    for buffer in program.buffers.values():
        if buffer.home is not None and program.finds(buffer):
            ledger.reserve(buffer.pools[buffer.home], buffer.size_bytes)
    for job in prepared.jobs:
        for pool, size in job.reserved:
            ledger.reserve(pool, size)
        for index, (_, sizes) in enumerate(job.each_released, job.index):
            for pool, size in sizes:
                ledger.release(pool, size)
            assert ledger.used_bytes == proof.entries[index].used_bytes
        released: dict[str, int] = {}
        for _, sizes in job.each_released:
            for pool, size in sizes:
                released[pool] = released.get(pool, 0) + size
        assert dict(job.released) == released


@pytest.mark.parametrize("tier", TIERS)
def test_most_frees_go_along_and_nothing_waits_for_more_than_before(tier: str) -> None:
    program, _, prepared = prepare("train_step", tier)
    inner = find_dependencies(program.tasks).inner
    heads = {
        index: job.index
        for job in prepared.jobs
        for index in range(job.index, job.index + len(job.tasks))
    }
    for job in prepared.jobs:
        own = set(inner[job.index])
        for index in range(job.index + 1, job.index + len(job.tasks)):
            for other in inner[index]:
                on_lane = other < job.index and prepared.lanes[other] == job.lane
                assert other >= job.index or other in own or on_lane
        followed = set(prepared.dependencies.inner[job.index])
        assert {heads[other] for other in own} - {job.index} <= followed
        assert all(other < job.index for other in followed)
    num_frees = sum(isinstance(task, Free) for task in program.tasks)
    assert sum(len(job.frees) for job in prepared.jobs) > num_frees / 2
