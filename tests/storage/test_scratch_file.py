import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import StorageError
from packhorse.storage.counters import IoCounters
from packhorse.storage.mapping import Mapping
from packhorse.storage.scratch_file import create_scratch_file
from packhorse.storage.space import free_bytes
from packhorse.units import MIB

PAGE = 4096


def pattern(size: int, seed: int = 1) -> bytes:
    return bytes((index * 131 + seed * 17 + (index >> 8)) & 0xFF for index in range(size))


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool | None:
    with create_scratch_file(tmp_path / "s", PAGE) as file:
        if request.param is None and not file.direct:
            pytest.skip("the file system of the temporary folder takes no direct I/O")
        file.remove()
    return request.param


def test_reads_in_place_what_was_written(tmp_path: Path, direct: bool | None) -> None:
    size = 5 * MIB
    content = pattern(size)
    with (
        Mapping(16 * MIB) as mapping,
        create_scratch_file(tmp_path / "s", 8 * MIB, direct=direct, block_bytes=MIB) as file,
    ):
        assert file.direct is (direct is None)
        mapping.view(0, size)[:] = content
        file.write_from(mapping.address, 2 * MIB, size)
        mapping.drop(0, size)
        assert bytes(mapping.view(0, 64)) == bytes(64)
        file.read_into(mapping.address + 8 * MIB, 2 * MIB, size)
        assert bytes(mapping.view(8 * MIB, size)) == content
        counters = file.counters
        assert (counters.read_bytes, counters.written_bytes) == (size, size)
        assert (counters.num_reads, counters.num_writes) == (5, 5)
        assert counters.read_ns > 0
        assert counters.write_ns > 0
    assert (tmp_path / "s").stat().st_size == 8 * MIB


def test_space_is_allocated_at_once(tmp_path: Path) -> None:
    with create_scratch_file(tmp_path / "s", MIB + 1) as file:
        assert file.size_bytes == MIB + PAGE
        assert (tmp_path / "s").stat().st_blocks * 512 >= MIB + PAGE


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 5 * PAGE),
    shift=st.integers(0, 2 * PAGE),
    page=st.integers(0, 3),
    as_bytes=st.booleans(),
)
def test_any_address_and_size_and_neighbours_keep_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, size: int, shift: int, page: int, as_bytes: bool
) -> None:
    total = 9 * PAGE
    background, content = pattern(total, 2), pattern(size, 3)
    path = tmp_path_factory.mktemp("any") / "s"
    with mmap.mmap(-1, total) as memory, create_scratch_file(path, total) as file:
        file.write_from(background, 0, total)
        if as_bytes:
            file.write_from(content, page * PAGE, size)
        else:
            memory[shift : shift + size] = content
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + shift
            file.write_from(start, page * PAGE, size)
        whole = bytearray(total)
        file.read_into(whole, 0, total)
        expected = bytearray(background)
        expected[page * PAGE : page * PAGE + size] = content
        assert whole == expected
        again = bytearray(size)
        file.read_into(again, page * PAGE, size)
        assert again == content


def test_counters_are_exact_under_threads(tmp_path: Path) -> None:
    with Mapping(4 * MIB) as mapping, create_scratch_file(tmp_path / "s", 4 * MIB) as file:
        before = file.counters
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(file.write_from, mapping.address + at, at, 64 * 1024)
                for at in range(0, 4 * MIB, 64 * 1024)
            ]
            for job in jobs:
                job.result()
        spent = file.counters.since(before)
        assert (spent.written_bytes, spent.num_writes) == (4 * MIB, 64)
        assert spent.read_bytes == 0
        assert before == IoCounters()


def test_partial_page_costs_are_counted(tmp_path: Path) -> None:
    with create_scratch_file(tmp_path / "s", 4 * PAGE) as file:
        if not file.direct:
            pytest.skip("only direct I/O moves whole pages")
        file.write_from(bytearray(PAGE + 10), 0, PAGE + 10)
        assert file.counters.written_bytes == 2 * PAGE
        assert file.counters.read_bytes == PAGE


def test_truncated_under_the_run(tmp_path: Path, direct: bool | None) -> None:
    with create_scratch_file(tmp_path / "s", 4 * PAGE, direct=direct) as file:
        os.truncate(tmp_path / "s", PAGE)
        with pytest.raises(StorageError, match=r"4096 bytes, 16384 are needed: it was truncated"):
            file.read_into(bytearray(PAGE), 2 * PAGE, PAGE)
        with pytest.raises(StorageError, match="changed under the run"):
            file.write_from(bytes(PAGE), 0, PAGE)
        assert file.counters == IoCounters()


def test_replaced_under_the_run(tmp_path: Path) -> None:
    with create_scratch_file(tmp_path / "s", 4 * PAGE) as file:
        (tmp_path / "other").write_bytes(bytes(4 * PAGE))
        (tmp_path / "other").rename(tmp_path / "s")
        with pytest.raises(StorageError, match="another file took its place") as caught:
            file.read_into(bytearray(PAGE), 0, PAGE)
        assert caught.value.where == str(tmp_path / "s")
        file.remove()
        assert (tmp_path / "s").exists()


def test_removed_under_the_run(tmp_path: Path) -> None:
    with create_scratch_file(tmp_path / "s", 4 * PAGE) as file:
        (tmp_path / "s").unlink()
        with pytest.raises(StorageError, match="it was removed"):
            file.write_from(bytes(PAGE), 0, PAGE)
        file.remove()


def test_short_transfers_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev

    def short_read(descriptor: int, parts: list[memoryview], offset: int) -> int:
        return real_read(descriptor, [parts[0][: 2 * PAGE]], offset)

    def short_write(descriptor: int, parts: list[memoryview], offset: int) -> int:
        return real_write(descriptor, [parts[0][:PAGE]], offset)

    content = pattern(7 * PAGE)
    with Mapping(MIB) as mapping, create_scratch_file(tmp_path / "s", 8 * PAGE) as file:
        mapping.view(0, len(content))[:] = content
        monkeypatch.setattr(os, "preadv", short_read)
        monkeypatch.setattr(os, "pwritev", short_write)
        file.write_from(mapping.address, 0, len(content))
        mapping.drop(0, 8 * PAGE)
        file.read_into(mapping.address, 0, len(content))
        assert bytes(mapping.view(0, len(content))) == content
        assert file.counters.num_reads == 4
        assert file.counters.num_writes == 7


def test_read_that_ends_early_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create_scratch_file(tmp_path / "s", 8 * PAGE) as file:
        monkeypatch.setattr(os, "preadv", lambda *_: 100)
        with pytest.raises(StorageError, match="before the end of the range"):
            file.read_into(mmap.mmap(-1, 2 * PAGE), 0, 2 * PAGE)


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        (errno.ENOSPC, "the disk is full: cannot write 4.00 KiB at byte 8192", "free some space"),
        (errno.EIO, "cannot write 4.00 KiB at byte 8192", "kernel log"),
        (errno.EROFS, "cannot write 4.00 KiB at byte 8192", "may write"),
    ],
)
def test_write_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str, fix: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with create_scratch_file(tmp_path / "s", 8 * PAGE) as file:
        monkeypatch.setattr(os, "pwritev", fail)
        with pytest.raises(StorageError, match=words) as caught:
            file.write_from(bytearray(PAGE), 2 * PAGE, PAGE)
    assert fix in str(caught.value)
    assert str(tmp_path / "s") in str(caught.value)


def test_too_little_space_names_need_and_have(tmp_path: Path) -> None:
    have = free_bytes(tmp_path)
    with pytest.raises(StorageError, match=r"need .* bytes\), have") as caught:
        create_scratch_file(tmp_path / "s", have + 1024 * MIB)
    assert str(tmp_path / "s") in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_allocation_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StorageError, match=r"need 1\.00 MiB"):
        create_scratch_file(tmp_path / "s", MIB)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot create the scratch file: No such file"):
        create_scratch_file(tmp_path / "none" / "s", PAGE)


def test_misuse_is_refused(tmp_path: Path) -> None:
    with create_scratch_file(tmp_path / "s", 2 * PAGE) as file:
        with pytest.raises(ValueError, match="multiple of 4096"):
            file.read_into(bytearray(PAGE), 5, PAGE)
        with pytest.raises(ValueError, match="outside"):
            file.read_into(bytearray(3 * PAGE), 0, 3 * PAGE)
        with pytest.raises(ValueError, match="has 10 bytes"):
            file.read_into(bytearray(10), 0, PAGE)
        with pytest.raises(ValueError, match="read-only"):
            file.read_into(memoryview(bytes(PAGE)), 0, PAGE)
    with pytest.raises(ValueError, match="closed"):
        file.read_into(bytearray(PAGE), 0, PAGE)


def test_memory_file_system_falls_back_to_buffered() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not os.access(shared, os.W_OK):
        pytest.skip("no memory file system here")
    folder = shared / f"packhorse-test-{os.getpid()}"
    folder.mkdir()
    try:
        with create_scratch_file(folder / "s", 4 * PAGE) as file:
            file.write_from(pattern(3 * PAGE + 7), 0, 3 * PAGE + 7)
            content = bytearray(3 * PAGE + 7)
            file.read_into(content, 0, len(content))
            assert content == pattern(len(content))
            if not file.direct:
                with pytest.raises(StorageError, match="does not take direct I/O"):
                    create_scratch_file(folder / "t", PAGE, direct=True)
    finally:
        shutil.rmtree(folder)


def test_buffered_transfers_leave_the_page_cache(tmp_path: Path) -> None:
    size = 8 * MIB
    with create_scratch_file(tmp_path / "s", size, direct=False) as file:
        file.write_from(bytearray(size), 0, size)
        file.read_into(bytearray(size), 0, size)
    with (
        (tmp_path / "s").open("rb") as raw,
        mmap.mmap(raw.fileno(), size, access=mmap.ACCESS_COPY) as seen,
    ):
        address = ctypes.addressof(ctypes.c_char.from_buffer(seen))
        flags = (ctypes.c_ubyte * (size // PAGE))()
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags) == 0
        )
        # What the read-ahead of the last block brought in may stay.
        assert bytes(flags).count(1) * PAGE <= MIB


def test_enospc_on_a_real_small_disk(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from packhorse.errors import StorageError
        from packhorse.storage.durable import write_durably
        from packhorse.storage.scratch_file import create_scratch_file
        folder = Path(sys.argv[1])
        try:
            create_scratch_file(folder / "s", 16 << 20)
        except StorageError as error:
            print(error)
        write_durably(folder / "f", b"old")
        try:
            write_durably(folder / "f", bytes(16 << 20))
        except StorageError as error:
            print(error)
        print((folder / "f").read_bytes(), sorted(p.name for p in folder.iterdir()))
        """
    )
    command = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c '{script}' "
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command + str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    assert "the scratch file does not fit on the disk: need 16.0 MiB" in done.stdout
    assert "the disk is full: cannot write 16.0 MiB" in done.stdout
    assert "b'old' ['f']" in done.stdout


def test_a_refused_direct_open_falls_back_to_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_direct(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    with create_scratch_file(tmp_path / "s", 2 * PAGE) as file:
        assert not file.direct
        file.write_from(pattern(PAGE + 1), 0, PAGE + 1)
        content = bytearray(PAGE + 1)
        file.read_into(content, 0, PAGE + 1)
        assert content == pattern(PAGE + 1)
        assert file.counters.written_bytes == file.counters.read_bytes == PAGE + 1
    with pytest.raises(StorageError, match="does not take direct I/O"):
        create_scratch_file(tmp_path / "t", PAGE, direct=True)
    assert not (tmp_path / "t").exists()
