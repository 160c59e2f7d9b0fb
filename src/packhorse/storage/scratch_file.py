"""One preallocated file that buffers are read from and written to in place.

In: plain memory addresses or buffers, and aligned offsets. Out: bytes moved, exactly counted.
Where the file system takes O_DIRECT, transfers bypass the page cache; elsewhere each block leaves
the page cache right after its transfer, so that cached file pages never count against a container's
memory limit. The aligned part of a transfer runs in place; memory at odd addresses and the last
part of a page go through one aligned bounce buffer.
A file that was truncated, replaced or removed under a run is refused before a byte of it is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from packhorse.errors import StorageError
from packhorse.storage.counters import IoCounters, IoMeter
from packhorse.storage.durable import fsync_folder
from packhorse.storage.extents import ALIGNMENT_BYTES, align_up
from packhorse.storage.memory import Memory, MemoryRange
from packhorse.storage.space import explain_failure, free_bytes, no_space
from packhorse.units import MIB, format_bytes

DEFAULT_BLOCK_BYTES: Final = 8 * MIB
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_BOUNCE_BYTES: Final = MIB
_SYNC_RANGE_ALL: Final = 7  # wait before, write, wait after: <linux/fs.h> SYNC_FILE_RANGE_*


class ScratchFile:
    """An open scratch file; made by `create_scratch_file` or `open_scratch_file`.

    Transfers may run on several threads at once, as long as their ranges do not overlap.
    """

    def __init__(
        self, path: Path, descriptor: int, *, size_bytes: int, direct: bool, block_bytes: int
    ) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._size_bytes = size_bytes
        self._direct = direct
        self._block_bytes = block_bytes
        self._meter = IoMeter()
        self._identity = _identity(os.fstat(descriptor))
        self._bounce = mmap.mmap(-1, _BOUNCE_BYTES)
        self._bounce_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._path

    @property
    def size_bytes(self) -> int:
        """Size of the file, a multiple of 4096."""
        return self._size_bytes

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT)."""
        return self._direct

    @property
    def counters(self) -> IoCounters:
        """What was moved since the file was opened."""
        return self._meter.counters

    def read_into(self, target: Memory, offset_bytes: int, size_bytes: int) -> None:
        """Read a range of the file into memory; blocks until the bytes are there.

        Args:
            target: a memory address, or a writable contiguous buffer of at least `size_bytes`. It
                is filled in place when it is aligned to 4096, through a bounce buffer otherwise.
                The caller keeps it alive.
            offset_bytes: a multiple of 4096.
            size_bytes: any; what reaches beyond the last whole page costs one extra page.

        Raises:
            StorageError: the file is shorter than it was made, is no longer the file at its path,
                or the disk fails.
        """
        with MemoryRange(target, size_bytes, writable=True) as memory:
            descriptor = self._check(offset_bytes, size_bytes)
            for start, length, in_place in self._split(memory.address, size_bytes):
                place = offset_bytes + start
                if in_place:
                    self._read(descriptor, memory.part(start, length), place)
                else:
                    with self._bounce_lock, memoryview(self._bounce) as bounce:
                        self._read(descriptor, bounce[: align_up(length)], place)
                        memory.part(start, length)[:] = bounce[:length]

    def write_from(
        self,
        source: Memory,
        offset_bytes: int,
        size_bytes: int,
    ) -> None:
        """Write memory to a range of the file; blocks until the disk (or its cache) has it.

        Args:
            source: a memory address, or a contiguous buffer of at least `size_bytes`; not changed.
            offset_bytes: a multiple of 4096.
            size_bytes: any; the rest of a last, partly written page keeps its content, which costs
                one read and one write of that page.

        Raises:
            StorageError: as for `read_into`, and when the disk is full.
        """
        with MemoryRange(source, size_bytes, writable=False) as memory:
            descriptor = self._check(offset_bytes, size_bytes)
            for start, length, in_place in self._split(memory.address, size_bytes):
                place = offset_bytes + start
                if in_place:
                    self._write(descriptor, memory.part(start, length), place)
                else:
                    with self._bounce_lock, memoryview(self._bounce) as bounce:
                        pages = bounce[: align_up(length)]
                        if length < len(pages):
                            self._read(descriptor, pages, place)
                        pages[:length] = memory.part(start, length)
                        self._write(descriptor, pages, place)

    def flush(self) -> None:
        """Bring everything that was written to the disk itself; blocks until it is there.

        Other threads may go on writing; what they write meanwhile may or may not be included.

        Raises:
            StorageError: the disk fails; what was written since the last flush may be lost. The
                file is no longer the one at its path, or is shorter.
        """
        descriptor = self._check(0, 0)
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise explain_failure(error, self._path, "flush the scratch file") from error

    def close(self) -> None:
        """Close the file and keep it on the disk. Closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Close the file and delete it, unless another file took its path.

        Raises:
            StorageError: it may not be deleted.
        """
        self.close()
        try:
            if _identity(self._path.stat()) == self._identity:
                self._path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise explain_failure(error, self._path, "remove the scratch file") from error

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"scratch file {self._path} is closed")
        return self._descriptor

    def _check(self, offset_bytes: int, size_bytes: int) -> int:
        """Refuse ranges that are not ours and files that are no longer what was made."""
        if offset_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"file offset {offset_bytes} is no multiple of {ALIGNMENT_BYTES}")
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self._size_bytes:
            raise ValueError(
                f"range of {size_bytes} bytes at {offset_bytes} is outside {self._path} of"
                f" {self._size_bytes} bytes"
            )
        descriptor = self._open_descriptor()
        try:
            there = self._path.stat()
        except FileNotFoundError as error:
            raise self._changed("it was removed") from error
        if _identity(there) != self._identity:
            raise self._changed("another file took its place")
        if there.st_size < self._size_bytes:
            raise self._changed(
                f"it has {there.st_size} bytes, {self._size_bytes} are needed: it was truncated"
            )
        return descriptor

    def _changed(self, how: str) -> StorageError:
        return StorageError(
            f"the scratch file changed under the run: {how}",
            where=str(self._path),
            fix="keep other programs away from the scratch folder, then resume from the last"
            " checkpoint",
        )

    def _split(self, address: int, size_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a transfer into (start, length, in place) pieces."""
        if not self._direct:
            whole, step, in_place = size_bytes, self._block_bytes, True
        else:
            whole = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            in_place = address % ALIGNMENT_BYTES == 0
            step = self._block_bytes if in_place else _BOUNCE_BYTES
        for start in range(0, whole, step):
            yield start, min(step, whole - start), in_place
        if whole < size_bytes:
            yield whole, size_bytes - whole, False

    def _read(self, descriptor: int, part: memoryview, offset_bytes: int) -> None:
        size_bytes = len(part)
        done = 0
        while done < size_bytes:
            began = time.perf_counter_ns()
            try:
                moved = os.preadv(descriptor, [part[done:]], offset_bytes + done)
            except OSError as error:
                doing = f"read {format_bytes(size_bytes)} at byte {offset_bytes}"
                raise explain_failure(error, self._path, doing) from error
            self._meter.add_read(moved, time.perf_counter_ns() - began)
            before, done = done, self._progress(done, moved, size_bytes)
            if done == before:
                raise self._changed(
                    f"it ends {size_bytes - done} bytes before the end of the range of"
                    f" {size_bytes} bytes at {offset_bytes}"
                )
        if not self._direct:
            os.posix_fadvise(descriptor, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)

    def _write(self, descriptor: int, part: memoryview, offset_bytes: int) -> None:
        size_bytes = len(part)
        doing = f"write {format_bytes(size_bytes)} at byte {offset_bytes}"
        done = 0
        while done < size_bytes:
            began = time.perf_counter_ns()
            try:
                moved = os.pwritev(descriptor, [part[done:]], offset_bytes + done)
                if not self._direct:
                    # Only clean pages leave the cache, and waiting here keeps it small.
                    _flush_range(descriptor, offset_bytes + done, moved)
            except OSError as error:
                raise explain_failure(error, self._path, doing) from error
            self._meter.add_write(moved, time.perf_counter_ns() - began)
            before, done = done, self._progress(done, moved, size_bytes)
            if done == before:
                raise StorageError(
                    f"the disk takes no more bytes: cannot {doing}",
                    where=str(self._path),
                    fix="look at the kernel log and use another disk; the run can be resumed",
                )
        if not self._direct:
            os.posix_fadvise(descriptor, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)

    def _progress(self, done: int, moved: int, size_bytes: int) -> int:
        """Advance by what moved; a short direct transfer continues at the last whole page."""
        after = done + moved
        if self._direct and after < size_bytes:
            after = after // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return after


def create_scratch_file(
    path: str | os.PathLike[str],
    size_bytes: int,
    *,
    direct: bool | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
) -> ScratchFile:
    """Make a file with all its space allocated, so that a later write cannot find the disk full.

    Args:
        path: its folder exists; an old file there is replaced.
        size_bytes: rounded up to a multiple of 4096.
        direct: False never uses O_DIRECT; None uses it where the file system takes it.
        block_bytes: largest single transfer, a multiple of 4096.

    Raises:
        StorageError: not enough space (need and have), or the folder is missing or unwritable. No
            file is left behind.
    """
    target = Path(path)
    size_bytes = max(align_up(size_bytes), ALIGNMENT_BYTES)
    _check_block(block_bytes)
    try:
        target.unlink(missing_ok=True)
        have_bytes = free_bytes(target)
        if have_bytes < size_bytes:
            raise no_space(target, size_bytes, have_bytes, "the scratch file")
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain_failure(error, target, "create the scratch file") from error
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        fsync_folder(target.parent)
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            have_bytes = free_bytes(target)
            raise no_space(target, size_bytes, have_bytes, "the scratch file") from error
        raise explain_failure(error, target, "allocate the scratch file") from error
    finally:
        os.close(descriptor)
    try:
        return _open(target, size_bytes, direct=direct, block_bytes=block_bytes, mode=os.O_RDWR)
    except StorageError:
        target.unlink(missing_ok=True)
        raise


def open_scratch_file(
    path: str | os.PathLike[str],
    size_bytes: int,
    *,
    direct: bool | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    writable: bool = True,
) -> ScratchFile:
    """Open a scratch file that an earlier process made, with what it wrote.

    Args:
        path: the file.
        size_bytes: as it was made; the other arguments as for `create_scratch_file`.
        writable: False where it is only read, perhaps from a disk that takes no writes.

    Raises:
        StorageError: it is not there or has another size.
    """
    target = Path(path)
    size_bytes = max(align_up(size_bytes), ALIGNMENT_BYTES)
    _check_block(block_bytes)
    try:
        found_bytes = target.stat().st_size
    except OSError as error:
        raise explain_failure(error, target, "open the scratch file") from error
    if found_bytes != size_bytes:
        raise StorageError(
            f"the scratch file has {found_bytes} bytes, {size_bytes} were made",
            where=str(target),
            fix="resume from a checkpoint; packhorse clean removes the scratch file",
        )
    mode = os.O_RDWR if writable else os.O_RDONLY
    return _open(target, size_bytes, direct=direct, block_bytes=block_bytes, mode=mode)


def _check_block(block_bytes: int) -> None:
    if block_bytes <= 0 or block_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"block size {block_bytes} is no multiple of {ALIGNMENT_BYTES}")


def _open(
    path: Path, size_bytes: int, *, direct: bool | None, block_bytes: int, mode: int
) -> ScratchFile:
    mode |= os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = None if direct is False else _open_direct(path, mode)
    is_direct = descriptor is not None
    if descriptor is None:
        if direct:
            raise StorageError(
                "this file system does not take direct I/O (O_DIRECT)",
                where=str(path),
                fix="use a folder on a local disk, or allow buffered I/O",
            )
        try:
            descriptor = os.open(path, mode)
        except OSError as error:
            raise explain_failure(error, path, "open the scratch file") from error
    return ScratchFile(
        path, descriptor, size_bytes=size_bytes, direct=is_direct, block_bytes=block_bytes
    )


def _open_direct(path: Path, mode: int) -> int | None:
    """Open with O_DIRECT and read one page; None when the file system refuses either."""
    if not _DIRECT:
        return None
    descriptor: int | None = None
    try:
        descriptor = os.open(path, mode | _DIRECT)
        with mmap.mmap(-1, ALIGNMENT_BYTES) as page, memoryview(page) as view:
            os.preadv(descriptor, [view], 0)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise explain_failure(error, path, "open the scratch file") from error
    return descriptor


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _flush_range(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "sync_file_range"):
        os.fdatasync(descriptor)
        return
    failed = libc.sync_file_range(
        descriptor, ctypes.c_int64(offset_bytes), ctypes.c_int64(size_bytes), _SYNC_RANGE_ALL
    )
    if failed:
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        os.fdatasync(descriptor)
