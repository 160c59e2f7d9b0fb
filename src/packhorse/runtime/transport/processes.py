"""Ranks that are processes: messages over `torch.distributed`.

In: an initialised default process group, as torchrun's environment gives it, and the channels that
programs use. Out: a `Transport`. Every channel has a communicator of its own, so that no message
waits behind one of another pair or direction; all ranks make them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch import Tensor

from packhorse.errors import PeerLostError, RunFailedError
from packhorse.runtime.transport.store import Store, Word, find_word, leave_word

WAIT: Final = timedelta(minutes=10)

Channel = tuple[int, int]


class ProcessTransport:
    """This process's end of all channels.

    Args:
        channels: (source, target) of all messages of all ranks: the same on every rank.
        store: the key-value store that all ranks met at.
        wait: how long a message may take to come.
    """

    def __init__(
        self, channels: Iterable[Channel], store: Store, *, wait: timedelta = WAIT
    ) -> None:
        self._store = store
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        for source, target in sorted(set(channels)):
            # Every rank takes part in making a group, whoever is in it.
            made = dist.new_group([source, target], timeout=wait)
            if self._rank in (source, target):
                assert isinstance(made, dist.ProcessGroup)
                self._groups[source, target] = made

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._num_ranks

    def send(self, tensor: Tensor, peer: int) -> None:
        """Hand a tensor to a peer; blocks until it may be changed again."""
        group = self._groups[self._rank, peer]
        try:
            group.send([tensor], _place_in(self._rank, peer), 0).wait()
        except RuntimeError as error:
            raise explain_loss(self._store, f"sending to rank {peer}", error, peer) from error

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Fill a tensor with a peer's next message; blocks until it is there."""
        group = self._groups[peer, self._rank]
        try:
            group.recv([tensor], _place_in(self._rank, peer), 0).wait()
        except RuntimeError as error:
            where = f"waiting for a message from rank {peer}"
            raise explain_loss(self._store, where, error, peer) from error

    def abort(self, reason: str, exit_code: int = RunFailedError.exit_code) -> None:
        """Leave word of why this rank ends; others notice when its process is gone."""
        word = Word(rank=self._rank, what=reason, by=self._rank, exit_code=exit_code)
        leave_word(self._store, word)

    def close(self) -> None:
        """Give up the channels, with the threads and connections that they have."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def explain_loss(
    store: Store, where: str, error: RuntimeError, peer: int | None = None
) -> PeerLostError:
    """Word a failed message with `peer`, or with all: why another rank ended, if it left word."""
    word = find_word(store)
    what = "another rank is gone" if word is None else word.as_loss()
    return PeerLostError(what, where=f"{where}: {str(error).partition(chr(10))[0]}", peer=peer)


def _place_in(rank: int, peer: int) -> int:
    # A group of two numbers its ranks anew, in ascending order.
    return 0 if peer < rank else 1
