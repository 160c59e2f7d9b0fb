"""Several scratch folders as one tier: whose share is how large, and how much they hold together.

In: drives with their rates and budgets. Out: shares in whole units of a round of stripes, and the
bytes that may lie on all of them. Shares follow the rates, so that all drives end at the same time;
the drive whose budget is the smallest for its share therefore limits them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from packhorse.machine.spec import Drive
from packhorse.units import MIB

ROUND_UNITS: Final = 16
UNIT_BYTES: Final = MIB


def share_units(drives: Sequence[Drive]) -> tuple[int, ...]:
    """Deal out a round: at least one unit each, else in proportion to the rates.

    A drive's rate is that of reading and writing the same number of bytes.
    """
    if len(drives) == 1:
        return (1,)
    rates = [both_ways_bytes_per_s(drive) for drive in drives]
    num_units = max(ROUND_UNITS, 2 * len(drives))
    exact = [rate / sum(rates) * num_units for rate in rates]
    units = [max(1, int(share)) for share in exact]
    while sum(units) != num_units:
        # Whoever is furthest below its share gets a unit; whoever is furthest above gives one.
        step = 1 if sum(units) < num_units else -1
        able = [at for at, own in enumerate(units) if own + step >= 1]
        chosen = max(able, key=lambda at: step * (exact[at] - units[at]))
        units[chosen] += step
    return tuple(units)


def usable_bytes(drives: Sequence[Drive]) -> int:
    """How much a plan may put on drives together, by their budgets and shares."""
    if len(drives) == 1:
        return drives[0].budget_bytes
    units = share_units(drives)
    rounds = min(
        drive.budget_bytes // (own * UNIT_BYTES) for drive, own in zip(drives, units, strict=True)
    )
    return rounds * sum(units) * UNIT_BYTES


def both_ways_bytes_per_s(drive: Drive) -> float:
    """The rate at which a drive reads and then writes the same bytes."""
    return 2 / (1 / drive.read_bytes_per_s + 1 / drive.write_bytes_per_s)
