"""What one of several ranks on a computer has of it.

In: the machine of the whole computer, and how many ranks share it. Out: the machine of each of
them: an equal part of the cores, of memory and of what the drives hold and do. A GPU is a rank's
own.
"""

from __future__ import annotations

from dataclasses import replace

from packhorse.machine.spec import Drive, Link, Machine, Saving, Tier


def share_threads(num_cores: int, num_ranks: int) -> int:
    """Threads that each rank computes with: its part of the cores, at least one."""
    return max(1, num_cores // num_ranks)


def share_machine(machine: Machine, num_ranks: int) -> Machine:
    """Give one of `num_ranks` equal ranks its part of a computer.

    Rates of computing stay: they were measured with the rank's threads. Drives that all ranks use
    at the same time give each a part of their rate.
    """
    if num_ranks == 1:
        return machine
    return replace(
        machine,
        num_cores=share_threads(machine.num_cores, num_ranks),
        tiers=tuple(
            tier
            if tier.name == "device" and machine.device != "cpu"
            else _share_tier(tier, num_ranks)
            for tier in machine.tiers
        ),
        links=tuple(
            _share_link(link, num_ranks) if "disk" in (link.source, link.target) else link
            for link in machine.links
        ),
        saving=None if machine.saving is None else _share_saving(machine.saving, num_ranks),
    )


def _share_tier(tier: Tier, num_ranks: int) -> Tier:
    return replace(
        tier,
        total_bytes=tier.total_bytes // num_ranks,
        budget_bytes=tier.budget_bytes // num_ranks,
        endurance_bytes=None
        if tier.endurance_bytes is None
        else max(1, tier.endurance_bytes // num_ranks),
        drives=tuple(_share_drive(drive, num_ranks) for drive in tier.drives),
    )


def _share_drive(drive: Drive, num_ranks: int) -> Drive:
    return replace(
        drive,
        budget_bytes=drive.budget_bytes // num_ranks,
        read_bytes_per_s=drive.read_bytes_per_s / num_ranks,
        write_bytes_per_s=drive.write_bytes_per_s / num_ranks,
    )


def _share_link(link: Link, num_ranks: int) -> Link:
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / num_ranks,
        mixed_bytes_per_s=_part(link.mixed_bytes_per_s, num_ranks),
        burst_bytes_per_s=_part(link.burst_bytes_per_s, num_ranks),
    )


def _share_saving(saving: Saving, num_ranks: int) -> Saving:
    return replace(saving, write_bytes_per_s=saving.write_bytes_per_s / num_ranks)


def _part(rate: float | None, num_ranks: int) -> float | None:
    return None if rate is None else rate / num_ranks
