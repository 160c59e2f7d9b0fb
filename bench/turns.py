"""Two ways of doing the same take turns, so that what else the machine does hits both alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

NUM_WARM_TURNS: Final = 2

Turn = Callable[[int], None]
"""Does its work once; is told the number of the turn, the first is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How long a turn took."""

    cpu_ns: int
    wall_ns: int


def take_turns(theirs: Turn, ours: Turn, num_turns: int) -> list[tuple[Taken, Taken]]:
    """Time the turns of two sides; who goes first changes, the first turns do not count."""
    pairs: list[tuple[Taken, Taken]] = []
    for turn in range(1, NUM_WARM_TURNS + num_turns + 1):
        first, second = (theirs, ours) if turn % 2 else (ours, theirs)
        taken = {first: _time(first, turn), second: _time(second, turn)}
        pairs.append((taken[theirs], taken[ours]))
    return pairs[NUM_WARM_TURNS:]


def _time(turn: Turn, number: int) -> Taken:
    cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
    turn(number)
    return Taken(cpu_ns=time.process_time_ns() - cpu_ns, wall_ns=time.perf_counter_ns() - wall_ns)
