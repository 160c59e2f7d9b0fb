"""Memory that a transfer reads from or writes to: a plain address, or a buffer of Python.

In: an address or a buffer. Out: byte views of it, in place, never a copy.
"""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType
from typing import Self

Memory = int | memoryview | mmap.mmap | bytes | bytearray


class MemoryRange:
    """A buffer or address as one byte view with a known address, for the time of a transfer.

    `address` is where the first byte lies; for a read-only buffer, whose address is out of reach,
    it is an odd number, so that such a buffer counts as unaligned.

    Raises:
        ValueError: the buffer is too small, or read-only where it must be written.
    """

    def __init__(
        self,
        memory: Memory,
        size_bytes: int,
        *,
        writable: bool,
    ) -> None:
        if isinstance(memory, int):
            self.address = memory
            array = (ctypes.c_ubyte * size_bytes).from_address(memory)
            self._view = memoryview(array).cast("B")  # ctypes' own format is "<B"
            return
        view = memoryview(memory).cast("B")  # bytes, whatever the array holds
        if writable and view.readonly:
            raise ValueError("cannot read into a read-only buffer")
        if len(view) < size_bytes:
            raise ValueError(f"the buffer has {len(view)} bytes, {size_bytes} are needed")
        self._view = view
        if view.readonly:
            self.address = 1
        else:
            self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.release()

    def part(self, start: int, length: int) -> memoryview:
        """Give a view of a part; not to be kept after the transfer."""
        return self._view[start : start + length]
