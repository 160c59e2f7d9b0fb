"""The C heap of this process while an engine lives: its mode, its room, and its limit.

In: the plan's heap mode and the pools. Out: free pages go back to the system before they would come
on top of what is granted. The ledger counts what lives; a heap that keeps what is freed holds more,
and what it holds in pieces cannot serve a large block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from packhorse.program.buffers import Pool
from packhorse.program.program import Program, Proof
from packhorse.runtime.kept_heap import find_kept_bytes
from packhorse.runtime.memory.heap import (
    KEEP_BELOW_BYTES,
    open_holes,
    seal_holes,
    set_heap_mode,
    settle_heap,
    trim_heap,
)
from packhorse.runtime.memory.resident import resident_bytes
from packhorse.units import MIB

# What was trimmed in vain is not trimmed again before the process has grown by so much.
_REPEAT_BYTES: Final = 4 * MIB


class ProcessHeap:
    """Sets the mode for the whole process; `close` opens the holes that it occupied.

    Args:
        pools: those that are this process's memory; with what is resident now they are the limit.
            None of them: there is no limit.
    """

    def __init__(self, mode: Literal["keep", "map"], pools: Iterable[Pool]) -> None:
        self._mode = mode
        set_heap_mode(mode)
        self._sealed = seal_holes() if mode == "map" else ()
        self._is_settled = mode == "map"
        granted_bytes = sum(pool.capacity_bytes for pool in pools)
        trim_heap()
        self._limit_bytes = resident_bytes() + granted_bytes if granted_bytes else None
        self._repeat_bytes = 0

    def settle(self, program: Program, proof: Proof) -> None:
        """Let a kept heap take what a program will use, once, so that it peaks the first time."""
        if not self._is_settled:
            self._sealed += settle_heap(*find_kept_bytes(program, proof))
        self._is_settled = True

    def keep_as_is(self) -> None:
        """Do not settle it any more: what runs now takes as much."""
        self._is_settled = True

    def make_room(self, workspace_bytes: int) -> None:
        """Give free pages back if a task could otherwise take the process above its limit.

        A workspace of large blocks is mapped, whatever the mode, and comes on top of what the heap
        holds; a smaller one is served from it.
        """
        if self._limit_bytes is None:
            return
        mapped_bytes = workspace_bytes if workspace_bytes >= KEEP_BELOW_BYTES else 0
        held_bytes = resident_bytes()
        if held_bytes + mapped_bytes <= self._limit_bytes or held_bytes < self._repeat_bytes:
            return
        trim_heap()
        self._repeat_bytes = resident_bytes() + _REPEAT_BYTES

    def close(self) -> None:
        """Open the holes."""
        open_holes(self._sealed)
        self._sealed = ()
