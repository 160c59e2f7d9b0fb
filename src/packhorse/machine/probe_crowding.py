"""Measures what moving bytes takes from computing on the same cores.

In: a way to move bytes for a while. Out: how long a byte keeps a core from computing, in ns.

    alone    so many matrix products, with all threads
    beside   the same while another thread moves bytes
    lost     what they take longer, over the bytes that were moved meanwhile; the median of rounds

A team of threads waits for its slowest one, so what another thread takes of one core is lost to
all. It is never less than the time that moving takes of a core by itself, nor more than all of it.
The products are those of a few rows with weights that no cache holds, as a block's are: what moves
takes of the memory's rate as well, which products of one small matrix do not feel.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from packhorse.machine.probe_passes import Moved

ROUNDS: Final = 3
_ROWS: Final = 256
_WIDTH: Final = 1024
_NUM_WEIGHTS: Final = 16

Move = Callable[[int], Moved]
"""Moves bytes until so many ns have passed, at least a piece."""


def measure_core_ns_per_byte(move: Move, limit_ns: int) -> float:
    """Measure how long moving a byte keeps a core from computing; takes about `limit_ns`."""
    began_ns = time.process_time_ns()
    alone = move(limit_ns // (2 * ROUNDS))
    own_ns = (time.process_time_ns() - began_ns) / alone.size_bytes
    slice_ns = limit_ns // (3 * ROUNDS)
    products = _Products()
    count = max(1, slice_ns * _NUM_WEIGHTS // max(products.take_ns(_NUM_WEIGHTS), 1))
    lost = [_lost_ns_per_byte(move, products, count) for _ in range(ROUNDS)]
    most_ns = alone.duration_ns / alone.size_bytes
    return min(max(statistics.median(lost), own_ns), most_ns)


class _Products:
    """Products of some rows with one weight after another."""

    def __init__(self) -> None:
        self._rows = torch.rand(_ROWS, _WIDTH)
        self._weights = torch.rand(_NUM_WEIGHTS, _WIDTH, _WIDTH)

    def take_ns(self, count: int) -> int:
        """Compute so many; gives how long that took."""
        began_ns = time.perf_counter_ns()
        for at in range(count):
            torch.mm(self._rows, self._weights[at % _NUM_WEIGHTS])
        return time.perf_counter_ns() - began_ns


def _lost_ns_per_byte(move: Move, products: _Products, count: int) -> float:
    alone_ns = products.take_ns(count)
    started, done = threading.Event(), threading.Event()

    def move_on() -> float:
        # Bytes in a nanosecond; the last piece may be moved when the products are over.
        size_bytes = 0
        began_ns = time.perf_counter_ns()
        started.set()
        while not done.is_set():
            size_bytes += move(1).size_bytes
        return size_bytes / (time.perf_counter_ns() - began_ns)

    with ThreadPoolExecutor(1, thread_name_prefix="packhorse-probe") as pool:
        moved = pool.submit(move_on)
        started.wait()
        try:
            beside_ns = products.take_ns(count)
        finally:
            done.set()
        rate = moved.result()
    return (beside_ns - alone_ns) / (rate * beside_ns)
