"""The ranks of a run, as its training loop sees them: who leads, and what all agree on.

In: the meeting of the ranks. Out: a `Crew`. What depends on files, clocks or signals is decided by
the first rank alone, or agreed on: then all ranks do the same in every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.runtime.transport.processes import Channel, ProcessTransport, explain_loss
from packhorse.runtime.transport.spec import Transport
from packhorse.runtime.transport.store import Store, Word, leave_word
from packhorse.trainer.whereabouts import Whereabouts

LONG_WAIT: Final = timedelta(hours=24)
"""How long a rank waits for one that lives: it may plan, read all data, or save a large model.

Who does not live any more is found by a `Lookout`, in seconds.
"""


class Met(Protocol):
    """Ranks that have met, as one of them sees it."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def store(self) -> Store:
        """The key-value store that all ranks met at."""
        ...

    def broadcast(self, text: str | None, *, wait: timedelta | None = None) -> str:
        """Give the first rank's text to all."""
        ...

    def gather(self, text: str, *, wait: timedelta | None = None) -> list[str]:
        """Give every rank's text to all, by rank."""
        ...

    def compare(self, facts: Mapping[str, str], fix: str, *, wait: timedelta | None = None) -> None:
        """Refuse what differs between ranks."""
        ...


class Crew(Protocol):
    """All ranks of a run, from where one of them stands."""

    @property
    def rank(self) -> int:
        """This rank; the first, 0, leads."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        ...

    def lead(self, work: Callable[[], str]) -> str:
        """Let the first rank do something; give what it found, on every rank.

        Raises:
            PackhorseError: on the first rank, what went wrong there.
            PeerLostError: on the others, that it did.
        """
        ...

    def lead_flag(self, look: Callable[[], bool]) -> bool:
        """Let the first rank look; give what it saw, on every rank."""
        ...

    def agree(self, number: int) -> int:
        """Give the largest number of any rank, on every rank."""
        ...

    def compare(self, facts: Mapping[str, str], fix: str) -> None:
        """Check that facts are the same on every rank.

        Raises:
            MismatchError: names the first that differs, and where; the same on every rank.
        """
        ...

    def tell(self, doing: str, *, finished_step: int | None = None) -> None:
        """Note what this rank begins to do, for who asks when a rank is lost."""
        ...

    def tell_tasks(self, look: Callable[[], Sequence[str]]) -> None:
        """Note who knows the tasks that this rank is in; asked from any thread."""
        ...

    def open_transport(self, channels: Iterable[Channel]) -> Transport | None:
        """Open the channels of all ranks; None where there is one rank."""
        ...

    def send_text(self, text: str, peer: int) -> None:
        """Hand a text to a peer; blocks until it is on its way."""
        ...

    def receive_text(self, peer: int) -> str:
        """Take a peer's next text."""
        ...

    def send(self, tensor: Tensor, peer: int) -> None:
        """Hand a contiguous tensor to a peer; blocks until it may be changed again."""
        ...

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Fill a contiguous tensor with a peer's next one."""
        ...


class Alone:
    """The crew of a run of one rank."""

    rank = 0
    num_ranks = 1

    def lead(self, work: Callable[[], str]) -> str:
        """See Crew."""
        return work()

    def lead_flag(self, look: Callable[[], bool]) -> bool:
        """See Crew."""
        return look()

    def agree(self, number: int) -> int:
        """See Crew."""
        return number

    def compare(self, facts: Mapping[str, str], fix: str) -> None:
        """See Crew."""

    def tell(self, doing: str, *, finished_step: int | None = None) -> None:
        """See Crew."""

    def tell_tasks(self, look: Callable[[], Sequence[str]]) -> None:
        """See Crew."""

    def open_transport(self, channels: Iterable[Channel]) -> Transport | None:
        """See Crew."""
        del channels

    def send_text(self, text: str, peer: int) -> None:
        """See Crew."""
        raise _no_peer(peer, text)

    def receive_text(self, peer: int) -> str:
        """See Crew."""
        raise _no_peer(peer)

    def send(self, tensor: Tensor, peer: int) -> None:
        """See Crew."""
        raise _no_peer(peer, tensor)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """See Crew."""
        raise _no_peer(peer, tensor)


ALONE: Final = Alone()


class MetCrew:
    """The crew of a run whose ranks are processes; all make theirs together."""

    def __init__(self, meeting: Met, whereabouts: Whereabouts) -> None:
        self._meeting = meeting
        self._whereabouts = whereabouts
        # The meeting's own group gives up after seconds.
        group = dist.new_group(timeout=LONG_WAIT)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    @property
    def rank(self) -> int:
        """See Crew."""
        return self._meeting.rank

    @property
    def num_ranks(self) -> int:
        """See Crew."""
        return self._meeting.num_ranks

    def lead(self, work: Callable[[], str]) -> str:
        """See Crew."""
        try:
            text = None if self.rank else work()
        except PackhorseError as error:
            # It ends the others' wait: they would otherwise say that this rank is lost.
            word = Word(rank=0, what=error.what, by=0, exit_code=error.exit_code)
            leave_word(self._meeting.store, word)
            raise
        # Others may come late: they load and trace by themselves what this rank has done before.
        return self._meeting.broadcast(text, wait=LONG_WAIT)

    def lead_flag(self, look: Callable[[], bool]) -> bool:
        """See Crew."""
        return self.lead(lambda: json.dumps(look())) == "true"

    def agree(self, number: int) -> int:
        """See Crew."""
        largest = torch.tensor([number])
        with self._watching("agreeing"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest.item())

    def compare(self, facts: Mapping[str, str], fix: str) -> None:
        """See Crew."""
        self._meeting.compare(facts, fix, wait=LONG_WAIT)

    def tell(self, doing: str, *, finished_step: int | None = None) -> None:
        """See Crew."""
        self._whereabouts.tell(doing, finished_step=finished_step)

    def tell_tasks(self, look: Callable[[], Sequence[str]]) -> None:
        """See Crew."""
        self._whereabouts.tell_tasks(look)

    def open_transport(self, channels: Iterable[Channel]) -> Transport | None:
        """See Crew."""
        return ProcessTransport(channels, self._meeting.store, wait=LONG_WAIT)

    def send_text(self, text: str, peer: int) -> None:
        """See Crew."""
        written = text.encode()
        self.send(torch.tensor([len(written)]), peer)
        if written:
            self.send(torch.frombuffer(bytearray(written), dtype=torch.uint8), peer)

    def receive_text(self, peer: int) -> str:
        """See Crew."""
        length = torch.empty(1, dtype=torch.int64)
        self.receive(length, peer)
        written = torch.empty(int(length.item()), dtype=torch.uint8)
        if written.numel():
            self.receive(written, peer)
        return written.numpy().tobytes().decode()

    def send(self, tensor: Tensor, peer: int) -> None:
        """See Crew."""
        with self._watching(f"sending to rank {peer}", peer):
            dist.send(tensor, peer, group=self._group)

    def receive(self, tensor: Tensor, peer: int) -> None:
        """See Crew."""
        with self._watching(f"waiting for rank {peer}", peer):
            dist.recv(tensor, peer, group=self._group)

    @contextmanager
    def _watching(self, where: str, peer: int | None = None) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise explain_loss(self._meeting.store, where, error, peer) from error


def _no_peer(peer: int, *_: object) -> ValueError:
    return ValueError(f"there is no rank {peer}: this one is alone")
