"""Edits of a program by the words of its text: `drop(program, "CP param/3 disk>device")`.

A task is found by how its text begins, blanks squeezed; it must be the only one, or is counted
with `number`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packhorse.errors import RuleError
from packhorse.model.spec import Model
from packhorse.program.buffers import Buffer
from packhorse.program.program import Program
from packhorse.program.tasks import Task
from packhorse.program.text import format_task
from packhorse.verifier.rules import verify_program


def find(program: Program, words: str, number: int | None = None) -> int:
    """The index of the task whose text begins with `words`."""
    wanted = words.split()
    found = [
        index
        for index, task in enumerate(program.tasks)
        if format_task(task).split()[: len(wanted)] == wanted
    ]
    assert found, f"no task begins with {words!r}"
    if number is None:
        assert len(found) == 1, f"{len(found)} tasks begin with {words!r}"
    return found[number or 0]


def drop(program: Program, words: str, number: int | None = None) -> Program:
    """Take a task out."""
    index = find(program, words, number)
    return with_tasks(program, program.tasks[:index] + program.tasks[index + 1 :])


def insert(program: Program, task: Task, *, before: str) -> Program:
    """Put a task in front of another one."""
    index = find(program, before)
    return with_tasks(program, (*program.tasks[:index], task, *program.tasks[index:]))


def move(program: Program, words: str, *, before: str, number: int | None = None) -> Program:
    """Take a task to a place in front of another one."""
    task = program.tasks[find(program, words, number)]
    return insert(drop(program, words, number), task, before=before)


def repeat(program: Program, words: str, number: int | None = None) -> Program:
    """Do a task twice in a row."""
    index = find(program, words, number)
    return with_tasks(program, program.tasks[: index + 1] + program.tasks[index:])


def change(program: Program, words: str, **fields: Any) -> Program:  # Any: fields of any task
    """Change fields of a task."""
    index = find(program, words)
    changed = replace(program.tasks[index], **fields)
    return with_tasks(program, (*program.tasks[:index], changed, *program.tasks[index + 1 :]))


def change_buffer(program: Program, name: str, **fields: Any) -> Program:  # Any: fields of a buffer
    """Change fields of a buffer."""
    changed = replace(program.buffers[name], **fields)
    return replace(program, buffers={**program.buffers, name: changed})


def add_buffer(program: Program, buffer: Buffer) -> Program:
    """Declare one more buffer."""
    return replace(program, buffers={**program.buffers, buffer.id: buffer})


def with_tasks(program: Program, tasks: tuple[Task, ...]) -> Program:
    """Replace all tasks."""
    return replace(program, tasks=tasks)


def reject(program: Program, model: Model | None, rule: str, *words: str) -> RuleError:
    """Check that a program is rejected by a rule, in words that name all of `words`."""
    with pytest.raises(RuleError) as caught:
        verify_program(program, model)
    message = str(caught.value)
    squeezed = " ".join(message.split())
    assert caught.value.rule == rule, message
    for word in words:
        assert word in squeezed, message
    assert len(message.splitlines()) < 30
    return caught.value
