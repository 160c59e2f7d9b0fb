"""Residency: what lives away from the device is brought for its uses and taken back.

In: tasks and the table of buffers. Out: the same tasks with Copy and Free for every buffer that
has a place in another tier. A buffer stays in the device between uses that are neighbours; else
it leaves after the first and returns before the second. It is copied out only when it was
changed since it was last copied, and a buffer without a home is dropped everywhere at its end.

Neighbours are counted in strides: a Forward, a Backward with its Recompute, and each Update after
the last Backward are one stride; norms and updates inside the backward belong to its stride. Two
uses are neighbours when they are in the same stride or in two that follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packhorse.program.buffers import Buffer, BufferId, TierName
from packhorse.program.tasks import (
    Backward,
    Copy,
    Forward,
    Free,
    GradNorm,
    Recompute,
    Task,
    Update,
    reads_of,
    writes_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    # A task that touches a buffer in the device tier.
    position: int
    changes: bool
    creates: bool


def add_residency(tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer]) -> tuple[Task, ...]:
    """Insert the copies and frees of every buffer that may lie outside the device tier."""
    strides = _number_strides(tasks)
    before: dict[int, list[Task]] = {}
    after: dict[int, list[Task]] = {}
    for buffer, uses in _find_uses(tasks, buffers).items():
        away = away_tier(buffers[buffer])
        if away is None:
            continue
        _move(buffers[buffer], away, uses, strides, before, after)
    result: list[Task] = []
    for position, task in enumerate(tasks):
        result += [*before.get(position, []), task, *after.get(position, [])]
    return tuple(result)


def away_tier(buffer: Buffer) -> TierName | None:
    """The tier beside the device where a buffer may lie; None when it never leaves the device."""
    return next((tier for tier in buffer.pools if tier != "device"), None)


def _move(
    buffer: Buffer,
    away: TierName,
    uses: Sequence[_Use],
    strides: Sequence[int],
    before: dict[int, list[Task]],
    after: dict[int, list[Task]],
) -> None:
    present = False
    stored = buffer.home is not None
    changed = False
    for index, use in enumerate(uses):
        if not present and not use.creates:
            before.setdefault(use.position, []).append(
                Copy(buffer=buffer.id, source=away, target="device")
            )
        present = True
        changed = changed or use.changes
        ending = after.setdefault(use.position, [])
        is_last = index + 1 == len(uses)
        if not is_last and strides[uses[index + 1].position] - strides[use.position] <= 1:
            continue
        if changed and not (is_last and buffer.home is None):
            ending.append(Copy(buffer=buffer.id, source="device", target=away))
            stored, changed = True, False
        ending.append(Free(buffer=buffer.id, tier="device"))
        present = False
        if is_last and buffer.home is None and stored:
            ending.append(Free(buffer=buffer.id, tier=away))


def _find_uses(
    tasks: Sequence[Task], buffers: Mapping[BufferId, Buffer]
) -> dict[BufferId, list[_Use]]:
    found: dict[BufferId, list[_Use]] = {}
    for position, task in enumerate(tasks):
        read = [buffer for buffer, _ in reads_of(task)]
        written = [buffer for buffer, _ in writes_of(task)]
        for buffer in dict.fromkeys([*read, *written]):
            if away_tier(buffers[buffer]) is not None:
                found.setdefault(buffer, []).append(
                    _Use(
                        position=position,
                        changes=buffer in written,
                        creates=buffer not in read,
                    )
                )
    return found


def _number_strides(tasks: Sequence[Task]) -> list[int]:
    numbers: list[int] = []
    stride = 0
    summed = False
    recomputed = False
    for task in tasks:
        match task:
            case Backward() if recomputed:
                pass
            case Forward() | Recompute() | Backward():
                stride += 1
            case Update() if summed:
                stride += 1
            case GradNorm():
                summed = True
            case _:
                pass
        recomputed = isinstance(task, Recompute)
        numbers.append(stride)
    return numbers
