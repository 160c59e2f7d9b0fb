"""Random changes of right programs, and whether one is harmless, told without the verifier.

In: the programs of all ranks. Out: `Mutant`s: a task dropped, done twice, swapped with another or
moved; a message swapped, moved, or sent to another rank or under another name. A mutant is harmless
if it does the same by an argument of its own:

    every rank has the same tasks as before
    every buffer in every tier sees them in the same order, but for reads between two changes
    each tier's pools, counted anew, hold no more than they may
    program order and messages together have no circle, and both ends of a channel agree
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final

from packhorse.program.buffers import BufferId, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Free, Recv, Send, Task, reads_of, workspace_of, writes_of

Tasks = tuple[Task, ...]
Place = tuple[BufferId, TierName]
NEAR: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """All ranks' programs with one change on one rank; `index` is where."""

    change: str
    rank: int
    index: int
    programs: tuple[Program, ...]


def draw_mutant(random: Random, programs: Sequence[Program], change: str) -> Mutant | None:
    """Draw a change of one kind; None where it would change nothing."""
    rank = random.randrange(len(programs))
    tasks = programs[rank].tasks
    of_messages = change.startswith("message")
    places = [at for at, task in enumerate(tasks) if not of_messages or _is_message(task)]
    if not places:
        return None
    index = random.choice(places)
    changed = CHANGES[change](random, programs, tasks, index)
    if changed == tasks:
        return None
    mutated = list(programs)
    mutated[rank] = replace(programs[rank], tasks=changed)
    return Mutant(change=change, rank=rank, index=index, programs=tuple(mutated))


def is_harmless(programs: Sequence[Program], mutant: Mutant) -> bool:
    """Whether a mutant does what the programs do, within the same pools."""
    before, after = programs[mutant.rank], mutant.programs[mutant.rank]
    return (
        Counter(before.tasks) == Counter(after.tasks)
        and _histories(before.tasks) == _histories(after.tasks)
        and _keeps_capacity(after)
        and _channels_agree(mutant.programs)
        and not _has_circle(mutant.programs)
    )


def _drop(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del random, programs
    return tasks[:at] + tasks[at + 1 :]


def _repeat(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del programs
    again = random.choice((at + 1, random.randint(at + 1, len(tasks))))
    return (*tasks[:again], tasks[at], *tasks[again:])


def _swap_neighbours(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del random, programs
    return _swap(tasks, at, min(at + 1, len(tasks) - 1))


def _swap_any(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del programs
    return _swap(tasks, at, random.randrange(len(tasks)))


def _move(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del programs
    rest = _drop(random, (), tasks, at)
    low, high = max(at - NEAR, 0), min(at + NEAR, len(rest))
    to = random.choice((random.randint(low, high), random.randint(0, len(rest))))
    return (*rest[:to], tasks[at], *rest[to:])


def _swap_messages(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del programs
    kind = type(tasks[at])
    alike = [other for other, task in enumerate(tasks) if type(task) is kind]
    return _swap(tasks, at, random.choice(alike))


def _send_elsewhere(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    message = tasks[at]
    assert isinstance(message, Send | Recv)
    peer = random.randrange(len(programs))
    return (*tasks[:at], replace(message, peer=peer), *tasks[at + 1 :])


def _rename_message(random: Random, programs: Sequence[Program], tasks: Tasks, at: int) -> Tasks:
    del programs
    message = tasks[at]
    assert isinstance(message, Send | Recv)
    names = [task.buffer for task in tasks if isinstance(task, Send | Recv)]
    return (*tasks[:at], replace(message, buffer=random.choice(names)), *tasks[at + 1 :])


CHANGES: Final[Mapping[str, Callable[[Random, Sequence[Program], Tasks, int], Tasks]]] = {
    "dropped": _drop,
    "done twice": _repeat,
    "swapped with its neighbour": _swap_neighbours,
    "swapped with any": _swap_any,
    "moved": _move,
    "message dropped": _drop,
    "message done twice": _repeat,
    "message swapped with another": _swap_messages,
    "message moved": _move,
    "message to another rank": _send_elsewhere,
    "message of another buffer": _rename_message,
}


def _swap(tasks: Tasks, one: int, other: int) -> Tasks:
    swapped = list(tasks)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return tuple(swapped)


def _is_message(task: Task) -> bool:
    return isinstance(task, Send | Recv)


def _histories(tasks: Tasks) -> Mapping[Place, list[Counter[Task]]]:
    # What each place sees: all readers up to a change together, the change alone.
    found: dict[Place, list[Counter[Task]]] = defaultdict(lambda: [Counter()])
    for task in tasks:
        changed = set(reads_of(task) if isinstance(task, Free) else writes_of(task))
        for place in set(reads_of(task)) - changed:
            found[place][-1][task] += 1
        for place in changed:
            found[place] += [Counter([task]), Counter()]
    return found


def _keeps_capacity(program: Program) -> bool:
    there: set[Place] = {
        (each.id, each.home)
        for each in program.buffers.values()
        if each.home is not None and program.finds(each)
    }
    for task in program.tasks:
        held: Counter[PoolId] = Counter({program.workspace_pool: workspace_of(task)})
        there.update(writes_of(task))
        for name, tier in there:
            held[program.buffers[name].pools[tier]] += program.buffers[name].size_bytes
        if any(held[pool.id] > pool.capacity_bytes for pool in program.pools):
            return False
        if isinstance(task, Free):
            there.discard((task.buffer, task.tier))
    return True


def _channels_agree(programs: Sequence[Program]) -> bool:
    sent: dict[tuple[int, int], list[BufferId]] = defaultdict(list)
    received: dict[tuple[int, int], list[BufferId]] = defaultdict(list)
    for program in programs:
        for task in program.tasks:
            if isinstance(task, Send):
                sent[program.rank, task.peer].append(task.buffer)
            elif isinstance(task, Recv):
                received[task.peer, program.rank].append(task.buffer)
    return sent == received


def _has_circle(programs: Sequence[Program]) -> bool:
    # A message is one node of both ranks' orders; channels are known to agree.
    counts: Counter[object] = Counter()
    orders: list[list[object]] = []
    for program in programs:
        order: list[object] = []
        for task in program.tasks:
            if isinstance(task, Send | Recv):
                ends = (program.rank, task.peer)
                channel = ends if isinstance(task, Send) else ends[::-1]
                counts[program.rank, channel] += 1
                order.append((channel, counts[program.rank, channel]))
        orders.append(order)
    after: dict[object, list[object]] = defaultdict(list)
    waits: Counter[object] = Counter()
    for order in orders:
        for one, other in pairwise(order):
            after[one].append(other)
            waits[other] += 1
    nodes = {node for order in orders for node in order}
    ready = [node for node in nodes if not waits[node]]
    num_done = 0
    while ready:
        num_done += 1
        for other in after[ready.pop()]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    return num_done < len(nodes)
