"""What moving bytes takes from computing lies between its own time of a core and all of it."""

from __future__ import annotations

import threading
import time

from packhorse.machine.probe_crowding import measure_core_ns_per_byte
from packhorse.machine.probe_passes import Moved

PIECE_BYTES = 1000
BUSY_NS = 2_000_000


def test_a_copy_by_hand_costs_at_least_its_own_time() -> None:
    def burn(limit_ns: int) -> Moved:
        began_ns = time.perf_counter_ns()
        size_bytes = 0
        while not size_bytes or time.perf_counter_ns() - began_ns < limit_ns:
            until_ns = time.thread_time_ns() + BUSY_NS
            while time.thread_time_ns() < until_ns:
                pass
            size_bytes += PIECE_BYTES
        return Moved(size_bytes=size_bytes, duration_ns=time.perf_counter_ns() - began_ns)

    assert measure_core_ns_per_byte(burn, 10**8) >= BUSY_NS / PIECE_BYTES


def test_it_costs_no_more_than_a_core_for_as_long_as_it_takes() -> None:
    waits: list[float] = []
    waiting = threading.Event()

    def wait(limit_ns: int) -> Moved:
        began_ns = time.perf_counter_ns()
        size_bytes = 0
        while not size_bytes or time.perf_counter_ns() - began_ns < limit_ns:
            # What takes its time without a core: the interpreter is busy for next to none of it.
            waiting.wait(0.001)
            size_bytes += PIECE_BYTES
        duration_ns = time.perf_counter_ns() - began_ns
        waits.append(duration_ns / size_bytes)
        return Moved(size_bytes=size_bytes, duration_ns=duration_ns)

    found = measure_core_ns_per_byte(wait, 10**8)
    assert 0 < found <= waits[0]
