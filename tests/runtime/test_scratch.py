"""The folders of a machine's disk tier become scratch files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from subjects import find_subject

from bench.planned import PLACES, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import Drive, Tier
from packhorse.program.buffers import Chunk, ChunkId, Layout, Pool, PoolId
from packhorse.runtime import hardware
from packhorse.runtime.memory.backing import HostBacking
from packhorse.runtime.scratch import choose_scratch, find_scratch
from packhorse.storage import scratch_space, striped_file, stripes
from packhorse.storage.scratch_file import ScratchFile, create_scratch_file
from packhorse.storage.scratch_space import Scratch, ScratchPart, make_scratch
from packhorse.units import MIB

FAST = Drive(
    path="fast",
    budget_bytes=100 * MIB,
    read_bytes_per_s=3e9,
    write_bytes_per_s=3e9,
    measured_bytes=MIB,
    direct=True,
    block_bytes=2 * MIB,
    num_threads=2,
    huge_pages=True,
)
SLOW = replace(
    FAST,
    path="slow",
    read_bytes_per_s=1e9,
    write_bytes_per_s=1e9,
    direct=False,
    num_threads=1,
    huge_pages=False,
)


def disk(*drives: Drive) -> Tier:
    tier = load_known_machine("laptop-16gb").tier("disk")
    assert tier is not None
    return replace(tier, drives=drives)


def test_drives_are_used_as_they_were_measured() -> None:
    assert find_scratch(disk(FAST, SLOW)) == Scratch(
        parts=(
            ScratchPart(
                folder=Path("fast"), units=12, direct=True, block_bytes=2 * MIB, num_threads=2
            ),
            ScratchPart(
                folder=Path("slow"), units=4, direct=False, block_bytes=2 * MIB, num_threads=1
            ),
        ),
        huge_pages=False,
    )


def test_folders_that_nobody_measured_are_used_in_the_usual_way() -> None:
    assert find_scratch(None) is None
    assert find_scratch(replace(disk(), path=None)) is None
    assert find_scratch(disk()) == make_scratch(Path("scratch"))


def test_a_folder_that_is_named_wins() -> None:
    assert choose_scratch("mine", (FAST,), "other") == make_scratch(Path("mine"))
    assert choose_scratch(None, (), "other") == make_scratch(Path("other"))
    assert choose_scratch(None, (FAST,), "other").parts[0].folder == Path("fast")


def test_a_run_over_two_folders_has_the_bits_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model for tests is smaller than one stripe.
    monkeypatch.setattr(stripes, "UNIT_BYTES", 4096)
    monkeypatch.setattr(striped_file, "_LEAST_PART_BYTES", 4096)
    made: dict[str, int] = {}

    def create(path: Path, size_bytes: int, **more: Any) -> ScratchFile:
        made[path.parent.name] = size_bytes
        return create_scratch_file(path, size_bytes, **more)

    monkeypatch.setattr(scratch_space, "create_scratch_file", create)
    entry = ZOO["weave"]
    steps = make_steps(entry, num_steps=3, num_microbatches=2)
    subject = find_subject("weave")
    plain = train_plainly(build_model(entry), subject.optimizer, steps, max_grad_norm=1.0)
    drives = (
        replace(FAST, path=str(tmp_path / "a"), num_threads=2),
        replace(SLOW, path=str(tmp_path / "b")),
    )
    scratch = choose_scratch(None, drives, "nowhere")
    curve = train_by_plan(subject, PLACES["all on disk"], steps, max_grad_norm=1.0, scratch=scratch)
    assert find_differences(plain, curve) == ()
    assert made["a"] > 2 * made["b"] > 20 * 4096
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("huge_pages", [True, False])
def test_chunks_lie_in_the_pages_that_the_disk_wants(
    huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Watched(HostBacking):
        def __init__(self, size_bytes: int, *, pinned: bool = False, huge_pages: bool) -> None:
            asked.append(huge_pages)
            super().__init__(size_bytes, pinned=pinned, huge_pages=huge_pages)

    monkeypatch.setattr(hardware, "HostBacking", Watched)
    chunk = Chunk(id=ChunkId(0), start=0, num_elements=128, group="all", trainable=True)
    layout = Layout(chunks=(chunk,), slots={}, dtypes={"param": "float32"})
    scratch = replace(make_scratch(Path("scratch")), huge_pages=huge_pages)
    pools = [
        Pool(id=PoolId("device"), tier="device", capacity_bytes=0),
        Pool(id=PoolId("host"), tier="host", capacity_bytes=0),
    ]
    tiers = hardware.make_tiers(layout, torch.device("cpu"), pools, scratch)
    assert asked == [huge_pages, huge_pages]
    for memory in tiers.values():
        memory.close()


@pytest.mark.parametrize("huge_pages", [True, False])
def test_huge_pages_are_asked_for_only_where_they_are_wanted(
    huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[object] = []
    backing = HostBacking(8 * MIB, huge_pages=huge_pages)
    monkeypatch.setattr(backing, "_libc", SimpleNamespace(madvise=lambda *a: advised.append(a)))
    backing.commit(0, 4 * MIB)
    assert bool(advised) is huge_pages
    backing.close()
