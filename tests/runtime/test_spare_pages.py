"""A pool with spare pages is filled to its limit, whatever the sizes of its chunks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.program.buffers import BufferId, PoolId
from packhorse.runtime.memory.backing import HostBacking
from packhorse.runtime.memory.spare import SparePages, Turns
from packhorse.storage.mapping import HUGE_PAGE_BYTES, PAGE_BYTES

POOL = PoolId("chunks")


def test_oldest_spare_pages_go_first_and_no_more_than_needed() -> None:
    spare = SparePages({POOL: 100})
    spare.keep(POOL, BufferId("a"), 30)
    spare.keep(POOL, BufferId("b"), 40)
    asked: list[tuple[str, int]] = []

    def drop(buffer: BufferId, keep_bytes: int) -> int:
        asked.append((buffer, keep_bytes))
        return keep_bytes

    spare.shed(POOL, 30, drop)
    assert asked == []
    spare.shed(POOL, 80, drop)
    assert asked == [("a", 0), ("b", 20)]
    spare.shed(POOL, 95, drop)
    assert asked[2:] == [("b", 5)]
    spare.reuse(POOL, BufferId("b"), 40)
    spare.shed(POOL, 100, drop)
    assert len(asked) == 3


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    limit=st.integers(0, 200),
    grain=st.integers(1, 7),
)
def test_a_pool_never_holds_more_than_its_limit(sizes: list[int], limit: int, grain: int) -> None:
    """Also where a tier gives back more than it was asked to."""
    spare = SparePages({POOL: limit})
    held: dict[BufferId, int] = {}

    def drop(buffer: BufferId, keep_bytes: int) -> int:
        held[buffer] = keep_bytes // grain * grain
        return held[buffer]

    for number, size in enumerate(sizes):
        used = min(size, limit)
        spare.shed(POOL, used, drop)
        assert used + sum(held.values()) <= limit
        buffer = BufferId(str(number))
        spare.keep(POOL, buffer, used)
        held[buffer] = used


def test_a_range_gives_back_what_lies_behind_what_is_kept() -> None:
    size = 2 * HUGE_PAGE_BYTES
    backing = HostBacking(size)
    backing.commit(0, size)
    tensor = backing.tensor(0, size, torch.uint8)
    tensor.fill_(1)
    kept = backing.shrink(0, size, HUGE_PAGE_BYTES + PAGE_BYTES + 1)
    assert kept == HUGE_PAGE_BYTES + PAGE_BYTES
    assert bool(tensor[:kept].all())
    assert not bool(tensor[kept:].any())  # dropped pages read as zeros
    backing.close()


@given(
    order=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20),
    taken=st.integers(0, 50),
    asked=st.sampled_from("abcdefg"),
)
def test_turns_are_counted_from_the_state_that_was_taken_last(
    order: list[str], taken: int, asked: str
) -> None:
    turns = Turns([BufferId(name) for name in order])
    for number in range(taken):
        turns.take(BufferId(order[number % len(order)]))
    coming = [order[(taken + ahead) % len(order)] for ahead in range(len(order))]
    expected = coming.index(asked) if asked in coming else len(order)
    assert turns.count_before(BufferId(asked)) == expected
    turns.take(BufferId("unknown"))
    assert turns.count_before(BufferId(asked)) == expected


def test_what_is_taken_last_of_all_loses_its_pages_first() -> None:
    order = [BufferId(name) for name in "abcd"]
    spare = SparePages({POOL: 100}, orders={POOL: order})
    dropped: list[str] = []

    def drop(buffer: BufferId, keep_bytes: int) -> int:
        dropped.append(buffer)
        return keep_bytes

    for name in "abc":
        spare.reuse(POOL, BufferId(name), 25)
        spare.keep(POOL, BufferId(name), 25)
    # The next one is d; of those with spare pages c has its turn last.
    spare.shed(POOL, 50, drop)
    assert dropped == ["c"]


def test_pages_are_handed_over_with_what_they_hold() -> None:
    size = 2 * HUGE_PAGE_BYTES
    backing = HostBacking(3 * size)
    source, target = (backing.tensor(start, size, torch.uint8) for start in (0, 2 * size))
    backing.commit(0, size)
    source.fill_(7)
    assert backing.move(0, 2 * size, size)
    assert bool((target == 7).all())
    assert not bool(source.any())  # without pages it reads as zeros
    target.fill_(8)
    assert backing.move(2 * size, 0, size)
    assert bool((source == 8).all())
    # Pages that are not whole huge ones stay where they are.
    assert not backing.move(PAGE_BYTES, 2 * size, size)
    assert bool((source == 8).all())
    backing.close()


def test_a_state_takes_over_the_pages_of_one_of_its_size() -> None:
    names = [BufferId(name) for name in "abcd"]
    spare = SparePages({POOL: 90}, frozenset({POOL}), {POOL: names})
    dropped: list[str] = []
    moved: list[tuple[str, str]] = []

    def drop(buffer: BufferId, keep_bytes: int) -> int:
        dropped.append(buffer)
        return keep_bytes

    def move(source: BufferId, target: BufferId) -> bool:
        moved.append((source, target))
        return True

    for name, size in zip(names, (40, 40, 30, 40), strict=True):
        spare.reuse(POOL, name, size)
        spare.make_way(POOL, name, drop, move)
        spare.fill(POOL, name)
        assert spare.unfilled_bytes(POOL) >= 0
        spare.keep(POOL, name, size)
    # c found nothing of its size, so b, whose turn comes last, gave way; then d took over a's.
    assert dropped == ["b"]
    assert moved == [("a", "d")]
    spare.reuse(POOL, names[0], 40)
    spare.make_way(POOL, names[0], drop, lambda *_: False)  # where the system moves nothing
    assert dropped[1:] == ["d"]


def test_what_is_being_written_has_its_pages_to_come() -> None:
    spare = SparePages({POOL: 100})
    spare.reuse(POOL, BufferId("a"), 60)
    assert spare.unfilled_bytes(POOL) == 100
    spare.fill(POOL, BufferId("a"))
    assert spare.unfilled_bytes(POOL) == 40
    spare.keep(POOL, BufferId("a"), 60)
    spare.shed(POOL, 70, lambda _, keep_bytes: keep_bytes)
    assert spare.unfilled_bytes(POOL) == 70
    spare.reuse(POOL, BufferId("a"), 60)
    assert spare.unfilled_bytes(POOL) == 70
    spare.fill(POOL, BufferId("a"))
    assert spare.unfilled_bytes(POOL) == 40


def test_a_pool_of_chunk_states_alone_makes_way_when_one_is_made() -> None:
    spare = SparePages({POOL: 100}, frozenset({POOL}))
    asked: list[tuple[str, int]] = []

    def drop(buffer: BufferId, keep_bytes: int) -> int:
        asked.append((buffer, keep_bytes))
        return keep_bytes

    for name in ("a", "b"):
        spare.reuse(POOL, BufferId(name), 40)
        spare.make_way(POOL, BufferId(name), drop, lambda *_: False)
        spare.fill(POOL, BufferId(name))
    spare.keep(POOL, BufferId("a"), 40)
    spare.shed(POOL, 100, drop)  # all of it is reserved, and 40 have been made
    assert (asked, spare.unfilled_bytes(POOL)) == ([], 20)
    spare.reuse(POOL, BufferId("c"), 50)
    spare.make_way(POOL, BufferId("c"), drop, lambda *_: False)
    assert (asked, spare.unfilled_bytes(POOL)) == ([("a", 10)], 50)
    spare.fill(POOL, BufferId("c"))
    assert spare.unfilled_bytes(POOL) == 0
    spare.reuse(POOL, BufferId("a"), 10)  # with the pages that it still has
    spare.make_way(POOL, BufferId("a"), drop, lambda *_: False)
    assert (len(asked), spare.unfilled_bytes(POOL)) == (1, 0)
