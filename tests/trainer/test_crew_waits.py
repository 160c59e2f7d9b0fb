"""The ranks of a run: how long they wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from packhorse.errors import InputError, PackhorseError, PeerLostError, StoppedError
from packhorse.runtime.transport.meeting import Meeting
from packhorse.runtime.transport.seats import read_seat
from packhorse.trainer.crew import LONG_WAIT, MetCrew
from packhorse.trainer.whereabouts import Whereabouts

SHORT = timedelta(seconds=1)


class Heard:
    """A meeting that keeps how long its rank would have waited for the others."""

    rank = 0
    num_ranks = 1
    store = HashStore()

    def __init__(self) -> None:
        self.waits: list[timedelta | None] = []

    def broadcast(self, text: str | None, *, wait: timedelta | None = None) -> str:
        self.waits.append(wait)
        return text or ""


def two_ranks(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "1",
    }


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=SHORT)
    yield
    dist.destroy_process_group()


def test_the_first_rank_waits_for_those_that_trace_and_load_what_it_has_already(gloo: None) -> None:
    meeting = Heard()
    crew = MetCrew(meeting, Whereabouts())
    assert crew.lead(lambda: "found") == "found"
    assert crew.lead_flag(lambda: True)
    assert meeting.waits == [LONG_WAIT] * 2


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (InputError("there is no such file"), "another rank has failed: rank 0: there is no such"),
        (StoppedError("stopped by SIGTERM"), "rank 0: stopped by SIGTERM"),
    ],
)
def test_a_first_rank_that_fails_raises_its_own_error_and_the_others_hear_of_it(
    gloo: None, error: PackhorseError, heard: str
) -> None:
    store = HashStore()
    first, second = (
        MetCrew(Meeting(read_seat(two_ranks(rank)), store, "host"), Whereabouts())
        for rank in range(2)
    )

    def fail() -> str:
        raise error

    with pytest.raises(type(error)) as raised:
        first.lead(fail)
    assert raised.value is error
    with pytest.raises(PeerLostError) as lost:
        second.lead(fail)
    assert lost.value.what.startswith(heard)


def test_ranks_wait_for_a_save_for_longer_than_a_meeting_does(gloo: None) -> None:
    crew = MetCrew(Heard(), Whereabouts())
    assert crew.agree(3) == 3
    backend = crew._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == LONG_WAIT
