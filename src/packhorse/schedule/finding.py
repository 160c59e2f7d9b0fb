"""The schedule that a name means: a named family, `searched`, or a function in a person's own file.

In: a name, or `file.py:function`. Out: a schedule, or an error that says what is wrong with the
name, the file, the function, or what it returned. A function is called with the number of ranks,
the number of microbatches and the costs; whether what it returns is right is for `check_schedule`
to say.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final, cast

from packhorse.errors import InputError
from packhorse.schedule.costs import Costs
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.searched import make_searched
from packhorse.schedule.spec import LETTERS, Schedule, Task

SEARCHED: Final = "searched"
NAMES: Final = (*FAMILIES, SEARCHED)
_SHAPE: Final = "return Schedule(placement={stage: rank, ...}, orders=[[task, ...], ...])"


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    num_stages: int | None = None,
) -> Schedule:
    """Make the schedule of a name.

    Raises:
        InputError: there is no such schedule, or a person's function fails.
        DoesNotFitError: nothing that may be searched fits the caps.
    """
    if name in FAMILIES:
        return make_named(name, num_ranks, num_microbatches, costs, num_stages=num_stages)
    if num_stages is not None:
        raise InputError(
            f"{name} decides on its stages itself, and {num_stages} are asked for",
            where="the number of stages",
            fix="leave it out",
        )
    if name == SEARCHED:
        return make_searched(num_ranks, num_microbatches, costs)
    if names_function(name):
        return _call_function(name, num_ranks, num_microbatches, costs)
    nearest = get_close_matches(name, NAMES, n=1, cutoff=0.4)
    hint = f"nearest: {nearest[0]}; " if nearest else ""
    raise InputError(
        f"there is no schedule {name!r}",
        where="the schedule's name",
        fix=f"{hint}take one of {', '.join(NAMES)}, or file.py:function",
    )


def names_function(name: str) -> bool:
    """Whether a name is that of a function in a file."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def _call_function(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    function = _load_function(name)
    path = name.rpartition(":")[0]
    call = f"{name}({num_ranks}, {num_microbatches}, costs)"
    try:
        made = function(num_ranks, num_microbatches, costs)
    except Exception as error:
        raise InputError(
            f"the schedule's function fails: {type(error).__name__}: {error}",
            where=f"{_find_line(error, path)}, called as {call}",
            fix="right the function; it is called with ranks, microbatches and costs",
        ) from error
    return _take_schedule(made, call)


def _load_function(name: str) -> Callable[[int, int, Costs], object]:
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise InputError("there is no such file", where=path, fix="check the path before the colon")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"the file cannot be run: {type(error).__name__}: {error}",
            where=_find_line(error, path),
            fix="right the file; it is run as any module",
        ) from error
    found: object = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        nearest = get_close_matches(function, own, n=1, cutoff=0.4)
        raise InputError(
            f"the file has no function {function!r}",
            where=path,
            fix=f"nearest: {nearest[0]}" if nearest else "write its name after the colon",
        )
    return cast("Callable[[int, int, Costs], object]", found)  # a person's own, checked on return


def _find_line(error: Exception, path: str) -> str:
    """Give the innermost line of the person's file that an error passed."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(path).absolute()]
    lines = lines or [frame.lineno for frame in frames if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


def _take_schedule(made: object, call: str) -> Schedule:
    """Take what a function returned, with lists for tuples and one rank for a tuple of one."""
    if not isinstance(made, Schedule):
        raise InputError(
            f"the schedule's function returned a {type(made).__name__}, not a Schedule",
            where=call,
            fix=_SHAPE,
        )
    placement = cast("object", made.placement)  # a person's values, not what the types say
    orders = cast("object", made.orders)  # likewise
    if not _is_mapping(placement) or not _is_list(orders):
        raise InputError(
            f"placement is a {type(placement).__name__} and orders a {type(orders).__name__}",
            where=call,
            fix=_SHAPE,
        )
    return Schedule(
        placement={
            _take_number(stage, "a stage", call): _take_ranks(ranks, stage, call)
            for stage, ranks in cast("Mapping[object, object]", placement).items()  # looked at next
        },
        orders=tuple(
            _take_order(order, rank, call)
            for rank, order in enumerate(cast("Sequence[object]", orders))  # looked at next
        ),
    )


def _take_ranks(ranks: object, stage: object, call: str) -> tuple[int, ...]:
    many = cast("Sequence[object]", ranks) if _is_list(ranks) else (ranks,)  # looked at next
    return tuple(_take_number(rank, f"a rank of stage {stage}", call) for rank in many)


def _take_order(order: object, rank: int, call: str) -> tuple[Task, ...]:
    if not _is_list(order):
        raise InputError(
            f"the order of rank {rank} is a {type(order).__name__}", where=call, fix=_SHAPE
        )
    tasks: list[Task] = []
    for at, task in enumerate(cast("Sequence[Any]", order)):  # Any: looked at one by one
        if type(task) not in LETTERS:
            raise InputError(
                f"task {at} of rank {rank} is a {type(task).__name__}: {task!r:.60}",
                where=call,
                fix="use Forward, Backward, InputGrad and WeightGrad of packhorse.schedule.spec",
            )
        for number in (task.stage, task.microbatch):
            _take_number(number, f"a number of task {at} of rank {rank}", call)
        tasks.append(task)
    return tuple(tasks)


def _take_number(number: object, what: str, call: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(f"{what} is {number!r:.60}, not a whole number", where=call, fix=_SHAPE)
    return number


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)
