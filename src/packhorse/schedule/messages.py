"""What ranks send each other: sends and receives, inferred from a schedule.

In: a schedule without circles. Out: for each rank its tasks with `Send` and `Receive` between them.
All ranks' lists are projections of one total order of tasks, in which every message stands right
behind the task that makes it. So both ends of a channel see the same sequence, and even where a
send ends only when its receive has begun (a rendezvous), the replay never sticks:

    for each task in the total order:
        append it to its rank's list
        for each task on another rank that needs its value:
            append Send to this rank's list, Receive to the other's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packhorse.errors import RuleError
from packhorse.schedule.costs import even_costs
from packhorse.schedule.numbering import Numbered, number_tasks
from packhorse.schedule.spec import Schedule, Task, name_task
from packhorse.schedule.timing import Timing, time_numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Hand what `task` has made to another rank; done when that one receives."""

    task: Task
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Take what `task` has made from another rank."""

    task: Task
    source: int


Action = Task | Send | Receive
_End = tuple[int, int]
"""One end of a message: the rank at the other, and twice the task's code, odd where it arrives."""


def order_tasks(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """Put the tasks of all ranks into one order that keeps each rank's own and every need.

    It is the order in which they begin when all stages take the same time.
    """
    places = order_places(time_evenly(number_tasks(schedule)))
    return tuple((rank, schedule.orders[rank][at]) for rank, at in places)


def time_evenly(numbered: Numbered) -> Timing:
    """Give each task its time when all stages take the same.

    Raises:
        ValueError: the schedule never ends.
    """
    return time_numbered(numbered, even_costs(numbered.num_stages))


def order_places(timing: Timing) -> Iterator[tuple[int, int]]:
    """Give rank and place of each task as they begin; of equal begins, by rank and place."""
    begins = [start_ns for times in timing.ranks for start_ns in times.starts_ns]
    places = [
        (rank, at) for rank, times in enumerate(timing.ranks) for at in range(len(times.starts_ns))
    ]
    return (places[index] for index in sorted(range(len(begins)), key=begins.__getitem__))


def project_messages(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Give each rank's tasks with the messages between them."""
    numbered = number_tasks(schedule)
    users = _find_users(numbered)
    lists: list[list[Action]] = [[] for _ in schedule.orders]
    for rank, at in order_places(time_evenly(numbered)):
        task = schedule.orders[rank][at]
        lists[rank].append(task)
        for user in users.get(numbered.orders[rank][at], ()):
            lists[rank].append(Send(task=task, target=user))
            lists[user].append(Receive(task=task, source=rank))
    return tuple(map(tuple, lists))


def _find_users(numbered: Numbered) -> dict[int, list[int]]:
    """Give the other ranks with tasks that need what a task has made, by its code."""
    rank_of, needs_of = numbered.rank_of, numbered.needs_of
    users: dict[int, list[int]] = {}
    for rank, order in enumerate(numbered.orders):
        for code in order:
            for need in needs_of(code):
                if rank_of[need] != rank:
                    users.setdefault(need, []).append(rank)
    return users


def prove_messages(schedule: Schedule, numbered: Numbered, timing: Timing) -> None:
    """Project a schedule's messages, and replay them as `check_messages` does.

    Args:
        timing: of the schedule, when all stages take the same time.

    Raises:
        RuleError: ranks wait for each other for ever; names what each of them waits at.
    """
    users = _find_users(numbered)
    ends: list[list[_End]] = [[] for _ in schedule.orders]
    for rank, at in order_places(timing):
        code = numbered.orders[rank][at]
        for user in users.get(code, ()):
            ends[rank].append((user, 2 * code))
            ends[user].append((rank, 2 * code + 1))
    if any(place < len(own) for place, own in zip(_replay(ends), ends, strict=True)):
        check_messages(project_messages(schedule))


def check_messages(lists: Sequence[Sequence[Action]]) -> None:
    """Replay all ranks' lists with sends that end only when their receive has begun.

    Raises:
        RuleError: ranks wait for each other for ever; names what each of them waits at.
    """
    codes: dict[Task, int] = {}
    ends: list[list[_End]] = [[] for _ in lists]
    places: list[list[int]] = [[] for _ in lists]
    for rank, actions in enumerate(lists):
        for at, action in enumerate(actions):
            match action:
                case Send():
                    end = action.target, 2 * codes.setdefault(action.task, len(codes))
                case Receive():
                    end = action.source, 2 * codes.setdefault(action.task, len(codes)) + 1
                case _:
                    continue
            ends[rank].append(end)
            places[rank].append(at)
    stuck = [
        (rank, places[rank][done])
        for rank, done in enumerate(_replay(ends))
        if done < len(ends[rank])
    ]
    if stuck:
        raise RuleError(
            f"{len(stuck)} ranks wait for messages for ever",
            rule="deadlock",
            where="\n".join(
                f"rank {rank} waits at action {at}: {name_action(lists[rank][at])}"
                for rank, at in stuck[:12]
            ),
            fix="let both ends of a channel have its messages in the same order",
        )


def _replay(ends: Sequence[Sequence[_End]]) -> list[int]:
    """Give how many of its messages' ends each rank comes to have behind it."""
    at = [0] * len(ends)
    pending = list(range(len(ends)))
    while pending:
        rank = pending.pop()
        own = ends[rank]
        while at[rank] < len(own):
            peer, key = own[at[rank]]
            theirs = ends[peer]
            if at[peer] == len(theirs) or theirs[at[peer]] != (rank, key ^ 1):
                break
            at[rank] += 1
            at[peer] += 1
            pending.append(peer)
    return at


def name_action(action: Action) -> str:
    """Name an action in a few words, such as `send 2F0 to 3`."""
    match action:
        case Send():
            return f"send {name_task(action.task)} to {action.target}"
        case Receive():
            return f"receive {name_task(action.task)} from {action.source}"
        case _:
            return name_task(action)
