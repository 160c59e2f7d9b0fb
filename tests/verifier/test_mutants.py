"""Whether a change of a program is harmless, told by dependencies, pools and messages alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from test_rank_programs import MODELS, make_ranks

from bench.mutants import CHANGES, Mutant, draw_mutant, is_harmless
from packhorse.errors import RuleError
from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Feed, Free, Recv, Send, Task
from packhorse.verifier.joint import verify_ranks

A, B = BufferId("a"), BufferId("b")
POOL = PoolId("device")
PARTS, RANKS = make_ranks(MODELS["ties and skips"], "disk", "1f1b", 3, "train_step")


def tighten(programs: list[Program]) -> list[Program]:
    proofs = verify_ranks(programs, PARTS)
    return [
        replace(
            program,
            pools=tuple(
                replace(pool, capacity_bytes=proof.peak_bytes[pool.id]) for pool in program.pools
            ),
        )
        for program, proof in zip(programs, proofs, strict=True)
    ]


TIGHT = tighten(RANKS)


def mutate(programs: list[Program], rank: int, tasks: list[Task]) -> Mutant:
    changed = list(programs)
    changed[rank] = replace(programs[rank], tasks=tuple(tasks))
    return Mutant(change="by hand", rank=rank, index=0, programs=tuple(changed))


def small_program(rank: int, tasks: list[Task], capacity: int) -> Program:
    return Program(
        kind="evaluate",
        model="m",
        rank=rank,
        num_microbatches=1,
        pools=(Pool(id=POOL, tier="device", capacity_bytes=capacity),),
        workspace_pool=POOL,
        buffers={
            name: Buffer(id=name, size_bytes=1, pools={"device": POOL}, home=None)
            for name in (A, B)
        },
        layout=Layout(chunks=(), slots={}, dtypes={}),
        tasks=tuple(tasks),
    )


def make(name: BufferId) -> Feed:
    return Feed(microbatch=0, writes=(name,))


def drop(name: BufferId) -> Free:
    return Free(buffer=name, tier="device")


def swap_first(programs: list[Program], rank: int, kinds: tuple[type, type]) -> Mutant:
    tasks = list(programs[rank].tasks)
    at = next(
        at
        for at in range(len(tasks) - 1)
        if isinstance(tasks[at], kinds[0])
        and isinstance(tasks[at + 1], kinds[1])
        and tasks[at].buffer != tasks[at + 1].buffer
    )
    tasks[at], tasks[at + 1] = tasks[at + 1], tasks[at]
    return mutate(programs, rank, tasks)


def test_the_same_programs_are_harmless() -> None:
    assert is_harmless(TIGHT, mutate(TIGHT, 0, list(TIGHT[0].tasks)))


def test_frees_may_change_places_but_not_tasks() -> None:
    assert is_harmless(TIGHT, swap_first(TIGHT, 1, (Free, Free)))
    tasks = list(TIGHT[1].tasks)
    assert not is_harmless(TIGHT, mutate(TIGHT, 1, tasks[:5] + tasks[6:]))
    assert not is_harmless(TIGHT, mutate(TIGHT, 1, tasks[:6] + tasks[5:]))


def test_a_task_before_what_it_needs_is_not_harmless() -> None:
    tasks = list(TIGHT[0].tasks)
    at, copy = next((at, task) for at, task in enumerate(tasks) if isinstance(task, Copy))
    last = max(i for i, t in enumerate(tasks) if isinstance(t, Free) and t.buffer == copy.buffer)
    del tasks[at]
    tasks.insert(last, copy)
    assert not is_harmless(TIGHT, mutate(TIGHT, 0, tasks))


def test_room_that_is_not_there_is_not_harmless() -> None:
    tasks = [make(A), drop(A), make(B), drop(B)]
    later = [make(A), make(B), drop(A), drop(B)]
    for capacity, harmless in ((1, False), (2, True)):
        programs = [small_program(0, tasks, capacity)]
        assert is_harmless(programs, mutate(programs, 0, later)) is harmless


def test_messages_in_another_order_are_not_harmless() -> None:
    sends = [Send(buffer=A, peer=1), Send(buffer=B, peer=1)]
    receives = [Recv(buffer=A, peer=0), Recv(buffer=B, peer=0)]
    programs = [
        small_program(0, [make(A), make(B), *sends], 2),
        small_program(1, receives, 2),
    ]
    assert is_harmless(programs, mutate(programs, 0, [make(B), make(A), *sends]))
    assert not is_harmless(programs, mutate(programs, 0, [make(A), make(B), *sends[::-1]]))
    assert not is_harmless(programs, mutate(programs, 1, receives[::-1]))


def test_a_circle_of_messages_is_not_harmless() -> None:
    ask, answer = Send(buffer=A, peer=1), Recv(buffer=B, peer=1)
    programs = [
        small_program(0, [make(A), ask, answer], 2),
        small_program(1, [Recv(buffer=A, peer=0), make(B), Send(buffer=B, peer=0)], 2),
    ]
    assert not is_harmless(programs, mutate(programs, 0, [make(A), answer, ask]))
    assert is_harmless(programs, mutate(programs, 0, list(programs[0].tasks)))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_accepted_is_harmless(change: str) -> None:
    random = Random(change)
    num_rejected = 0
    for _ in range(40):
        mutant = draw_mutant(random, TIGHT, change)
        if mutant is None:
            continue
        try:
            verify_ranks(mutant.programs, PARTS)
        except RuleError:
            num_rejected += 1
        else:
            assert is_harmless(TIGHT, mutant), f"rank {mutant.rank}, task {mutant.index}"
    assert num_rejected
