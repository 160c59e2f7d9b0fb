"""The memory under chunk states: a reserved address range whose pages come and go.

In: sizes. Out: tensors at fixed addresses. On CPU an anonymous mapping; `memory/cuda.py` has the
same for a CUDA device. A range is committed before it is first written, and dropped when its bytes
are given back.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from packhorse.storage.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping

_MADV_HUGEPAGE: Final = 14


class Backing(Protocol):
    """A reserved range of addresses; offsets and sizes are in bytes."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """A 1-D view of a range, committed or not; it must not be touched while dropped."""
        ...

    def commit(self, offset: int, size_bytes: int) -> None:
        """Put memory behind a range that is dropped."""
        ...

    def drop(self, offset: int, size_bytes: int) -> None:
        """Give the memory behind a range back."""
        ...

    def shrink(self, offset: int, size_bytes: int, keep_bytes: int) -> int:
        """Give back what a range holds beyond its first `keep_bytes`, or more; returns the rest."""
        ...

    def move(self, source: int, target: int, size_bytes: int) -> bool:
        """Hand the memory behind a range to one that is dropped; the source is dropped then.

        Returns:
            False where that cannot be; nothing has changed then.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class HostBacking:
    """An anonymous mapping of this process; pages appear when they are touched.

    Dropped pages read as zeros. With `pinned`, the range is registered with CUDA chunk by chunk as
    it is committed, so that copies to a device run at full speed and can be asynchronous.
    `huge_pages`: ask for them.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False, huge_pages: bool = True) -> None:
        # A huge page that a chunk fills only partly would cost more than the ledger says, so only
        # the whole huge pages of a committed range are advised.
        self._mapping = Mapping(max(size_bytes, PAGE_BYTES), huge_pages=False)
        self._pinned = pinned
        self._huge_pages = huge_pages
        self._registered: set[int] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._mapping.address

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """A 1-D view of a range."""
        return torch.frombuffer(self._mapping.view(offset, size_bytes), dtype=dtype)

    def commit(self, offset: int, size_bytes: int) -> None:
        """Ask for huge pages where the range fills them; the pages come when they are touched."""
        whole = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole and self._huge_pages:
            start = ctypes.c_void_p(self.address + offset)
            # Where the kernel refuses, transfers are slower, not wrong.
            self._libc.madvise(start, ctypes.c_size_t(whole), _MADV_HUGEPAGE)
        if self._pinned and offset not in self._registered:
            _ask_cuda("cudaHostRegister", self.address + offset, size_bytes, 0)
            self._registered.add(offset)

    def drop(self, offset: int, size_bytes: int) -> None:
        """Give the pages of a range back."""
        if offset in self._registered:
            _ask_cuda("cudaHostUnregister", self.address + offset)
            self._registered.discard(offset)
        self._mapping.drop(offset, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)

    def shrink(self, offset: int, size_bytes: int, keep_bytes: int) -> int:
        """Give whole pages back from the end of a range; pinned ones go together."""
        kept = 0 if self._pinned else keep_bytes // PAGE_BYTES * PAGE_BYTES
        self.drop(offset + kept, size_bytes - kept)
        return kept

    def move(self, source: int, target: int, size_bytes: int) -> bool:
        """Hand whole huge pages over; pinned ones stay where the device knows them.

        What is committed is advised as far as it is whole huge pages, so such a range is of one
        piece to the kernel, and moves as one.
        """
        if self._pinned or any(each % HUGE_PAGE_BYTES for each in (source, target, size_bytes)):
            return False
        return self._mapping.move(source, target, size_bytes)

    def close(self) -> None:
        """Give everything back."""
        for offset in tuple(self._registered):
            # A device that has failed answers nothing any more; what it did is told elsewhere.
            with contextlib.suppress(RuntimeError):
                _ask_cuda("cudaHostUnregister", self.address + offset)
        self._registered.clear()
        self._mapping.close()


def _ask_cuda(name: str, *args: int) -> None:
    runtime = cast(Any, torch.cuda.cudart())  # Any, cast: torch gives the CUDA runtime no type
    torch.cuda.check_error(getattr(runtime, name)(*args))
