"""Exact counts of what went to and came from a disk.

In: single transfers, from any thread. Out: frozen `IoCounters`. The bytes are those that the
operating system moved, padding included, so that a bench may gate on them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class IoCounters:
    """Bytes, operations and time of one file since it was opened.

    Times are those spent inside transfers, added up over threads.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_ns: int = 0
    write_ns: int = 0
    num_reads: int = 0
    num_writes: int = 0

    def plus(self, other: IoCounters) -> IoCounters:
        """Add the counts of another file."""
        return IoCounters(
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            read_ns=self.read_ns + other.read_ns,
            write_ns=self.write_ns + other.write_ns,
            num_reads=self.num_reads + other.num_reads,
            num_writes=self.num_writes + other.num_writes,
        )

    def since(self, earlier: IoCounters) -> IoCounters:
        """Subtract an earlier snapshot of the same file."""
        return IoCounters(
            read_bytes=self.read_bytes - earlier.read_bytes,
            written_bytes=self.written_bytes - earlier.written_bytes,
            read_ns=self.read_ns - earlier.read_ns,
            write_ns=self.write_ns - earlier.write_ns,
            num_reads=self.num_reads - earlier.num_reads,
            num_writes=self.num_writes - earlier.num_writes,
        )


class IoMeter:
    """Adds up transfers; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = IoCounters()

    @property
    def counters(self) -> IoCounters:
        """The counts so far."""
        return self._counters

    def add_read(self, size_bytes: int, duration_ns: int) -> None:
        """Count one read of the operating system."""
        with self._lock:
            old = self._counters
            self._counters = replace(
                old,
                read_bytes=old.read_bytes + size_bytes,
                read_ns=old.read_ns + duration_ns,
                num_reads=old.num_reads + 1,
            )

    def add_write(self, size_bytes: int, duration_ns: int) -> None:
        """Count one write of the operating system."""
        with self._lock:
            old = self._counters
            self._counters = replace(
                old,
                written_bytes=old.written_bytes + size_bytes,
                write_ns=old.write_ns + duration_ns,
                num_writes=old.num_writes + 1,
            )
