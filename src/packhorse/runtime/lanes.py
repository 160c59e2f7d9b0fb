"""Lanes: where tasks run. Each lane is first in, first out.

In: work in program order, each with the places of the tasks it must follow. Out: completions.
`InlineLanes` runs every lane on the caller's thread and waits for the device, so that a task is
complete when `submit` returns; lanes with threads or streams of their own implement the same
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from packhorse.program.tasks import Lane

Work = Callable[[], None]


class Lanes(Protocol):
    """Runs work on lanes.

    Only the executor's thread calls these; work runs on its lane and may end in any order between
    lanes. Both waits raise what a task raised.
    """

    def submit(self, index: int, lane: Lane, work: Work, done: Work, after: Sequence[int]) -> None:
        """Queue the work of task `index` behind the tasks `after` and its lane's earlier work.

        `done` is called once the work, the device's part included, is complete.
        """
        ...

    def wait_any(self) -> bool:
        """Block until one more task has completed; False when none is pending."""
        ...

    def wait_all(self) -> None:
        """Block until all submitted tasks have completed."""
        ...


class InlineLanes:
    """Every lane on the caller's thread.

    Args:
        synchronize: waits until the device has done what was asked of it; nothing on CPU.
    """

    def __init__(self, synchronize: Work | None = None) -> None:
        self._synchronize = synchronize

    def submit(self, index: int, lane: Lane, work: Work, done: Work, after: Sequence[int]) -> None:
        """Run the work now; what it must follow has run already."""
        del index, lane, after
        work()
        if self._synchronize is not None:
            self._synchronize()
        done()

    def wait_any(self) -> bool:
        """Nothing is ever pending."""
        return False

    def wait_all(self) -> None:
        """Nothing is ever pending."""
