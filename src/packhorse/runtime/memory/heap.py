"""How the C heap treats large blocks, where the C library lets us say so (glibc).

In: `map` (large blocks are mapped, and given back when freed: memory falls to the live bytes, at
the cost of page faults) or `keep` (freed blocks stay for the next allocation).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import cache
from typing import Final, Literal, NamedTuple

from packhorse.graph.liveness import LARGE_BLOCK_BYTES
from packhorse.units import KIB, MIB

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MAP_FROM_BYTES: Final = 64 * KIB
# Blocks from here on are mapped in either mode. Into the hole that a large block leaves small ones
# move, and then the next large one takes new pages: with glibc's largest threshold, 32 MiB, a kept
# heap of 31 MiB gradients grew to twice what lived in it. Mapping costs little at this size.
KEEP_BELOW_BYTES: Final = LARGE_BLOCK_BYTES
_SMALL_BYTES: Final = 4 * MIB
# Below 512 bytes, such objects lie in Python's own pools.
_OBJECT_BYTES: Final = 400


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


def seal_holes(mode: Literal["keep", "map"]) -> tuple[int, ...]:
    """Occupy the large free blocks inside the heap, so that large requests are not served there.

    The C library looks for a free block before it maps a new one, and would never give back the
    pages of one that it finds in the midst of the heap, where planning leaves many. An occupied
    hole has no pages but those of its borders.

    Returns:
        Addresses for `open_holes`.
    """
    libc = _load_allocator()
    if libc is None:
        return ()
    libc.mallopt(_M_MMAP_THRESHOLD, KEEP_BELOW_BYTES)
    sealed = _occupy_holes(libc)
    if mode == "map":
        libc.mallopt(_M_MMAP_THRESHOLD, _MAP_FROM_BYTES)
    return sealed


def open_holes(sealed: tuple[int, ...]) -> None:
    """Free what `seal_holes` occupies."""
    libc = _load_allocator()
    if libc is not None:
        for block in sealed:
            libc.free(block)


def settle_heap(size_bytes: int, block_bytes: int) -> tuple[int, ...]:
    """Occupy the holes of a kept heap, take so many pages at its end, and leave those free.

    A kept heap that begins so does not grow while no more than that is in use: where its blocks
    fall differs from run to run of a program, and each new place would cost new pages. Some of the
    pages lie in small holes and in Python's pools, into which small objects wander.

    Args:
        block_bytes: the pages lie in one piece as long as this is below `KEEP_BELOW_BYTES`.

    Returns:
        Addresses for `open_holes`.
    """
    libc = _load_allocator()
    if libc is None:
        return ()
    sealed = _occupy_holes(libc)
    taken: list[int] = []
    for each_bytes, total_bytes in ((block_bytes, size_bytes), (2 * KIB, _SMALL_BYTES)):
        for _ in range(-(-total_bytes // each_bytes)):
            block = libc.malloc(each_bytes)
            if not block:
                break
            ctypes.memset(block, 0, each_bytes)
            taken.append(block)
    gc.collect()
    objects = [bytes(_OBJECT_BYTES) for _ in range(_SMALL_BYTES // _OBJECT_BYTES)]
    del objects
    for block in taken:
        libc.free(block)
    return sealed


def trim_heap() -> None:
    """Give free heap pages back to the system now, for example after tracing."""
    libc = _load_allocator()
    if libc is not None:
        libc.malloc_trim(0)


class LiveBlocks(NamedTuple):
    """Bytes of the blocks in use: inside the heap, its occupied holes included, and mapped."""

    heap_bytes: int
    mapped_bytes: int


def count_live_blocks() -> LiveBlocks | None:
    """Count the blocks in use; None where nobody does."""
    count = _find_counter()
    if count is None:
        return None
    counts = count()
    return LiveBlocks(int(counts.uordblks), int(counts.hblkhd))


@cache
def _find_counter() -> Callable[[], _Counts] | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Counts
    return libc.mallinfo2


class _Counts(ctypes.Structure):
    # What mallinfo2 returns.
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _occupy_holes(libc: ctypes.CDLL) -> tuple[int, ...]:
    """Take every free block inside the heap that is large; it has no pages but at its borders."""
    trim_heap()
    end = libc.sbrk(0)
    occupied: list[int] = []
    size_bytes = KEEP_BELOW_BYTES // 2
    while size_bytes >= _MAP_FROM_BYTES:
        block = libc.malloc(size_bytes)
        if block and block + size_bytes <= end:
            occupied.append(block)
            continue
        libc.free(block)
        size_bytes //= 2
    return tuple(occupied)


def _load_allocator() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim") or not hasattr(libc, "mallopt"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    return libc
