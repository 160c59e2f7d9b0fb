"""In map mode a large block never lands in a hole of the heap, where its pages would stay."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId, saved_id
from packhorse.program.program import Program
from packhorse.program.tasks import Forward
from packhorse.runtime.memory.heap import (
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


def make_forward(workspace_bytes: int, writes: tuple[BufferId, ...] = ()) -> Forward:
    return Forward(block=0, microbatch=0, reads=(), writes=writes, workspace_bytes=workspace_bytes)


def test_free_pages_go_before_the_process_outgrows_what_is_granted(libc: ctypes.CDLL) -> None:
    granted = Pool(id=PoolId("heap"), tier="device", capacity_bytes=72 * MIB)
    heap = ProcessHeap("keep", [granted])
    before = resident_bytes()
    blocks = [libc.malloc(4 * MIB) for _ in range(12)]
    for block in blocks:
        ctypes.memset(block, 1, 4 * MIB)
    fence = libc.malloc(1024)  # the heap's end stays where it is
    for block in blocks:
        libc.free(block)
    heap.make_room(make_forward(24 * MIB))  # served from what is free
    assert resident_bytes() - before > 40 * MIB
    heap.make_room(make_forward(64 * MIB))  # some of it comes on top
    assert resident_bytes() - before < 8 * MIB
    libc.free(fence)
    heap.close()


def test_a_heap_that_outgrows_what_is_granted_is_mapped_from_then_on(libc: ctypes.CDLL) -> None:
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
    heap.make_room(make_forward(4 * MIB))
    assert resident_bytes() - before > 40 * MIB  # what is granted, and kept
    beside = mmap.mmap(-1, 66 * MIB)
    for offset in range(0, 66 * MIB, mmap.PAGESIZE):
        beside[offset] = 1
    heap.make_room(make_forward(4 * MIB))  # too much, even with all that is free given back
    assert resident_bytes() - before < 70 * MIB
    use_blocks()
    assert resident_bytes() - before < 70 * MIB  # nothing is kept any more
    beside.close()
    heap.close()


def test_what_a_body_leaves_counts_as_much_as_its_workspace(libc: ctypes.CDLL) -> None:
    pool = Pool(id=PoolId("heap"), tier="device", capacity_bytes=MIB)
    saved = Buffer(id=saved_id(0, 0), size_bytes=20 * MIB, pools={"device": pool.id}, home=None)
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
    trim_heap()
    heap = ProcessHeap("keep", [pool], [program], resident_bytes() + 48 * MIB)
    before = resident_bytes()
    blocks = [libc.malloc(4 * MIB) for _ in range(4)]
    fence = libc.malloc(128 * KIB)
    for block in blocks:
        ctypes.memset(block, 1, 4 * MIB)
        libc.free(block)
    heap.make_room(make_forward(24 * MIB))
    assert resident_bytes() - before > 12 * MIB
    heap.make_room(make_forward(24 * MIB, (saved.id,)))
    assert resident_bytes() - before < 4 * MIB
    libc.free(fence)
    heap.close()
