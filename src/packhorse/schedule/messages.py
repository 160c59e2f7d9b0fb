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

from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.errors import RuleError
from packhorse.schedule.costs import even_costs
from packhorse.schedule.needs import list_needs
from packhorse.schedule.spec import Schedule, Task, WeightGrad, name_task
from packhorse.schedule.timing import time_schedule


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


def order_tasks(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """Put the tasks of all ranks into one order that keeps each rank's own and every need.

    It is the order in which they begin when all stages take the same time.
    """
    timing = time_schedule(schedule, even_costs(schedule.num_stages))
    begins = [
        (start_ns, rank, at)
        for rank, times in enumerate(timing.ranks)
        for at, start_ns in enumerate(times.starts_ns)
    ]
    return tuple((rank, schedule.orders[rank][at]) for _, rank, at in sorted(begins))


def project_messages(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Give each rank's tasks with the messages between them."""
    ordered = order_tasks(schedule)
    rank_of = {task: rank for rank, task in ordered}
    users: dict[Task, list[int]] = {}
    for rank, task in ordered:
        if isinstance(task, WeightGrad):
            continue
        for need in list_needs(task, schedule.num_stages, rank_of):
            if rank_of[need] != rank:
                users.setdefault(need, []).append(rank)
    lists: list[list[Action]] = [[] for _ in schedule.orders]
    for rank, task in ordered:
        lists[rank].append(task)
        for user in users.get(task, ()):
            lists[rank].append(Send(task=task, target=user))
            lists[user].append(Receive(task=task, source=rank))
    return tuple(map(tuple, lists))


def check_messages(lists: Sequence[Sequence[Action]]) -> None:
    """Replay all ranks' lists with sends that end only when their receive has begun.

    Raises:
        RuleError: ranks wait for each other for ever; names what each of them waits at.
    """
    at = [0] * len(lists)
    pending = list(range(len(lists)))
    while pending:
        rank = pending.pop()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            match action:
                case Send():
                    peer, answer = action.target, Receive(task=action.task, source=rank)
                case Receive():
                    peer, answer = action.source, Send(task=action.task, target=rank)
                case _:
                    at[rank] += 1
                    continue
            if at[peer] == len(lists[peer]) or lists[peer][at[peer]] != answer:
                break
            at[rank] += 1
            at[peer] += 1
            pending.append(peer)
    stuck = [rank for rank, place in enumerate(at) if place < len(lists[rank])]
    if stuck:
        raise RuleError(
            f"{len(stuck)} ranks wait for messages for ever",
            rule="deadlock",
            where="\n".join(
                f"rank {rank} waits at action {at[rank]}: {name_action(lists[rank][at[rank]])}"
                for rank in stuck[:12]
            ),
            fix="let both ends of a channel have its messages in the same order",
        )


def name_action(action: Action) -> str:
    """Name an action in a few words, such as `send 2F0 to 3`."""
    match action:
        case Send():
            return f"send {name_task(action.task)} to {action.target}"
        case Receive():
            return f"receive {name_task(action.task)} from {action.source}"
        case _:
            return name_task(action)
