"""Whether others compute here too: what they take of the cores while something is measured.

In: two looks at the clocks of the cores that this process may use. Out: how many cores others kept
busy between them, and the share of the compute threads' time that this cost. Cores that would have
been idle cost nothing; what a hypervisor took counts as taken. Interrupts do not count: they are as
a rule our own transfers.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

import psutil

from packhorse.machine.limits import find_core_limit
from packhorse.units import format_percent

BUSY_SHARE: Final = 0.1
"""From this share on a measurement is not believed without a word."""

# The clocks tick a hundred times a second: over less nothing can be said.
_LEAST_S: Final = 0.25
_SURE_SHARE: Final = 0.9
_WORTH_TELLING: Final = 2.0
_OTHER: Final = ("idle", "iowait", "irq", "softirq", "guest", "guest_nice")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreClocks:
    """One look: seconds that the cores were at work since the start, and what of it was ours.

    `num_cores` is how many physical ones this process may use.
    """

    at_s: float
    busy_s: float
    own_s: float
    num_cores: int

    def others_since(self, before: CoreClocks) -> float:
        """How many cores others kept busy since an earlier look; 0 over too short a time."""
        passed_s = self.at_s - before.at_s
        if passed_s < _LEAST_S:
            return 0.0
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return max(0.0, others_s / passed_s)

    def share_since(self, before: CoreClocks, num_threads: int) -> float:
        """The share of the time of `num_threads` threads that others took, 0 to 1."""
        spare = max(0, self.num_cores - num_threads)
        taken = self.others_since(before) - spare
        return min(1.0, max(0.0, taken / num_threads))


def read_core_clocks() -> CoreClocks:
    """Look at the clocks of the cores that this process may use, children that ended included."""
    own = psutil.Process().cpu_times()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    busy_s = sum(
        sum(seconds for name, seconds in times._asdict().items() if name not in _OTHER)
        for cpu, times in enumerate(psutil.cpu_times(percpu=True))
        if allowed is None or cpu in allowed
    )
    return CoreClocks(
        at_s=time.monotonic(),
        busy_s=busy_s,
        own_s=own.user + own.system + own.children_user + own.children_system,
        num_cores=find_core_limit().num_physical,
    )


def say_busy(share: float, *, what: str, fix: str, slowdown: float = 1.0) -> str | None:
    """Say in one line that a measurement is not to be believed; None where it may be.

    Args:
        share: of the compute threads' time, taken by others meanwhile.
        what: what was measured, as `its rates`.
        fix: what to do once the machine is idle.
        slowdown: how many times as long as the machine's rates give it took, where that is known:
            threads that wait for each other lose more than their share of time.
    """
    if share < BUSY_SHARE:
        return None
    # Of a share near 1 nothing can be concluded but that it was too much.
    slow = f"{1 / (1 - share):.1f} x or more" if share <= _SURE_SHARE else "many times"
    told = (
        f" (they took {slowdown:.1f} x what the machine's rates give)"
        if slowdown > _WORTH_TELLING
        else ""
    )
    return (
        f"the machine was busy while {what} were measured: other processes took"
        f" {format_percent(share)} of the compute threads' time{told}, so forecasts may be {slow}"
        f" too long; when it is idle, {fix}"
    )
