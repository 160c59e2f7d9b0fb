"""Who is lost is named: threads at one store, and processes that end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from torch.distributed import HashStore

from packhorse.runtime.transport.lookout import Lookout
from packhorse.runtime.transport.meeting import Attendee
from packhorse.runtime.transport.peer_processes import find_end, find_process_space, open_process
from packhorse.runtime.transport.store import Word, find_word, leave_word

LOOK_S = 0.01
WAIT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Met:
    rank: int
    num_ranks: int
    store: HashStore
    attendees: tuple[Attendee, ...]
    barrier: Callable[[], object]


def attend(rank: int, pid: int = 1) -> Attendee:
    return Attendee(rank=rank, host=f"host-{rank}", address="10.0.0.1", port=1, pid=pid)


@contextmanager
def look_out(
    attendees: Sequence[Attendee], **changes: object
) -> Generator[tuple[HashStore, list[Lookout]]]:
    """Let all ranks look out; each ends by force what does not end by itself."""
    store = HashStore()
    together = threading.Barrier(len(attendees))
    options = {"give_up": lambda _: None, "silent_looks": 10**9, "look_s": LOOK_S}

    def begin(rank: int) -> Lookout:
        met = Met(
            rank=rank,
            num_ranks=len(attendees),
            store=store,
            attendees=tuple(attendees),
            barrier=together.wait,
        )
        return Lookout(met, describe=lambda: f"in task {rank}", **(options | changes))

    with ThreadPoolExecutor(len(attendees)) as pool:
        lookouts = list(pool.map(begin, range(len(attendees))))
    try:
        yield store, lookouts
    finally:
        for lookout in lookouts:
            lookout.close()


@pytest.fixture
def process() -> Generator[subprocess.Popen[bytes]]:
    """A process that waits until it is ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_a_rank_that_is_killed_is_named_with_its_signal(process) -> None:
    space = find_process_space()
    killed = replace(attend(1, process.pid), process_space=space)
    others = [replace(attend(rank, os.getpid()), process_space=space) for rank in (0, 2)]
    with look_out([others[0], killed, others[1]]) as (store, (first, _, third)):
        process.kill()
        found = [lookout.await_word(None, WAIT_S, "nobody knows") for lookout in (first, third)]
        # One of both speaks, and both know it.
        assert found[0] == found[1] == find_word(store)
        assert (found[0].rank, found[0].what, found[0].exit_code) == (1, "ended by SIGKILL", 4)
        assert found[0].by in (0, 2)
        places = first.await_places(WAIT_S)
    assert places == {0: "in task 0", 1: "in task 1", 2: "in task 2"}


def test_a_rank_that_ends_after_its_work_is_not_lost(process) -> None:
    space = find_process_space()
    own = replace(attend(0, os.getpid()), process_space=space)
    with look_out([own, replace(attend(1, process.pid), process_space=space)]) as (_, lookouts):
        lookouts[1].leave()
        process.terminate()
        lookouts[0].await_leaving(WAIT_S)
        lookouts[0].await_failure(10 * LOOK_S)
        assert lookouts[0].word is None


def test_a_rank_that_is_silent_is_named_by_the_others() -> None:
    with look_out([attend(rank) for rank in range(3)], silent_looks=30) as (_, lookouts):
        lookouts[2].close()
        words = [lookout.await_word(None, WAIT_S, "nobody knows") for lookout in lookouts[:2]]
    assert words[0] == words[1]
    assert (words[0].rank, words[0].what) == (2, "silent for 0 s: it hangs, or is cut off")


def test_who_is_named_by_a_failed_message_is_lost_when_nobody_knows_better() -> None:
    with look_out([attend(0), attend(1)]) as (_, (first, _)):
        word = first.await_word(1, WAIT_S, "nobody knows")
    assert word == Word(rank=1, what="it exchanges no more messages, and left no word", by=0)


def test_what_is_said_first_stands_and_ends_the_others_by_force() -> None:
    given_up: list[Word] = []
    full = threading.Event()

    def give_up(word: Word) -> None:
        given_up.append(word)
        if len(given_up) == 2:
            full.set()

    with look_out([attend(rank) for rank in range(3)], give_up=give_up, end_s=0.0) as (
        store,
        (first, second, _),
    ):
        second.begin_end()
        word = second.say(Word(rank=1, what="the disk is full", by=1, exit_code=4))
        assert full.wait(WAIT_S)
        assert first.say(Word(rank=0, what="a message failed", by=0)) == word
        assert leave_word(store, Word(rank=2, what="late", by=2)) == word
    assert given_up == [word, word]
    assert str(word) == "rank 1: the disk is full"


def test_a_store_that_is_gone_ends_all() -> None:
    class Gone(HashStore):
        def clone(self) -> Gone:
            return self

        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError(f"no {keys[0]}: broken pipe")

    met = Met(
        rank=1,
        num_ranks=2,
        store=Gone(),
        attendees=(attend(0), attend(1)),
        barrier=lambda: None,
    )
    lookout = Lookout(met, describe=str, give_up=lambda _: None, look_s=LOOK_S)
    word = lookout.await_word(None, WAIT_S, "nobody knows")
    lookout.close()
    assert word.what.startswith("the store that all ranks met at is gone")
    assert word.by == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "signal 40"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_how_a_process_ended(code: str, words: str) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        descriptor = open_process(process.pid)
        assert descriptor is not None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find_end(process.pid) == words
        os.close(descriptor)
    assert find_end(process.pid) is None
    assert open_process(process.pid) is None
