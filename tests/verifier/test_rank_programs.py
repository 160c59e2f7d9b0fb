"""Programs of several ranks: right ones pass together, broken ones fail by the rule's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from edits import with_tasks
from models import make_model, make_pipeline, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.errors import RuleError
from packhorse.model.parts import cut_model
from packhorse.model.spec import Model
from packhorse.plan.spec import SCHEDULED
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Free,
    PackLosses,
    PackNorms,
    Recv,
    Send,
    SumTied,
    Task,
    reads_of,
    writes_of,
)
from packhorse.program.text import format_program, format_task, parse_program
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.verifier.joint import check_deadlock, verify_ranks

NUM_MICROBATCHES = 3
MODELS = {
    "plain": make_model(num_layers=4),
    "ties and skips": make_model(
        num_layers=4, tied_head=True, shared_layers=(1, 3, 4), skips=((0, 3), (1, 4), (1, 5))
    ),
}
PLANS = {
    "resident": {"clips": True},
    "disk": {
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "activations": ("keep", "recompute"),
        "clips": False,
    },
}
CASES = [
    ("plain", "resident", "1f1b", 3, "train_step"),
    ("ties and skips", "disk", "1f1b", 3, "train_step"),
    ("ties and skips", "resident", "interleaved", 2, "train_step"),
    ("ties and skips", "resident", "gpipe", 2, "evaluate"),
]


def make_ranks(
    model: Model, plan: str, family: str, num_ranks: int, kind: str
) -> tuple[list[Model], list[Program]]:
    schedule = make_named(family, num_ranks, NUM_MICROBATCHES, even_costs(num_ranks))
    num_stages = schedule.num_stages
    bounds = [len(model.blocks) * at // num_stages for at in range(num_stages + 1)]
    pipeline = make_pipeline(schedule, bounds)
    parts = list(cut_model(model, pipeline.owners))
    plans = [
        make_plan(part, num_microbatches=NUM_MICROBATCHES, tied_sum="per_step", **PLANS[plan])
        for part in parts
    ]
    return parts, [
        lower_plan(replace(planned, order=SCHEDULED, pipeline=pipeline), part, kind)
        for planned, part in zip(plans, parts, strict=True)
    ]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)), name="case")
def make_case(request: pytest.FixtureRequest):
    name, plan, family, num_ranks, kind = request.param
    return make_ranks(MODELS[name], plan, family, num_ranks, kind)


def replace_rank(programs: Sequence[Program], rank: int, tasks: Sequence[Task]) -> list[Program]:
    changed = list(programs)
    changed[rank] = with_tasks(programs[rank], tuple(tasks))
    return changed


def assert_rejected(programs: Sequence[Program], models: Sequence[Model], what: str) -> None:
    try:
        verify_ranks(programs, models)
    except RuleError:
        return
    pytest.fail(f"{what} was accepted")


def test_ranks_pass_and_their_texts_parse_back(case) -> None:
    models, programs = case
    proofs = verify_ranks(programs, models)
    assert [len(proof.entries) for proof in proofs] == [len(each.tasks) for each in programs]
    assert verify_ranks(programs) == proofs
    for program in programs:
        assert parse_program(format_program(program)) == program


def test_a_deleted_task_is_missed(case) -> None:
    models, programs = case
    for rank, program in enumerate(programs):
        for index, task in enumerate(program.tasks):
            tasks = program.tasks[:index] + program.tasks[index + 1 :]
            assert_rejected(
                replace_rank(programs, rank, tasks),
                models,
                f"rank {rank} without {format_task(task)}",
            )


def test_a_duplicated_task_is_seen(case) -> None:
    models, programs = case
    for rank, program in enumerate(programs):
        for index, task in enumerate(program.tasks):
            tasks = program.tasks[: index + 1] + program.tasks[index:]
            assert_rejected(
                replace_rank(programs, rank, tasks),
                models,
                f"rank {rank} with {format_task(task)} twice",
            )


def test_swapped_neighbours_that_conflict_are_seen(case) -> None:
    models, programs = case
    for rank, program in enumerate(programs):
        for index in range(len(program.tasks) - 1):
            one, other = program.tasks[index : index + 2]
            if not _conflict(one, other):
                continue
            tasks = (*program.tasks[:index], other, one, *program.tasks[index + 2 :])
            assert_rejected(
                replace_rank(programs, rank, tasks),
                models,
                f"rank {rank}: {format_task(one)} after {format_task(other)}",
            )


def test_messages_of_a_channel_in_another_order_are_seen(case) -> None:
    models, programs = case
    seen = 0
    for rank, program in enumerate(programs):
        places = [at for at, task in enumerate(program.tasks) if isinstance(task, Send)]
        for first, second in pairwise(places):
            one, other = program.tasks[first], program.tasks[second]
            if one.peer != other.peer:
                continue
            tasks = list(program.tasks)
            tasks[first], tasks[second] = other, one
            with pytest.raises(RuleError):
                verify_ranks(replace_rank(programs, rank, tasks), models)
            # Without the model only the channel itself can tell.
            with pytest.raises(RuleError):
                verify_ranks(replace_rank(programs, rank, tasks))
            seen += 1
    assert seen


def test_a_message_to_another_peer_is_seen(case) -> None:
    models, programs = case
    for rank, program in enumerate(programs):
        for index, task in enumerate(program.tasks):
            if isinstance(task, Send | Recv):
                for peer in range(-1, len(programs) + 1):
                    if peer == task.peer:
                        continue
                    tasks = list(program.tasks)
                    tasks[index] = type(task)(buffer=task.buffer, peer=peer)
                    with pytest.raises(RuleError, match="rule messages"):
                        verify_ranks(replace_rank(programs, rank, tasks), models)


def test_sums_of_tied_parameters_keep_their_order() -> None:
    models, programs = make_ranks(MODELS["ties and skips"], "resident", "1f1b", 3, "train_step")
    seen = 0
    for rank, program in enumerate(programs):
        for index, task in enumerate(program.tasks):
            if isinstance(task, SumTied):
                tasks = list(program.tasks)
                tasks[index] = SumTied(
                    parameter=task.parameter, reads=task.reads[::-1], writes=task.writes
                )
                with pytest.raises(RuleError, match=r"rule reads.*adds in another order"):
                    verify_ranks(replace_rank(programs, rank, tasks), models)
                seen += 1
    assert seen >= 4


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    _, programs = make_ranks(MODELS["plain"], "resident", "1f1b", 2, "train_step")
    crossed = []
    for program in programs:
        messages = [task for task in program.tasks if isinstance(task, Send | Recv)]
        sends = [task for task in messages if isinstance(task, Send)]
        # Every rank sends all that it has before it receives anything.
        crossed.append(
            with_tasks(program, (*sends, *(task for task in messages if task not in sends)))
        )
    with pytest.raises(RuleError, match="rule deadlock: 2 of 2 ranks wait") as caught:
        check_deadlock(crossed)
    assert "rank 0 waits at task 0 (SEND value/" in str(caught.value)
    assert "rank 1 waits at task 0 (SEND dvalue/" in str(caught.value)


def test_programs_of_all_ranks_are_wanted() -> None:
    models, programs = make_ranks(MODELS["plain"], "resident", "1f1b", 3, "train_step")
    with pytest.raises(RuleError, match="rule whole: the programs are of ranks"):
        verify_ranks(programs[::-1], models[::-1])
    with pytest.raises(RuleError, match="rule whole: the model is cut for 3 ranks, not 2"):
        verify_ranks(programs[:2], models[:2])
    others, _ = make_ranks(MODELS["plain"], "resident", "interleaved", 3, "train_step")
    with pytest.raises(RuleError, match="rule whole: the parts are not those of one model"):
        verify_ranks(programs, [models[0], others[1], models[2]])
    _, evaluation = make_ranks(MODELS["plain"], "resident", "1f1b", 3, "evaluate")
    with pytest.raises(RuleError, match="rule whole: rank 1 has a evaluate program"):
        verify_ranks([programs[0], evaluation[1], programs[2]], models)


def test_every_kind_of_task_of_ranks_is_there() -> None:
    _, programs = make_ranks(MODELS["ties and skips"], "resident", "1f1b", 3, "train_step")
    kinds = {type(task) for program in programs for task in program.tasks}
    assert {Send, Recv, SumTied, PackNorms, PackLosses} <= kinds


def _conflict(one: Task, other: Task) -> bool:
    def touched(task: Task) -> tuple[set, set]:
        changed = set(writes_of(task))
        if isinstance(task, Free):
            changed.add((task.buffer, task.tier))
        return {*reads_of(task), *changed}, changed

    first, first_changed = touched(one)
    second, second_changed = touched(other)
    return bool(first & second_changed or second & first_changed)
