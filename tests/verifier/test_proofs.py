"""Proofs: every lowered plan has one, and its ledgers are the sums of what lies in the pools."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from lowered_cases import cases
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.program.audit import check_against_proof
from packhorse.program.digest import digest_program
from packhorse.program.program import Program
from packhorse.program.tasks import Free, workspace_of, writes_of
from packhorse.program.text import format_program, parse_program
from packhorse.verifier.rules import verify_program

KINDS = ("train_step", "evaluate", "load", "save")


@given(cases())
@settings(max_examples=25)
def test_every_lowered_plan_is_proved(case) -> None:
    model, plan = case
    for kind in KINDS:
        program = lower_plan(plan, model, kind)
        verify_program(program, model)
        verify_program(program)
        assert parse_program(format_program(program)) == program


@pytest.mark.parametrize("kind", KINDS)
def test_ledgers_are_sums_of_what_is_there(kind: str) -> None:
    model = make_model(num_layers=3, tied_head=True, skips=((0, 3),))
    plan = make_plan(
        model, parameters="disk", activations="recompute", num_microbatches=2, heap="keep"
    )
    program = lower_plan(plan, model, kind)
    proof = verify_program(program, model)
    assert proof.digest == digest_program(program)
    assert [entry.task for entry in proof.entries] == list(program.tasks)
    for entry, (used, peak) in zip(proof.entries, _count(program), strict=True):
        assert +Counter(entry.used_bytes) == used
        assert +Counter(entry.peak_bytes) == peak
        assert set(entry.used_bytes) == {pool.id for pool in program.pools}
    largest = {
        pool.id: max(entry.peak_bytes[pool.id] for entry in proof.entries) for pool in program.pools
    }
    assert proof.peak_bytes == largest


def test_a_run_as_proved_passes_the_audit() -> None:
    model = make_model()
    program = lower_plan(make_plan(model, parameters="disk"), model, "train_step")
    proof = verify_program(program, model)
    for index, (task, (used, _)) in enumerate(zip(program.tasks, _count(program), strict=True)):
        check_against_proof(proof, index, task, used)


def test_a_program_without_tasks_is_steady() -> None:
    program = lower_plan(make_plan(make_model()), make_model(), "evaluate")
    empty = Program(
        kind="evaluate",
        model=program.model,
        rank=0,
        num_microbatches=0,
        pools=program.pools,
        workspace_pool=program.workspace_pool,
        buffers={name: b for name, b in program.buffers.items() if b.home},
        layout=program.layout,
        tasks=(),
    )
    assert verify_program(empty).entries == ()


def _count(program: Program):
    # Recounts everything at every task, in the plainest way.
    there = {
        (buffer.id, buffer.home)
        for buffer in program.buffers.values()
        if buffer.home and program.kind != "load"
    }
    for task in program.tasks:
        peak = _sum(program, there | set(writes_of(task)))
        peak[program.workspace_pool] += workspace_of(task)
        there |= set(writes_of(task))
        if isinstance(task, Free):
            there -= {(task.buffer, task.tier)}
        yield _sum(program, there), +peak


def _sum(program: Program, there) -> Counter:
    total: Counter = Counter()
    for name, tier in there:
        total[program.buffers[name].pools[tier]] += program.buffers[name].size_bytes
    return total
