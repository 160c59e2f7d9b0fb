"""A run whose scratch lies on several drives: kept, killed, continued, moved to other drives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import test_training
from test_training import KillAt, Killed, Listener, assert_same_weights, curve, load, run
from tiny_runs import ALL_ON_DISK, make_machine

from packhorse.machine.spec import Drive, Machine
from packhorse.storage import striped_file, stripes
from packhorse.storage.kept_state import find_kept
from packhorse.storage.scratch_folder import find_leftovers
from packhorse.trainer.run_folder import ResumeNewest

KEPT = {**ALL_ON_DISK, "durable": 1}


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for tests is smaller than one stripe."""
    monkeypatch.setattr(stripes, "UNIT_BYTES", 4096)
    monkeypatch.setattr(striped_file, "_LEAST_PART_BYTES", 4096)


def use_drives(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float]) -> None:
    """Give the machine of the runs to come a drive of each name and rate."""

    def make(folder: Path) -> Machine:
        machine = make_machine(folder)
        drives = tuple(
            Drive(
                path=str(folder / name),
                budget_bytes=2**28,
                read_bytes_per_s=rate,
                write_bytes_per_s=rate,
                measured_bytes=1,
                direct=True,
                block_bytes=2**20,
                num_threads=2,
                huge_pages=True,
            )
            for name, rate in rates.items()
        )
        device, disk = machine.tiers
        disk = replace(disk, path=drives[0].path, drives=drives)
        return replace(machine, tiers=(device, disk))

    monkeypatch.setattr(test_training, "make_machine", make)


def files_in(folder: Path) -> list[int]:
    return [left.size_bytes for left in find_leftovers(folder) if "state" in left.path.name]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one drive that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, plan={**ALL_ON_DISK, "durable": "off"}, save_steps=None)
    return folder


@pytest.mark.parametrize(
    ("rates", "note"),
    [
        ({"a": 3e9, "b": 1e9}, "resumed in place"),
        ({"a": 1e9, "b": 1e9}, "laid out by another plan"),
        ({"a": 1e9}, "laid out by another plan"),
        ({"a": 1e9, "c": 1e9, "d": 2e9}, "laid out by another plan"),
    ],
    ids=["same", "other-shares", "one-drive", "other-drives"],
)
def test_a_killed_run_goes_on_whatever_drives_there_are(
    tmp_path: Path,
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    rates: dict[str, float],
    note: str,
) -> None:
    use_drives(monkeypatch, {"a": 3e9, "b": 1e9})
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4), plan=KEPT, save_steps=None)
    (large,), (small,) = files_in(tmp_path / "a"), files_in(tmp_path / "b")
    assert abs(large - 3 * small) <= 16 * 4096
    ((kept,), _) = find_kept(tmp_path / "a")
    assert kept.entry.step == 3

    use_drives(monkeypatch, rates)
    listener = Listener()
    run(tmp_path, resume=ResumeNewest(), observer=listener, plan=KEPT, save_steps=None)
    assert any(note in text for text in listener.notes)
    assert curve(tmp_path / "run") == curve(straight / "run")
    assert_same_weights(load(tmp_path / "run"), load(straight / "run"))
    for name in ("a", "b", *rates):
        assert find_leftovers(tmp_path / name) == ()
