"""How the C heap treats large blocks, where the C library lets us say so (glibc).

In: `map` (large blocks are mapped, and given back when freed: memory falls to the live bytes, at
the cost of page faults) or `keep` (freed blocks stay for the next allocation).
"""

from __future__ import annotations

import ctypes
from typing import Final, Literal

from packhorse.units import KIB, MIB

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MAP_FROM_BYTES: Final = 64 * KIB
# The largest threshold that glibc accepts: blocks from here on are mapped in either mode.
KEEP_BELOW_BYTES: Final = 32 * MIB
_SMALL_BYTES: Final = 4 * MIB


def set_heap_mode(mode: Literal["keep", "map"]) -> bool:
    """Set the mode for the whole process; False when the C library has no such setting."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    if mode == "map":
        settings = ((_M_MMAP_THRESHOLD, _MAP_FROM_BYTES), (_M_TRIM_THRESHOLD, MIB), (_M_TOP_PAD, 0))
    else:
        settings = (
            (_M_MMAP_THRESHOLD, KEEP_BELOW_BYTES),
            (_M_TRIM_THRESHOLD, 2**31 - 1),
            (_M_TOP_PAD, MIB),
        )
    # Lanes are threads; with a heap for each, what one frees would not serve the next.
    settings = (*settings, (_M_ARENA_MAX, 1))
    accepted = [libc.mallopt(key, value) == 1 for key, value in settings]  # each one is tried
    return all(accepted)


def settle_heap(size_bytes: int) -> None:
    """Give free heap pages back, then take so many and leave them free in the heap.

    A kept heap that begins so does not grow while no more than that is in use: where its blocks
    fall differs from run to run of a program, and each new place would cost new pages. Some of the
    pages lie in small holes, into which Python's and torch's own small objects wander.
    """
    libc = ctypes.CDLL(None)
    trim_heap()
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    taken: list[int] = []
    for block_bytes, total_bytes in ((MIB, size_bytes), (2 * KIB, _SMALL_BYTES)):
        for _ in range(-(-total_bytes // block_bytes)):
            block = libc.malloc(block_bytes)
            if not block:
                break
            ctypes.memset(block, 0, block_bytes)
            taken.append(block)
    for block in taken:
        libc.free(block)


def trim_heap() -> None:
    """Give free heap pages back to the system now, for example after tracing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
