"""What lies in a kept heap, and how large it may become while a program runs.

In: programs and their proofs. Out: bytes. Blocks from 16 MiB on are mapped and given back in either
heap mode, so only smaller ones count; they leave holes, so they get room for more than is live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from packhorse.program.buffers import BufferId
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Free, workspace_of, writes_of
from packhorse.runtime.memory.heap import KEEP_BELOW_BYTES

# Blocks of a few sizes leave holes; with so much room for what is live at once the rest fits.
ROOM: Final = 2


def find_heap_buffers(programs: Iterable[Program]) -> Mapping[BufferId, int]:
    """Sizes of the buffers that lie in the device's pool of workspaces."""
    return {
        buffer.id: buffer.size_bytes
        for program in programs
        for buffer in program.buffers.values()
        if buffer.pools.get("device") == program.workspace_pool
    }


def find_kept_bytes(program: Program, proof: Proof) -> tuple[int, int]:
    """Find what the heap should take at once, within what the proof grants its pool.

    A workspace of 16 MiB or more is taken for blocks that are mapped.

    Returns:
        Bytes in all, and in one piece.
    """
    pool = program.workspace_pool
    live: dict[BufferId, int] = {}
    live_bytes = kept = 0
    for task in program.tasks:
        if isinstance(task, Free):
            live_bytes -= live.pop(task.buffer, 0)
            continue
        for buffer, tier in writes_of(task):
            declared = program.buffers[buffer]
            is_kept = declared.pools[tier] == pool and declared.size_bytes < KEEP_BELOW_BYTES
            if is_kept and buffer not in live:
                live[buffer] = declared.size_bytes
                live_bytes += declared.size_bytes
        workspace = workspace_of(task)
        kept = max(kept, live_bytes + (workspace if workspace < KEEP_BELOW_BYTES else 0))
    capacity = next(each.capacity_bytes for each in program.pools if each.id == pool)
    mapped = proof.peak_bytes[pool] - kept
    total = max(min(ROOM * kept, capacity - mapped), 0)
    return total, max(min(kept, KEEP_BELOW_BYTES // 2, total), 1)
