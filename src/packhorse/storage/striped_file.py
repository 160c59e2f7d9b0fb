"""Several scratch files that are read and written as one, all at the same time.

In: memory and ranges, as for `ScratchFile`. Out: the same, at the sum of the drives' rates: every
transfer is cut into stripes, and each file's stripes move on threads of their own. One file with
several threads is the same thing, for a drive that wants more than one transfer in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from packhorse.storage.counters import IoCounters
from packhorse.storage.disk_threads import DiskThreads
from packhorse.storage.extents import ALIGNMENT_BYTES
from packhorse.storage.memory import Memory, MemoryRange
from packhorse.storage.scratch_file import ScratchFile
from packhorse.storage.stripes import Piece, Stripes, split_pieces
from packhorse.units import MIB

_LEAST_PART_BYTES: Final = MIB
_DIRECTIONS: Final = 2


class StripedFile:
    """Open scratch files under one range of offsets; owns and closes them.

    Reads and writes may run at once, as long as their ranges do not overlap.

    Args:
        files: each of the size that `stripes` gives it.
        stripes: how offsets are dealt out to the files.
        num_threads: of each file and direction.
        size_bytes: of all files together.
    """

    def __init__(
        self,
        files: Sequence[ScratchFile],
        *,
        stripes: Stripes,
        num_threads: Sequence[int],
        size_bytes: int,
    ) -> None:
        if len(files) != len(stripes.units) or len(files) != len(num_threads):
            raise ValueError(f"{len(files)} files for {len(stripes.units)} shares")
        expected = stripes.sizes(size_bytes)
        found = tuple(file.size_bytes for file in files)
        # A file never has less than one page.
        if found != tuple(max(size, ALIGNMENT_BYTES) for size in expected):
            raise ValueError(f"files of {found} bytes for shares of {expected} bytes")
        self._files = tuple(files)
        self._stripes = stripes
        self._num_threads = tuple(num_threads)
        self._size_bytes = sum(expected)
        # The caller's thread takes one part of each transfer itself.
        self._threads = DiskThreads(max(1, _DIRECTIONS * (sum(num_threads) - 1)))

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
        """Where the first file lies."""
        return self._files[0].path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the files lie."""
        return tuple(file.path for file in self._files)

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return self._size_bytes

    @property
    def direct(self) -> bool:
        """Whether all transfers bypass the page cache."""
        return all(file.direct for file in self._files)

    @property
    def counters(self) -> IoCounters:
        """What was moved since the files were opened, added up; times overlap."""
        total = IoCounters()
        for file in self._files:
            total = total.plus(file.counters)
        return total

    def read_into(self, target: Memory, offset_bytes: int, size_bytes: int) -> None:
        """Read a range into memory; blocks until all of it is there. See `ScratchFile`."""
        self._move(target, offset_bytes, size_bytes, writing=False)

    def write_from(self, source: Memory, offset_bytes: int, size_bytes: int) -> None:
        """Write memory to a range; blocks until all drives have it. See `ScratchFile`."""
        self._move(source, offset_bytes, size_bytes, writing=True)

    def flush(self) -> None:
        """Bring everything that was written to the disks themselves; blocks until it is there."""
        self._run([file.flush for file in self._files])

    def close(self) -> None:
        """Close all files and keep them on the disk. Closing twice is harmless."""
        self._threads.close()
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Close and delete all files, but those whose path another file took."""
        self._threads.close()
        for file in self._files:
            file.remove()

    def _move(self, memory: Memory, offset_bytes: int, size_bytes: int, *, writing: bool) -> None:
        if offset_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"file offset {offset_bytes} is no multiple of {ALIGNMENT_BYTES}")
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self._size_bytes:
            raise ValueError(
                f"range of {size_bytes} bytes at {offset_bytes} is outside the files of"
                f" {self._size_bytes} bytes"
            )
        with MemoryRange(memory, size_bytes, writable=not writing) as whole:
            self._run(
                [
                    partial(self._move_pieces, pieces, whole, writing=writing)
                    for pieces in self._deal(offset_bytes, size_bytes)
                ]
            )

    def _deal(self, offset_bytes: int, size_bytes: int) -> list[list[Piece]]:
        """Cut a range into what each thread moves."""
        by_file: dict[int, list[Piece]] = {}
        for piece in self._stripes.pieces(offset_bytes, size_bytes):
            by_file.setdefault(piece.file, []).append(piece)
        return [
            part
            for file, pieces in by_file.items()
            for part in split_pieces(pieces, self._num_threads[file], _LEAST_PART_BYTES)
        ]

    def _move_pieces(self, pieces: list[Piece], memory: MemoryRange, *, writing: bool) -> None:
        for piece in pieces:
            file = self._files[piece.file]
            move = file.write_from if writing else file.read_into
            part = memory.part(piece.start_bytes, piece.size_bytes)
            move(part, piece.offset_bytes, piece.size_bytes)

    def _run(self, jobs: list[Callable[[], None]]) -> None:
        """Do all jobs at once, the first on this thread; blocks until every one has ended.

        Raises:
            StorageError: the first that any of them raised.
        """
        others: list[Future[None]] = []
        try:
            others += [self._threads.submit(job) for job in jobs[1:]]
            for job in jobs[:1]:
                job()
        finally:
            # They move bytes of memory that the caller may drop as soon as this returns.
            wait(others)
        for other in others:
            other.result()
