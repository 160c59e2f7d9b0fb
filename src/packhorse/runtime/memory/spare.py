"""Spare pages: chunks that are free in the ledger, but whose pages are still held.

Giving a chunk's pages back costs page faults when it is written or loaded again, often in the same
step. As long as the ledger and the spare pages together stay within what the pool may hold, nothing
is gained by giving them back: memory never exceeds what was predicted.

In: chunk states as they are reserved, made and freed. Out: the spare pages to drop now, and no more
of them than needed: chunks differ in size, and a pool that gave back whole ones would be filled now
more and now less. A step takes its states in the same order as the one before it, so those go first
whose turn comes last (Belady, 1966): to drop the oldest would drop what is taken next, and none of
many gradients in turn would ever find its pages. Where a pool holds nothing but chunk states, spare
pages make room when a state is made, not when it is reserved: lanes run ahead by many states, which
have no pages until their turn comes. There a spare state of the same size hands its pages over,
which takes microseconds: the kernel clears what it makes, 0.4 ns a byte beside computing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from packhorse.program.buffers import BufferId, Pool, PoolId, state_id
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Free, writes_of

NO_ORDERS: Final[Mapping[PoolId, Sequence[BufferId]]] = {}


class Turns:
    """In which order the states of a pool are taken into use, step after step.

    Args:
        order: of one step; a state that is taken several times is in it as often.
    """

    def __init__(self, order: Sequence[BufferId]) -> None:
        self._places: dict[BufferId, list[int]] = {}
        for place, buffer in enumerate(order):
            self._places.setdefault(buffer, []).append(place)
        self._length = len(order)
        self._next = 0

    def take(self, buffer: BufferId) -> None:
        """Note that a state is taken; what the order does not have changes nothing."""
        if buffer in self._places:
            self._next = (self._next + self.count_before(buffer) + 1) % self._length

    def count_before(self, buffer: BufferId) -> int:
        """How many others come before a state's next turn; one that has none comes last."""
        places = self._places.get(buffer)
        if places is None:
            return self._length
        at = bisect_left(places, self._next)
        return (places[at] if at < len(places) else places[0] + self._length) - self._next


class SparePages:
    """The spare chunk states of each pool.

    Args:
        limits: bytes that a pool may hold, spare pages counted: its largest proved peak, or its
            capacity where lanes run ahead.
        alone: pools that hold nothing but chunk states.
        orders: in which a step takes the states of a pool; where there is none, the oldest spare
            pages go first.
    """

    def __init__(
        self,
        limits: Mapping[PoolId, int],
        alone: frozenset[PoolId] = frozenset(),
        orders: Mapping[PoolId, Sequence[BufferId]] = NO_ORDERS,
    ) -> None:
        self._limits = limits
        self._turns = {pool: Turns(orders.get(pool, ())) for pool in limits}
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
        self._turns[pool].take(buffer)
        self._total[pool] -= spare_bytes
        self._fresh[pool][buffer] = size_bytes - spare_bytes
        if pool in self._made:
            self._made[pool][buffer] = size_bytes

    def is_above(self, pool: PoolId, used_bytes: int) -> bool:
        """Whether `shed` has pages to drop of a pool in which so much is reserved."""
        return pool not in self._made and used_bytes + self._total[pool] > self._limits[pool]

    def make_way(
        self,
        pool: PoolId,
        buffer: BufferId,
        drop: Callable[[BufferId, int], int],
        move: Callable[[BufferId, BufferId], bool],
    ) -> None:
        """Find pages for what has been taken into use of a pool that holds chunk states alone.

        Args:
            drop: as for `shed`.
            move: called as move(source, target), two states of one size: hands all pages over to
                one that has none; False: it cannot.
        """
        if pool not in self._made:
            return
        used_bytes = sum(self._made[pool].values())
        if used_bytes + self._total[pool] > self._limits[pool]:
            self._hand_over(pool, buffer, move)
            self._drop(pool, used_bytes, drop)

    def _hand_over(
        self, pool: PoolId, target: BufferId, move: Callable[[BufferId, BufferId], bool]
    ) -> None:
        size_bytes = self._made[pool][target]
        if self._fresh[pool][target] != size_bytes:
            return
        spare = self._spare[pool]
        equal = [buffer for buffer, held_bytes in spare.items() if held_bytes == size_bytes]
        if not equal:
            return
        source = max(equal, key=self._turns[pool].count_before)
        if move(source, target):
            self._total[pool] -= spare.pop(source)
            self._fresh[pool][target] = 0

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
        if used_bytes + self._total[pool] <= self._limits[pool]:
            return
        turns = self._turns[pool]
        for buffer in sorted(spare, key=turns.count_before, reverse=True):
            excess = used_bytes + self._total[pool] - self._limits[pool]
            if excess <= 0:
                return
            held_bytes = spare[buffer]
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
    steps = [program for program in programs if program.kind == "train_step"]
    orders = find_orders(steps[0]) if steps else NO_ORDERS
    return SparePages(limits, find_chunk_pools(programs) & limits.keys(), orders)


def find_orders(program: Program) -> Mapping[PoolId, Sequence[BufferId]]:
    """In which order a program takes the chunk states of each pool, those at home left out."""
    states = _states_of(program)
    present = {(each.id, each.home) for each in program.buffers.values() if each.home is not None}
    orders: dict[PoolId, list[BufferId]] = {}
    for task in program.tasks:
        if isinstance(task, Free):
            present.discard((task.buffer, task.tier))
            continue
        for place in writes_of(task):
            buffer, tier = place
            if buffer in states and place not in present:
                present.add(place)
                orders.setdefault(program.buffers[buffer].pools[tier], []).append(buffer)
    return orders


def _states_of(program: Program) -> frozenset[BufferId]:
    layout = program.layout
    return frozenset(state_id(name, chunk.id) for name in layout.dtypes for chunk in layout.chunks)


def find_chunk_pools(programs: Iterable[Program]) -> frozenset[PoolId]:
    """The pools that hold nothing but states of chunks."""
    found: set[PoolId] = set()
    shared: set[PoolId] = set()
    for program in programs:
        states = _states_of(program)
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
