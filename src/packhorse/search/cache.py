"""How many bytes a cache of chunks would move in a step: an offline simulation.

In: the tasks of a step in program order, and the layout that says what the states of its chunks
are. Out: `Traffic`: how often a state is loaded and written back, and the bytes of both. The whole
order of accesses is known beforehand, so the best choice is too.

    for each task that touches states of chunks:
        load those that are not there; what the task creates needs no load
        until all of them fit, evict one that the task does not touch:
            belady    the one whose next use is farthest away (MIN)
            lru       the one whose last use is longest ago
            none      everything leaves after each task
        what has no further use and lives only inside a step is dropped
    at the end everything leaves

Whatever leaves is written back if it was changed since it was loaded. Of states of one size Belady
loads the fewest possible; of states of several sizes, and for write-backs, it is only a good
guess. Equal choices fall to a clean state before a changed one, then to the one that was used
first: the same order gives the same traffic everywhere.

Source: Belady, A study of replacement algorithms for a virtual-storage computer (1966), as Elixir
(Huang et al., 2022) counts the moves of a traced order of chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final, Literal

from packhorse.model.spec import ITEM_BYTES
from packhorse.program.buffers import BufferId, Layout, state_id
from packhorse.program.tasks import Copy, Free, Task, reads_of, writes_of

Policy = Literal["belady", "lru", "none"]
POLICIES: Final[tuple[Policy, ...]] = ("belady", "lru", "none")
GRADIENT: Final = "grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of a chunk; one that does not last lives only inside a step."""

    id: BufferId
    size_bytes: int
    lasts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A task touches a state: whether it changes it, and whether it creates it."""

    state: State
    changes: bool
    creates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a step moves between the device and the tier beside it."""

    num_loads: int
    num_stores: int
    loaded_bytes: int
    stored_bytes: int

    @property
    def num_moves(self) -> int:
        """Transfers both ways."""
        return self.num_loads + self.num_stores

    @property
    def moved_bytes(self) -> int:
        """Bytes both ways."""
        return self.loaded_bytes + self.stored_bytes


Accesses = Sequence[Sequence[Access]]
"""For each task of a step that touches states of chunks, all of them at once."""


def list_states(layout: Layout) -> Mapping[BufferId, State]:
    """List every state of every chunk; of frozen chunks there are only parameters."""
    found: dict[BufferId, State] = {}
    for chunk in layout.chunks:
        for name in layout.dtypes if chunk.trainable else ("param",):
            state = State(
                id=state_id(name, chunk.id),
                size_bytes=chunk.num_elements * ITEM_BYTES[layout.dtypes[name]],
                lasts=name != GRADIENT,
            )
            found[state.id] = state
    return found


def trace_accesses(tasks: Sequence[Task], layout: Layout) -> Accesses:
    """Trace which states each task of a step touches on the device.

    Copies and frees are left out: they are what a cache decides.
    """
    states = list_states(layout)
    traced: list[tuple[Access, ...]] = []
    for task in tasks:
        if isinstance(task, Copy | Free):
            continue
        read = [buffer for buffer, tier in reads_of(task) if tier == "device"]
        written = [buffer for buffer, tier in writes_of(task) if tier == "device"]
        touched = tuple(
            Access(state=states[buffer], changes=buffer in written, creates=buffer not in read)
            for buffer in dict.fromkeys((*read, *written))
            if buffer in states
        )
        if touched:
            traced.append(touched)
    return tuple(traced)


def widest_bytes(accesses: Accesses) -> int:
    """The most that one task touches at once: no cache can be smaller."""
    return max((sum(a.state.size_bytes for a in touched) for touched in accesses), default=0)


def simulate_cache(accesses: Accesses, *, capacity_bytes: int, policy: Policy) -> Traffic:
    """Count what a step moves when at most `capacity_bytes` of states are on the device.

    Raises:
        ValueError: a task touches more than that at once.
    """
    least = widest_bytes(accesses)
    if capacity_bytes < least:
        raise ValueError(
            f"a cache of {capacity_bytes} bytes cannot hold the {least} bytes that one task touches"
        )
    cache = _Cache(policy, capacity_bytes, _find_next_uses(accesses))
    for position, touched in enumerate(accesses):
        cache.touch(position, touched)
    return cache.close()


_NextUses = Sequence[Sequence[float]]
_Rank = tuple[float, bool, int]  # smallest leaves first: when it is used, changed, its number


def _find_next_uses(accesses: Accesses) -> _NextUses:
    # Per task and access, the position of the task that touches the state next; inf for none.
    following: dict[BufferId, float] = {}
    found: list[list[float]] = []
    for position in range(len(accesses) - 1, -1, -1):
        touched = accesses[position]
        found.append([following.get(access.state.id, inf) for access in touched])
        following.update({access.state.id: position for access in touched})
    return found[::-1]


class _Cache:
    # What is on the device, and a heap of what to evict next; entries of it may be out of date.

    def __init__(self, policy: Policy, capacity_bytes: int, next_uses: _NextUses) -> None:
        self._policy: Policy = policy
        self._capacity_bytes = capacity_bytes
        self._next_uses = next_uses
        self._used_bytes = 0
        self._number: dict[BufferId, int] = {}
        self._states: list[State] = []
        self._changed: dict[BufferId, bool] = {}
        self._rank: dict[BufferId, _Rank] = {}
        self._heap: list[_Rank] = []
        self._num_loads = self._num_stores = self._loaded_bytes = self._stored_bytes = 0

    def touch(self, position: int, touched: Sequence[Access]) -> None:
        held = {access.state.id for access in touched}
        missing = [access for access in touched if access.state.id not in self._changed]
        self._make_room(sum(access.state.size_bytes for access in missing), held)
        for access in missing:
            self._bring(access)
        for access, next_use in zip(touched, self._next_uses[position], strict=True):
            name = access.state.id
            self._changed[name] = self._changed[name] or access.changes
            if next_use == inf and not access.state.lasts:
                self._drop(access.state)
            elif self._policy == "none":
                self._evict(access.state)
            else:
                age = -next_use if self._policy == "belady" else float(position)
                self._rank[name] = (age, self._changed[name], self._number[name])
                heappush(self._heap, self._rank[name])

    def close(self) -> Traffic:
        for state in self._states:
            if state.id in self._changed:
                self._evict(state)
        return Traffic(
            num_loads=self._num_loads,
            num_stores=self._num_stores,
            loaded_bytes=self._loaded_bytes,
            stored_bytes=self._stored_bytes,
        )

    def _bring(self, access: Access) -> None:
        state = access.state
        if state.id not in self._number:
            self._number[state.id] = len(self._states)
            self._states.append(state)
        self._changed[state.id] = False
        self._used_bytes += state.size_bytes
        if not access.creates:
            self._num_loads += 1
            self._loaded_bytes += state.size_bytes

    def _make_room(self, need_bytes: int, held: Collection[BufferId]) -> None:
        # What the task holds is ranked anew after it, so its old entries may be lost here.
        while self._used_bytes + need_bytes > self._capacity_bytes:
            rank = heappop(self._heap)
            state = self._states[rank[2]]
            if state.id not in held and self._rank.get(state.id) == rank:
                self._evict(state)

    def _evict(self, state: State) -> None:
        if self._changed[state.id]:
            self._num_stores += 1
            self._stored_bytes += state.size_bytes
        self._drop(state)

    def _drop(self, state: State) -> None:
        del self._changed[state.id]
        self._rank.pop(state.id, None)
        self._used_bytes -= state.size_bytes
