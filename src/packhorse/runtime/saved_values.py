"""What a block saved for its backward, taken apart into storages and put together again.

In: the tensors of a `saved/` buffer and how they lie in their storages, as the trace tells it. Out:
the bytes of each storage that the buffer owns, once each, and from their copies the same tensors:
dtype, shape, stride and offset. Tensors that are views of anything else stay as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from threading import RLock

import torch
from torch import Tensor

from packhorse.errors import AuditError
from packhorse.graph.code import SavedLayout
from packhorse.graph.trace import Traced
from packhorse.program.buffers import Buffer, BufferId
from packhorse.storage.extents import align_up

Payload = tuple[Tensor, ...]


def find_saved_layouts(traced: Traced, buffers: Iterable[Buffer]) -> Mapping[BufferId, SavedLayout]:
    """How what blocks save lies, for each such buffer that may leave the device."""
    found: dict[BufferId, SavedLayout] = {}
    for buffer in buffers:
        block, _, microbatch = buffer.id.removeprefix("saved/").partition("@")
        if len(buffer.pools) > 1 and microbatch and block.isdigit():
            body = traced.model.blocks[int(block)].body
            found[buffer.id] = traced.code[body].saved
    return found


def take_apart(buffer: BufferId, payload: Payload, layout: SavedLayout) -> tuple[Tensor, ...]:
    """The bytes of each storage that a buffer owns, without a copy.

    Raises:
        AuditError: they are not those of the trace.
    """
    parts: dict[int, Tensor] = {}
    for tensor, place in zip(payload, layout.places, strict=True):
        if place is not None and place not in parts:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            parts[place] = whole.set_(tensor.untyped_storage())
    sizes = tuple(parts[place].numel() for place in range(len(layout.sizes_bytes)))
    if sizes != layout.sizes_bytes:
        raise AuditError(
            f"{buffer} has storages of {sizes} bytes, its trace has {layout.sizes_bytes}",
            fix="trace the model and make the plan again",
        )
    return tuple(parts[place] for place in range(len(sizes)))


def put_together(payload: Payload, layout: SavedLayout, parts: Sequence[Tensor]) -> Payload:
    """The tensors of a payload over other bytes: those of the parts."""
    return tuple(
        tensor if place is None else _view(tensor, parts[place])
        for tensor, place in zip(payload, layout.places, strict=True)
    )


def own_tensors(payload: Payload, layout: SavedLayout | None) -> Payload:
    """The tensors whose bytes are the buffer's own; all of them where nothing else is known."""
    if layout is None:
        return payload
    pairs = zip(payload, layout.places, strict=True)
    return tuple(tensor for tensor, place in pairs if place is not None)


def empty_parts(layout: SavedLayout, device: torch.device) -> tuple[Tensor, ...]:
    """Bytes for each storage, not yet written."""
    return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in layout.sizes_bytes)


class _Mapped:
    # Memory for the storages of a value, and which of them no tensor uses any more.
    def __init__(self, memory: mmap.mmap, layout: SavedLayout) -> None:
        self.memory = memory
        ends = accumulate(map(align_up, layout.sizes_bytes), initial=0)
        self.places = list(zip(ends, layout.sizes_bytes, strict=False))
        self.unused: list[int] = []
        self.is_in_parts = False

    @property
    def is_unused(self) -> bool:
        return len(self.unused) == sum(size_bytes > 0 for _, size_bytes in self.places)

    def drop(self, index: int) -> None:
        start, size_bytes = self.places[index]
        self.memory.madvise(mmap.MADV_DONTNEED, start, align_up(size_bytes))


class SpareMemory:
    """Mapped memory of values that are gone, kept for the next value of the same size.

    The kernel clears pages that it makes, which takes longer than a drive reads. Whoever is short
    of memory drops it. Any thread may call: the last tensor over a storage may go on any.

    Args:
        keeps: False where values share a pool with chunks: those take what the ledger has free, and
            nothing is kept.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        # Tensors may go, and tell of it, while this thread is inside.
        self._lock = RLock()
        self._spare: list[mmap.mmap] = []
        self._begun: list[_Mapped] = []
        self._is_open = keeps

    def take(self, layout: SavedLayout) -> mmap.mmap | None:
        """Give memory that has its pages, if there is some of just the size."""
        size_bytes = _mapped_bytes(layout)
        with self._lock:
            for index, memory in enumerate(self._spare):
                if len(memory) == size_bytes:
                    return self._spare.pop(index)
        return None

    def end(self, mapped: _Mapped, index: int) -> None:
        """Note that no tensor uses a storage any more."""
        with self._lock:
            mapped.unused.append(index)
            if mapped.is_in_parts:
                mapped.drop(index)
            elif mapped.is_unused:
                if mapped in self._begun:
                    self._begun.remove(mapped)
                if self._is_open:
                    self._spare.append(mapped.memory)
            elif mapped not in self._begun:
                self._begun.append(mapped)

    def settle(self) -> None:
        """Give back what is unused of values that are gone but for some storages."""
        with self._lock:
            begun, self._begun = self._begun, []
            for mapped in begun:
                mapped.is_in_parts = True
                for index in mapped.unused:
                    mapped.drop(index)

    def drop(self) -> None:
        """Give all of it back."""
        with self._lock:
            self._spare.clear()

    def close(self) -> None:
        """Give all back, and keep nothing any more."""
        self._is_open = False
        self.drop()


def map_parts(
    layout: SavedLayout, spare: SpareMemory, memory: mmap.mmap | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Bytes for all storages in memory, one behind the other as they lie on the disk, and for each.

    So a disk reads them at once, without a detour. Pages come as they are written, and are spare
    once no tensor lies over any of them.

    Args:
        memory: from `spare`; None: new one.
    """
    if not _mapped_bytes(layout):
        return torch.empty(0, dtype=torch.uint8), empty_parts(layout, torch.device("cpu"))
    if memory is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, _mapped_bytes(layout), flags=flags)
        # Small pages would be made, cleared and given back one by one.
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = _Mapped(memory, layout)
    parts = tuple(_map_part(mapped, index, spare) for index in range(len(mapped.places)))
    return torch.frombuffer(memory, dtype=torch.uint8), parts


def _map_part(mapped: _Mapped, index: int, spare: SpareMemory) -> Tensor:
    start, size_bytes = mapped.places[index]
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # The tensor's storage holds this object, and this one the mapping.
    held = (ctypes.c_char * size_bytes).from_buffer(mapped.memory, start)
    weakref.finalize(held, spare.end, mapped, index)
    return torch.frombuffer(held, dtype=torch.uint8)


def _mapped_bytes(layout: SavedLayout) -> int:
    return sum(map(align_up, layout.sizes_bytes))


def _view(tensor: Tensor, part: Tensor) -> Tensor:
    made = torch.empty(0, dtype=tensor.dtype, device=part.device)
    return made.set_(part.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
