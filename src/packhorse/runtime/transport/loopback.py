"""Ranks that are threads of one process: a send meets its receive in memory.

In: tensors. Out: the same bytes in the receiver's tensor. A send is complete only when its receive
has taken it (a rendezvous), which is the hardest that any transport may be on a program.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from torch import Tensor

from packhorse.errors import PeerLostError, RunFailedError

WAIT_S: Final = 600.0


class _Message:
    # A tensor that waits to be taken.
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.taken = False


class LoopbackGroup:
    """All ranks' ends, in one process."""

    def __init__(self, num_ranks: int, *, wait_s: float = WAIT_S) -> None:
        self.num_ranks = num_ranks
        self._wait_s = wait_s
        # One condition for all: a test's ranks are few.
        self._changed = threading.Condition()
        self._waiting: dict[tuple[int, int], deque[_Message]] = {}
        self._reason: str | None = None

    def end_of(self, rank: int) -> LoopbackTransport:
        """The end of one rank."""
        return LoopbackTransport(self, rank)

    def send(self, tensor: Tensor, source: int, target: int) -> None:
        """Leave a tensor for its receiver and wait until it has been taken."""
        message = _Message(tensor)
        with self._changed:
            self._waiting.setdefault((source, target), deque()).append(message)
            self._changed.notify_all()
            self._wait(lambda: message.taken, f"rank {target} to take a message of rank {source}")

    def receive(self, tensor: Tensor, source: int, target: int) -> None:
        """Wait for a tensor and take it."""
        with self._changed:
            queue = self._waiting.setdefault((source, target), deque())
            self._wait(lambda: bool(queue), f"a message from rank {source} to rank {target}")
            message = queue.popleft()
            tensor.copy_(message.tensor)
            message.taken = True
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Make everybody fail who waits, or will."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        found = self._changed.wait_for(
            lambda: is_there() or self._reason is not None, timeout=self._wait_s
        )
        if self._reason is not None:
            raise PeerLostError(
                f"another rank has failed: {self._reason}", where=f"waiting for {what}"
            )
        if not found:
            raise PeerLostError(
                f"nothing came for {self._wait_s:.0f} s", where=f"waiting for {what}"
            )


class LoopbackTransport:
    """One rank's end in a `LoopbackGroup`."""

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._group.num_ranks

    def send(self, tensor: Tensor, peer: int) -> None:
        """Hand a tensor over; blocks until it has been taken."""
        self._group.send(tensor, self._rank, peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Take a tensor; blocks until it is there."""
        self._group.receive(tensor, peer, self._rank)

    def abort(self, reason: str, exit_code: int = RunFailedError.exit_code) -> None:
        """Make every rank fail."""
        del exit_code  # threads have none
        self._group.abort(f"rank {self._rank}: {reason}")

    def close(self) -> None:
        """Nothing to give up."""
