"""A machine that stands for a faster one: the same ratios, slow enough to be kept up with here.

In: a machine with a device, such as a known one, and a factor. Out: a `Machine` whose rates are all
divided by it. The runtime makes its tasks last as long as these rates say, on the CPU: the device
tier is then a share of this process's memory, the host tier another one. Overlap, order and memory
are the real ones, and all times are those of the faster machine times the factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.spec import Emulation, Machine, TierName

_NEEDED: Final[tuple[tuple[TierName, TierName], ...]] = (("device", "host"), ("host", "device"))


def slow_down(machine: Machine, factor: float, budget_bytes: Mapping[TierName, int]) -> Machine:
    """Give the machine that emulates another one.

    Args:
        machine: has a device and a host tier, linked both ways.
        factor: how many times slower every rate is.
        budget_bytes: what is there of `device` and `host`; other tiers are left out.

    Raises:
        InputError: the machine has no host tier beside its device, the factor is no positive
            number, or a budget of the two is missing.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(
            f"a machine cannot be {factor} times slower",
            where=f"machine {machine.name}",
            fix="give a positive number, such as 400",
        )
    for tier in ("device", "host"):
        if budget_bytes.get(tier, 0) <= 0:
            raise InputError(
                f"the emulated machine has no memory for its {tier} tier",
                where=f"machine {machine.name}",
                fix=f"give a budget for it: {tier}=1GiB",
            )
    if any(machine.link(source, target) is None for source, target in _NEEDED):
        raise InputError(
            f"{machine.name} has no host tier beside its device, so there is nothing to emulate",
            where=f"machine {machine.name}",
            fix="name a machine with a GPU; the catalogue has some",
        )
    return replace(
        machine,
        name=f"emulated-{machine.name}",
        source="hand",
        fingerprint=f"emulated:{machine.fingerprint}",
        device="cpu",
        num_cores=1,
        num_threads=1,
        bf16_native=False,
        tiers=tuple(
            replace(tier, total_bytes=size, budget_bytes=size)
            for tier in machine.tiers
            if (size := budget_bytes.get(tier.name)) is not None
        ),
        links=tuple(
            replace(
                link,
                bytes_per_s=link.bytes_per_s / factor,
                mixed_bytes_per_s=None
                if link.mixed_bytes_per_s is None
                else link.mixed_bytes_per_s / factor,
                latency_ns=round(link.latency_ns * factor),
            )
            for link in machine.links
            if (link.source, link.target) in _NEEDED
        ),
        matmul=tuple(
            replace(point, flops_per_s=point.flops_per_s / factor) for point in machine.matmul
        ),
        memory_bytes_per_s=machine.memory_bytes_per_s / factor,
        updates=tuple(
            replace(rate, parameters_per_s=rate.parameters_per_s / factor)
            for rate in machine.updates
        ),
        emulation=Emulation(of=machine.name, slowdown=factor),
    )
