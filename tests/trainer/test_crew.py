"""What ranks leave to the first one, and hear from it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
from torch.distributed import HashStore

from packhorse.errors import InputError, PeerLostError
from packhorse.runtime.transport.meeting import Meeting
from packhorse.runtime.transport.seats import Seat
from packhorse.trainer.crew import ALONE, MetCrew
from packhorse.trainer.whereabouts import Whereabouts


class WatchedStore:
    """A store that tells when somebody has looked for what others say."""

    def __init__(self, store, looked: Event) -> None:
        self._store, self._looked = store, looked

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        found = self._store.check(keys)
        self._looked.set()
        return found


def lead_with_a_late_second(work):
    """Two ranks lead; the second comes when the first has already looked for it in vain."""
    store, looked = HashStore(), Event()

    def attend(rank):
        seat = Seat(rank=rank, num_ranks=2, local_rank=rank, num_local=2, place="here")
        own = WatchedStore(store, looked) if rank == 0 else store
        # Nobody waits for what everybody says, unless they are told to.
        crew = MetCrew(Meeting(seat, own, "host", wait=timedelta(0)), Whereabouts())
        if rank:
            assert looked.wait(20)
        try:
            return crew.lead(work)
        except (InputError, PeerLostError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(attend, (0, 1)))


def test_the_first_rank_waits_for_those_that_are_still_busy():
    assert lead_with_a_late_second(lambda: "found") == ["found", "found"]


def test_what_went_wrong_on_the_first_rank_is_heard_by_late_ones():
    def fail():
        raise InputError("the folder is in use", where="run", fix="wait")

    first, second = lead_with_a_late_second(fail)
    assert (type(first), first.what) == (InputError, "the folder is in use")
    assert isinstance(second, PeerLostError)
    assert second.what == "rank 0 has failed: the folder is in use"


def test_one_rank_leads_and_agrees_with_itself():
    assert ALONE.lead(lambda: "found") == "found"
    assert ALONE.lead_flag(lambda: True)
    assert ALONE.agree(3) == 3
    assert ALONE.open_transport([]) is None
    with pytest.raises(ValueError, match="there is no rank 1"):
        ALONE.receive_text(1)
