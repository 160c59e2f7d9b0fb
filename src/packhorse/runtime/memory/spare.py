"""Spare pages: chunks that are free in the ledger, but whose pages are still held.

Giving a chunk's pages back costs page faults when it is written or loaded again, often in the same
step. As long as the ledger and the spare pages together stay within what the pool may hold, nothing
is gained by giving them back: memory never exceeds what was predicted.

In: chunk states as they are reserved, made and freed. Out: the spare pages to drop now, oldest
first, and no more of them than needed: chunks differ in size, and a pool that gave back whole ones
would be filled now more and now less. Where a pool holds nothing but chunk states, spare pages make
room when a state is made, not when it is reserved: lanes run ahead by many states, which have no
pages until their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from packhorse.program.buffers import BufferId, Pool, PoolId, state_id
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program, Proof


class SparePages:
    """The spare chunk states of each pool.

    Args:
        limits: bytes that a pool may hold, spare pages counted: its largest proved peak, or its
            capacity where lanes run ahead.
        alone: pools that hold nothing but chunk states.
    """

    def __init__(
        self, limits: Mapping[PoolId, int], alone: frozenset[PoolId] = frozenset()
    ) -> None:
        self._limits = limits
        self._made: dict[PoolId, dict[BufferId, int]] = {pool: {} for pool in alone}
        self._spare: dict[PoolId, dict[BufferId, int]] = {pool: {} for pool in limits}
        self._total = dict.fromkeys(limits, 0)
        self._filled = dict.fromkeys(limits, 0)
        self._fresh: dict[PoolId, dict[BufferId, int]] = {pool: {} for pool in limits}

    def unfilled_bytes(self, pool: PoolId) -> int:
        """What chunk states may still take pages for, those included that are being written."""
        return max(0, self._limits[pool] - self._filled[pool])

    def fill(self, pool: PoolId, buffer: BufferId) -> None:
        """Note that a chunk state that was taken into use has been written, and has its pages."""
        self._filled[pool] += self._fresh[pool].pop(buffer, 0)

    def keep(self, pool: PoolId, buffer: BufferId, size_bytes: int) -> None:
        """Note a freed chunk state whose pages stay for now."""
        self.fill(pool, buffer)
        self._made.get(pool, {}).pop(buffer, None)
        self._spare[pool][buffer] = size_bytes
        self._total[pool] += size_bytes

    def reuse(self, pool: PoolId, buffer: BufferId, size_bytes: int) -> None:
        """Note that a chunk state is in use, or so again; its pages, if spare, are no longer so."""
        spare_bytes = self._spare[pool].pop(buffer, 0)
        self._total[pool] -= spare_bytes
        self._fresh[pool][buffer] = size_bytes - spare_bytes
        if pool in self._made:
            self._made[pool][buffer] = size_bytes

    def is_above(self, pool: PoolId, used_bytes: int) -> bool:
        """Whether `shed` has pages to drop of a pool in which so much is reserved."""
        return pool not in self._made and used_bytes + self._total[pool] > self._limits[pool]

    def make_way(self, pool: PoolId, drop: Callable[[BufferId, int], int]) -> None:
        """Drop pages for what has been taken into use of a pool that holds chunk states alone.

        Args:
            drop: as for `shed`.
        """
        if pool in self._made:
            self._drop(pool, sum(self._made[pool].values()), drop)

    def shed(self, pool: PoolId, used_bytes: int, drop: Callable[[BufferId, int], int]) -> None:
        """Drop pages so that a pool with more than chunk states keeps to its limit.

        Args:
            used_bytes: what is reserved in it.
            drop: called as drop(buffer, keep_bytes): gives back what a chunk state holds beyond
                `keep_bytes`, or more, and returns what it still holds.
        """
        if pool not in self._made:
            self._drop(pool, used_bytes, drop)

    def _drop(self, pool: PoolId, used_bytes: int, drop: Callable[[BufferId, int], int]) -> None:
        spare = self._spare[pool]
        while spare:
            excess = used_bytes + self._total[pool] - self._limits[pool]
            if excess <= 0:
                return
            buffer, held_bytes = next(iter(spare.items()))
            kept_bytes = drop(buffer, max(held_bytes - excess, 0))
            self._total[pool] -= held_bytes - kept_bytes
            self._filled[pool] -= held_bytes - kept_bytes
            if kept_bytes:
                spare[buffer] = kept_bytes
            else:
                del spare[buffer]


def plan_spare_pages(
    pools: Iterable[Pool], programs: Collection[Program], proofs: Iterable[Proof]
) -> SparePages:
    """Make the spare pages of the pools, for the programs that will run."""
    found = find_limits(programs, proofs)
    limits = {pool.id: found.get(pool.id, 0) for pool in pools}
    return SparePages(limits, find_chunk_pools(programs) & limits.keys())


def find_chunk_pools(programs: Iterable[Program]) -> frozenset[PoolId]:
    """The pools that hold nothing but states of chunks."""
    found: set[PoolId] = set()
    shared: set[PoolId] = set()
    for program in programs:
        layout = program.layout
        states = {state_id(name, chunk.id) for name in layout.dtypes for chunk in layout.chunks}
        found.update(pool.id for pool in program.pools)
        shared.add(program.workspace_pool)
        for buffer in program.buffers.values():
            if buffer.id not in states:
                shared.update(buffer.pools.values())
    return frozenset(found - shared)


def find_limits(programs: Iterable[Program], proofs: Iterable[Proof]) -> Mapping[PoolId, int]:
    """What each pool may hold, spare pages counted.

    Lanes that run ahead use what there is, some steps more and some less, so there spare pages fill
    the pool from the start: memory is the same from step to step.
    """
    if any(has_transfers(program.tasks) for program in programs):
        return {pool.id: pool.capacity_bytes for program in programs for pool in program.pools}
    peaks: dict[PoolId, int] = {}
    for proof in proofs:
        for pool, used in proof.peak_bytes.items():
            peaks[pool] = max(peaks.get(pool, 0), used)
    return peaks
