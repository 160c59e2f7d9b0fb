"""Compares the file of kept state with the marks that its writes left in the record.

In: kept state. Out: the first buffer that is not what was written, if any. The file is read once,
at the drive's rate: a part that is of another drive, of an older step, or was never written in
spite of a flush, is found before a run goes on from it.
"""

from __future__ import annotations

import mmap
from typing import Final

from packhorse.storage.kept_state import KeptState, open_kept
from packhorse.storage.page_marks import mark_pages
from packhorse.storage.scratch_space import StateFile
from packhorse.units import MIB

_BLOCK_BYTES: Final = 8 * MIB


def find_stale(kept: KeptState) -> str | None:
    """Name the first buffer that is not what was written; None when all are.

    Raises:
        StorageError: the disk fails, or a part of the file is gone.
    """
    layout, entry = kept.layout, kept.entry
    slots = dict(zip(layout.in_slots, entry.slots, strict=True))
    # Not closed: where the drive fails, the error's own traceback still holds views of it.
    memory = mmap.mmap(-1, _BLOCK_BYTES)
    with open_kept(kept) as file:
        for name, mark in zip(layout.marked, entry.marks, strict=True):
            size_bytes, *offsets = layout.buffers[name]
            if mark is None:
                continue
            if _mark_file(file, memory, offsets[slots.get(name, 0)], size_bytes) != mark:
                return name
    return None


def _mark_file(file: StateFile, memory: mmap.mmap, offset_bytes: int, size_bytes: int) -> int:
    mark = 0
    for start in range(0, size_bytes, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, size_bytes - start)
        file.read_into(memory, offset_bytes + start, length)
        mark = mark_pages(memory, length, mark)
    return mark
