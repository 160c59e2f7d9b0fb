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


def map_parts(layout: SavedLayout) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Bytes for all storages in memory, one behind the other as they lie on the disk, and for each.

    So a disk reads them at once, without a detour. Pages come as they are written, and those of a
    storage go with the last tensor over it.
    """
    ends = [0, *accumulate(map(align_up, layout.sizes_bytes))]
    if not ends[-1]:
        return torch.empty(0, dtype=torch.uint8), empty_parts(layout, torch.device("cpu"))
    made = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Small pages would be made, cleared and given back one by one, which takes longer than a drive
    # reads.
    made.madvise(mmap.MADV_HUGEPAGE)
    parts = (_map_part(made, *part) for part in zip(ends, layout.sizes_bytes, strict=False))
    return torch.frombuffer(made, dtype=torch.uint8), tuple(parts)


def _map_part(made: mmap.mmap, start: int, size_bytes: int) -> Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # The tensor's storage holds this object, and this one the mapping.
    held = (ctypes.c_char * size_bytes).from_buffer(made, start)
    weakref.finalize(held, made.madvise, mmap.MADV_DONTNEED, start, align_up(size_bytes))
    return torch.frombuffer(held, dtype=torch.uint8)


def _view(tensor: Tensor, part: Tensor) -> Tensor:
    made = torch.empty(0, dtype=tensor.dtype, device=part.device)
    return made.set_(part.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
