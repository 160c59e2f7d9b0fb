"""The schedule and costs that a command's options mean, made or read, and proved right.

In: a `ScheduleRequest`, the options as they were typed. Out: a schedule that keeps every rule, and
its costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packhorse.cli.kinds import read_text
from packhorse.cli.schedule_costs import read_costs
from packhorse.cli.screen import Tell
from packhorse.errors import FileFormatError, InputError
from packhorse.schedule.costs import Costs
from packhorse.schedule.csv_text import parse_csv
from packhorse.schedule.finding import SEARCHED, make_schedule
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.spec import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What was typed: a name, sizes, costs and caps; None for what was left out."""

    name: str
    num_ranks: int | None
    num_microbatches: int | None
    num_stages: int | None = None
    num_replicas: int = 1
    costs: str = ""
    memory_cap: str | None = None


def take_schedule(request: ScheduleRequest, tell: Tell | None = None) -> tuple[Schedule, Costs]:
    """Make the schedule, or read it, and prove it right; `tell` hears of what may take long.

    Raises:
        InputError: an option is wrong or missing, or a file cannot be read.
        RuleError: the schedule breaks a rule.
    """
    if request.name.endswith(".csv"):
        schedule = _read_csv(request)
        costs = read_request_costs(request, schedule.num_ranks)
    else:
        num_ranks, num_microbatches = need_sizes(request)
        costs = read_request_costs(request, num_ranks)
        if tell is not None and request.name == SEARCHED:
            tell("searching", 0, None)
        schedule = make_schedule(
            request.name, num_ranks, num_microbatches, costs, num_stages=request.num_stages
        )
        found = schedule.num_ranks, schedule.num_microbatches
        if found != (num_ranks, num_microbatches):
            raise InputError(
                f"the schedule is of {found[0]} ranks and {found[1]} microbatches, not of"
                f" {num_ranks} and {num_microbatches}",
                where=request.name,
                fix="make it for the ranks and microbatches that the function is called with",
            )
    check_schedule(schedule)
    return schedule, costs


def read_request_costs(request: ScheduleRequest, num_ranks: int) -> Costs:
    """Read the costs and caps of a request.

    Raises:
        InputError: as `read_costs`.
    """
    return read_costs(
        request.costs, request.memory_cap, num_ranks, num_replicas=request.num_replicas
    )


def need_sizes(request: ScheduleRequest) -> tuple[int, int]:
    """Give the numbers of ranks and microbatches.

    Raises:
        InputError: one of them was not given.
    """
    if request.num_ranks is None or request.num_microbatches is None:
        option, example = ("--ranks", 4) if request.num_ranks is None else ("--microbatches", 8)
        raise InputError(
            f"{option} is missing",
            where=request.name or "packhorse schedule",
            fix=f"add it, for example {option} {example}",
        )
    return request.num_ranks, request.num_microbatches


def _read_csv(request: ScheduleRequest) -> Schedule:
    path = request.name
    try:
        schedule = parse_csv(read_text(Path(path)))
    except FileFormatError as error:
        place = path if error.where == path else f"{path}: {error.where}"
        raise FileFormatError(error.what, where=place, fix=error.fix) from error
    for option, wanted, found in (
        ("--ranks", request.num_ranks, schedule.num_ranks),
        ("--microbatches", request.num_microbatches, schedule.num_microbatches),
        ("--stages", request.num_stages, schedule.num_stages),
    ):
        if wanted not in (None, found):
            raise InputError(
                f"{option} is {wanted}, and the file has {found}",
                where=path,
                fix="leave the option out, or name another file",
            )
    return schedule
