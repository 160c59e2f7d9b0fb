"""OpenMP's threads belong to the thread that used them first.

In: nothing. Out: the calling thread's idle helpers are gone. libgomp counts the helpers of all
threads; with more of them than cores it lets each sleep at once between parallel regions, which
makes small operations of another thread several times slower.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

_PAUSE_SOFT: Final = 1


def release_team() -> bool:
    """End the calling thread's OpenMP helpers; they come back when it computes in parallel.

    Returns:
        False where the OpenMP library cannot do that.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    paths = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    released = False
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            released = library.omp_pause_resource_all(_PAUSE_SOFT) == 0 or released
    return released
