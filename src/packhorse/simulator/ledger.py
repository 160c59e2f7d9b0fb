"""Bytes in use per pool over time, and what will be released when.

In: the tasks of a program in the order in which they are issued, by their footprints. Out: when
there is room for each; the peak of each pool, and its curve.

Reservations arrive in the order of time; a release that is due is booked before any later
reservation, so each curve is recorded in the order of time too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from packhorse.errors import RuleError
from packhorse.program.buffers import Pool, PoolId
from packhorse.simulator.footprints import Footprint, Footprints
from packhorse.timeline.names import name_of
from packhorse.timeline.spec import MemoryPoint, curve_from
from packhorse.units import format_bytes


class Ledger:
    """What pools hold while tasks are issued.

    Raises:
        RuleError: a pool starts with more than it holds (`capacity`).
    """

    def __init__(
        self, footprints: Footprints, ordered: Sequence[Footprint], pools: Sequence[Pool]
    ) -> None:
        self._ordered = ordered
        self._footprints = footprints
        self._pool_of = footprints.pools
        self._size_of = footprints.sizes
        self._workspace_pool = footprints.workspace_pool
        self._capacity_bytes = {pool.id: pool.capacity_bytes for pool in pools}
        self._used_bytes = dict.fromkeys(self._capacity_bytes, 0)
        self._present = bytearray(len(footprints.places))
        self._due: list[tuple[int, int, PoolId, int]] = []
        self._num_due = 0
        for place in footprints.homes:
            pool = self._pool_of[place]
            assert pool is not None
            self._present[place] = True
            self._used_bytes[pool] += self._size_of[place]
        for pool, used_bytes in self._used_bytes.items():
            if used_bytes > self._capacity_bytes[pool]:
                raise RuleError(
                    f"pool {pool} starts with {format_bytes(used_bytes)} and holds"
                    f" {format_bytes(self._capacity_bytes[pool])}",
                    rule="capacity",
                    where="before the first task",
                    fix="plan again with the budget that the machine has",
                )
        self._start_bytes = dict(self._used_bytes)
        self._changes: list[tuple[int, PoolId, int]] = []
        self.peak_bytes = dict(self._used_bytes)

    @property
    def num_places(self) -> int:
        """How many places tasks touch."""
        return len(self._size_of)

    def reserve(self, index: int, footprint: Footprint, now_ns: int) -> int:
        """Reserve what a task creates and works in; returns when all of it fits, from `now_ns`.

        Raises:
            RuleError: a buffer is not there (`present`), or a task can never fit (`capacity`).
        """
        present = self._present
        for place in footprint.reads:
            if not present[place]:
                raise self._absent(index, place)
        if footprint.frees:
            present[footprint.reads[0]] = False
            return now_ns
        need_bytes: dict[PoolId, int] = {}
        if footprint.workspace_bytes:
            need_bytes[self._workspace_pool] = footprint.workspace_bytes
        for place in footprint.writes:
            if not present[place]:
                present[place] = True
                pool = self._pool_of[place]
                if pool is None:
                    raise self._nowhere(index, place)
                need_bytes[pool] = need_bytes.get(pool, 0) + self._size_of[place]
        if not need_bytes:
            return now_ns
        due = self._due
        while due and due[0][0] <= now_ns:
            self._book_release()
        for pool, size_bytes in need_bytes.items():
            # Room that one pool has does not go while another one's comes.
            while self._used_bytes[pool] + size_bytes > self._capacity_bytes[pool]:
                if not due:
                    raise self._never_fits(index, need_bytes)
                now_ns = max(now_ns, due[0][0])
                while due and due[0][0] <= now_ns:
                    self._book_release()
        for pool, size_bytes in need_bytes.items():
            used_bytes = self._used_bytes[pool] = self._used_bytes[pool] + size_bytes
            if used_bytes > self.peak_bytes[pool]:
                self.peak_bytes[pool] = used_bytes
            self._changes.append((now_ns, pool, size_bytes))
        return now_ns

    def release_at(self, end_ns: int, footprint: Footprint) -> None:
        """Note what a task gives back when it completes."""
        if footprint.workspace_bytes:
            self._push(end_ns, self._workspace_pool, footprint.workspace_bytes)
        if footprint.frees:
            place = footprint.reads[0]
            pool = self._pool_of[place]
            assert pool is not None
            self._push(end_ns, pool, self._size_of[place])

    def curves(self, zero_ns: int) -> Mapping[PoolId, tuple[MemoryPoint, ...]]:
        """Give the use of each pool over time from a moment on, up to the last release."""
        while self._due:
            self._book_release()
        used_bytes = dict(self._start_bytes)
        curves: dict[PoolId, list[tuple[int, int]]] = {
            pool: [(0, used)] for pool, used in used_bytes.items()
        }
        for at_ns, pool, change_bytes in self._changes:
            used = used_bytes[pool] = used_bytes[pool] + change_bytes
            points = curves[pool]
            # Two rises, or two falls, at one moment are one; a rise and a fall stay two points, or
            # the peak of a task that takes no time would be lost.
            if len(points) > 1 and points[-1][0] == at_ns:
                rose = points[-1][1] > points[-2][1]
                if rose == (change_bytes > 0):
                    points[-1] = (at_ns, used)
                    continue
            points.append((at_ns, used))
        return {pool: curve_from(points, zero_ns) for pool, points in curves.items()}

    def _push(self, end_ns: int, pool: PoolId, size_bytes: int) -> None:
        heappush(self._due, (end_ns, self._num_due, pool, size_bytes))
        self._num_due += 1

    def _book_release(self) -> None:
        at_ns, _, pool, size_bytes = heappop(self._due)
        self._used_bytes[pool] -= size_bytes
        self._changes.append((at_ns, pool, -size_bytes))

    def _absent(self, index: int, place: int) -> RuleError:
        name, tier = self._footprints.places[place]
        return RuleError(
            f"{name_of(self._ordered[index].task)} needs {name}, which is not in the tier {tier}",
            rule="present",
            where=self._surroundings(index),
        )

    def _nowhere(self, index: int, place: int) -> RuleError:
        name, tier = self._footprints.places[place]
        return RuleError(
            f"{name} has no place in the tier {tier}",
            rule="present",
            where=self._surroundings(index),
        )

    def _never_fits(self, index: int, need_bytes: Mapping[PoolId, int]) -> RuleError:
        pool, size_bytes = next(
            (pool, size)
            for pool, size in need_bytes.items()
            if self._used_bytes[pool] + size > self._capacity_bytes[pool]
        )
        used, capacity = self._used_bytes[pool], self._capacity_bytes[pool]
        return RuleError(
            f"{name_of(self._ordered[index].task)} needs {format_bytes(size_bytes)} of pool {pool},"
            f" where {format_bytes(capacity - used)} of {format_bytes(capacity)} are free and no"
            " earlier task will release more",
            rule="capacity",
            where=self._surroundings(index),
            fix="plan again with a larger budget, or free a buffer before this task",
        )

    def _surroundings(self, index: int) -> str:
        near = range(max(0, index - 3), min(len(self._ordered), index + 4))
        return "\n".join(
            f"{'>' if at == index else ' '} {at} {name_of(self._ordered[at].task)}" for at in near
        )
