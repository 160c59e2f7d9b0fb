"""A machine with the rates that a run showed.

In: a machine, and by what each rate was off: measured over planned. Out: the same machine with
other rates. What was not seen stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packhorse.machine.spec import Link, Machine, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFactors:
    """Measured rate over planned rate; 1 for what was not seen."""

    disk_read: float = 1.0
    disk_write: float = 1.0
    compute: float = 1.0
    update: float = 1.0


def rescale_machine(machine: Machine, factors: RateFactors) -> Machine:
    """Multiply a machine's rates by what a run showed of them."""
    saving = machine.saving
    return replace(
        machine,
        tiers=tuple(_rescale_tier(tier, factors) for tier in machine.tiers),
        links=tuple(_rescale_link(link, factors) for link in machine.links),
        updates=tuple(
            replace(update, parameters_per_s=update.parameters_per_s * factors.update)
            for update in machine.updates
        ),
        compute_scale=machine.compute_scale / factors.compute,
        saving=saving
        and replace(saving, write_bytes_per_s=saving.write_bytes_per_s * factors.disk_write),
    )


def _rescale_tier(tier: Tier, factors: RateFactors) -> Tier:
    return replace(
        tier,
        drives=tuple(
            replace(
                drive,
                read_bytes_per_s=drive.read_bytes_per_s * factors.disk_read,
                write_bytes_per_s=drive.write_bytes_per_s * factors.disk_write,
            )
            for drive in tier.drives
        ),
    )


def _rescale_link(link: Link, factors: RateFactors) -> Link:
    if link.source == "disk":
        factor = factors.disk_read
    elif link.target == "disk":
        factor = factors.disk_write
    else:
        return link
    mixed = link.mixed_bytes_per_s
    return replace(
        link,
        bytes_per_s=link.bytes_per_s * factor,
        mixed_bytes_per_s=None if mixed is None else mixed * factor,
    )
