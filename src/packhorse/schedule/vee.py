"""Schedules on a V of stages: each rank has one stage on the way down and one on the way back.

In: ranks, microbatches, costs (not looked at). Out: a schedule with two stages on each rank. The
first rank has both ends of the model, so that a microbatch's backward begins where it is needed
first, and every rank saves about the same.

    zb-v     Qi et al. (2024): p microbatches saved on every rank; with F = I = W no rank idles
             between its first and its last task, once there are 2p-1 microbatches
    v-half   Qi et al., "Pipeline Parallelism with Controllable Memory" (2024): floor((p+2)/2)
             saved, about p/(2m) idle
    v-min    the same authors: floor((p+4)/3) saved, about 2p/(3m) idle

The last two repeat a pattern every six slots, the slots of one microbatch on one rank. A pattern
says in which slot each of the four passes of microbatch 0 begins on rank r:

             forward  forward back  input grad back    input grad         gap
    v-half   2r       3p - 2 - r    3p - 1 + gap + 2r  6p - 2 + gap - r   3 if p is even
    v-min    r        2p - 1 - r    2p + gap + r       4p - 1 + gap - r   2 if 3 divides p

The gap keeps the passes of different microbatches out of each other's slots. Weight gradients take
the slots that are left, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from packhorse.schedule.costs import Costs
from packhorse.schedule.placements import place_vee
from packhorse.schedule.spec import (
    Forward,
    InputGrad,
    Schedule,
    Task,
    WeightGrad,
    crop_schedule,
)

_PERIOD: Final = 6
_Pattern = tuple[int, int, int, int]


def make_zb_v(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Order the V so that forwards of the way back and gradients of both ways alternate."""
    del costs
    enough = max(num_microbatches, 2 * num_ranks - 1)

    def order(rank: int) -> tuple[Task, ...]:
        list_ = _RankList(rank, 2 * num_ranks - 1 - rank)
        list_.add("F" * (2 * (num_ranks - rank) - 1))
        list_.add("fF" * rank + "fiw" * (num_ranks - rank))
        while list_.count("f") < enough:
            list_.add("FIWfiw" if list_.count("F") < enough else "IWfiw")
        list_.add("Ii" * rank + "IW" * (num_ranks - rank))
        list_.add("w" * (enough - list_.count("w")) + "W" * (enough - list_.count("W")))
        return list_.tasks

    whole = Schedule(placement=place_vee(num_ranks), orders=tuple(map(order, range(num_ranks))))
    return crop_schedule(whole, num_stages=2 * num_ranks, num_microbatches=num_microbatches)


def make_v_half(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Repeat the pattern that saves half of what 1F1B's first rank saves."""
    del costs
    gap = 0 if num_ranks % 2 else 3

    def pattern(rank: int) -> _Pattern:
        return (
            2 * rank,
            3 * num_ranks - 2 - rank,
            3 * num_ranks - 1 + gap + 2 * rank,
            6 * num_ranks - 2 + gap - rank,
        )

    return _repeat(num_ranks, num_microbatches, pattern)


def make_v_min(num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Repeat the pattern that saves a third of what 1F1B's first rank saves."""
    del costs
    gap = 0 if num_ranks % 3 else 2

    def pattern(rank: int) -> _Pattern:
        return (
            rank,
            2 * num_ranks - 1 - rank,
            2 * num_ranks + gap + rank,
            4 * num_ranks - 1 + gap - rank,
        )

    return _repeat(num_ranks, num_microbatches, pattern)


class _RankList:
    """A rank's tasks by letters: F, I, W of its stage on the way down, f, i, w on the way back."""

    def __init__(self, down: int, back: int) -> None:
        self._stages = {"F": down, "I": down, "W": down, "f": back, "i": back, "w": back}
        self._counts = dict.fromkeys(self._stages, 0)
        self._tasks: list[Task] = []

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(self._tasks)

    def count(self, letter: str) -> int:
        return self._counts[letter]

    def add(self, letters: str) -> None:
        """Append the next microbatch of each letter."""
        kinds = {"f": Forward, "i": InputGrad, "w": WeightGrad}
        for letter in letters:
            kind = kinds[letter.lower()]
            task = kind(stage=self._stages[letter], microbatch=self._counts[letter])
            self._tasks.append(task)
            self._counts[letter] += 1


def _repeat(
    num_ranks: int, num_microbatches: int, pattern_of: Callable[[int], _Pattern]
) -> Schedule:
    def order(rank: int) -> tuple[Task, ...]:
        list_ = _RankList(rank, 2 * num_ranks - 1 - rank)
        slots = {
            first + _PERIOD * microbatch: letter
            for letter, first in zip("FfiI", pattern_of(rank), strict=True)
            for microbatch in range(num_microbatches)
        }
        left = deque[str]()
        for slot in range(max(slots) + 1):
            letter = slots.get(slot)
            if letter is not None:
                list_.add(letter)
                if letter in "iI":
                    left.append("w" if letter == "i" else "W")
            elif left:
                list_.add(left.popleft())
        list_.add("".join(left))
        return list_.tasks

    return Schedule(placement=place_vee(num_ranks), orders=tuple(map(order, range(num_ranks))))
