"""Measures how fast files are saved, by the way that saves go.

In: a folder. Out: a `Saving`. A file without a name is written through the page cache in blocks,
each with its CRC-32, and every so many bytes all of it is brought to the disk and dropped from the
cache; then small changes are brought there one by one. The file is gone however the probe ends.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import zlib
from typing import Final

from packhorse.machine.spec import Saving
from packhorse.storage.space import explain_failure, nearest_folder
from packhorse.units import MIB

# As the writer of checkpoints does it.
BLOCK_BYTES: Final = MIB
SYNC_BYTES: Final = 64 * MIB

_MOST_BYTES: Final = 256 * MIB
_LIMIT_NS: Final = 4 * 10**9
_NUM_SYNCS: Final = 5
_SMALL_BYTES: Final = 4096


def measure_saving(folder: str, *, file_bytes: int = _MOST_BYTES) -> Saving:
    """Measure in the folder, or nearest above it.

    Args:
        file_bytes: the most that is written; it ends early when it takes some seconds.

    Raises:
        StorageError: the folder is unwritable, or the disk is full or fails.
    """
    parent = nearest_folder(folder)
    size_bytes = max(BLOCK_BYTES, min(file_bytes, _MOST_BYTES) // BLOCK_BYTES * BLOCK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            return _measure(file.fileno(), size_bytes)
    except OSError as error:
        raise explain_failure(error, parent, "measure how fast files are saved") from error


def _measure(descriptor: int, size_bytes: int) -> Saving:
    os.posix_fallocate(descriptor, 0, size_bytes)
    block = os.urandom(BLOCK_BYTES)
    checksum_ns = write_ns = written_bytes = unsynced_bytes = 0
    while written_bytes < size_bytes and write_ns < _LIMIT_NS:
        began_ns = time.perf_counter_ns()
        zlib.crc32(block)
        summed_ns = time.perf_counter_ns()
        os.pwrite(descriptor, block, written_bytes)
        written_bytes += BLOCK_BYTES
        unsynced_bytes += BLOCK_BYTES
        if unsynced_bytes >= SYNC_BYTES or written_bytes >= size_bytes:
            _bring(descriptor)
            unsynced_bytes = 0
        checksum_ns += summed_ns - began_ns
        write_ns += time.perf_counter_ns() - summed_ns
    began_ns = time.perf_counter_ns()
    _bring(descriptor)
    write_ns += time.perf_counter_ns() - began_ns
    return Saving(
        write_bytes_per_s=written_bytes * 1e9 / max(write_ns, 1),
        checksum_bytes_per_s=written_bytes * 1e9 / max(checksum_ns, 1),
        sync_ns=_measure_sync(descriptor),
    )


def _measure_sync(descriptor: int) -> int:
    taken_ns: list[int] = []
    for index in range(_NUM_SYNCS):
        began_ns = time.perf_counter_ns()
        os.pwrite(descriptor, bytes([index]) * _SMALL_BYTES, 0)
        os.fsync(descriptor)
        taken_ns.append(time.perf_counter_ns() - began_ns)
    return round(statistics.median(taken_ns))


def _bring(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
