"""One reserved range of memory in which every chunk owns a fixed place.

In: a size, which may exceed the RAM by far. Out: addresses and views that stay valid, whatever is
loaded or dropped. Only touched pages count as memory; a dropped page reads as zeros.
The range begins at a multiple of the huge page size and asks for huge pages, so that direct I/O
moves large segments.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from types import TracebackType
from typing import Final, Self

from packhorse.errors import RefusedError
from packhorse.units import GIB, MIB, format_bytes

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 * MIB
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10
# MAYMOVE, FIXED, and DONTUNMAP: the source stays reserved, without pages.
_MREMAP_MOVE: Final = 1 | 2 | 4
_MINCORE_STEP_BYTES: Final = GIB


@cache
def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    if hasattr(libc, "mremap"):
        libc.mremap.restype = ctypes.c_void_p
    return libc


class Mapping:
    """An anonymous, private, lazily filled memory range.

    Args:
        size_bytes: rounded up to whole pages. Costs address space only.
        huge_pages: ask the kernel for 2 MiB pages.

    Dropping part of a 2 MiB page takes it out of this process at once, but the kernel may hold the
    rest of that page until it needs memory: give large ranges places at multiples of
    `HUGE_PAGE_BYTES`.

    Raises:
        RefusedError: the kernel grants no such range.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool = True) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a mapping needs a positive size, not {size_bytes}")
        self._size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._map: mmap.mmap | None = mmap.mmap(
                -1,
                self._size_bytes + HUGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
        except OSError as error:
            raise RefusedError(
                f"cannot reserve {format_bytes(size_bytes)} of address space: {error.strerror}",
                where="mmap with MAP_NORESERVE",
                fix="raise the address space limit (ulimit -v) or set vm.overcommit_memory to 0 or"
                " 1, or lower the budget",
            ) from error
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -first % HUGE_PAGE_BYTES
        self._address = first + self._start
        self._huge_pages = huge_pages and self._advise_huge_pages(self._map)

    def _advise_huge_pages(self, reserved: mmap.mmap) -> bool:
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        try:
            reserved.madvise(mmap.MADV_HUGEPAGE, self._start, self._size_bytes)
        except OSError:
            # A kernel built without huge pages refuses the advice; the range works all the same.
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Usable size, whole pages."""
        return self._size_bytes

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of `HUGE_PAGE_BYTES`."""
        return self._address

    @property
    def huge_pages(self) -> bool:
        """Whether the kernel took the advice to use huge pages."""
        return self._huge_pages

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Give a writable view of a range; the memory stays reserved as long as a view lives."""
        self._check_range(offset_bytes, size_bytes)
        start = self._start + offset_bytes
        return memoryview(self._reserved())[start : start + size_bytes]

    def drop(self, offset_bytes: int, size_bytes: int) -> None:
        """Give the pages of a range back to the system at once; they read as zeros afterwards.

        Nothing may read, write or transfer the range meanwhile.

        Args:
            offset_bytes: a multiple of `PAGE_BYTES`.
            size_bytes: a multiple of `PAGE_BYTES`.
        """
        self._check_range(offset_bytes, size_bytes)
        if offset_bytes % PAGE_BYTES or size_bytes % PAGE_BYTES:
            raise ValueError(
                f"cannot drop {size_bytes} bytes at {offset_bytes}: both must be multiples of"
                f" {PAGE_BYTES}"
            )
        if size_bytes:
            self._reserved().madvise(mmap.MADV_DONTNEED, self._start + offset_bytes, size_bytes)

    def move(self, source_bytes: int, target_bytes: int, size_bytes: int) -> bool:
        """Move the pages of a range to another one that has none, with what they hold.

        Takes microseconds where dropping and making anew takes milliseconds: the kernel clears what
        it makes. Afterwards the source reads as zeros. Nothing may use either range meanwhile.

        Args:
            source_bytes, target_bytes: where the ranges begin, multiples of `PAGE_BYTES`; huge
                pages stay whole at multiples of `HUGE_PAGE_BYTES`.
            size_bytes: of both, a multiple of `PAGE_BYTES`; they do not overlap.

        Returns:
            False where the system does not do it (before Linux 5.7, or a source in several pieces):
            the source is as it was, the target without pages.

        Raises:
            RefusedError: it does not, and does not give the target's addresses back either.
        """
        self._check_range(source_bytes, size_bytes)
        self._check_range(target_bytes, size_bytes)
        if any(each % PAGE_BYTES for each in (source_bytes, target_bytes, size_bytes)):
            raise ValueError(
                f"cannot move {size_bytes} bytes from {source_bytes} to {target_bytes}: all must be"
                f" multiples of {PAGE_BYTES}"
            )
        self._reserved()
        libc = _load_libc()
        if not hasattr(libc, "mremap"):
            return False
        moved: int | None = libc.mremap(
            ctypes.c_void_p(self._address + source_bytes),
            ctypes.c_size_t(size_bytes),
            ctypes.c_size_t(size_bytes),
            _MREMAP_MOVE,
            ctypes.c_void_p(self._address + target_bytes),
        )
        if moved == self._address + target_bytes:
            return True
        self._map_again(target_bytes, size_bytes)
        return False

    def _map_again(self, offset_bytes: int, size_bytes: int) -> None:
        # A move that fails may have taken its target away before it found out.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        address = self._address + offset_bytes
        made: int | None = _load_libc().mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(size_bytes),
            protection,
            flags,
            -1,
            ctypes.c_long(0),
        )
        if made != address:
            raise RefusedError(
                f"cannot reserve {format_bytes(size_bytes)} of address space again:"
                f" {os.strerror(ctypes.get_errno())}",
                where="mmap after a failed mremap",
                fix="raise the address space limit (ulimit -v) and vm.max_map_count",
            )

    def resident_bytes(self, offset_bytes: int = 0, size_bytes: int | None = None) -> int:
        """Count the bytes of a range (default: all) that are backed by pages, by mincore.

        A page that was read before it was ever written maps the shared zero page: it counts here
        though it costs no memory.
        """
        size_bytes = self._size_bytes - offset_bytes if size_bytes is None else size_bytes
        self._check_range(offset_bytes, size_bytes)
        self._reserved()
        libc = _load_libc()
        num_pages = 0
        start = self._address + offset_bytes // PAGE_BYTES * PAGE_BYTES
        end = self._address + offset_bytes + size_bytes
        for address in range(start, end, _MINCORE_STEP_BYTES):
            length = min(_MINCORE_STEP_BYTES, end - address)
            flags = (ctypes.c_ubyte * -(-length // PAGE_BYTES))()
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), flags) != 0:
                raise OSError(ctypes.get_errno(), "mincore failed")
            num_pages += bytes(flags).count(1)
        return num_pages * PAGE_BYTES

    def close(self) -> None:
        """Give all pages back. Views that still live read zeros; the range goes with the last."""
        if self._map is not None:
            self.drop(0, self._size_bytes)
            self._map = None

    def _reserved(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the mapping is closed")
        return self._map

    def _check_range(self, offset_bytes: int, size_bytes: int) -> None:
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self._size_bytes:
            raise ValueError(
                f"range of {size_bytes} bytes at {offset_bytes} is outside the mapping of"
                f" {self._size_bytes} bytes"
            )
