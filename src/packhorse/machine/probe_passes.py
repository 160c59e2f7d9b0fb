"""Passes over a probe's file: writes, reads, and both at once, each for a limited time.

In: an open file and memory. Out: bytes and nanoseconds. Pieces are as large as a run's transfers
often are; the clock runs while a piece moves, and in the mixed pass from one common start.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from packhorse.storage.mapping import Mapping
from packhorse.storage.scratch_space import StateFile
from packhorse.units import MIB

PIECE_BYTES: Final = 32 * MIB
PAGE_BYTES: Final = 4096
_PATTERN_BYTES: Final = 8 * MIB
_LATENCY_RUNS: Final = 25

Clock = Callable[[], int]
"""Gives nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a pass moved, in how long."""

    size_bytes: int
    duration_ns: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes over time."""
        return self.size_bytes * 1e9 / max(1, self.duration_ns)


class Passes:
    """Moves pieces between a file and memory; `size_bytes` of the file are in use.

    Args:
        file: at least one page.
        memory: two pieces long: reads have one of their own.
    """

    def __init__(
        self, file: StateFile, memory: Mapping, *, clock: Clock = time.perf_counter_ns
    ) -> None:
        self._file = file
        self._memory = memory
        self._clock = clock
        self.piece_bytes = memory.size_bytes // 2
        self.size_bytes = file.size_bytes

    def prime(self, limit_ns: int) -> None:
        """Write the file for the first time; what the time does not reach is used no more.

        The first write of allocated space costs more than every later one.
        """
        moved = self.write(limit_ns)
        self.size_bytes = max(moved.size_bytes, PAGE_BYTES)

    def write(self, limit_ns: int) -> Moved:
        """Write the file once, or for as long as the limit is; whole pieces."""
        return self._pass(self._write_piece, range(self._num_pieces), limit_ns)

    def write_from(self, first: int, num_pieces: int) -> Moved:
        """Write so many pieces from a piece on; after the last one comes the first."""
        pieces = [(first + each) % self._num_pieces for each in range(num_pieces)]
        return self._pass(self._write_piece, pieces, None)

    def read(self, limit_ns: int) -> Moved:
        """Read the file once, or for as long as the limit is; whole pieces."""
        return self._pass(self._read_piece, range(self._num_pieces), limit_ns)

    def mix(self, limit_ns: int) -> tuple[Moved, Moved] | None:
        """Read one half of the file and write the other at once, for as long as the limit is.

        Returns:
            What was read and what was written; None where one piece is all there is.
        """
        half = self._num_pieces // 2
        if not half:
            return None
        begin = threading.Barrier(2)

        def run(move: Callable[[int], None], pieces: range) -> Moved:
            begin.wait()
            return self._rounds(move, pieces, limit_ns)

        with ThreadPoolExecutor(1, thread_name_prefix="packhorse-probe") as pool:
            written = pool.submit(run, self._write_piece, range(half, self._num_pieces))
            try:
                read = run(self._read_piece, range(half))
            except BaseException:
                # The other thread must not wait for a partner that never comes.
                begin.abort()
                raise
        return read, written.result()

    def latency_ns(self, *, writing: bool) -> int:
        """Median time of moving one page, over pages spread across the file."""
        num_pages = self.size_bytes // PAGE_BYTES
        move = self._file.write_from if writing else self._file.read_into
        durations_ns: list[int] = []
        for index in range(_LATENCY_RUNS):
            began = self._clock()
            move(self._memory.address, index * 7919 % num_pages * PAGE_BYTES, PAGE_BYTES)
            durations_ns.append(self._clock() - began)
        return round(statistics.median(durations_ns))

    @property
    def _num_pieces(self) -> int:
        return -(-self.size_bytes // self.piece_bytes)

    def _pass(
        self, move: Callable[[int], None], pieces: Sequence[int], limit_ns: int | None
    ) -> Moved:
        size_bytes = duration_ns = 0
        for piece in pieces:
            began = self._clock()
            move(piece)
            duration_ns += self._clock() - began
            size_bytes += self._length(piece)
            if limit_ns is not None and duration_ns >= limit_ns:
                break
        return Moved(size_bytes=size_bytes, duration_ns=duration_ns)

    def _rounds(self, move: Callable[[int], None], pieces: range, limit_ns: int) -> Moved:
        began = self._clock()
        size_bytes = number = 0
        while True:
            piece = pieces[number % len(pieces)]
            move(piece)
            size_bytes += self._length(piece)
            number += 1
            duration_ns = self._clock() - began
            if duration_ns >= limit_ns:
                return Moved(size_bytes=size_bytes, duration_ns=duration_ns)

    def _length(self, piece: int) -> int:
        return min(self.piece_bytes, self.size_bytes - piece * self.piece_bytes)

    def _write_piece(self, piece: int) -> None:
        offset_bytes = piece * self.piece_bytes
        self._file.write_from(self._memory.address, offset_bytes, self._length(piece))

    def _read_piece(self, piece: int) -> None:
        # A run reads into chunks whose pages it gave back: making them anew is in the rate.
        self._memory.drop(self.piece_bytes, self.piece_bytes)
        address = self._memory.address + self.piece_bytes
        self._file.read_into(address, piece * self.piece_bytes, self._length(piece))


def make_memory(file_bytes: int, *, huge_pages: bool) -> Mapping:
    """Memory for passes over a file: a piece of bytes that differ, and room for one more."""
    half_bytes = file_bytes // 2 // PAGE_BYTES * PAGE_BYTES
    piece_bytes = max(PAGE_BYTES, min(PIECE_BYTES, half_bytes))
    memory = Mapping(2 * piece_bytes, huge_pages=huge_pages)
    # A drive may skip zeros, and compress what repeats.
    view = memory.view(0, piece_bytes)
    pattern = os.urandom(min(_PATTERN_BYTES, piece_bytes))
    for start in range(0, piece_bytes, len(pattern)):
        end = min(start + len(pattern), piece_bytes)
        view[start:end] = pattern[: end - start]
    view.release()
    return memory
