"""Residency: what lives away from the device is brought for its uses and taken back.

In: tasks, the table of buffers, and the tier of rest of those without a home. Out: the same tasks
with Copy and Free for every buffer that has a place in another tier. Uses are in the device, or for
updates in the host. A buffer stays where it is between uses in one tier that are neighbours; else
it leaves for its tier of rest after the first and comes from there before the second. It is copied
back only when it was changed since, and a buffer without a home is dropped everywhere at its end.

Neighbours are counted in stretches: Forwards of a block that follow each other (over micro-batches)
are one stretch; so are its Backwards, or halves of them, with their Recomputes; so are all of them
where each Backward follows its Forward over several micro-batches; so is each Update after the last
Backward. Norms and updates inside the backward belong to its stretch. Two uses are neighbours when
they are in the same stretch or in two that follow each other. So what a block needs is brought once
for all micro-batches that go through it together, and a gradient stays until the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from packhorse.program.buffers import NORM, Buffer, BufferId, TierName
from packhorse.program.tasks import (
    BlockTask,
    Copy,
    Forward,
    Free,
    GradNorm,
    Task,
    Update,
    accesses_of,
    reads_of,
    writes_of,
)


class _Use(NamedTuple):
    # A task that touches a buffer in a tier.
    position: int
    tier: TierName
    changes: bool
    creates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    # What is inserted before and after the tasks at their positions.
    before: dict[int, list[Task]]
    after: dict[int, list[Task]]

    def bring(self, position: int, *tasks: Task) -> None:
        self.before.setdefault(position, []).extend(tasks)

    def leave(self, position: int, *tasks: Task) -> None:
        self.after.setdefault(position, []).extend(tasks)


def add_residency(
    tasks: Sequence[Task],
    buffers: Mapping[BufferId, Buffer],
    rests: Mapping[BufferId, TierName],
) -> tuple[Task, ...]:
    """Insert the copies and frees of every buffer that may lie outside the device tier.

    Args:
        rests: where a buffer without a home waits between its uses.
    """
    stretches = _number_stretches(tasks)
    moves = _Moves(before={}, after={})
    for buffer, uses in _find_uses(tasks, buffers).items():
        rest = buffers[buffer].home or rests[buffer]
        _move(buffers[buffer], rest, uses, stretches, moves)
    result: list[Task] = []
    for position, task in enumerate(tasks):
        if position in moves.before:
            result += moves.before[position]
        result.append(task)
        if position in moves.after:
            result += moves.after[position]
    return tuple(result)


def moves_between_tiers(buffer: Buffer) -> bool:
    """Whether a buffer may leave the device; this pass then takes it along and drops it."""
    return len(buffer.pools) > 1 and buffer.id != NORM


def _move(
    buffer: Buffer, rest: TierName, uses: Sequence[_Use], stretches: Sequence[int], moves: _Moves
) -> None:
    # Between uses that are no neighbours the tier of rest holds the newest version.
    newest: set[TierName] = set() if buffer.home is None else {rest}
    waits = buffer.home is not None
    for index, use in enumerate(uses):
        following = uses[index + 1] if index + 1 < len(uses) else None
        ends = following is None and buffer.home is None
        if not use.creates and use.tier not in newest:
            copy = Copy(buffer=buffer.id, source=rest, target=use.tier)
            if ends and rest == "device":
                # The device has no further use for it: it goes at once, and its room is free.
                moves.leave(uses[index - 1].position, copy, Free(buffer=buffer.id, tier=rest))
                waits = False
            else:
                moves.bring(use.position, copy)
            newest.add(use.tier)
        if use.changes:
            newest = {use.tier}
        if use.tier == rest:
            waits = not ends
            if ends:
                moves.leave(use.position, Free(buffer=buffer.id, tier=rest))
            continue
        near = following is not None and (
            following.tier == use.tier
            and stretches[following.position] - stretches[use.position] <= 1
        )
        if near:
            continue
        if rest not in newest and not ends:
            moves.leave(use.position, Copy(buffer=buffer.id, source=use.tier, target=rest))
            newest.add(rest)
            waits = True
        moves.leave(use.position, Free(buffer=buffer.id, tier=use.tier))
        newest.discard(use.tier)
        if ends and waits:
            moves.leave(use.position, Free(buffer=buffer.id, tier=rest))


def _find_uses(
    tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer]
) -> dict[BufferId, list[_Use]]:
    found: dict[BufferId, list[_Use]] = {}
    moving = {name for name, buffer in buffers.items() if moves_between_tiers(buffer)}
    for position, task in enumerate(tasks):
        _, names, _, changed = accesses_of(task)
        if moving.isdisjoint(names) and moving.isdisjoint(changed):
            continue
        read, written = reads_of(task), writes_of(task)
        for buffer, tier in dict.fromkeys([*read, *written]):
            if buffer in moving:
                found.setdefault(buffer, []).append(
                    _Use(
                        position=position,
                        tier=tier,
                        changes=(buffer, tier) in written,
                        creates=(buffer, tier) not in read,
                    )
                )
    return found


def _number_stretches(tasks: Sequence[Task]) -> list[int]:
    numbers: list[int] = []
    stretch = 0
    summed = False
    runs = [task for task in tasks if isinstance(task, BlockTask)]
    starts = _find_starts(runs)
    num_runs = 0
    for task in tasks:
        if isinstance(task, BlockTask):
            stretch += starts[num_runs]
            num_runs += 1
        match task:
            case Update() if summed:
                stretch += 1
            case GradNorm():
                summed = True
            case _:
                pass
        numbers.append(stretch)
    return numbers


def _find_starts(runs: Sequence[BlockTask]) -> list[bool]:
    # Which runs of blocks begin a stretch: where another block begins, or the block's backward,
    # unless its forward goes on afterwards.
    starts: list[bool] = []
    for _, group in groupby(runs, key=lambda task: task.block):
        forwards = [isinstance(task, Forward) for task in group]
        turns = [before != after for before, after in pairwise(forwards)]
        backward_at = [at for at, is_forward in enumerate(forwards) if not is_forward]
        mixed = bool(backward_at) and any(forwards[backward_at[0] : backward_at[-1]])
        starts += [True, *([False] * len(turns) if mixed else turns)]
    return starts
