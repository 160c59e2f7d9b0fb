"""The folders of a machine's disk tier become scratch files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from subjects import find_subject

from bench.planned import PLACES, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import Drive, Tier
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
