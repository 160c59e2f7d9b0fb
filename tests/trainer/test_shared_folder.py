"""Ranks that see one run folder, and ranks that do not; threads at one store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from packhorse.errors import InputError, MismatchError, PackhorseError
from packhorse.runtime.transport.meeting import Meeting
from packhorse.runtime.transport.seats import Seat
from packhorse.trainer.shared_folder import check_shared


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A rank on a host of its own."""

    meeting: Meeting
    rank: int
    hosts: tuple[str, ...] = ("a", "b", "c")

    def gather(self, text: str, *, wait: timedelta | None = None) -> list[str]:
        return self.meeting.gather(text, wait=wait)


def hold(act: Callable[[Placed], object]) -> list[object]:
    store = HashStore()

    def attend(rank: int) -> object:
        seat = Seat(rank=rank, num_ranks=3, local_rank=0, num_local=1, place="a:1")
        try:
            return act(Placed(meeting=Meeting(seat, store, "x"), rank=rank))
        except PackhorseError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(attend, range(3)))


def test_one_folder_passes_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    assert hold(lambda placed: check_shared(folder, placed)) == [None] * 3
    assert list(tmp_path.iterdir()) == []


def test_who_sees_another_folder_is_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".packhorse-shared").write_text("of a run that was killed")

    def check(placed: Placed) -> None:
        name = "other" if placed.rank == 2 else "run"
        check_shared(tmp_path / name, placed, late_s=0.0)

    for error in hold(check):
        assert isinstance(error, InputError)
        assert error.what == "rank 2 does not see what rank 0 writes into output_dir"
        assert "on hosts a and c" in (error.where or "")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_of_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = HashStore()
    seat = Seat(rank=0, num_ranks=1, local_rank=0, num_local=1, place="a:1")
    placed = Placed(meeting=Meeting(seat, store, "x"), rank=0)
    with pytest.raises(PackhorseError, match="write into the run folder"):
        check_shared(tmp_path / "file" / "run", placed)


def test_facts_that_differ_are_named_with_their_hosts() -> None:
    def compare(placed: Placed) -> None:
        meeting = placed.meeting
        meeting.introduce({"GLOO_SOCKET_IFNAME": "lo"})
        meeting.compare({"torch": "2", "recipe": f"{placed.rank // 2}"}, "give all the same")

    for error in hold(compare):
        assert isinstance(error, MismatchError)
        assert error.what == "recipe is 0 on rank 0 and 1 on rank 2"
        assert error.where == "hosts x and x"
        assert error.fix == "give all the same"
