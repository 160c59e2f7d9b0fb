"""Where the states of chunks lie: device, host and disk, and how they get from one to another.

In: Copy and Free tasks, reservations. Out: bytes moved, memory held. Every state of every chunk
has one place per tier; which places hold it now is known by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import Lock

from torch import Tensor

from packhorse.errors import AuditError
from packhorse.program.buffers import (
    Buffer,
    BufferId,
    Chunk,
    Layout,
    Pool,
    PoolId,
    TierName,
    state_id,
)
from packhorse.program.tasks import Copy
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.runtime.memory.spare import SparePages


class ChunkTiers:
    """The states of all chunks over the tiers of one rank.

    Args:
        memory: the tiers of memory, at least `device`.
        disk: the disk tier.
        pools: which pool is part of which tier.
        spare: the spare pages of those pools.
        audit: fill with NaN what is new and not yet written, and what is gone.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        memory: Mapping[TierName, ChunkMemory],
        disk: DiskTier,
        pools: tuple[Pool, ...],
        spare: SparePages,
        audit: bool,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._audit = audit
        self._tier_of: dict[PoolId, TierName] = {pool.id: pool.tier for pool in pools}
        self._spare = spare
        # States are created and removed on lanes while the executor sheds pages.
        self._lock = Lock()
        tiers: tuple[TierName, ...] = (*memory, "disk")
        self._present: dict[TierName, set[BufferId]] = {tier: set() for tier in tiers}
        self._states: dict[BufferId, tuple[str, Chunk]] = {
            state_id(state, chunk.id): (state, chunk)
            for state in layout.dtypes
            for chunk in layout.chunks
        }

    def __contains__(self, buffer: BufferId) -> bool:
        return buffer in self._states

    def place_of(self, buffer: BufferId) -> tuple[str, Chunk]:
        """The state and chunk behind a name."""
        return self._states[buffer]

    def tensor(self, buffer: BufferId, tier: TierName) -> Tensor:
        """A state in a tier of memory; it holds what was last written there."""
        return self._memory[tier].tensor(*self._states[buffer])

    def is_present(self, buffer: BufferId, tier: TierName) -> bool:
        """Whether a tier holds a state."""
        return buffer in self._present[tier]

    def create(self, buffer: BufferId, tier: TierName, pool: PoolId) -> None:
        """Give a state its place in a tier; its bytes are reserved.

        In an audit it holds NaN until it is written.
        """
        if tier == "disk":
            self._present[tier].add(buffer)
            return
        # Pages must not be taken for spare ones, and dropped, once the state has its place again.
        with self._lock:
            size_bytes = self._memory[tier].size_bytes(*self._states[buffer])
            self._spare.reuse(pool, buffer, size_bytes)
            self._spare.make_way(
                pool, buffer, partial(self._shrink, tier), partial(self._move, tier)
            )
            self._present[tier].add(buffer)
        self._commit(buffer, tier)

    def fill(self, buffer: BufferId, tier: TierName, pool: PoolId) -> None:
        """Note that a state that was created has been written."""
        if tier != "disk":
            with self._lock:
                self._spare.fill(pool, buffer)

    def shed(self, pool: PoolId, used_bytes: int) -> None:
        """Drop spare pages of a pool with more than chunk states until it keeps to its limit."""
        if not self._spare.is_above(pool, used_bytes):
            return
        with self._lock:
            self._spare.shed(pool, used_bytes, partial(self._shrink, self._tier_of[pool]))

    def _shrink(self, tier: TierName, buffer: BufferId, keep_bytes: int) -> int:
        return self._memory[tier].shrink(*self._states[buffer], keep_bytes)

    def _move(self, tier: TierName, source: BufferId, target: BufferId) -> bool:
        return self._memory[tier].move(self._states[source], self._states[target])

    def unfilled_bytes(self, pool: PoolId) -> int:
        """What chunk states of a pool may still take pages for."""
        with self._lock:
            return self._spare.unfilled_bytes(pool)

    def describe_files(self) -> tuple[str, ...]:
        """The files behind the disk tier, for errors."""
        return () if self._disk.path is None else (f"scratch file {self._disk.path}",)

    def _commit(self, buffer: BufferId, tier: TierName) -> None:
        self._memory[tier].commit(*self._states[buffer])
        if self._audit:
            self._memory[tier].poison(*self._states[buffer])

    def remove(self, buffer: Buffer, tier: TierName) -> None:
        """Take a state out of a tier; its pages stay as spare ones for now."""
        self._present[tier].discard(buffer.id)
        if tier == "disk":
            return
        if self._audit:
            self._memory[tier].poison(*self._states[buffer.id])
        with self._lock:
            self._spare.keep(buffer.pools[tier], buffer.id, buffer.size_bytes)

    def borrow(self, buffer: BufferId) -> bool:
        """Bring a state that lies elsewhere to the device, outside of any program.

        Returns:
            False when it is there already; else `give_back` is due.
        """
        if self.is_present(buffer, "device"):
            return False
        source: TierName = "disk" if buffer in self._present["disk"] else "host"
        self._present["device"].add(buffer)
        self._commit(buffer, "device")
        self.copy(Copy(buffer=buffer, source=source, target="device"))
        return True

    def give_back(self, buffer: BufferId) -> None:
        """Drop a borrowed state."""
        self._present["device"].discard(buffer)
        self._memory["device"].drop(*self._states[buffer])

    def copy(self, task: Copy) -> None:
        """Move the bytes of a state; blocks until they are there.

        Raises:
            AuditError: the source does not hold it.
        """
        if not self.is_present(task.buffer, task.source):
            raise AuditError(
                f"{task.buffer} is copied from {task.source}, but it is not there",
                fix="run the program that was verified",
            )
        state, chunk = self._states[task.buffer]
        if task.source == "disk":
            self._disk.read(task.buffer, self._memory[task.target].address(state, chunk))
        elif task.target == "disk":
            self._disk.write(task.buffer, self._memory[task.source].address(state, chunk))
        else:
            target = self._memory[task.target].tensor(state, chunk)
            target.copy_(self._memory[task.source].tensor(state, chunk))
