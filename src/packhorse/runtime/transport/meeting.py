"""The meeting of ranks: all come within a time, know each other, and say short things to all.

In: torchrun's environment. Out: a `Meeting`: who is where, texts from everybody to everybody, and
gloo's default process group. Whoever does not come, cannot be reached, or says nothing is named by
rank, host and address; nobody waits longer than he was told to.

    connect to the store that torchrun keeps
    listen at the address that gloo will take; say at the store: I am here, there
    wait for all others; connect to each; say who could not be reached
    only then let gloo connect all of them, which names nobody when it fails
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as TorchStore
from torch.distributed.rendezvous import (
    rendezvous,  # pyright: ignore[reportUnknownVariableType]  # its keywords have no types
)

from packhorse.errors import MismatchError, PackhorseError, PeerLostError
from packhorse.runtime.transport.peer_processes import find_process_space
from packhorse.runtime.transport.seats import INTERFACE, Seat, find_address, read_seat
from packhorse.runtime.transport.store import Store, Word, find_word, leave_word

WAIT: Final = timedelta(seconds=30)
"""How long the others may take to come, or to say what everybody says."""

_LEAVE_WAIT: Final = timedelta(seconds=5)
_PREFIX: Final = "packhorse/meeting"
# Between two looks at what the others have said.
_FIRST_PAUSE_S: Final = 0.0002
_MOST_PAUSE_S: Final = 0.1
_MOST_THREADS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendee:
    """A rank that came, and where it listens.

    `pid` is its process among those of `process_space`, which is the same where ranks see each
    other's processes; None where nobody can tell.
    """

    rank: int
    host: str
    address: str
    port: int
    pid: int
    process_space: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} ({self.address})"


class Meeting:
    """All ranks, seen from this one. Every rank calls its methods in the same order.

    Args:
        seat: which rank this is.
        store: the store that all ranks met at.
        host: the name of this computer.
        wait: how long others may take to say what everybody says.
    """

    def __init__(self, seat: Seat, store: Store, host: str, *, wait: timedelta = WAIT) -> None:
        self.rank, self.num_ranks = seat.rank, seat.num_ranks
        self.local_rank, self.num_local = seat.local_rank, seat.num_local
        self.host = host
        self.place = seat.place
        self.store = store
        self.attendees: tuple[Attendee, ...] = ()
        self._wait = wait
        self._round = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every rank; known once `introduce` is done."""
        return tuple(attendee.host for attendee in self.attendees)

    def introduce(self, environment: Mapping[str, str]) -> None:
        """Learn who is where, and that everybody can be reached from everywhere.

        Raises:
            PeerLostError: names who did not come or cannot be reached; the same on every rank.
            InputError: the environment names a network interface that is not there.
        """
        address = find_address(environment)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as door:
            door.bind((address, 0))
            door.listen(self.num_ranks)
            port = int(door.getsockname()[1])
            own = Attendee(
                rank=self.rank,
                host=self.host,
                address=address,
                port=port,
                pid=os.getpid(),
                process_space=find_process_space(),
            )
            texts = self.gather(json.dumps(asdict(own)))
            self.attendees = tuple(_read_attendee(text) for text in texts)
            lost = [
                f"{other} cannot be reached from {own}: {why}"
                for other, why in _find_unreachable(self.attendees, self.rank, self._wait / 2)
            ]
            # The door stays open until everybody has knocked.
            found = self.gather(json.dumps(lost))
        sentences: list[str] = [each for text in found for each in json.loads(text)]
        if sentences:
            more = f"\nand {len(sentences) - 5} more" if len(sentences) > 5 else ""
            raise PeerLostError(
                sentences[0],
                where="\n".join([f"the meeting at {self.place}", *sentences[1:5]]) + more,
                fix="let the ranks' hosts connect to each other on any port, or say on each host"
                f" which network to take: {INTERFACE}=eth0",
            )

    def gather(self, text: str, *, wait: timedelta | None = None) -> list[str]:
        """Say a text to all and hear everybody's, by rank; blocks until all have said theirs.

        Raises:
            PeerLostError: a rank has failed, or said nothing for so long.
        """
        number = self._round
        self._round += 1
        if number > 1:
            # Everybody has said something since, and so has read what was said before that.
            self.store.delete_key(_key(number - 2, self.rank))
        try:
            self.store.set(_key(number, self.rank), text)
            self._wait_for([_key(number, rank) for rank in range(self.num_ranks)], wait)
            keys = [_key(number, rank) for rank in range(self.num_ranks)]
            return [value.decode() for value in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise PeerLostError(
                "the store that all ranks met at is gone",
                where=f"{self.place}: {str(error).partition(chr(10))[0]}",
                fix="look at what the launcher and rank 0 said last",
            ) from error

    def broadcast(self, text: str | None, *, wait: timedelta | None = None) -> str:
        """Hear what rank 0 says; what others give is not read. Blocks as `gather` does."""
        return self.gather(text or "", wait=wait)[0]

    def barrier(self, *, wait: timedelta | None = None) -> None:
        """Wait for everybody; blocks as `gather` does."""
        self.gather("", wait=wait)

    def compare(self, facts: Mapping[str, str], fix: str, *, wait: timedelta | None = None) -> None:
        """Check that facts are the same on every rank; blocks as `gather` does.

        Raises:
            MismatchError: names the first that differs, and where; the same on every rank.
        """
        found: list[dict[str, str]] = [
            json.loads(text) for text in self.gather(json.dumps(dict(facts)), wait=wait)
        ]
        for name, value in found[0].items():
            others = [rank for rank, each in enumerate(found) if each.get(name) != value]
            if others:
                rank = others[0]
                raise MismatchError(
                    f"{name} is {value} on rank 0 and {found[rank].get(name)} on rank {rank}"
                    + (f" and {len(others) - 1} more" if len(others) > 1 else ""),
                    where=f"hosts {self.hosts[0]} and {self.hosts[rank]}",
                    fix=fix,
                )

    def abort(self, reason: str) -> None:
        """Leave word of why this rank ends; whoever waits for it fails. Harmless when repeated."""
        leave_word(self.store, Word(rank=self.rank, what=reason, by=self.rank))

    def connect(self, environment: Mapping[str, str]) -> None:
        """Introduce this rank to all others, and make gloo's default process group.

        Raises:
            InputError: the environment names a network interface that is not there.
            PeerLostError: names who did not come or cannot be reached.
        """
        try:
            self.introduce(environment)
        except PackhorseError as error:
            self.abort(error.what)
            raise
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore("packhorse/gloo", cast("TorchStore", self.store)),  # it is one
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=self._wait,
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"gloo cannot connect rank {self.rank} with the others",
                where="\n".join(
                    [str(error).partition("\n")[0], *(str(each) for each in self.attendees)]
                ),
                fix=f"say on each host which network to take: {INTERFACE}=eth0",
            ) from error

    def close(self) -> None:
        """Give up gloo's groups; nothing may be under way. Closing twice is harmless.

        Rank 0, whose process may keep the store, blocks until the others have read what they need,
        or a few seconds.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        left = [f"{_PREFIX}/left/{rank}" for rank in range(1, self.num_ranks)]
        end_s = time.monotonic() + _LEAVE_WAIT.total_seconds()
        with suppress(RuntimeError):
            if self.rank:
                self.store.set(left[self.rank - 1], "")
                return
            while not self.store.check(left) and time.monotonic() < end_s:
                time.sleep(_MOST_PAUSE_S)

    def _wait_for(self, keys: Sequence[str], wait: timedelta | None) -> None:
        # The store's own wait would not notice that another rank has failed meanwhile.
        limit = wait or self._wait
        end_s = time.monotonic() + limit.total_seconds()
        pause_s = _FIRST_PAUSE_S
        while not self.store.check(list(keys)):
            word = find_word(self.store)
            if word is not None:
                raise PeerLostError(word.as_loss(), where=f"the meeting at {self.place}")
            if time.monotonic() >= end_s:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise self._miss(missing, limit)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _miss(self, missing: Sequence[int], limit: timedelta) -> PeerLostError:
        seconds = f"{limit.total_seconds():.0f} s"
        if self.attendees:
            names = ", ".join(str(self.attendees[rank]) for rank in missing)
            return PeerLostError(
                f"{names} said nothing for {seconds}",
                where=f"the meeting at {self.place}",
                fix="look at what that rank said last",
            )
        here = [rank for rank in range(self.num_ranks) if rank not in missing]
        came = [str(_read_attendee(self.store.get(_key(0, rank)).decode())) for rank in here]
        names = ", ".join(str(rank) for rank in missing)
        return PeerLostError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {names} of {self.num_ranks} did not come"
            f" within {seconds}",
            where="\n".join(
                [f"the meeting at {self.place}", *(f"{each} is here" for each in came)]
            ),
            fix="start the launcher on every host, with the same number of hosts and ranks",
        )


def open_meeting(environment: Mapping[str, str], *, wait: timedelta = WAIT) -> Meeting:
    """Find the store where all ranks meet; nobody is met yet.

    Raises:
        InputError: the environment is not torchrun's.
        PeerLostError: the store cannot be reached.
    """
    seat = read_seat(environment)
    try:
        store, _, _ = next(
            rendezvous("env://", rank=seat.rank, world_size=seat.num_ranks, timeout=wait)
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {seat.rank} of {seat.num_ranks} found no store to meet the others at within"
            f" {wait.total_seconds():.0f} s",
            where=f"{seat.place}: {str(error).partition(chr(10))[0]}",
            fix="check that the launcher runs on every host, and that this address and port can be"
            " reached from here",
        ) from error
    return Meeting(seat, cast("Store", store), socket.gethostname(), wait=wait)  # untyped


def _key(number: int, rank: int) -> str:
    return f"{_PREFIX}/{number}/{rank}"


def _read_attendee(text: str) -> Attendee:
    return Attendee(**json.loads(text))


def _find_unreachable(
    attendees: Sequence[Attendee], rank: int, wait: timedelta
) -> list[tuple[Attendee, str]]:
    """Knock at every other rank's door, and list those that do not open, and why."""

    def knock(other: Attendee) -> str | None:
        try:
            with socket.create_connection((other.address, other.port), wait.total_seconds() / 2):
                return None
        except OSError as error:
            return error.strerror or str(error)

    others = [other for other in attendees if other.rank != rank]
    if not others:
        return []
    with ThreadPoolExecutor(min(len(others), _MOST_THREADS)) as pool:
        found = zip(others, pool.map(knock, others), strict=True)
        return [(other, why) for other, why in found if why is not None]
