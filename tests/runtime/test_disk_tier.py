"""The disk tier keeps finished steps: in place, with two slots, for one run."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packhorse.errors import InputError, StorageError
from packhorse.program.buffers import Buffer, BufferId, PoolId
from packhorse.runtime.disk import DiskTier, Keeping
from packhorse.storage.kept_check import find_stale
from packhorse.storage.kept_state import KeptState, find_kept, open_kept, remove_kept
from packhorse.storage.record import RecordFile
from packhorse.storage.scratch_folder import find_leftovers
from packhorse.storage.scratch_space import Scratch, ScratchPart

SIZE = 8192
PARAM, GRAD = BufferId("param/0"), BufferId("grad/0")
BUFFERS = {
    name: Buffer(
        id=name,
        size_bytes=SIZE,
        pools={"device": PoolId("device"), "disk": PoolId("disk")},
        home="disk" if name == PARAM else None,
    )
    for name in (PARAM, GRAD)
}


def keeping(owner: str = "run") -> Keeping:
    return Keeping(sizes_bytes={PARAM: SIZE}, description={"owner": owner})


@contextmanager
def page(value: int) -> Generator[int]:
    memory = mmap.mmap(-1, SIZE)
    view = memoryview(memory).cast("B")
    view[:] = bytes([value]) * SIZE
    holder = (ctypes.c_char * SIZE).from_buffer(memory)
    yield ctypes.addressof(holder)
    del holder
    view.release()


def write(disk: DiskTier, buffer: BufferId, value: int) -> None:
    with page(value) as address:
        disk.write(buffer, address)


def read(disk: DiskTier, buffer: BufferId) -> int:
    with page(0) as address:
        disk.read(buffer, address)
        found = set(ctypes.string_at(address, SIZE))
    assert len(found) == 1
    return found.pop()


def end_abruptly(disk: DiskTier) -> None:
    """What the end of a process leaves: files as they are, no lock."""
    disk.settle()
    assert disk._folder is not None  # pyright: ignore[reportPrivateUsage]
    disk._folder.close()  # pyright: ignore[reportPrivateUsage]


def test_without_keeping_nothing_stays(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path) as disk:
        write(disk, PARAM, 1)
        write(disk, GRAD, 2)
        assert disk.size_bytes == 2 * SIZE
        assert not disk.keeps
        assert (read(disk, PARAM), read(disk, GRAD)) == (1, 2)
    assert find_leftovers(tmp_path) == ()


def test_what_changes_twice_after_a_step_leaves_the_step_alone(tmp_path: Path) -> None:
    disk = DiskTier(BUFFERS, tmp_path, keeping())
    assert disk.size_bytes == 3 * SIZE
    write(disk, PARAM, 1)
    disk.commit(1, {"seed": 7})
    write(disk, PARAM, 2)
    write(disk, GRAD, 9)
    write(disk, PARAM, 3)
    assert read(disk, PARAM) == 3
    end_abruptly(disk)
    (kept,), unreadable = find_kept(tmp_path)
    assert unreadable == ()
    assert (kept.owner, kept.entry.step, dict(kept.entry.state)) == ("run", 1, {"seed": 7})
    with DiskTier(BUFFERS, tmp_path, keeping(), kept) as again:
        assert again.is_reopened
        assert again.recorded_step == 1
        assert read(again, PARAM) == 1
        write(again, PARAM, 4)
        again.commit(2, {})
        again.settle()
    ((kept,), _) = find_kept(tmp_path)  # it stays when the process ends as it should
    with DiskTier(BUFFERS, tmp_path, keeping(), kept) as last:
        assert read(last, PARAM) == 4
        last.discard()
    assert find_leftovers(tmp_path) == ()


def test_a_file_without_a_finished_step_goes(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
    assert find_leftovers(tmp_path) == ()
    end_abruptly(DiskTier(BUFFERS, tmp_path, keeping()))
    assert len(find_leftovers(tmp_path)) == 2
    with DiskTier(BUFFERS, tmp_path) as disk:
        write(disk, PARAM, 1)
    assert find_leftovers(tmp_path) == ()


@pytest.mark.parametrize("newcomer", [None, keeping("other")])
def test_kept_state_is_refused_to_who_does_not_resume_it(
    tmp_path: Path, newcomer: Keeping | None
) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
        disk.commit(5, {})
    with pytest.raises(InputError, match="state of the run in run after step 5") as caught:
        DiskTier(BUFFERS, tmp_path, newcomer)
    assert "--resume" in str(caught.value)
    assert "packhorse clean" in str(caught.value)
    ((kept,), _) = find_kept(tmp_path)
    remove_kept(kept)
    DiskTier(BUFFERS, tmp_path, newcomer).close()


def test_kept_state_that_cannot_be_opened_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)

    def fail(path: Path) -> RecordFile:
        raise StorageError("too many open files", where=str(path))

    with monkeypatch.context() as patch:
        patch.setattr("packhorse.runtime.disk.open_record", fail)
        with pytest.raises(StorageError, match="too many open files"):
            DiskTier(BUFFERS, tmp_path, keeping(), kept)
    assert find_kept(tmp_path) == ((kept,), ())
    with DiskTier(BUFFERS, tmp_path, keeping(), kept) as again:
        assert read(again, PARAM) == 1


def test_another_layout_gets_a_file_of_its_own_beside_the_resumed_one(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)
    alone = {PARAM: BUFFERS[PARAM]}
    with DiskTier(alone, tmp_path, keeping(), kept) as disk:
        assert not disk.is_reopened
        assert kept.file.is_file()
        write(disk, PARAM, 2)
        disk.commit(5, {})
        disk.settle()
        remove_kept(kept)
        assert not kept.file.exists()
    ((newer,), _) = find_kept(tmp_path)
    assert newer.names != kept.names
    assert newer.entry.step == 5


def test_a_torn_record_and_a_lost_file_are_told_by_name(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        for step in (1, 2):
            write(disk, PARAM, step)
            disk.commit(step, {})
    ((kept,), _) = find_kept(tmp_path)
    content = bytearray(kept.record.read_bytes())
    content[content.index(b'"step":2') + 7] ^= 1
    kept.record.write_bytes(content)
    ((twin,), _) = find_kept(tmp_path)
    assert twin.entry.step == 2
    assert "does not match its checksum" in twin.damaged[0]
    kept.file.unlink()
    found, (unreadable,) = find_kept(tmp_path)
    assert found == ()
    assert "is missing" in unreadable.reason


BIG = 5 * 2**20
KEEP_BIG = Keeping(sizes_bytes={PARAM: BIG}, description={"owner": "run"})
BIG_BUFFERS = {
    name: Buffer(id=name, size_bytes=BIG, pools=BUFFERS[name].pools, home=BUFFERS[name].home)
    for name in BUFFERS
}


def striped(*folders: Path, units: tuple[int, ...] = (2, 1)) -> Scratch:
    return Scratch(
        parts=tuple(
            ScratchPart(folder=folder, units=share)
            for folder, share in zip(folders, units, strict=True)
        )
    )


def fill(disk: DiskTier, buffer: BufferId, value: int) -> None:
    memory = ctypes.create_string_buffer(bytes([value]) * BIG, BIG)
    disk.write(buffer, ctypes.addressof(memory))


def look(disk: DiskTier, buffer: BufferId) -> set[int]:
    memory = ctypes.create_string_buffer(BIG)
    disk.read(buffer, ctypes.addressof(memory))
    return set(memory.raw)


def test_a_tier_over_two_folders_is_one(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    with DiskTier(BIG_BUFFERS, striped(*folders)) as disk:
        fill(disk, PARAM, 1)
        fill(disk, GRAD, 2)
        assert (look(disk, PARAM), look(disk, GRAD)) == ({1}, {2})
        sizes = [leftover.size_bytes for folder in folders for leftover in find_leftovers(folder)]
        assert sum(sizes) == 2 * BIG
        assert len(sizes) == 2
    assert [find_leftovers(folder) for folder in folders] == [(), ()]


def test_steps_are_kept_over_two_folders(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    keep = Keeping(sizes_bytes={PARAM: BIG}, description={"owner": "run"})
    with DiskTier(BIG_BUFFERS, striped(*folders), keep) as disk:
        fill(disk, PARAM, 1)
        disk.commit(1, {})
        disk.settle()
        fill(disk, PARAM, 2)
    ((kept,), _) = find_kept(folders[0])
    assert len(kept.parts) == 1
    with open_kept(kept) as file:
        assert file.size_bytes == disk.size_bytes
    with DiskTier(BIG_BUFFERS, striped(*folders), keep, kept) as disk:
        assert disk.is_reopened
        assert look(disk, PARAM) == {1}
    # Other shares lie elsewhere: a new file is made beside the old one.
    with DiskTier(BIG_BUFFERS, striped(*folders, units=(1, 1)), keep, kept) as disk:
        assert not disk.is_reopened
        remove_kept(kept)
        assert not any(path.exists() for path in (kept.file, *kept.parts, kept.record))


def test_a_missing_part_is_not_believed(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    keep = Keeping(sizes_bytes={PARAM: BIG}, description={"owner": "run"})
    with DiskTier(BIG_BUFFERS, striped(*folders), keep) as disk:
        fill(disk, PARAM, 1)
        disk.commit(1, {})
        disk.settle()
    ((kept,), _) = find_kept(folders[0])
    kept.parts[0].unlink()
    found, (unreadable,) = find_kept(folders[0])
    assert found == ()
    assert "is missing" in unreadable.reason


MOMENT, FROZEN = BufferId("exp_avg/0"), BufferId("param/1")
# The moment lies on the disk and so comes first there; the parameter is written behind.
BEHIND = {
    name: Buffer(id=name, size_bytes=SIZE, pools=BUFFERS[PARAM].pools, home="disk")
    for name in (FROZEN, MOMENT)
}
BEHIND_KEPT = Keeping(sizes_bytes={PARAM: SIZE, MOMENT: SIZE}, description={"owner": "run"})


def read_kept(kept: KeptState) -> dict[str, int]:
    """What the record and the file say, without the tier that wrote them."""
    slots = dict(zip(kept.layout.in_slots, kept.entry.slots, strict=True))
    found: dict[str, int] = {}
    with open_kept(kept) as file:
        for name in kept.layout.marked:
            size_bytes, *offsets = kept.layout.buffers[name]
            content = bytearray(size_bytes)
            file.read_into(content, offsets[slots.get(name, 0)], size_bytes)
            assert len(set(content)) == 1
            found[name] = content[0]
    return found


def test_states_that_are_not_all_written_in_a_step_are_read_by_their_names(tmp_path: Path) -> None:
    """A step without labels changes nothing, but what lies in memory is written behind all same."""
    with DiskTier(BEHIND, tmp_path, BEHIND_KEPT) as disk:
        write(disk, FROZEN, 9)
        for step, moment in ((1, 1), (2, None), (3, 3), (4, None)):
            if moment is not None:
                write(disk, MOMENT, 10 + moment)
            write(disk, PARAM, step)
            disk.commit(step, {})
            disk.settle()
            ((kept,), _) = find_kept(tmp_path)
            assert read_kept(kept) == {MOMENT: 11 if step < 3 else 13, PARAM: step, FROZEN: 9}
            assert find_stale(kept) is None
    ((kept,), _) = find_kept(tmp_path)
    with DiskTier(BEHIND, tmp_path, BEHIND_KEPT, kept) as disk:
        assert (read(disk, PARAM), read(disk, MOMENT), read(disk, FROZEN)) == (4, 13, 9)
        # What is not written again keeps its mark.
        write(disk, PARAM, 5)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)
    assert find_stale(kept) is None
    with kept.file.open("r+b") as file:
        file.seek(kept.layout.buffers[FROZEN][1])
        file.write(b"x")
    assert find_stale(kept) == FROZEN


@pytest.mark.parametrize("newcomer", [None, keeping("other"), keeping()])
def test_state_that_may_come_back_is_left_alone(tmp_path: Path, newcomer: Keeping | None) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    with DiskTier(BIG_BUFFERS, striped(*folders), KEEP_BIG) as disk:
        fill(disk, PARAM, 1)
        disk.commit(3, {})
    part = next(folders[1].glob("*.scratch"))
    part.rename(tmp_path / "part")
    before = sorted(tmp_path.rglob("*"))
    for place in (folders[0], striped(*folders)):
        with pytest.raises(InputError, match="state of the run in run after step 3, which cannot"):
            DiskTier(BIG_BUFFERS, place, newcomer)
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "part").rename(part)
    ((kept,), _) = find_kept(folders[0])
    assert find_stale(kept) is None


def test_what_a_file_was_filled_from_goes_with_it(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)
    with DiskTier(BUFFERS, tmp_path, None, kept) as disk:
        write(disk, PARAM, 2)
    assert find_kept(tmp_path) == ((kept,), ())
    with DiskTier(BUFFERS, tmp_path, None, kept) as disk:
        disk.discard()
    assert find_leftovers(tmp_path) == ()


@pytest.mark.parametrize("same", [True, False], ids=["in-place", "other-plan"])
@pytest.mark.parametrize("call", ["posix_fallocate", "fdatasync", "pwrite", "pwritev", "fsync"])
@pytest.mark.parametrize("at", range(4))
def test_wherever_the_disk_is_full_a_whole_step_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int, same: bool
) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 5)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)
    inner, calls = getattr(os, call), 0

    def fail(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(*arguments)

    failed: StorageError | None = None
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        buffers = BUFFERS if same else {PARAM: BUFFERS[PARAM]}
        try:
            with DiskTier(buffers, tmp_path, keeping(), kept) as disk:
                for step in (6, 7):
                    write(disk, PARAM, step)
                    disk.commit(step, {})
                    disk.settle()
        except StorageError as error:
            failed = error
    assert (failed is None) == (calls <= at)
    assert failed is None or any(words in str(failed) for words in ("disk is full", "not fit"))
    found, unreadable = find_kept(tmp_path)
    assert unreadable == ()
    assert found[-1].entry.step == 5 or same
    for each in found:
        assert find_stale(each) is None
        assert read_kept(each) == {PARAM: each.entry.step}
    assert {path.path for path in find_leftovers(tmp_path)} == {
        path for each in found for path in each.files
    }


def test_a_second_file_that_does_not_fit_says_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(BUFFERS, tmp_path, keeping()) as disk:
        write(disk, PARAM, 1)
        disk.commit(5, {})
    ((kept,), _) = find_kept(tmp_path)
    monkeypatch.setattr("packhorse.storage.scratch_file.free_bytes", lambda _: 0)
    for keep in (None, keeping("other")):
        with pytest.raises(StorageError, match="does not fit on the disk") as caught:
            DiskTier(BUFFERS, tmp_path, keep, kept)
        assert f"beside {kept.file}" in str(caught.value)
        assert "or resume as before" in str(caught.value)
    with DiskTier(BUFFERS, tmp_path, keeping(), kept) as disk:
        assert disk.is_reopened
