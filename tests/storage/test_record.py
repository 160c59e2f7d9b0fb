"""The record of a scratch file: the newest whole entry counts, a torn one never does."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from packhorse.errors import FileFormatError
from packhorse.storage.record import (
    Entry,
    create_record,
    open_record,
    read_record,
    same_header,
)

HEADER = {"owner": "runs/a", "buffers": {"param/0": [4096, 0, 8192]}}


def entry(step: int) -> Entry:
    return Entry(step=step, slots=(step % 2, 0), state={"step": step})


def record_with(path: Path, *steps: int) -> Path:
    file = create_record(path, HEADER, num_buffers=2)
    for step in steps:
        file.add(entry(step))
    file.close()
    return path


def test_a_new_record_has_a_header_and_no_entry(tmp_path: Path) -> None:
    found = read_record(record_with(tmp_path / "record"))
    assert same_header(found.header, HEADER)
    assert found.entry is None
    assert found.damaged == ()


@pytest.mark.parametrize("last", [1, 2, 3, 8])
def test_the_newest_entry_counts(tmp_path: Path, last: int) -> None:
    found = read_record(record_with(tmp_path / "record", *range(1, last + 1)))
    assert found.entry == entry(last)
    assert found.damaged == ()


def test_a_record_that_was_opened_again_goes_on(tmp_path: Path) -> None:
    path = record_with(tmp_path / "record", 1, 2, 3)
    file = open_record(path)
    file.add(entry(4))
    file.close()
    assert read_record(path).entry == entry(4)
    content = path.read_bytes()
    assert b'"step":3' not in content  # nothing speaks of slots that are written again


def test_wherever_a_write_is_torn_the_entry_before_it_stands(tmp_path: Path) -> None:
    path = record_with(tmp_path / "record", 1, 2)
    before = path.read_bytes()
    file = open_record(path)
    file.add(entry(3))
    file.close()
    after = path.read_bytes()
    places = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    first, last = places[0], places[-1]
    draw = random.Random(3)
    for _ in range(60):
        cut = draw.randrange(first, last + 1)
        path.write_bytes(after[:cut] + before[cut:])
        found = read_record(path)
        assert found.entry in (entry(2), entry(3))
        # A page may also be written while the one before it is not.
        path.write_bytes(before[:cut] + after[cut:])
        assert read_record(path).entry in (entry(2), entry(3))
    path.write_bytes(after[: first + 8] + before[first + 8 :])
    found = read_record(path)
    assert found.entry == entry(2)
    assert found.damaged == ("entry 0 of record does not match its checksum",)


def test_where_power_fails_no_step_before_the_last_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was written since a flush, any part may be there or not."""
    path = tmp_path / "record"
    file = create_record(path, HEADER, num_buffers=2)
    durable, found = path.read_bytes(), set[int | None]()
    written: list[tuple[int, bytes]] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync

    def fail_power(durable: bytes, parts: list[tuple[int, bytes]]) -> int | None:
        content = bytearray(durable)
        for place, part in parts:
            content[place : place + len(part)] = part
        after = tmp_path / "after"
        after.write_bytes(content)
        entry = read_record(after).entry
        return None if entry is None else entry.step

    def write(descriptor: int, block: bytes, place: int) -> int:
        torn = [*written, (place, block[: len(block) // 2])]
        found.update(fail_power(durable, parts) for parts in (written, torn, torn[-1:]))
        written.append((place, block))
        found.update(fail_power(durable, parts) for parts in (written, written[-1:]))
        return pwrite(descriptor, block, place)

    def flush(descriptor: int) -> None:
        nonlocal durable
        fdatasync(descriptor)
        durable = path.read_bytes()
        written.clear()

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", flush)
    file.add(entry(1))
    for step in range(2, 6):
        found.clear()
        file.add(entry(step))
        assert found == {step - 1, step}
    file.close()


def test_a_flipped_bit_never_brings_an_older_step_back(tmp_path: Path) -> None:
    path = record_with(tmp_path / "record", 6, 7)
    whole = path.read_bytes()
    places = [at for at in range(len(whole)) if whole[at:].startswith(b'"step":7')]
    first, second = places[0], places[-1]
    for flipped in ([first], [second], [first, second]):
        content = bytearray(whole)
        for at in flipped:
            content[at + 7] ^= 1
        path.write_bytes(content)
        found = read_record(path)
        assert found.entry == (None if len(flipped) == 2 else entry(7))
        assert len(found.damaged) == len(flipped)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = record_with(tmp_path / "record", 1)
    content = bytearray(path.read_bytes())
    content[content.index(b"runs/a")] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="header does not match its checksum"):
        read_record(path)


def test_headers_are_the_same_in_any_order_of_their_keys() -> None:
    assert same_header(HEADER, dict(reversed(HEADER.items())))
    assert not same_header(HEADER, {**HEADER, "owner": "runs/b"})
    assert not same_header(HEADER, {"owner": "runs/a"})
