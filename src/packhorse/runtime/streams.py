"""Lanes on a device that works by itself: each lane has a stream, and waits for what it asked for.

In: lanes, and streams for them. Out: the same lanes; a task is complete when the device is.

    on the lane's thread:  make the lane's stream current; do the work: it queues kernels and copies
                           record an event behind them; wait for it, without the interpreter's lock
    then, as on any lane:  the task is complete, its reservations are released, others may follow

So streams run beside each other as threads do on a CPU. A task's kernels are queued only when all
that it follows is complete, whichever lane that was on; streams never wait for each other, and no
tensor is used on one stream while another still writes it. What torch's allocator gets back from a
task's own stream it may hand out to later work of that stream at once, and that is ordered behind;
buffers go back by a Free, after everything that touched them. The price is a gap between two tasks
of a lane: as long as an event takes to be noticed and the first kernel to be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from packhorse.program.tasks import Lane
from packhorse.runtime.lanes import DeviceFailedError, Done, Lanes, LanesAround, Work


class Stream(Protocol):
    """A queue of a device's work; used by one thread at a time."""

    def use(self) -> AbstractContextManager[object]:
        """Let the calling thread queue its work here."""
        ...

    def finish(self) -> None:
        """Block until all that is queued here is done."""
        ...


class CudaStream:
    """A stream of a CUDA device. It does not wait for the default stream."""

    def __init__(self, device: int) -> None:
        self._stream = torch.cuda.Stream(device)
        # A blocking event sleeps instead of keeping a core busy.
        self._event = torch.cuda.Event(blocking=True)

    def use(self) -> AbstractContextManager[object]:
        """Make it the calling thread's current stream, and its device the current one."""
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Block until all that is queued here is done; other threads go on."""
        self._event.record(self._stream)
        self._event.synchronize()


class StreamLanes(LanesAround):
    """Lanes with a stream each.

    Args:
        lanes: run the work; each lane on one thread.
        make_stream: called for each lane when it is first used, on the executor's thread.
    """

    def __init__(self, lanes: Lanes, make_stream: Callable[[], Stream]) -> None:
        super().__init__(lanes)
        self._make_stream = make_stream
        self._streams: dict[Lane, Stream] = {}

    def submit(
        self,
        index: int,
        lane: Lane,
        work: Work,
        done: Done,
        after: Sequence[int],
        then: Work | None = None,
    ) -> None:
        """Queue the work of a task, and the wait for the device behind it; see `Lanes`."""
        if lane not in self._streams:
            self._streams[lane] = self._make_stream()
        stream = self._streams[lane]

        def wait_behind(part: Work) -> None:
            try:
                with stream.use():
                    try:
                        part()
                    finally:
                        # Also after an error: memory is given back when a lane has ended.
                        stream.finish()
            except RuntimeError as error:  # also torch's errors of devices and their memory
                raise DeviceFailedError(index, lane, error) from error

        follow = None if then is None else partial(wait_behind, then)
        self._lanes.submit(index, lane, partial(wait_behind, work), done, after, follow)
