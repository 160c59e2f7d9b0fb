"""The pace of another machine: lanes on which a task ends no sooner than it would there.

In: lanes, and how long each task takes on the machine that is emulated. Out: the same lanes, with
the same work done in the same order; a task that is done early sleeps until its time is over. So
copies take bytes / rate, and blocks and updates what the machine's cost model says, with real
threads, real bytes and real numbers. Only waiting is added, nothing is skipped: a task that takes
longer here than it should makes the emulation late, and is told by `overrun_ns`.

    begin = now; work; sleep until begin + duration, less what this lane slept too long before

A message begins when both ends are ready, which only the real one can tell: its whole time comes
behind it, on either side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Lane, Recv, Send
from packhorse.runtime.lanes import Done, Lanes, LanesAround, Work

Pace = Callable[[Program], Sequence[int]]
"""Gives for each task of a program the nanoseconds that it takes on the emulated machine."""

# A sleep ends tens of microseconds late, so shorter ones are put off to the lane's next task; and
# a lane makes up for no more than this, or a stall would let its later tasks run free.
_SHORTEST_SLEEP_NS: Final = 200_000
_MOST_CARRIED_NS: Final = 2_000_000


class PacedLanes(LanesAround):
    """Lanes whose tasks take their time.

    Args:
        lanes: where the work is done.
        pace: how long each task takes; asked once for each kind of program.
        now_ns: the clock.
        sleep: waits for so many seconds by that clock.
    """

    def __init__(
        self,
        lanes: Lanes,
        pace: Pace,
        *,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(lanes)
        self._pace = pace
        self._now_ns = now_ns
        self._sleep = sleep
        self._known: dict[ProgramKind, Sequence[int]] = {}
        self._durations: Mapping[int, int] = {}
        self._messages: frozenset[int] = frozenset()
        # Each lane's own: only its thread touches them.
        self._carried_ns: dict[Lane, int] = {}
        self._overrun_ns: dict[Lane, int] = {}

    @property
    def overrun_ns(self) -> int:
        """By how much tasks have taken longer than they should, all of them together."""
        return sum(self._overrun_ns.values())

    def begin(self, program: Program, first: int = 0) -> None:
        """Take the pace of the program that is issued next.

        Args:
            first: number of its first task.
        """
        if program.kind not in self._known:
            self._known[program.kind] = self._pace(program)
        self._durations = dict(enumerate(self._known[program.kind], first))
        self._messages = frozenset(
            index
            for index, task in enumerate(program.tasks, first)
            if isinstance(task, Send | Recv)
        )

    def submit(
        self,
        index: int,
        lane: Lane,
        work: Work,
        done: Done,
        after: Sequence[int],
        then: Work | None = None,
    ) -> None:
        """Queue the work of a task, and its wait behind it; see `Lanes`.

        What is no task of the program takes as long as it takes.
        """
        duration_ns = self._durations.get(index)
        if duration_ns is None:
            self._lanes.submit(index, lane, work, done, after, then)
            return

        waits_for_peer = index in self._messages

        def work_and_wait() -> None:
            begin_ns = self._now_ns()
            work()
            worked_ns = 0 if waits_for_peer else self._now_ns() - begin_ns
            self._wait(lane, duration_ns, worked_ns)

        self._lanes.submit(index, lane, work_and_wait, done, after, then)

    def _wait(self, lane: Lane, duration_ns: int, worked_ns: int) -> None:
        if worked_ns > duration_ns:
            self._overrun_ns[lane] = self._overrun_ns.get(lane, 0) + worked_ns - duration_ns
        rest_ns = max(duration_ns - worked_ns, 0) + self._carried_ns.get(lane, 0)
        if rest_ns >= _SHORTEST_SLEEP_NS:
            begin_ns = self._now_ns()
            self._sleep(rest_ns / 1e9)
            rest_ns -= self._now_ns() - begin_ns
        self._carried_ns[lane] = max(rest_ns, -_MOST_CARRIED_NS)
