"""The ledger: what is reserved in each pool, by size alone.

In: reservations in issue order, releases at completion. Out: used bytes per pool, never above the
pool's capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packhorse.errors import AuditError
from packhorse.program.buffers import Pool, PoolId
from packhorse.units import format_bytes


class Ledger:
    """Used bytes of every pool."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._capacity = {pool.id: pool.capacity_bytes for pool in pools}
        self._used = dict.fromkeys(self._capacity, 0)

    @property
    def used_bytes(self) -> Mapping[PoolId, int]:
        """What is reserved now."""
        return self._used

    def fits(self, pool: PoolId, size_bytes: int) -> bool:
        """Whether a reservation would fit now."""
        return self.shortfall(pool, size_bytes) <= 0

    def shortfall(self, pool: PoolId, size_bytes: int) -> int:
        """How many bytes must be released before a reservation fits; it fits at 0 or less."""
        return self._used[pool] + size_bytes - self._capacity[pool]

    def reserve(self, pool: PoolId, size_bytes: int) -> None:
        """Take bytes.

        Raises:
            AuditError: they do not fit; a verified program never asks for that.
        """
        if not self.fits(pool, size_bytes):
            raise AuditError(
                f"pool {pool} holds {format_bytes(self._used[pool])} of "
                f"{format_bytes(self._capacity[pool])}; {format_bytes(size_bytes)} more do not fit",
                fix="run the program that was verified for this budget",
            )
        self._used[pool] += size_bytes

    def release(self, pool: PoolId, size_bytes: int) -> None:
        """Give bytes back."""
        self._used[pool] -= size_bytes
        assert self._used[pool] >= 0, f"pool {pool} released more than it held"
