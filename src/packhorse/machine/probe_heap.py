"""Measures what it costs when the C heap maps large blocks and gives them back at once.

In: a number of threads. Out: a `Heap`. glibc's settings hold for a whole process, so a short child
process runs this file: one loop of products and elementwise steps with large blocks mapped, then
the same with blocks kept. Where there is no glibc both are the same and the cost is 0.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from packhorse.errors import RunFailedError
from packhorse.machine.spec import Heap
from packhorse.units import KIB

# What a kept heap wastes depends on a model's mixture of sizes, which no loop here can know.
# Freed blocks between live ones stay unused until something of their size comes along.
KEEP_SLACK: Final = 0.1
MAP_THRESHOLD_BYTES: Final = 256 * KIB
_TIMEOUT_S: Final = 60
_SIZE: Final = 512
_PHASE_NS: Final = 500_000_000
_MIN_RUNS: Final = 5
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4


def measure_heap(num_threads: int) -> Heap:
    """Measure the cost of mapping in a child process with `num_threads` compute threads.

    Raises:
        RunFailedError: the child process fails.
    """
    command = [sys.executable, "-m", "packhorse.machine.probe_heap", str(num_threads)]
    search = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": str(num_threads)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            env=environment,
        )
        mapped_ns, kept_ns = (float(word) for word in done.stdout.split())
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        detail = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise RunFailedError(
            "cannot measure the cost of the heap modes: the child process failed",
            where=f"{' '.join(command)}\n{detail[-1] if detail else ''}".strip(),
            fix="run this command by itself to see why",
        ) from error
    return Heap(map_cost=max(0.0, mapped_ns / kept_ns - 1), keep_slack=KEEP_SLACK)


def run_child(num_threads: int) -> tuple[float, float]:
    """Time the loop with blocks mapped and with blocks kept; changes this process's heap."""
    import torch

    torch.set_num_threads(num_threads)
    weight = torch.ones(_SIZE, _SIZE) / _SIZE
    start = torch.ones(_SIZE, _SIZE)

    def run() -> None:
        hidden = start
        for _ in range(4):
            inner = torch.nn.functional.gelu(hidden @ weight)
            hidden = (hidden + inner) * 0.5

    # Mapped comes first: once kept, free blocks would serve requests that should be mapped.
    _set_heap({_M_MMAP_THRESHOLD: MAP_THRESHOLD_BYTES, _M_MMAP_MAX: 65536})
    mapped_ns = _median_ns(run)
    _set_heap({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})
    return mapped_ns, _median_ns(run)


def _set_heap(settings: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in settings.items():
            libc.mallopt(parameter, value)


def _median_ns(run: Callable[[], None]) -> float:
    for _ in range(3):
        run()
    durations_ns: list[int] = []
    while len(durations_ns) < _MIN_RUNS or sum(durations_ns) < _PHASE_NS:
        # CPU time: what mapping costs is work, and other processes must not count as such.
        began = time.process_time_ns()
        run()
        durations_ns.append(max(1, time.process_time_ns() - began))
    return statistics.median(durations_ns)


if __name__ == "__main__":
    sys.stdout.write(" ".join(str(value) for value in run_child(int(sys.argv[1]))))
