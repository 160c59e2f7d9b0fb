"""Every task of real programs deleted, duplicated or swapped with its neighbour, one at a time.

The verifier rejects each deletion and duplication in words that name the task. It rejects a swap,
or the two tasks touch different places and either order is right; then the audit against the
proof of the right program names the task.
"""

from __future__ import annotations

import pytest
from edits import with_tasks
from halved_orders import two_later
from models import make_model, make_plan

from packhorse.compiler.lower import Lowerer
from packhorse.errors import AuditError, RuleError
from packhorse.program.audit import check_against_proof
from packhorse.program.tasks import Free, Task, reads_of, writes_of
from packhorse.program.text import format_task
from packhorse.verifier.rules import verify_program

MODELS = {
    "plain": make_model(),
    "ties and skips": make_model(
        num_layers=3, tied_head=True, shared_layers=(1, 2, 3), skips=((0, 3),)
    ),
    "frozen": make_model(frozen=("embed",)),
    "saves nothing": make_model(saves=False),
    "halved": make_model(num_layers=3, tied_head=True, skips=((0, 3),), halved=True),
}
PLANS = {
    "resident": {"num_microbatches": 2, "clips": False},
    "disk": {
        "num_microbatches": 2,
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "activations": ("keep", "recompute"),
    },
    "layered": {
        "num_microbatches": 3,
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "activations": ("keep", "recompute"),
        "order": "layered",
        "tied_sum": "per_step",
    },
    "summed once": {"num_microbatches": 3, "gradients": "disk", "tied_sum": "per_step"},
}
CASES = [
    ("plain", "resident", "train_step"),
    ("ties and skips", "disk", "train_step"),
    ("frozen", "disk", "train_step"),
    ("saves nothing", "resident", "train_step"),
    ("ties and skips", "layered", "train_step"),
    ("ties and skips", "summed once", "train_step"),
    ("plain", "disk", "evaluate"),
    ("plain", "layered", "evaluate"),
    ("halved", "resident", "train_step"),
    ("halved", "summed once", "train_step"),
    ("frozen", "disk", "load"),
    ("frozen", "disk", "save"),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case).replace(" ", "_"), name="case")
def make_case(request: pytest.FixtureRequest):
    name, plan, kind = request.param
    model = MODELS[name]
    made = make_plan(model, **PLANS[plan])
    halves = two_later(model, made.numerics.num_microbatches) if name == "halved" else ()
    return model, Lowerer(model, halves).lower(made, kind)


def test_a_deleted_task_is_missed(case) -> None:
    model, program = case
    for index, task in enumerate(program.tasks):
        tasks = program.tasks[:index] + program.tasks[index + 1 :]
        with pytest.raises(RuleError) as caught:
            verify_program(with_tasks(program, tasks), model)
        assert _names(str(caught.value), task), f"{format_task(task)} deleted: {caught.value}"


def test_a_duplicated_task_is_named(case) -> None:
    model, program = case
    for index in range(len(program.tasks)):
        tasks = program.tasks[: index + 1] + program.tasks[index:]
        with pytest.raises(RuleError) as caught:
            verify_program(with_tasks(program, tasks), model)
        assert f"task {index + 1} " in str(caught.value)


def test_swapped_tasks_are_rejected_or_independent_and_audited(case) -> None:
    model, program = case
    proof = verify_program(program, model)
    num_accepted = 0
    for index in range(len(program.tasks) - 1):
        first, second = program.tasks[index : index + 2]
        swapped = with_tasks(
            program, (*program.tasks[:index], second, first, *program.tasks[index + 2 :])
        )
        independent = not _depends(first, second) and not _depends(second, first)
        if not independent:
            with pytest.raises(RuleError, match=f"task ({index}|{index + 1}) "):
                verify_program(swapped, model)
            continue
        # Independent tasks are rejected only where their order fills a pool: here there is room.
        run = verify_program(swapped, model)
        num_accepted += 1
        entry = run.entries[index]
        with pytest.raises(AuditError, match=f"task {index} "):
            check_against_proof(proof, index, entry.task, entry.used_bytes)
    assert num_accepted < len(program.tasks)


def _depends(first: Task, second: Task) -> bool:
    # Freeing a place changes it.
    changed = set(reads_of(first) if isinstance(first, Free) else writes_of(first))
    return not changed.isdisjoint({*reads_of(second), *writes_of(second)})


def _names(message: str, task: Task) -> bool:
    unsaid = ("reads=", "writes=", "work=", "at=")
    words = " ".join(word for word in format_task(task).split() if not word.startswith(unsaid))
    return words in " ".join(message.split()) or any(
        buffer in message for buffer, _ in (*reads_of(task), *writes_of(task))
    )
