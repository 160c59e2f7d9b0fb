import mmap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError, StorageError
from packhorse.storage.disk_threads import DiskThreads
from packhorse.storage.mapping import Mapping
from packhorse.storage.scratch_file import create_scratch_file
from packhorse.storage.scratch_folder import find_leftovers
from packhorse.storage.scratch_space import (
    Scratch,
    ScratchPart,
    claim_space,
    make_scratch,
)
from packhorse.storage.striped_file import StripedFile
from packhorse.storage.stripes import UNIT_BYTES, Piece, Stripes, split_pieces
from packhorse.units import MIB

PAGE = 4096


def pattern(size: int, seed: int = 1) -> bytes:
    block = bytes((index * 131 + seed * 17 + (index >> 8)) & 0xFF for index in range(65_521))
    return (block * (size // len(block) + 1))[:size]


def open_striped(folder: Path, units: tuple[int, ...], size: int, *, threads: int = 1):
    stripes = Stripes(units=units)
    files = []
    for index, part in enumerate(stripes.sizes(size)):
        (folder / str(index)).mkdir(exist_ok=True)
        files.append(create_scratch_file(folder / str(index) / "s", part, block_bytes=MIB))
    return StripedFile(files, stripes=stripes, num_threads=[threads] * len(units), size_bytes=size)


@given(
    units=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    whole=st.integers(1, 40 * MIB),
    data=st.data(),
)
def test_every_byte_has_one_place(units: list[int], whole: int, data: st.DataObject) -> None:
    stripes = Stripes(units=tuple(units))
    sizes = stripes.sizes(whole)
    padded = -(-whole // PAGE) * PAGE
    assert sum(sizes) == padded
    pieces = list(stripes.pieces(0, padded))
    for file, size in enumerate(sizes):
        mine = [piece for piece in pieces if piece.file == file]
        ends = [0] + [piece.offset_bytes + piece.size_bytes for piece in mine]
        assert [piece.offset_bytes for piece in mine] == ends[:-1]
        assert ends[-1] == size
    # A range inside is cut at the same places as the whole.
    begin = data.draw(st.integers(0, whole // PAGE)) * PAGE
    size = data.draw(st.integers(0, padded - begin))
    for piece in stripes.pieces(begin, size):
        place = begin + piece.start_bytes
        owner = next(
            p
            for p in pieces
            if p.start_bytes <= place < p.start_bytes + p.size_bytes or len(units) == 1
        )
        assert piece.file == owner.file
        assert piece.offset_bytes - owner.offset_bytes == place - owner.start_bytes
    assert sum(piece.size_bytes for piece in stripes.pieces(begin, size)) == size


@given(
    sizes=st.lists(st.integers(1, 9 * MIB), min_size=1, max_size=6),
    num_parts=st.integers(1, 5),
)
def test_threads_share_the_pieces(sizes: list[int], num_parts: int) -> None:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(Piece(file=0, offset_bytes=start, start_bytes=start, size_bytes=size))
        start += size
    parts = split_pieces(pieces, num_parts, MIB)
    assert 1 <= len(parts) <= num_parts
    flat = [piece for part in parts for piece in part]
    ends = [0] + [piece.start_bytes + piece.size_bytes for piece in flat]
    assert [piece.start_bytes for piece in flat] == ends[:-1]
    assert ends[-1] == start
    if len(parts) > 1:
        assert min(sum(p.size_bytes for p in part) for part in parts[:-1]) >= MIB


@pytest.mark.parametrize("units", [(1, 1), (3, 1), (1, 2, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_reads_what_was_written(tmp_path: Path, units: tuple[int, ...], threads: int) -> None:
    size = 11 * MIB + 3 * PAGE
    content = pattern(size)
    with (
        Mapping(24 * MIB) as mapping,
        open_striped(tmp_path, units, size, threads=threads) as file,
    ):
        mapping.view(0, size)[:] = content
        file.write_from(mapping.address, 0, size)
        mapping.drop(0, size)
        file.read_into(mapping.address, 0, size)
        assert mapping.view(0, size) == content
        # A part in the middle, of odd length, at an odd address.
        part = 3 * MIB + 77
        file.read_into(mapping.address + 12 * MIB + 1, 5 * PAGE, part)
        assert mapping.view(12 * MIB + 1, part) == content[5 * PAGE :][:part]
        file.write_from(pattern(part, seed=2), 2 * MIB, part)
        changed = bytearray(content)
        changed[2 * MIB : 2 * MIB + part] = pattern(part, seed=2)
        mapping.drop(0, size)
        file.read_into(mapping.address, 0, size)
        assert mapping.view(0, size) == changed
        file.flush()
    sizes = [(tmp_path / str(index) / "s").stat().st_size for index in range(len(units))]
    assert tuple(sizes) == Stripes(units=units).sizes(size)


def test_counts_add_up(tmp_path: Path) -> None:
    with Mapping(8 * MIB) as mapping, open_striped(tmp_path, (3, 1), 8 * MIB) as file:
        file.write_from(mapping.address, 0, 8 * MIB)
        before = file.counters
        file.read_into(mapping.address, 0, 8 * MIB)
        moved = file.counters.since(before)
        assert (moved.read_bytes, moved.written_bytes) == (8 * MIB, 0)
        assert before.written_bytes == 8 * MIB
        assert file.size_bytes == 8 * MIB
        assert file.path == tmp_path / "0/s"
        assert file.paths == (tmp_path / "0/s", tmp_path / "1/s")


def test_all_files_move_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_striped(tmp_path, (1, 1), 2 * UNIT_BYTES)
    together = threading.Barrier(2, timeout=60)

    class Waiting:
        size_bytes = UNIT_BYTES

        def read_into(self, *_: object) -> None:
            together.wait()

        def close(self) -> None:
            """Nothing is open."""

    with file:
        for real in file._files:
            real.close()
        file._files = (Waiting(), Waiting())
        with mmap.mmap(-1, 2 * UNIT_BYTES) as memory:
            file.read_into(memory, 0, 2 * UNIT_BYTES)
    assert not together.broken


def test_a_failing_drive_fails_the_transfer_after_the_others_ended(tmp_path: Path) -> None:
    memory = bytearray(4 * MIB)
    with open_striped(tmp_path, (1, 1), 4 * MIB) as file:
        (tmp_path / "1/s").unlink()
        with pytest.raises(StorageError, match="it was removed"):
            file.read_into(memory, 0, 4 * MIB)
        # What lies on the other drive alone can still be read.
        file.read_into(memory, 0, MIB)


def test_threads_end_with_their_file_and_hand_errors_over() -> None:
    threads = DiskThreads(2)
    together = threading.Barrier(2, timeout=60)
    names: list[str] = []

    def meet() -> None:
        together.wait()
        names.append(threading.current_thread().name)

    def fail() -> None:
        raise StorageError("the drive is gone")

    for job in [threads.submit(meet), threads.submit(meet)]:
        job.result(60)
    assert sorted(names) == ["packhorse-disk-0", "packhorse-disk-1"]
    with pytest.raises(StorageError, match="the drive is gone"):
        threads.submit(fail).result(60)
    mine = [thread for thread in threading.enumerate() if thread.name in names]
    # A drive that never answers must not keep a process from ending.
    assert [thread.daemon for thread in mine] == [True, True]
    threads.close()
    threads.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(ValueError, match="have ended"):
        threads.submit(meet)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting() -> None:
    threads = DiskThreads(1)

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(StorageError, match="has ended"):
        threads.submit(end).result(60)
    threads.close()


def test_ranges_are_checked(tmp_path: Path) -> None:
    with open_striped(tmp_path, (1, 1), 4 * MIB) as file, mmap.mmap(-1, MIB) as memory:
        with pytest.raises(ValueError, match="no multiple of 4096"):
            file.read_into(memory, 1, 10)
        with pytest.raises(ValueError, match="outside the files"):
            file.write_from(memory, 4 * MIB, 1)
    with create_scratch_file(tmp_path / "a", MIB) as one:
        with pytest.raises(ValueError, match="1 files for 2 shares"):
            StripedFile([one], stripes=Stripes(units=(1, 1)), num_threads=[1], size_bytes=MIB)
        with pytest.raises(ValueError, match="for shares of"):
            StripedFile([one], stripes=Stripes(units=(1,)), num_threads=[1], size_bytes=2 * MIB)


def scratch_in(*folders: Path, num_threads: int = 1) -> Scratch:
    return Scratch(
        parts=tuple(ScratchPart(folder=folder, num_threads=num_threads) for folder in folders)
    )


def test_a_space_of_one_folder_has_plain_files(tmp_path: Path) -> None:
    assert make_scratch(tmp_path) == scratch_in(tmp_path)
    assert make_scratch(scratch_in(tmp_path)) == scratch_in(tmp_path)
    with claim_space(make_scratch(tmp_path)) as space:
        assert not isinstance(space.create_file("state", PAGE), StripedFile)
    with claim_space(scratch_in(tmp_path, num_threads=2)) as space:
        file = space.create_file("state", PAGE)
        assert isinstance(file, StripedFile)
        file.remove()


def test_a_space_of_two_folders_keeps_and_removes_both_parts(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    content = pattern(5 * MIB)
    with claim_space(scratch_in(*folders)) as space:
        with space.create_file("state", 5 * MIB) as file:
            file.write_from(content, 0, len(content))
        with space.create_file("other", 5 * MIB):
            pass
        assert space.folders == folders
        assert space.stripes.sizes(5 * MIB) == (3 * MIB, 2 * MIB)
        # Another run's part, beside the parts of this one.
        foreign = folders[1] / "packhorse-state-00000000.scratch"
        foreign.write_bytes(b"theirs")
        removed = space.remove_files(but=[space.file_path("state")])
        assert sorted(leftover.path.name for leftover in removed) == [
            f"packhorse-other.1-{space.tag}.scratch",
            "packhorse-other.scratch",
        ]
        assert foreign.read_bytes() == b"theirs"
        foreign.unlink()
        with pytest.raises(InputError, match="in use by process"):
            claim_space(scratch_in(folders[1]))
    with claim_space(scratch_in(*folders)) as space:
        with space.open_file("state", 5 * MIB) as file:
            found = bytearray(len(content))
            file.read_into(found, 0, len(found))
            assert found == content
        with pytest.raises(StorageError, match="bytes, "):
            space.open_file("state", 9 * MIB)
        space.open_file("state", 5 * MIB).remove()
    assert [find_leftovers(folder) for folder in folders] == [(), ()]


def test_a_space_that_cannot_be_had_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        claim_space(scratch_in(tmp_path / "a", tmp_path / "file"))
    with (
        claim_space(scratch_in(tmp_path / "a", tmp_path / "b")) as space,
        pytest.raises(StorageError, match="does not fit"),
    ):
        space.create_file("state", 1 << 60)
    assert find_leftovers(tmp_path / "a") == ()
