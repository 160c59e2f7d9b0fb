"""Looks out for the other ranks of a run, from a thread of its own, and names the one that is lost.

In: a meeting. Out: the `Word` that ended the run, also where the rank that it is about could not
say anything: it was killed, its computer is gone, or it hangs.

    every second:
        say at the store: I am here, in this task
        has a rank left word? does one on this computer no longer run? is one silent?
    once there is word: let the main thread end by itself, which also frees what it holds
    where it does not, as it waits for a message in foreign code: end the process

Silence is counted in looks of this rank, not in seconds: who slept himself blames nobody for it.
The thread has its own connection to the store, as others wait for minutes on theirs.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from packhorse.runtime.transport.meeting import Attendee
from packhorse.runtime.transport.peer_processes import find_end, open_process
from packhorse.runtime.transport.store import Store, Word, find_word, leave_word

LOOK_S: Final = 1.0
SILENT_LOOKS: Final = 20
"""A rank that says nothing during so many looks is lost."""
END_S: Final = 8.0
"""How long the main thread may take to end by itself once a rank has failed."""
STOP_S: Final = 60.0
"""How long it may take where all stop for a signal."""

# One that says nothing any more when a message failed as well.
_SUSPECT_LOOKS: Final = 4
# So often in a row the store is not to be reached.
_STORE_LOOKS: Final = 3
# After a message has failed: so long whoever failed may leave word, or be found on this computer.
_FIRST_S: Final = 1.5
_PAUSE_S: Final = 0.05
_CLOSE_S: Final = 5.0
_PREFIX: Final = "packhorse/lookout"


class Met(Protocol):
    """Ranks that have met, as one of them sees it."""

    rank: int
    num_ranks: int
    store: Store
    attendees: tuple[Attendee, ...]

    def barrier(self) -> None:
        """Wait for everybody."""
        ...


class Lookout:
    """Begins at once, on all ranks together.

    Args:
        describe: says where this rank is; called from the thread.
        give_up: called from the thread when the main thread does not end; is to end the process.
        silent_looks: see `SILENT_LOOKS`.
    """

    def __init__(
        self,
        meeting: Met,
        *,
        describe: Callable[[], str],
        give_up: Callable[[Word], None],
        silent_looks: int = SILENT_LOOKS,
        look_s: float = LOOK_S,
        end_s: float = END_S,
    ) -> None:
        self._rank, self._num_ranks = meeting.rank, meeting.num_ranks
        self._attendees = meeting.attendees
        self._describe, self._give_up = describe, give_up
        self._silent_looks, self._look_s, self._end_s = silent_looks, look_s, end_s
        self._others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        self._store = meeting.store.clone()
        self._number = 0
        self._num_failures = 0
        # What each other rank said last, and for how many looks it has not said anything new.
        self._said: dict[int, bytes] = {}
        self._silence = dict.fromkeys(self._others, 0)
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._word: Word | None = None
        self._word_s = 0.0
        self._is_ending = False
        self._closing = threading.Event()
        self._ear, self._bell = os.pipe()
        self._beat()
        meeting.barrier()
        self._processes = self._open_processes()
        self._thread = threading.Thread(target=self._watch, name="packhorse-lookout", daemon=True)
        self._thread.start()

    @property
    def word(self) -> Word | None:
        """What ended the run; None so far."""
        return self._word

    def leave(self) -> None:
        """Say that this rank has nothing more to do: its end is no loss."""
        with suppress(RuntimeError):
            self._store.set(_key("left", self._rank), "")

    def begin_end(self) -> None:
        """Say that the main thread is ending: it is not to be ended by force."""
        self._is_ending = True

    def await_word(self, peer: int | None, limit_s: float, otherwise: str) -> Word:
        """Find out why a message failed; blocks until somebody knows.

        Args:
            peer: who the message was for or from, where it was a single one.
            otherwise: what is said where nobody does within the limit.
        """
        began_s = time.monotonic()
        while self._word is None:
            passed_s = time.monotonic() - began_s
            word = None
            if passed_s > _FIRST_S and peer is not None and peer not in self._left:
                word = self._lost(peer, "it exchanges no more messages, and left no word")
            elif passed_s > _FIRST_S and (rank := self._find_silent(_SUSPECT_LOOKS)) is not None:
                word = self._lost(rank, "gone without a word")
            elif passed_s > limit_s:
                word = Word(rank=None, what=otherwise, by=self._rank)
            if word is not None:
                self.say(word)
            time.sleep(_PAUSE_S)
        return self._word

    def await_failure(self, limit_s: float) -> None:
        """Wait a moment for word, or for the end of a rank, which brings word."""
        end_s = time.monotonic() + limit_s
        while self._word is None and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)

    def say(self, word: Word) -> Word:
        """Leave word, and give the one that stands."""
        if self._word is not None:
            return self._word
        stands = leave_word(self._store, word) or word
        self._take(stands)
        return stands

    def await_places(self, limit_s: float) -> Mapping[int, str]:
        """Ask all ranks that still run where they are; give what they said last, by rank."""
        asked = {rank: self._said.get(rank) for rank in self._others if rank not in self._gone}
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and any(
            said == self._said.get(rank)
            and rank not in self._left | self._gone
            and not self._silence[rank] > _SUSPECT_LOOKS
            for rank, said in asked.items()
        ):
            time.sleep(_PAUSE_S)
        places = {rank: _place_in(said) for rank, said in self._said.items()}
        return dict(sorted({**places, self._rank: self._describe()}.items()))

    def await_leaving(self, limit_s: float) -> None:
        """Wait until no other rank has anything to do, or they are gone."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and not self._left | self._gone >= set(self._others):
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the thread, which must not be in the store's code when the process ends.

        Closing twice is harmless.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._bell, b"!")
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            for descriptor in (self._ear, self._bell, *self._processes):
                os.close(descriptor)

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._beat()
                self._look()
                self._num_failures = 0
            except RuntimeError:
                self._num_failures += 1
                if self._num_failures == _STORE_LOOKS:
                    # Nobody can be told: the first rank speaks.
                    what = "the store that all ranks met at is gone, and with it the launcher"
                    self._take(Word(rank=None, what=what, by=0))
            self._end_late()
            self._rest()

    def _beat(self) -> None:
        self._number += 1
        said = json.dumps([self._number, self._describe()])
        self._store.set(_key("here", self._rank), said)

    def _look(self) -> None:
        if self._word is None and (word := find_word(self._store)) is not None:
            self._take(word)
        if not self._others:
            return
        said = self._store.multi_get([_key("here", rank) for rank in self._others])
        for rank, text in zip(self._others, said, strict=True):
            self._silence[rank] = self._silence[rank] + 1 if text == self._said.get(rank) else 0
            self._said[rank] = text
            if rank not in self._left and self._store.check([_key("left", rank)]):
                self._left.add(rank)
        if self._word is None and (rank := self._find_silent(self._silent_looks)) is not None:
            seconds = f"{self._silent_looks * self._look_s:.0f} s"
            self.say(self._lost(rank, f"silent for {seconds}: it hangs, or is cut off"))

    def _find_silent(self, num_looks: int) -> int | None:
        silent = {rank: num for rank, num in self._silence.items() if rank not in self._left}
        rank = max(silent, key=silent.__getitem__, default=None)
        return rank if rank is not None and silent[rank] >= num_looks else None

    def _rest(self) -> None:
        """Wait for the next look, or until a process of another rank on this computer ends."""
        poll = select.poll()
        for descriptor in (self._ear, *self._processes):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(self._look_s * 1000)]
        for descriptor in ready:
            if descriptor == self._ear:
                continue
            rank = self._processes.pop(descriptor)
            os.close(descriptor)
            # At once: the launcher is about to take away what the kernel knows.
            self._explain_end(rank, find_end(self._attendees[rank].pid))

    def _explain_end(self, rank: int, how: str | None) -> None:
        self._gone.add(rank)
        with suppress(RuntimeError):
            if self._store.check([_key("left", rank)]):
                self._left.add(rank)
                return
        self.say(self._lost(rank, f"ended {'without a word' if how is None else f'by {how}'}"))

    def _take(self, word: Word) -> None:
        if self._word is None:
            self._word_s = time.monotonic()
            self._word = word

    def _end_late(self) -> None:
        word = self._word
        # Who failed himself is ending already.
        if word is None or self._is_ending or word.rank == self._rank:
            return
        limit_s = STOP_S if word.is_stop else self._end_s
        if time.monotonic() - self._word_s > limit_s:
            self._is_ending = True
            self._give_up(word)

    def _lost(self, rank: int, what: str) -> Word:
        return Word(rank=rank, what=what, by=self._rank)

    def _open_processes(self) -> dict[int, int]:
        own = self._attendees[self._rank].process_space
        found: dict[int, int] = {}
        for other in self._attendees:
            if other.rank != self._rank and own is not None and other.process_space == own:
                descriptor = open_process(other.pid)
                if descriptor is not None:
                    found[descriptor] = other.rank
        return found


def _place_in(said: bytes) -> str:
    place: str = json.loads(said)[1]
    return place


def _key(what: str, rank: int) -> str:
    return f"{_PREFIX}/{what}/{rank}"


def describe_places(
    places: Mapping[int, str], attendees: Sequence[Attendee], lost: int | None
) -> str:
    """Say where each rank was, a line for each; of one that is lost it is what it said last."""
    return "\n".join(
        f"{attendees[rank]}{', when it was last heard' if rank == lost else ''}: {place}"
        for rank, place in places.items()
    )
