"""How tensors get from rank to rank.

A channel is a pair of ranks and a direction. Both ends of a channel use it in the same order, one
message after another, each end from one thread at a time; channels do not wait for each other.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """One rank's end of all its channels."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        ...

    def send(self, tensor: Tensor, peer: int) -> None:
        """Hand a contiguous tensor to a peer; blocks until it may be changed again.

        Raises:
            PeerLostError: the peer, or another rank, is gone.
        """
        ...

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Fill a contiguous tensor with a peer's next message; blocks until it is there.

        Raises:
            PeerLostError: the peer, or another rank, is gone.
        """
        ...

    def abort(self, reason: str, exit_code: int) -> None:
        """Give up: every rank that waits for a message, or will, fails. Harmless when repeated.

        Args:
            exit_code: of what went wrong; all ranks end with it.
        """
        ...

    def close(self) -> None:
        """Give up the channels; nothing may be under way. Closing twice is harmless."""
        ...
