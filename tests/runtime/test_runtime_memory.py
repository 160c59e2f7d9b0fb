"""Chunk memory, the ledger and the disk tier, each alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from packhorse.errors import AuditError, InputError, StorageError
from packhorse.program.buffers import (
    CHUNK_ALIGN_ELEMENTS,
    PAGE_BYTES,
    Buffer,
    BufferId,
    Chunk,
    ChunkId,
    Layout,
    Pool,
    PoolId,
    Slot,
)
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.memory.chunks import ChunkMemory, chunk_table
from packhorse.runtime.memory.ledger import Ledger

BIG = CHUNK_ALIGN_ELEMENTS + 1000


def make_layout() -> Layout:
    """`a` and `b` in chunk 0; `big` runs through chunks 1 and 2."""
    one, two = CHUNK_ALIGN_ELEMENTS, 2 * CHUNK_ALIGN_ELEMENTS
    sizes = {0: (0, 128), 1: (one, CHUNK_ALIGN_ELEMENTS), 2: (two, 1024)}
    return Layout(
        chunks=tuple(
            Chunk(id=ChunkId(i), start=start, num_elements=count, group="all", trainable=True)
            for i, (start, count) in sizes.items()
        ),
        slots={
            "a": Slot(parameter="a", start=0, shape=(3, 5), num_elements=15),
            "b": Slot(parameter="b", start=32, shape=(90,), num_elements=90),
            "big": Slot(parameter="big", start=one, shape=(BIG // 8, 8), num_elements=BIG),
        },
        dtypes={"param": "bfloat16", "grad": "float32"},
    )


@pytest.fixture
def memory():
    made = ChunkMemory(make_layout())
    yield made
    made.close()


def test_chunks_start_at_pages_and_parameters_at_64_bytes(memory: ChunkMemory) -> None:
    layout = make_layout()
    for state in layout.dtypes:
        addresses = [memory.address(state, chunk) for chunk in layout.chunks]
        assert all(address % PAGE_BYTES == 0 for address in addresses)
        assert len(set(addresses)) == 3
        for name in layout.slots:
            assert memory.parameter(state, name).data_ptr() % 64 == 0
        for chunk in layout.chunks:
            assert memory.tensor(state, chunk).data_ptr() == memory.address(state, chunk)
            assert memory.tensor(state, chunk).numel() == chunk.num_elements


def test_parameters_are_views_of_their_chunks(memory: ChunkMemory) -> None:
    chunks = chunk_table(make_layout())
    memory.parameter("grad", "a").copy_(torch.arange(15.0).view(3, 5))
    assert torch.equal(memory.tensor("grad", chunks[ChunkId(0)])[:15], torch.arange(15.0))
    big = memory.parameter("grad", "big")
    big.view(-1).copy_(torch.arange(float(BIG)))
    second = memory.tensor("grad", chunks[ChunkId(2)])
    assert second[0] == CHUNK_ALIGN_ELEMENTS
    assert second[999] == BIG - 1
    assert second[1000:].abs().sum() == 0


def test_states_do_not_share_bytes(memory: ChunkMemory) -> None:
    memory.parameter("grad", "big").fill_(3)
    memory.parameter("grad", "b").fill_(2)
    assert memory.parameter("param", "big").abs().sum() == 0
    memory.parameter("param", "b").fill_(7)
    assert torch.equal(memory.parameter("grad", "b"), torch.full((90,), 2.0))
    assert memory.parameter("param", "b").dtype == torch.bfloat16


def test_pieces_say_where_parameters_lie(memory: ChunkMemory) -> None:
    found = [
        [(start, stop, slot.parameter, first) for start, stop, slot, first in memory.pieces(chunk)]
        for chunk in make_layout().chunks
    ]
    assert found == [
        [(0, 15, "a", 0), (32, 122, "b", 0)],
        [(0, CHUNK_ALIGN_ELEMENTS, "big", 0)],
        [(0, 1000, "big", CHUNK_ALIGN_ELEMENTS)],
    ]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_dropped_chunk_reads_as_zeros_and_gives_its_pages_back(memory: ChunkMemory) -> None:
    chunk = make_layout().chunks[1]
    memory.tensor("grad", chunk).fill_(1)
    memory.parameter("grad", "b").fill_(5)
    before = resident_bytes()
    memory.drop("grad", chunk)
    assert before - resident_bytes() >= memory.size_bytes("grad", chunk) - PAGE_BYTES
    assert memory.tensor("grad", chunk).abs().sum() == 0
    assert torch.equal(memory.parameter("grad", "b"), torch.full((90,), 5.0))


def test_poison_fills_parameters_and_leaves_padding_zero(memory: ChunkMemory) -> None:
    chunk = make_layout().chunks[0]
    memory.tensor("param", chunk).fill_(1)
    memory.poison("param", chunk)
    tensor = memory.tensor("param", chunk)
    assert tensor[:15].isnan().all()
    assert tensor[32:122].isnan().all()
    assert tensor[15:32].abs().sum() == 0
    assert tensor[122:].abs().sum() == 0
    assert not memory.parameter("param", "big").isnan().any()


POOLS = (
    Pool(id=PoolId("device"), tier="device", capacity_bytes=100),
    Pool(id=PoolId("disk"), tier="disk", capacity_bytes=50),
)


def test_ledger_counts_per_pool() -> None:
    ledger = Ledger(POOLS)
    ledger.reserve(PoolId("device"), 60)
    ledger.reserve(PoolId("disk"), 50)
    assert dict(ledger.used_bytes) == {"device": 60, "disk": 50}
    assert ledger.fits(PoolId("device"), 40)
    assert not ledger.fits(PoolId("device"), 41)
    ledger.release(PoolId("device"), 60)
    assert ledger.fits(PoolId("device"), 100)


def test_ledger_refuses_what_does_not_fit_and_keeps_its_sums() -> None:
    ledger = Ledger(POOLS)
    ledger.reserve(PoolId("device"), 60)
    with pytest.raises(AuditError, match="pool device holds 60 B of 100 B; 41 B more do not fit"):
        ledger.reserve(PoolId("device"), 41)
    assert ledger.used_bytes[PoolId("device")] == 60
    with pytest.raises(AssertionError, match="released more"):
        ledger.release(PoolId("device"), 61)


def make_buffer(name: str, size: int, *tiers: str) -> Buffer:
    return Buffer(
        id=BufferId(name), size_bytes=size, pools={t: PoolId(t) for t in tiers}, home=tiers[0]
    )


BUFFERS = {
    b.id: b
    for b in (
        make_buffer("param/0", 5000, "disk", "device"),
        make_buffer("grad/0", 4096, "device"),
        make_buffer("param/1", 100, "disk"),
    )
}


def test_disk_tier_gives_every_disk_buffer_an_extent(tmp_path: Path) -> None:
    memory = torch.arange(2048, dtype=torch.float32)
    target = torch.zeros(2048)
    with DiskTier(BUFFERS, tmp_path) as disk:
        # Whole pages and no more: what the plan counts is what the disk gives.
        assert disk.size_bytes == 3 * PAGE_BYTES
        (scratch,) = tmp_path.glob("*.scratch")
        assert scratch.stat().st_size >= disk.size_bytes
        before = disk.counters
        disk.write(BufferId("param/0"), memory.data_ptr())
        disk.write(BufferId("param/1"), memory[100:].data_ptr())
        disk.read(BufferId("param/0"), target.data_ptr())
        moved = disk.counters.since(before)
        assert torch.equal(target[:1250], memory[:1250])
        assert target[1250:].abs().sum() == 0, "no byte beyond the buffer is written"
        assert moved.written_bytes >= 5100
        assert moved.read_bytes >= 5000
    assert list(tmp_path.iterdir()) == [], "the scratch file is removed at the end"


def test_nothing_on_disk_needs_no_folder() -> None:
    with DiskTier({BufferId("grad/0"): BUFFERS[BufferId("grad/0")]}, None) as disk:
        assert disk.size_bytes == 0
        assert disk.counters.read_bytes == 0


def test_buffers_on_disk_without_a_folder_are_refused() -> None:
    with pytest.raises(InputError, match="2 buffers on disk, but no scratch folder"):
        DiskTier(BUFFERS, None)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with DiskTier(BUFFERS, tmp_path), pytest.raises(InputError, match="in use by process"):
        DiskTier(BUFFERS, tmp_path)


def test_a_full_disk_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StorageError) as caught:
        DiskTier(BUFFERS, tmp_path)
    assert "space" in str(caught.value)
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == [], "neither file nor lock is left"
    monkeypatch.undo()
    DiskTier(BUFFERS, tmp_path).close()
