"""Lanes: where tasks run. Each lane is first in, first out.

In: work in program order, each with the places of the tasks it must follow. Out: completions.
`InlineLanes` runs every lane on the caller's thread, so that a task is complete when `submit`
returns. `ThreadLanes` has a thread for each lane, so that disk, copies and compute run beside each
other; the caller only issues and waits. `runtime/streams.py` puts a device's streams under either.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from packhorse.program.tasks import Lane

Work = Callable[[], None]
Done = Callable[[int, int], None]
"""Told when the work began and ended, in ns of `time.perf_counter_ns`."""
Wanted = Callable[[int], bool]
"""Asked about each task that completes, in that order, by whatever thread it completes on: whether
who waits is to be woken now. Whoever waits does nothing else meanwhile."""

STUCK_AFTER_S: Final = 600.0
"""No task of a sane plan takes as long; a drive or a peer that is silent for so long is gone."""

_JOIN_S: Final = 30.0
# Who waits for certain tasks hears of others this late: the executor asks then whether to go on.
_LOOK_S: Final = 0.1


class LanesStuckError(Exception):
    """Nothing completes any more; `running` gives for each busy lane the task that it is in."""

    def __init__(self, what: str, running: Mapping[Lane, int]) -> None:
        self.what = what
        self.running = dict(running)
        super().__init__(what)


class DeviceFailedError(Exception):
    """The device failed in the work of task `index`, or had no memory left for it."""

    def __init__(self, index: int, lane: Lane, error: RuntimeError) -> None:
        self.index = index
        self.lane = lane
        super().__init__(str(error).partition("\n")[0])


class Lanes(Protocol):
    """Runs work on lanes.

    Only the executor's thread calls these; work runs on its lane and may end in any order between
    lanes. Tasks go by numbers; no two that have not completed have the same. Both waits raise what
    a task raised. After an error nothing more runs.
    """

    def submit(
        self,
        index: int,
        lane: Lane,
        work: Work,
        done: Done,
        after: Sequence[int],
        then: Work | None = None,
    ) -> None:
        """Queue the work of task `index` behind the tasks `after` and its lane's earlier work.

        Tasks of `after` that are not under way count as complete. `then` is done at once behind the
        work, the device's part included, and belongs to the task: others wait for it too.

        `done` is called on the executor's thread, by `submit` or a wait, once all of it is
        complete, with the times of the work.
        """
        ...

    def wait_any(self, wanted: Wanted | None = None) -> bool:
        """Block until one more task has completed; False when none is pending.

        Args:
            wanted: tells which tasks are worth being woken for, by default all; what completes
                before them is told with them, or a moment later.
        """
        ...

    def wait_all(self) -> None:
        """Block until all submitted tasks have completed."""
        ...

    @property
    def running(self) -> Mapping[Lane, int]:
        """The task that each busy lane is in, or failed in; any thread may ask."""
        ...

    def close(self) -> None:
        """Let what runs now end, drop the rest. Closing twice is harmless."""
        ...


class LanesAround:
    """Lanes around others, for what shall be done otherwise when a task is queued."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def wait_any(self, wanted: Wanted | None = None) -> bool:
        """Block until one more task has completed; see `Lanes`."""
        return self._lanes.wait_any(wanted)

    def wait_all(self) -> None:
        """Block until all submitted tasks have completed."""
        self._lanes.wait_all()

    @property
    def running(self) -> Mapping[Lane, int]:
        """See `Lanes`."""
        return self._lanes.running

    def close(self) -> None:
        """Close the lanes within."""
        self._lanes.close()


class InlineLanes:
    """Every lane on the caller's thread."""

    def submit(
        self,
        index: int,
        lane: Lane,
        work: Work,
        done: Done,
        after: Sequence[int],
        then: Work | None = None,
    ) -> None:
        """Run the work now; what it must follow has run already."""
        del index, lane, after
        begin_ns = time.perf_counter_ns()
        work()
        end_ns = time.perf_counter_ns()
        if then is not None:
            then()
        done(begin_ns, end_ns)

    def wait_any(self, wanted: Wanted | None = None) -> bool:
        """Nothing is ever pending."""
        del wanted
        return False

    def wait_all(self) -> None:
        """Nothing is ever pending."""

    @property
    def running(self) -> Mapping[Lane, int]:
        """Only the caller's thread is ever busy."""
        return {}

    def close(self) -> None:
        """Nothing is ever pending."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """Work in a lane's queue; its lane notes the times. `after` had not ended at its issue."""

    index: int
    work: Work
    done: Done
    after: tuple[int, ...]
    then: Work | None
    begin_ns: int = 0
    end_ns: int = 0


class ThreadLanes:
    """A thread for each lane, made when the lane is first used.

    A lane takes its jobs in order and lets each wait for the tasks it must follow. All of those
    were issued earlier, so lanes cannot wait for each other in a ring. To wake a thread costs more
    than a small task, so only one that has something to do now is woken: a lane that sleeps and
    whose first job may run, and the executor for a task that it waits for.

    Args:
        prepare: called once on each new thread, for settings that belong to threads.
        stuck_after_s: how long nothing may complete.
    """

    def __init__(self, *, prepare: Work, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._prepare = prepare
        self._stuck_after_s = stuck_after_s
        # One lock guards all that follows. The executor waits on `_finished`, each lane on its own
        # condition.
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._wakers: dict[Lane, threading.Condition] = {}
        self._queues: dict[Lane, deque[_Job]] = {}
        self._threads: dict[Lane, threading.Thread] = {}
        self._running: dict[Lane, int] = {}
        # Lanes that sleep and have not been woken yet.
        self._asleep: set[Lane] = set()
        # Whose work has not ended, and how many of all that are not booked yet.
        self._unfinished: set[int] = set()
        self._ended: deque[_Job] = deque()
        self._num_pending = 0
        # What the executor sleeps for; None: it does not sleep.
        self._wanted: Wanted | None = None
        self._error: BaseException | None = None
        self._closing = False

    def submit(
        self,
        index: int,
        lane: Lane,
        work: Work,
        done: Done,
        after: Sequence[int],
        then: Work | None = None,
    ) -> None:
        """Queue the work on its lane's thread."""
        self._book()
        with self._lock:
            self._raise_error()
            waits = tuple([task for task in after if task in self._unfinished])
            self._unfinished.add(index)
            self._num_pending += 1
            job = _Job(index=index, work=work, done=done, after=waits, then=then)
            queue = self._queue(lane)
            queue.append(job)
            if lane in self._asleep and self._is_ready(queue):
                self._wake(lane)

    def wait_any(self, wanted: Wanted | None = None) -> bool:
        """Block until one more task has completed; False when none is pending."""
        with self._lock:
            if not self._num_pending:
                return False
            if not self._ended:
                self._await_one(wanted)
        self._book()
        return True

    def wait_all(self) -> None:
        """Block until all submitted tasks have completed."""
        while self.wait_any():
            pass

    @property
    def running(self) -> Mapping[Lane, int]:
        """See `Lanes`."""
        return self._running.copy()

    def close(self) -> None:
        """Let what runs now end, drop the rest, and end the threads.

        Raises:
            LanesStuckError: a lane does not come back, so its memory must not be given back.
        """
        with self._lock:
            self._closing = True
            for lane, queue in self._queues.items():
                queue.clear()
                self._wakers[lane].notify()
        for lane, thread in self._threads.items():
            thread.join(_JOIN_S)
            if thread.is_alive():
                raise LanesStuckError(f"lane {lane} does not end", self._running)
        self._threads.clear()

    def _queue(self, lane: Lane) -> deque[_Job]:
        if lane not in self._queues:
            if self._closing:
                raise RuntimeError("these lanes are closed")
            self._queues[lane] = deque()
            self._wakers[lane] = threading.Condition(self._lock)
            thread = threading.Thread(
                target=self._work, args=(lane,), name=f"packhorse-{lane}", daemon=True
            )
            self._threads[lane] = thread
            thread.start()
        return self._queues[lane]

    def _book(self) -> None:
        # On the executor's thread and without the lock: what completed meanwhile. It alone takes
        # from the queue.
        while self._ended:
            job = self._ended.popleft()
            self._num_pending -= 1
            job.done(job.begin_ns, job.end_ns)
        self._raise_error()

    def _await_one(self, wanted: Wanted | None) -> None:
        left_s = self._stuck_after_s
        self._raise_error()
        self._wanted = wanted or _all_tasks
        try:
            while not self._ended:
                if left_s <= 0:
                    raise LanesStuckError(
                        f"nothing has moved for {self._stuck_after_s:.0f} s", self._running
                    )
                look_s = min(_LOOK_S, left_s)
                self._finished.wait(look_s)
                self._raise_error()
                left_s -= look_s
        finally:
            self._wanted = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, lane: Lane) -> None:
        try:
            self._prepare()
        except BaseException as error:
            if self._fail(error):
                return
            raise
        job: _Job | None = None
        while (job := self._next(lane, job)) is not None:
            try:
                job.begin_ns = time.perf_counter_ns()
                job.work()
                job.end_ns = time.perf_counter_ns()
                if job.then is not None:
                    job.then()
            except BaseException as error:
                if self._fail(error):
                    return
                raise

    def _next(self, lane: Lane, ended: _Job | None) -> _Job | None:
        """Tell of the job that has ended, and wait for a lane's next one; None at the end."""
        with self._lock:
            if ended is not None:
                self._end(lane, ended)
            queue = self._queues[lane]
            while not self._is_ready(queue):
                self._asleep.add(lane)
                self._wakers[lane].wait()
            self._asleep.discard(lane)
            if self._closing or self._error is not None:
                return None
            job = queue.popleft()
            self._running[lane] = job.index
            return job

    def _end(self, lane: Lane, job: _Job) -> None:
        del self._running[lane]
        self._unfinished.discard(job.index)
        self._ended.append(job)
        if self._wanted is not None and self._wanted(job.index):
            self._wanted = None
            self._finished.notify()
        for other in tuple(self._asleep):
            if self._is_ready(self._queues[other]):
                self._wake(other)

    def _wake(self, lane: Lane) -> None:
        self._asleep.discard(lane)
        self._wakers[lane].notify()

    def _is_ready(self, queue: deque[_Job]) -> bool:
        if self._closing or self._error is not None:
            return True
        return bool(queue) and self._unfinished.isdisjoint(queue[0].after)

    def _fail(self, error: BaseException) -> bool:
        """Keep the first error for the executor's thread, which raises it; others are its notes.

        One cause, such as a drive that is gone, may fail several lanes.

        Returns:
            False after the end, when nobody asks for errors any more.
        """
        with self._lock:
            if self._error is not None:
                if error is not self._error:
                    self._error.add_note(f"then another lane failed: {error}")
                return True
            self._error = error
            for waker in self._wakers.values():
                waker.notify()
            self._finished.notify()
            return not self._closing


def _all_tasks(index: int) -> bool:
    del index
    return True
