from dataclasses import replace

import pytest

from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.files import format_machine, parse_machine
from packhorse.machine.rescale import RateFactors, rescale_machine
from packhorse.machine.spec import Drive

GPU = load_known_machine("rtx-4090")
FACTORS = RateFactors(disk_read=0.5, disk_write=0.25, compute=0.8, update=2.0)


def test_only_what_was_seen_changes() -> None:
    assert rescale_machine(GPU, RateFactors()) == GPU


def test_rates_are_multiplied() -> None:
    mixed = tuple(replace(link, mixed_bytes_per_s=1e9) for link in GPU.links)
    before = replace(GPU, links=mixed, compute_scale=1.2)
    after = rescale_machine(before, FACTORS)
    for old, new in zip(before.links, after.links, strict=True):
        factor = 0.5 if old.source == "disk" else 0.25 if old.target == "disk" else 1
        assert new.bytes_per_s == old.bytes_per_s * factor
        assert new.mixed_bytes_per_s == 1e9 * factor
        assert new.latency_ns == old.latency_ns
    assert after.compute_scale == pytest.approx(1.5)
    assert [u.parameters_per_s for u in after.updates] == [
        2 * u.parameters_per_s for u in before.updates
    ]
    assert after.matmul == before.matmul
    assert parse_machine(format_machine(after)) == after


def test_drives_change_with_their_links() -> None:
    drive = Drive(
        path="scratch",
        budget_bytes=1,
        read_bytes_per_s=4e9,
        write_bytes_per_s=4e9,
        measured_bytes=1,
        direct=True,
        block_bytes=4096,
        num_threads=1,
        huge_pages=True,
    )
    tiers = tuple(
        replace(tier, drives=(drive,)) if tier.name == "disk" else tier for tier in GPU.tiers
    )
    disk = rescale_machine(replace(GPU, tiers=tiers), FACTORS).tier("disk")
    assert disk is not None
    assert disk.drives == (replace(drive, read_bytes_per_s=2e9, write_bytes_per_s=1e9),)
