"""Two slots: whatever was written when a process ended, the recorded step is untouched."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from packhorse.errors import StorageError
from packhorse.storage.record import Entry, create_record, read_record
from packhorse.storage.slots import Slots

NAMES = ("a", "b", "c")


class Disk:
    """Two slots per name; remembers what they held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[tuple[str, int], int] = {}
        self.slots = Slots(
            NAMES,
            flush=self.flush,
            record=create_record(path, {}, num_buffers=len(NAMES)),
            recorded=None,
        )

    def flush(self) -> None:
        """Everything that is written here is there."""

    def write(self, name: str, value: int) -> None:
        slot = self.slots.slot_to_write(name)
        self.content[name, slot] = value
        self.slots.wrote(name, slot)

    def read(self, name: str) -> int:
        return self.content[name, self.slots.slot_to_read(name)]

    def recorded(self) -> dict[str, int] | None:
        entry = read_record(self.path).entry
        if entry is None:
            return None
        return {n: self.content[n, s] for n, s in zip(NAMES, entry.slots, strict=True)}


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_step_survives_whatever_is_written_after_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    disk = Disk(tmp_path / "record")
    recorded: dict[str, int] | None = None
    newest: dict[str, int] = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        disk.write(name, 0)
    for value in range(1, 40):
        name = draw.choice(NAMES)
        disk.write(name, value)
        newest[name] = value
        assert {n: disk.read(n) for n in NAMES} == newest
        assert disk.recorded() == recorded
        if draw.random() < 0.3:
            disk.slots.commit(value, {})
            disk.slots.settle()
            recorded = dict(newest)
            assert disk.recorded() == recorded
            assert disk.slots.recorded_step == value


def test_a_write_waits_for_a_commit_and_then_takes_the_other_slot(tmp_path: Path) -> None:
    gate = threading.Event()
    events: list[object] = []

    def flush() -> None:
        gate.wait(10)
        events.append("flushed")

    slots = Slots(
        NAMES,
        flush=flush,
        record=create_record(tmp_path / "record", {}, num_buffers=3),
        recorded=None,
    )
    assert slots.slot_to_write("a") == 0
    slots.wrote("a", 0)
    slots.commit(1, {})
    assert slots.slot_to_read("a") == 0  # reads do not wait

    def write() -> None:
        events.append(slots.slot_to_write("a"))

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.05)
    assert events == []
    assert slots.recorded_step is None
    gate.set()
    writer.join(10)
    assert events == ["flushed", 1]
    assert slots.recorded_step == 1


def test_an_entry_is_written_only_after_the_flush(tmp_path: Path) -> None:
    path = tmp_path / "record"
    seen: list[Entry | None] = []
    slots = Slots(
        NAMES,
        flush=lambda: seen.append(read_record(path).entry),
        record=create_record(path, {}, num_buffers=3),
        recorded=None,
    )
    slots.commit(1, {})
    slots.commit(2, {})
    slots.settle()
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1].step == 1


def test_slots_go_on_from_a_recorded_entry(tmp_path: Path) -> None:
    entry = Entry(step=4, slots=(1, 0, 1), state={})
    record = create_record(tmp_path / "record", {}, num_buffers=3)
    slots = Slots(NAMES, flush=lambda: None, record=record, recorded=entry)
    assert [slots.slot_to_read(name) for name in NAMES] == [1, 0, 1]
    assert [slots.slot_to_write(name) for name in NAMES] == [0, 1, 0]
    assert slots.recorded_step == 4


def test_a_failed_flush_is_told_and_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record"

    def fail() -> None:
        raise StorageError("cannot flush the scratch file: Input/output error")

    slots = Slots(NAMES, flush=fail, record=create_record(path, {}, num_buffers=3), recorded=None)
    slots.commit(1, {})
    with pytest.raises(StorageError, match="cannot flush"):
        slots.settle()
    with pytest.raises(StorageError, match="cannot flush"):
        slots.slot_to_write("a")
    assert read_record(path).entry is None


def test_a_flush_that_does_not_end_is_told_and_not_waited_for_again(tmp_path: Path) -> None:
    may_end = threading.Event()
    path = tmp_path / "record"
    slots = Slots(
        NAMES,
        flush=lambda: None if may_end.wait(30) else pytest.fail("nobody lets it end"),
        record=create_record(path, {}, num_buffers=len(NAMES)),
        recorded=None,
        stuck_after_s=0.05,
    )
    slots.commit(1, {})
    with pytest.raises(StorageError, match=r"not brought a finished step .* in 0\.05 s") as caught:
        slots.settle()
    assert str(path) in str(caught.value)
    for ask in (slots.settle, lambda: slots.slot_to_write("a"), lambda: slots.commit(2, {})):
        with pytest.raises(StorageError) as again:
            ask()
        assert again.value is caught.value
    assert read_record(path).entry is None
    may_end.set()
    while slots.recorded_step is None:  # a drive that answers after all has lost nothing
        threading.Event().wait(0.001)
    slots.settle()
    assert slots.recorded_step == 1
