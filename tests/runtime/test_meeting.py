"""Ranks that meet: threads at one store, each with torchrun's environment of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
from torch.distributed import HashStore

from packhorse.errors import InputError, PackhorseError, PeerLostError
from packhorse.runtime.transport import meeting as meeting_module
from packhorse.runtime.transport import seats
from packhorse.runtime.transport.meeting import Meeting
from packhorse.runtime.transport.seats import LOOPBACK, find_address, read_seat
from packhorse.runtime.transport.store import Word, find_word

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=20)


def environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
    }


def hold(
    num_ranks: int,
    act: Callable[[Meeting, Mapping[str, str]], object],
    *,
    wait: timedelta = LONG,
    absent: frozenset[int] = frozenset(),
) -> list[object]:
    """Let every rank that comes do something; give what each returned or raised."""
    store = HashStore()

    def attend(rank: int) -> object:
        env = environment(rank, num_ranks)
        meeting = Meeting(read_seat(env), store, f"host-{rank // 2}", wait=wait)
        try:
            return act(meeting, env)
        except PackhorseError as error:
            return error

    ranks = [rank for rank in range(num_ranks) if rank not in absent]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attend, ranks))


def test_everybody_hears_everybody_round_after_round() -> None:
    def talk(meeting: Meeting, env: Mapping[str, str]) -> object:
        meeting.introduce(env)
        heard = [meeting.gather(f"{meeting.rank}:{turn}") for turn in range(20)]
        meeting.barrier()
        told = meeting.broadcast("from 0" if meeting.rank == 0 else None)
        return heard, told, meeting.hosts

    expected = [[f"{rank}:{turn}" for rank in range(3)] for turn in range(20)]
    assert hold(3, talk) == [(expected, "from 0", ("host-0", "host-0", "host-1"))] * 3


def test_what_was_said_is_not_kept_for_ever() -> None:
    store = HashStore()
    alone = Meeting(read_seat(environment(0, 1)), store, "host-0")
    for _ in range(50):
        assert alone.gather("x") == ["x"]
    assert store.num_keys() <= 2


def test_who_does_not_come_is_named_with_those_that_came() -> None:
    def come(meeting: Meeting, env: Mapping[str, str]) -> object:
        return meeting.introduce(env)

    errors = hold(4, come, wait=SHORT, absent=frozenset({1, 3}))
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.what == "ranks 1, 3 of 4 did not come within 0 s"
        assert error.where is not None
        assert "node-0:29500" in error.where
        assert "rank 0 on host host-0" in error.where
        assert "rank 2 on host host-1" in error.where


def test_who_falls_silent_is_named_with_host_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "find_address", lambda _: LOOPBACK)

    def fall_silent(meeting: Meeting, env: Mapping[str, str]) -> object:
        meeting.introduce(env)
        return None if meeting.rank == 2 else meeting.gather("still here", wait=SHORT)

    first, second, _ = hold(3, fall_silent)
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert error.what == f"rank 2 on host host-1 ({LOOPBACK}) said nothing for 0 s"


def test_a_rank_that_fails_lets_the_others_go_at_once() -> None:
    def fail(meeting: Meeting, env: Mapping[str, str]) -> object:
        meeting.introduce(env)
        if meeting.rank == 1:
            meeting.abort("the disk is full")
            return find_word(meeting.store)
        return meeting.gather("")

    error, word = hold(2, fail)
    assert isinstance(error, PeerLostError)
    assert error.what == "another rank has failed: rank 1: the disk is full"
    assert word == Word(rank=1, what="the disk is full", by=1)


def test_who_cannot_be_reached_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        # Bound and not listening: who connects there is refused.
        closed = taken.getsockname()[1]
        attendee = meeting_module.Attendee

        def at_a_closed_door(**facts: object) -> object:
            return attendee(**{**facts, **({"port": closed} if facts["rank"] == 1 else {})})

        monkeypatch.setattr(meeting_module, "Attendee", at_a_closed_door)
        monkeypatch.setattr(meeting_module, "find_address", lambda _: LOOPBACK)
        errors = hold(3, lambda meeting, env: meeting.introduce(env))
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.what == (
            f"rank 1 on host host-0 ({LOOPBACK}) cannot be reached from"
            f" rank 0 on host host-0 ({LOOPBACK}): Connection refused"
        )
        assert "GLOO_SOCKET_IFNAME" in (error.fix or "")


def test_a_store_that_is_gone_is_no_silent_rank() -> None:
    class Gone(HashStore):
        def set(self, *_: object) -> None:
            raise RuntimeError("Broken pipe\nand more")

    meeting = Meeting(read_seat(environment(0, 2)), Gone(), "host-0")
    with pytest.raises(PeerLostError, match="store that all ranks met at is gone") as caught:
        meeting.gather("")
    assert caught.value.where == "node-0:29500: Broken pipe"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": ""}, "RANK is missing"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', not a number"),
        ({"RANK": "2"}, "RANK is 2, not below WORLD_SIZE, which is 2"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is missing"),
    ],
)
def test_an_environment_that_makes_no_sense(change: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read_seat(environment(0, 2) | change)
    assert "torchrun" in (caught.value.fix or "")


def test_the_address_is_that_of_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_address({"GLOO_SOCKET_IFNAME": "lo"}) == LOOPBACK
    with pytest.raises(InputError, match="no network interface 'nowhere0'") as caught:
        find_address({"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert "lo" in (caught.value.fix or "")

    def know_no_name(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(seats.socket, "getaddrinfo", know_no_name)
    assert find_address({}) == LOOPBACK


def test_the_rank_that_may_keep_the_store_leaves_last() -> None:
    begun = Event()

    def leave(meeting: Meeting, env: Mapping[str, str]) -> object:
        del env
        if meeting.rank:
            begun.wait(LONG.total_seconds())
            meeting.close()
            return None
        begun.set()
        meeting.close()
        return meeting.store.check(["packhorse/meeting/left/1", "packhorse/meeting/left/2"])

    assert hold(3, leave) == [True, None, None]
