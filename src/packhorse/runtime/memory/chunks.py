"""Chunk states in the device tier on CPU: each owns a fixed range of one reserved mapping.

In: a layout and its states. Out: tensors that are views of the mapping and stay valid for ever.
A dropped range gives its pages back and reads as zeros; loading writes it in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from packhorse.program.buffers import (
    CHUNK_ALIGN_ELEMENTS,
    PAGE_BYTES,
    Chunk,
    ChunkId,
    Layout,
    Slot,
)
from packhorse.storage.mapping import HUGE_PAGE_BYTES, Mapping


class ChunkMemory:
    """All states of all chunks, at fixed addresses.

    Resident memory is what has been written and not dropped.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._base: dict[str, int] = {}
        span = -(-layout.num_elements // CHUNK_ALIGN_ELEMENTS) * CHUNK_ALIGN_ELEMENTS
        total = 0
        item = {state: _dtype(name).itemsize for state, name in layout.dtypes.items()}
        for state in layout.dtypes:
            self._base[state] = total
            total += -(-span * item[state] // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._item = item
        # A huge page that a chunk only partly fills would cost more than the ledger says, so only
        # the whole huge pages of each chunk are advised.
        self._mapping = Mapping(max(total, PAGE_BYTES), huge_pages=False)
        self._flat = {
            state: torch.frombuffer(
                self._mapping.view(self._base[state], span * item[state]), dtype=_dtype(name)
            )
            for state, name in layout.dtypes.items()
        }
        self._advise()

    def _advise(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        advise_huge_pages = 14  # MADV_HUGEPAGE; without it transfers are slower, not wrong
        for state in self._layout.dtypes:
            for chunk in self._layout.chunks:
                whole = self.size_bytes(state, chunk) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                if whole:
                    address = ctypes.c_void_p(self.address(state, chunk))
                    libc.madvise(address, ctypes.c_size_t(whole), advise_huge_pages)

    def size_bytes(self, state: str, chunk: Chunk) -> int:
        """Bytes of a state of a chunk."""
        return chunk.num_elements * self._item[state]

    def address(self, state: str, chunk: Chunk) -> int:
        """Address of a state of a chunk; a multiple of the page size."""
        return self._mapping.address + self._base[state] + chunk.start * self._item[state]

    def tensor(self, state: str, chunk: Chunk) -> Tensor:
        """The whole state of a chunk: 1-D, `chunk.num_elements` long, padding included."""
        return self._flat[state][chunk.start : chunk.start + chunk.num_elements]

    def parameter(self, state: str, name: str) -> Tensor:
        """The state of one parameter, in its shape."""
        slot = self._layout.slots[name]
        return self._flat[state][slot.start : slot.stop].view(slot.shape)

    def drop(self, state: str, chunk: Chunk) -> None:
        """Give a chunk's pages back; it reads as zeros until it is written again."""
        offset = self._base[state] + chunk.start * self._item[state]
        size = -(-self.size_bytes(state, chunk) // PAGE_BYTES) * PAGE_BYTES
        self._mapping.drop(offset, size)

    def poison(self, state: str, chunk: Chunk) -> None:
        """Fill the parameters of a chunk with NaN and its padding with zeros."""
        tensor = self.tensor(state, chunk)
        tensor.zero_()
        for start, stop, _, _ in self.pieces(chunk):
            tensor[start:stop].fill_(float("nan"))

    def pieces(self, chunk: Chunk) -> Sequence[tuple[int, int, Slot, int]]:
        """Where parameters lie in a chunk: (start, stop, slot, first element of the parameter)."""
        found: list[tuple[int, int, Slot, int]] = []
        stop = chunk.start + chunk.num_elements
        for slot in self._layout.slots_of(chunk):
            first, last = max(slot.start, chunk.start), min(slot.stop, stop)
            found.append((first - chunk.start, last - chunk.start, slot, first - slot.start))
        return found

    def close(self) -> None:
        """Give everything back. Tensors handed out must not be used any more."""
        self._mapping.close()


def chunk_table(layout: Layout) -> MappingOf[ChunkId, Chunk]:
    """Chunks by id."""
    return {chunk.id: chunk for chunk in layout.chunks}


def elements_of(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
