"""The ranks of a run: how long they wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from packhorse.errors import InputError
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

    def fail() -> str:
        raise InputError("no")

    with pytest.raises(InputError):
        crew.lead(fail)
    assert meeting.waits == [LONG_WAIT] * 3


def test_ranks_wait_for_a_save_for_longer_than_a_meeting_does(gloo: None) -> None:
    crew = MetCrew(Heard(), Whereabouts())
    assert crew.agree(3) == 3
    backend = crew._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == LONG_WAIT
