"""A schedule by its name, and a person's own function: run, or told exactly why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import InputError, PackhorseError
from packhorse.schedule.costs import even_costs
from packhorse.schedule.finding import NAMES, make_schedule, names_function
from packhorse.schedule.proof import check_schedule
from tests.schedule.schedule_cases import make_even

HEAD = "from packhorse.schedule.spec import Backward, Forward, Schedule\n"
OWN = f"""{HEAD}

def mine(ranks, microbatches, costs):
    def order(rank):
        ahead = min(ranks - 1 - rank, microbatches)
        tasks = [Forward(stage=rank, microbatch=m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                tasks.append(Forward(stage=rank, microbatch=ahead + m))
            tasks.append(Backward(stage=rank, microbatch=m))
        return tasks
    placement = {{rank: rank for rank in range(ranks)}}
    return Schedule(placement=placement, orders=[order(rank) for rank in range(ranks)])
"""


def write(folder: Path, text: str) -> str:
    path = folder / "own.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:mine"


def fail(name: str) -> PackhorseError:
    with pytest.raises(InputError) as found:
        make_schedule(name, 2, 3, even_costs(2))
    assert found.value.fix
    return found.value


def test_twenty_lines_of_ones_own(tmp_path: Path) -> None:
    name = write(tmp_path, OWN)
    assert len(OWN.splitlines()) <= 20
    assert names_function(name)
    schedule = make_schedule(name, 4, 6, even_costs(4))
    assert schedule == make_even("1f1b", 4, 6)
    check_schedule(schedule)


def test_every_name_is_found() -> None:
    for name in NAMES:
        assert make_schedule(name, 2, 3, even_costs(2)).num_microbatches == 3
        assert not names_function(name)


def test_an_unknown_name_has_the_nearest() -> None:
    error = fail("zbv")
    assert error.what == "there is no schedule 'zbv'"
    assert error.fix is not None
    assert error.fix.startswith("nearest: zb-v; take one of gpipe, 1f1b, ")
    with pytest.raises(InputError, match="searched decides on its stages itself"):
        make_schedule("searched", 2, 3, even_costs(2), num_stages=4)


def test_a_file_that_is_not_there_or_cannot_run(tmp_path: Path) -> None:
    assert fail(f"{tmp_path}/none.py:mine").what == "there is no such file"
    error = fail(write(tmp_path, "x = 1\ny = 1 / 0\n"))
    assert error.what == "the file cannot be run: ZeroDivisionError: division by zero"
    assert error.where == f"{tmp_path}/own.py:2"
    error = fail(write(tmp_path, "x = 1\ndef mine(:\n"))
    assert "SyntaxError" in error.what
    assert error.where == f"{tmp_path}/own.py:2"


def test_a_function_that_is_not_there_or_fails(tmp_path: Path) -> None:
    error = fail(write(tmp_path, OWN.replace("mine", "mines")))
    assert error.what == "the file has no function 'mine'"
    assert error.fix == "nearest: mines"
    error = fail(write(tmp_path, OWN.replace("ahead = min", "ahead = max(None, 1) or min")))
    assert error.what.startswith("the schedule's function fails: TypeError: ")
    assert error.where is not None
    assert error.where.startswith(f"{tmp_path}/own.py:6, called as {tmp_path}/own.py:mine(2, 3,")


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("None", "the schedule's function returned a NoneType, not a Schedule"),
        ("Schedule(placement=[0], orders=[])", "placement is a list and orders a list"),
        ("Schedule(placement={0: 0}, orders=[0])", "the order of rank 0 is a int"),
        ("Schedule(placement={0: 'a'}, orders=[[]])", "a rank of stage 0 is 'a'"),
        ("Schedule(placement={None: 0}, orders=[[]])", "a stage is None"),
        ("Schedule(placement={0: 0}, orders=[['0F0']])", "task 0 of rank 0 is a str: '0F0'"),
        (
            "Schedule(placement={0: 0}, orders=[[Forward(stage=0, microbatch=0.5)]])",
            "a number of task 0 of rank 0 is 0.5",
        ),
    ],
)
def test_what_is_no_schedule_is_told(tmp_path: Path, returned: str, what: str) -> None:
    error = fail(write(tmp_path, f"{HEAD}def mine(*_):\n    return {returned}\n"))
    assert error.what.startswith(what)
