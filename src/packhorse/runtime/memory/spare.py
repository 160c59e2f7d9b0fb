"""Spare pages: chunks that are free in the ledger, but whose pages are still held.

Giving a chunk's pages back costs page faults when it is written or loaded again, often in the same
step. As long as the ledger and the spare pages together stay within what the pool may hold, nothing
is gained by giving them back: memory never exceeds what was predicted.

In: freed and reserved chunk states, in order. Out: the chunk states to drop now, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packhorse.program.buffers import BufferId, PoolId


class SparePages:
    """The spare chunk states of each pool.

    Args:
        limits: bytes that a pool may hold, spare pages counted: its largest proved peak, or its
            capacity where lanes run ahead.
    """

    def __init__(self, limits: Mapping[PoolId, int]) -> None:
        self._limits = limits
        self._spare: dict[PoolId, dict[BufferId, int]] = {pool: {} for pool in limits}
        self._total = dict.fromkeys(limits, 0)

    def keep(self, pool: PoolId, buffer: BufferId, size_bytes: int) -> None:
        """Note a freed chunk state whose pages stay for now."""
        self._spare[pool][buffer] = size_bytes
        self._total[pool] += size_bytes

    def reuse(self, pool: PoolId, buffer: BufferId) -> None:
        """Note that a chunk state is in use again; its pages, if spare, are no longer so."""
        self._total[pool] -= self._spare[pool].pop(buffer, 0)

    def shed(self, pool: PoolId, used_bytes: int) -> Iterator[BufferId]:
        """Give the chunk states to drop so that the pool keeps to its limit."""
        spare = self._spare[pool]
        while spare and used_bytes + self._total[pool] > self._limits[pool]:
            buffer = next(iter(spare))
            self.reuse(pool, buffer)
            yield buffer
