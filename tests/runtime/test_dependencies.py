"""What a task must follow, within its program and from one program to the next."""

from __future__ import annotations

import pytest
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.program.program import Program, ProgramKind
from packhorse.runtime.dependencies import History, find_dependencies

KINDS: tuple[ProgramKind, ...] = ("train_step", "evaluate", "save")


def lower(kind: ProgramKind, tier: str) -> Program:
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
    return lower_plan(plan, model, kind)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_programs_in_a_row_depend_on_each_other_as_one_program_does(tier, first, second):
    """Three programs, task by task, against the dependencies of all their tasks together."""
    programs = [lower(kind, tier) for kind in (first, second, first)]
    together = find_dependencies([task for program in programs for task in program.tasks])
    history = History()
    number = 0
    for program in programs:
        own = find_dependencies(program.tasks)
        begin = number
        for index in range(len(program.tasks)):
            after = {begin + other for other in own.inner[index]}
            after |= history.before(own.entering.get(index, {}))
            assert after == set(together.inner[number]), (index, program.tasks[index])
            number += 1
        history.add(own, begin, range(number))


def test_what_is_complete_is_forgotten():
    program = lower("train_step", "disk")
    own = find_dependencies(program.tasks)
    places = {place: True for places in own.entering.values() for place in places}
    history = History()
    history.add(own, 0, range(len(program.tasks)))
    assert history.before(places)
    last = len(program.tasks) - 1
    history.add(find_dependencies(()), last + 1, (last,))
    assert history.before(places) <= {last}
    history.add(find_dependencies(()), last + 1, ())
    assert not history.before(places)
