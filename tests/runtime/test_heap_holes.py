"""In map mode a large block never lands in a hole of the heap, where its pages would stay."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import pytest

from packhorse.graph.liveness import HeapUse
from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId, saved_id
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Forward
from packhorse.runtime.memory import process_heap
from packhorse.runtime.memory.heap import (
    count_live_blocks,
    open_holes,
    seal_holes,
    set_heap_mode,
    settle_heap,
    trim_heap,
)
from packhorse.runtime.memory.process_heap import ProcessHeap
from packhorse.units import KIB, MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4 * KIB


@pytest.fixture
def libc():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("this C library has no mallopt")
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    yield libc
    set_heap_mode("keep")


def test_pages_of_a_large_block_go_when_it_is_freed(libc: ctypes.CDLL) -> None:
    set_heap_mode("keep")
    # Holes: every other block is freed, the ones between stay.
    blocks = [libc.malloc(8 * MIB) for _ in range(16)]
    for block in blocks[::2]:
        libc.free(block)
    set_heap_mode("map")
    sealed = seal_holes("map")
    assert sealed
    before = resident_bytes()
    used = [libc.malloc(MIB) for _ in range(24)]
    for block in used:
        ctypes.memset(block, 1, MIB)
    assert resident_bytes() - before >= 23 * MIB
    for block in used:
        libc.free(block)
    assert resident_bytes() - before < MIB
    open_holes(sealed)
    for block in blocks[1::2]:
        libc.free(block)


def test_a_settled_heap_holds_what_is_used_next_without_growing(libc: ctypes.CDLL) -> None:
    set_heap_mode("keep")
    blocks = [libc.malloc(8 * MIB) for _ in range(16)]
    for block in blocks[::2]:
        libc.free(block)
    sealed = settle_heap(64 * MIB, 8 * MIB)
    before = resident_bytes()
    for size_bytes in (12 * MIB, 8 * MIB, 3 * MIB, 7 * MIB):
        used = [libc.malloc(size_bytes) for _ in range(48 * MIB // size_bytes)]
        for block in used:
            ctypes.memset(block, 1, size_bytes)
        assert resident_bytes() - before < MIB
        for block in used:
            libc.free(block)
    open_holes(sealed)
    for block in blocks[1::2]:
        libc.free(block)


def test_large_blocks_of_a_kept_heap_leave_no_holes_for_small_ones(libc: ctypes.CDLL) -> None:
    set_heap_mode("keep")
    before = resident_bytes()
    small: list[int] = []
    for _ in range(8):
        large = libc.malloc(31 * MIB)
        ctypes.memset(large, 1, 31 * MIB)
        libc.free(large)
        small.append(libc.malloc(MIB))
        ctypes.memset(small[-1], 1, MIB)
    assert resident_bytes() - before < 64 * MIB  # one large and eight small ones
    for block in small:
        libc.free(block)


def make_room(
    heap: ProcessHeap, task: Forward, *, large_bytes: int = 0, small_bytes: int | None = None
) -> None:
    """Run a body that takes nothing of what it may."""
    small_bytes = task.workspace_bytes if small_bytes is None else small_bytes
    with heap.room(task, HeapUse(large_bytes=large_bytes, small_bytes=small_bytes)):
        pass


def make_forward(workspace_bytes: int, writes: tuple[BufferId, ...] = ()) -> Forward:
    return Forward(block=0, microbatch=0, reads=(), writes=writes, workspace_bytes=workspace_bytes)


def test_free_pages_go_before_the_process_outgrows_what_is_granted(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()
    make_room(heap, make_forward(24 * MIB))
    blocks = [libc.malloc(4 * MIB) for _ in range(12)]
    for block in blocks:
        ctypes.memset(block, 1, 4 * MIB)
    fence = libc.malloc(1024)  # the heap's end stays where it is
    for block in blocks:
        libc.free(block)
    make_room(heap, make_forward(24 * MIB))  # served from what is free, as before
    assert resident_bytes() - before > 40 * MIB
    make_room(heap, make_forward(64 * MIB))  # some of it comes on top
    assert resident_bytes() - before < 8 * MIB
    libc.free(fence)
    heap.close()


def test_pages_that_went_back_serve_no_body(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()

    def fill(size_bytes: int) -> int:
        block = libc.malloc(size_bytes)
        ctypes.memset(block, 1, size_bytes)
        return block

    blocks: list[int] = []
    fences: list[int] = []
    for size_bytes in (*[2 * MIB] * 10, *[4 * MIB] * 12):
        blocks.append(fill(size_bytes))
        fences.append(libc.malloc(128 * KIB))
    for block in blocks:
        libc.free(block)
    make_room(heap, make_forward(40 * MIB))
    assert resident_bytes() - before < 8 * MIB  # nothing that is free has pages
    for block in [fill(2 * MIB) for _ in range(10)]:  # but for 20 MiB, in pieces
        libc.free(block)
    beside = mmap.mmap(-1, 20 * MIB)
    for offset in range(0, 20 * MIB, mmap.PAGESIZE):
        beside[offset] = 1
    make_room(heap, make_forward(32 * MIB))
    body = [fill(4 * MIB) for _ in range(8)]
    assert resident_bytes() - before <= granted.capacity_bytes
    for block in (*body, *fences):
        libc.free(block)
    beside.close()
    heap.close()


def test_a_body_that_made_the_heap_grow_counts_as_if_it_did_again(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()
    task = make_forward(20 * MIB)
    modest = HeapUse(large_bytes=0, small_bytes=19 * MIB)
    greedy = HeapUse(large_bytes=0, small_bytes=20 * MIB)
    with heap.room(task, modest):
        pass
    with heap.room(task, greedy):
        blocks = [libc.malloc(4 * MIB) for _ in range(3)]
        for block in blocks:
            ctypes.memset(block, 1, 4 * MIB)
    blocks += [libc.malloc(4 * MIB) for _ in range(10)]
    fence = libc.malloc(128 * KIB)
    for block in blocks:
        ctypes.memset(block, 1, 4 * MIB)
        libc.free(block)
    beside = mmap.mmap(-1, 6 * MIB)
    for offset in range(0, 6 * MIB, mmap.PAGESIZE):
        beside[offset] = 1
    assert resident_bytes() - before > 56 * MIB
    with heap.room(task, modest):
        assert resident_bytes() - before > 56 * MIB
    with heap.room(task, greedy):  # 12 MiB more are too many
        assert resident_bytes() - before < 10 * MIB
    libc.free(fence)
    beside.close()
    heap.close()


def test_blocks_are_counted_only_where_room_may_be_short(
    libc: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def count() -> object:
        counted.append(1)
        return count_live_blocks()

    heap = ProcessHeap("keep", [Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)])
    monkeypatch.setattr(process_heap, "count_live_blocks", count)
    make_room(heap, make_forward(8 * MIB))  # four times as much is there
    assert not counted
    make_room(heap, make_forward(24 * MIB))
    assert counted
    heap.close()


def test_a_body_that_grows_where_room_is_short_is_not_let_in_again(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()
    task, use = make_forward(12 * MIB), HeapUse(large_bytes=0, small_bytes=12 * MIB)

    def fill_and_free(count: int) -> int:
        blocks = [libc.malloc(4 * MIB) for _ in range(count)]
        fence = libc.malloc(128 * KIB)
        for block in blocks:
            ctypes.memset(block, 1, 4 * MIB)
            libc.free(block)
        return fence

    fences = [fill_and_free(8)]
    with heap.room(task, use):  # known to find all that it takes
        pass
    fences.append(fill_and_free(13))
    with heap.room(task, use):
        assert resident_bytes() - before > 50 * MIB
        beside = mmap.mmap(-1, 8 * MIB)  # this time it does not
        for offset in range(0, 8 * MIB, mmap.PAGESIZE):
            beside[offset] = 1
    assert resident_bytes() - before > 58 * MIB
    with heap.room(task, use):
        assert resident_bytes() - before < 20 * MIB
    for fence in fences:
        libc.free(fence)
    beside.close()
    heap.close()


def test_live_blocks_are_counted_where_they_lie(libc: ctypes.CDLL) -> None:
    set_heap_mode("keep")
    sealed = seal_holes("keep")
    before = count_live_blocks()
    small, large = libc.malloc(8 * MIB), libc.malloc(24 * MIB)
    after = count_live_blocks()
    assert before is not None
    assert after is not None
    assert abs(after.heap_bytes - before.heap_bytes - 8 * MIB) < MIB
    assert abs(after.mapped_bytes - before.mapped_bytes - 24 * MIB) < MIB
    for block in (small, large):
        libc.free(block)
    open_holes(sealed)


def test_a_heap_is_mapped_while_it_would_outgrow_what_is_granted(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()

    def use_blocks() -> None:
        blocks = [libc.malloc(4 * MIB) for _ in range(12)]
        fence = libc.malloc(128 * KIB)
        for block in blocks:
            ctypes.memset(block, 1, 4 * MIB)
            libc.free(block)
        libc.free(fence)

    use_blocks()
    make_room(heap, make_forward(4 * MIB))
    assert resident_bytes() - before > 40 * MIB  # what is granted, and kept
    beside = mmap.mmap(-1, 66 * MIB)
    for offset in range(0, 66 * MIB, mmap.PAGESIZE):
        beside[offset] = 1
    # Too much, even with all that is free given back: nothing is kept, for as long.
    with heap.room(make_forward(4 * MIB), HeapUse(large_bytes=0, small_bytes=0)):
        assert resident_bytes() - before < 70 * MIB
        use_blocks()
        assert resident_bytes() - before < 70 * MIB
    beside.close()
    assert resident_bytes() - before < 4 * MIB
    use_blocks()
    assert resident_bytes() - before > 40 * MIB
    heap.close()


def make_saved_program(size_bytes: int) -> tuple[Program, BufferId]:
    """A program with one buffer in its pool of workspaces, which may lie on the disk as well."""
    pool = Pool(id=PoolId("heap"), tier="device", capacity_bytes=MIB)
    saved = Buffer(
        id=saved_id(0, 0),
        size_bytes=size_bytes,
        pools={"device": pool.id, "disk": PoolId("disk")},
        home=None,
    )
    program = Program(
        kind="train_step",
        model="",
        rank=0,
        num_microbatches=1,
        pools=(pool,),
        workspace_pool=pool.id,
        buffers={saved.id: saved},
        layout=Layout(chunks=(), slots={}, dtypes={}),
        tasks=(),
    )
    return program, saved.id


def keep_free_pages(libc: ctypes.CDLL) -> int:
    """Leave 16 MiB of pages free in the heap; the block behind them is to be freed."""
    blocks = [libc.malloc(4 * MIB) for _ in range(4)]
    fence: int = libc.malloc(128 * KIB)
    for block in blocks:
        ctypes.memset(block, 1, 4 * MIB)
        libc.free(block)
    return fence


def test_what_a_body_leaves_counts_as_much_as_its_workspace(libc: ctypes.CDLL) -> None:
    program, saved = make_saved_program(20 * MIB)
    trim_heap()
    heap = ProcessHeap("keep", program.pools, [program], resident_bytes() + 48 * MIB)
    before = resident_bytes()
    make_room(heap, make_forward(24 * MIB))
    fence = keep_free_pages(libc)
    make_room(heap, make_forward(24 * MIB))
    assert resident_bytes() - before > 12 * MIB
    make_room(heap, make_forward(24 * MIB, (saved,)))
    assert resident_bytes() - before < 4 * MIB
    libc.free(fence)
    heap.close()


def test_pages_of_small_blocks_stay_beside_large_ones(libc: ctypes.CDLL) -> None:
    trim_heap()
    pool = Pool(id=PoolId("heap"), tier="device", capacity_bytes=MIB)
    heap = ProcessHeap("keep", [pool], limit_bytes=resident_bytes() + 60 * MIB)
    before = resident_bytes()
    fence = keep_free_pages(libc)
    # At its fullest the body holds 30 MiB, most of it in large blocks; 20 MiB of small ones were
    # there before.
    make_room(heap, make_forward(30 * MIB), large_bytes=24 * MIB, small_bytes=6 * MIB)
    assert resident_bytes() - before > 12 * MIB
    make_room(heap, make_forward(30 * MIB), large_bytes=24 * MIB, small_bytes=20 * MIB)
    assert resident_bytes() - before < 4 * MIB
    libc.free(fence)
    heap.close()


def open_for_fetching(size_bytes: int, *, granted_bytes: int) -> tuple[ProcessHeap, Copy]:
    """A kept heap, and a copy that brings a value of that size back from the disk."""
    program, saved = make_saved_program(size_bytes)
    trim_heap()
    heap = ProcessHeap("keep", program.pools, [program], resident_bytes() + granted_bytes)
    return heap, Copy(buffer=saved, source="disk", target="device")


def test_what_a_lane_has_taken_is_no_progress_of_another(libc: ctypes.CDLL) -> None:
    heap, fetch = open_for_fetching(24 * MIB, granted_bytes=84 * MIB)
    before = resident_bytes()
    fence = keep_free_pages(libc)
    with heap.room(make_forward(16 * MIB), HeapUse(large_bytes=0, small_bytes=16 * MIB)):
        with heap.room(fetch):
            came = mmap.mmap(-1, 24 * MIB)
            for offset in range(0, 24 * MIB, mmap.PAGESIZE):
                came[offset] = 1
        assert resident_bytes() - before > 36 * MIB
        with heap.room(fetch):  # the body is still to take all that it may
            assert resident_bytes() - before < 28 * MIB
    came.close()
    libc.free(fence)
    heap.close()


def test_a_value_waits_for_a_body_where_there_is_no_room_beside_it(libc: ctypes.CDLL) -> None:
    heap, fetch = open_for_fetching(24 * MIB, granted_bytes=48 * MIB)
    is_in, came = threading.Event(), threading.Event()

    def take() -> None:
        is_in.set()
        with heap.room(fetch):
            came.set()

    lane = threading.Thread(target=take)
    with heap.room(make_forward(16 * MIB), HeapUse(large_bytes=0, small_bytes=16 * MIB)):
        lane.start()
        assert is_in.wait(10)
        assert not came.wait(0.2)
    lane.join(10)
    assert came.is_set()
    with heap.room(fetch):  # where no body runs nobody is waited for
        pass
    heap.close()


def test_what_one_lane_is_still_to_take_counts_for_the_others(libc: ctypes.CDLL) -> None:
    heap, fetch = open_for_fetching(24 * MIB, granted_bytes=48 * MIB)
    before = resident_bytes()
    fence = keep_free_pages(libc)
    with heap.room(fetch):
        assert resident_bytes() - before > 12 * MIB
    with heap.room(make_forward(12 * MIB), HeapUse(large_bytes=0, small_bytes=12 * MIB)):
        assert resident_bytes() - before > 12 * MIB
        with heap.room(fetch):
            assert resident_bytes() - before < 4 * MIB
        fence_2 = keep_free_pages(libc)  # the body has taken it all by now
        with heap.room(Copy(buffer=BufferId("value/x@0"), source="disk", target="device")):
            assert resident_bytes() - before > 12 * MIB
    for block in (fence, fence_2):
        libc.free(block)
    heap.close()
