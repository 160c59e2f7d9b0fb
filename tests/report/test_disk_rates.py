from dataclasses import replace

from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import Drive
from packhorse.report.disk_rates import describe_disk_rates
from packhorse.units import GIB

CPU = load_known_machine("laptop-16gb")


def probed(*, measured=4 * GIB, burst=None, mixed=None, name="laptop-16gb"):
    machine = load_known_machine(name)
    drive = Drive(
        path="scratch",
        budget_bytes=1,
        read_bytes_per_s=1,
        write_bytes_per_s=1,
        measured_bytes=measured,
        direct=True,
        block_bytes=4096,
        num_threads=1,
        huge_pages=True,
    )
    links = tuple(
        replace(
            link,
            bytes_per_s=2.0 * GIB if link.source == "disk" else 1.0 * GIB,
            burst_bytes_per_s=burst if link.target == "disk" else None,
            mixed_bytes_per_s=mixed,
        )
        for link in machine.links
    )
    tiers = tuple(
        replace(tier, drives=(drive,)) if tier.name == "disk" else tier for tier in machine.tiers
    )
    return replace(machine, source="probe", links=links, tiers=tiers)


def test_a_plan_without_a_disk_says_nothing():
    assert describe_disk_rates(probed(), 0) is None
    assert describe_disk_rates(replace(CPU, links=()), GIB) is None


def test_rates_that_were_measured_at_that_size():
    assert describe_disk_rates(probed(), 8 * GIB) == (
        "read 2.00 GiB/s, write 1.00 GiB/s; measured on 4.00 GiB"
    )
    assert describe_disk_rates(probed(mixed=0.75 * GIB, name="rtx-4090"), GIB) == (
        "read 2.00 GiB/s, write 1.00 GiB/s; 1.50 GiB/s both at once; measured on 4.00 GiB"
    )


def test_a_small_file_is_told_unless_the_rate_is_sustained():
    words = "for 9.00 GiB of scratch: `packhorse probe --sustained` tells"
    assert words in str(describe_disk_rates(probed(), 9 * GIB))
    sustained = str(describe_disk_rates(probed(burst=3.0 * GIB), 9 * GIB))
    assert "write 1.00 GiB/s sustained (3.00 GiB/s at first)" in sustained
    assert "probe" not in sustained


def test_rates_that_nobody_measured():
    text = str(describe_disk_rates(CPU, GIB))
    assert text.endswith("; from data sheets, never measured")
    old = replace(CPU, source="probe")
    assert str(describe_disk_rates(old, GIB)).endswith("; from a probe")
