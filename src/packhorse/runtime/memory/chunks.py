"""Chunk states in one memory tier: each owns a fixed range of one reserved range of addresses.

In: a layout, its states, and the memory under them. Out: tensors that stay valid for ever.
A dropped range gives its memory back; loading writes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf

import torch
from torch import Tensor

from packhorse.program.buffers import CHUNK_ALIGN_ELEMENTS, Chunk, ChunkId, Layout, Slot
from packhorse.runtime.memory.backing import Backing, HostBacking
from packhorse.storage.mapping import HUGE_PAGE_BYTES


class ChunkMemory:
    """All states of all chunks, at fixed addresses.

    Memory is held for what has been committed and not dropped.

    Args:
        make_backing: makes the range of addresses for a number of bytes; by default this
            process's own memory.
    """

    def __init__(
        self, layout: Layout, make_backing: Callable[[int], Backing] = HostBacking
    ) -> None:
        self._layout = layout
        self._base: dict[str, int] = {}
        span = -(-layout.num_elements // CHUNK_ALIGN_ELEMENTS) * CHUNK_ALIGN_ELEMENTS
        total = 0
        self._item = {state: _dtype(name).itemsize for state, name in layout.dtypes.items()}
        for state in layout.dtypes:
            self._base[state] = total
            total += -(-span * self._item[state] // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._backing = make_backing(total)
        self._flat = {
            state: self._backing.tensor(self._base[state], span * self._item[state], _dtype(name))
            for state, name in layout.dtypes.items()
        }

    def size_bytes(self, state: str, chunk: Chunk) -> int:
        """Bytes of a state of a chunk."""
        return chunk.num_elements * self._item[state]

    def address(self, state: str, chunk: Chunk) -> int:
        """Address of a state of a chunk; a multiple of the page size."""
        return self._backing.address + self._offset(state, chunk)

    def tensor(self, state: str, chunk: Chunk) -> Tensor:
        """The whole state of a chunk: 1-D, `chunk.num_elements` long, padding included."""
        return self._flat[state][chunk.start : chunk.start + chunk.num_elements]

    def parameter(self, state: str, name: str) -> Tensor:
        """The state of one parameter, in its shape."""
        slot = self._layout.slots[name]
        return self._flat[state][slot.start : slot.stop].view(slot.shape)

    def commit(self, state: str, chunk: Chunk) -> None:
        """Put memory behind a chunk; its content is undefined."""
        self._backing.commit(self._offset(state, chunk), self.size_bytes(state, chunk))

    def drop(self, state: str, chunk: Chunk) -> None:
        """Give a chunk's memory back; it must be committed before it is touched again."""
        self._backing.drop(self._offset(state, chunk), self.size_bytes(state, chunk))

    def shrink(self, state: str, chunk: Chunk, keep_bytes: int) -> int:
        """Give back what a chunk holds beyond its first bytes, or more.

        Returns:
            What it still holds; it must be committed before it is touched again.
        """
        return self._backing.shrink(
            self._offset(state, chunk), self.size_bytes(state, chunk), keep_bytes
        )

    def move(self, source: tuple[str, Chunk], target: tuple[str, Chunk]) -> bool:
        """Hand the memory of a state over to one of the same size that is dropped.

        Returns:
            False where that cannot be; nothing has changed then.
        """
        size_bytes = self.size_bytes(*target)
        return self._backing.move(self._offset(*source), self._offset(*target), size_bytes)

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
        self._backing.close()

    def _offset(self, state: str, chunk: Chunk) -> int:
        return self._base[state] + chunk.start * self._item[state]


def chunk_table(layout: Layout) -> MappingOf[ChunkId, Chunk]:
    """Chunks by id."""
    return {chunk.id: chunk for chunk in layout.chunks}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
