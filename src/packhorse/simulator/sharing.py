"""Two lanes that move bytes over one path, such as a drive that is read and written at once.

In: a machine's links, alone and mixed; transfers in program order. Out: when each begins and ends.
One number says how a path is shared, `at_once`: how much work gets done in a nanosecond while both
lanes are busy, in nanoseconds of either lane alone.

    mixed rate / rate alone, summed over both directions
    2    full duplex: the lanes do not notice each other
    1.4  together they move 1.4 times as much as in turns
    1    half duplex: in turns
    0.8  worse than in turns

A transfer that is booked keeps its times, so whoever comes later takes what is left: it moves at
`at_once - 1` of its rate while the other lane is busy, and at its full rate in the gaps. The path
then carries exactly `at_once` while both lanes are busy. Below 1 nothing is left, and all transfers
take longer, by as much of the loss as the program mixes them: `stretch_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import Final

from packhorse.machine.spec import Link, Machine
from packhorse.program.program import Program
from packhorse.program.tasks import Copy, Lane, lane_of
from packhorse.simulator.costs import CostModel

HALF_DUPLEX: Final = 1.0
FULL_DUPLEX: Final = 2.0
_LEAST_AT_ONCE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPath:
    """Two lanes over one path, and how much work both do at once."""

    lanes: tuple[Lane, Lane]
    at_once: float = HALF_DUPLEX


class PathCalendar:
    """When the two lanes of a shared path are busy; each lane books in the order of time."""

    def __init__(self, path: SharedPath) -> None:
        first, second = path.lanes
        self._other: dict[Lane, Lane] = {first: second, second: first}
        self._pace = min(max(path.at_once - 1, 0.0), 1.0)
        self._starts: dict[Lane, list[int]] = {lane: [] for lane in path.lanes}
        self._ends: dict[Lane, list[int]] = {lane: [] for lane in path.lanes}

    def book(self, lane: Lane, ready_ns: int, duration_ns: int) -> tuple[int, int]:
        """Take the path for a transfer, not before `ready_ns`; returns its start and its end.

        Args:
            duration_ns: how long it takes alone.
        """
        starts, ends = self._starts[self._other[lane]], self._ends[self._other[lane]]
        place = bisect_right(ends, ready_ns)
        start_ns: int | None = None
        now_ns, left_ns = ready_ns, duration_ns
        while place < len(starts):
            gap_ns = max(starts[place] - now_ns, 0)
            if left_ns <= gap_ns:
                break
            if gap_ns and start_ns is None:
                start_ns = now_ns
            left_ns -= gap_ns
            now_ns += gap_ns
            beside_ns = ends[place] - now_ns
            if self._pace:
                start_ns = now_ns if start_ns is None else start_ns
                if ceil(left_ns / self._pace) <= beside_ns:
                    left_ns = ceil(left_ns / self._pace)
                    break
                left_ns -= int(beside_ns * self._pace)
            now_ns = ends[place]
            place += 1
        end_ns = now_ns + left_ns
        start_ns = now_ns if start_ns is None else start_ns
        self._starts[lane].append(start_ns)
        self._ends[lane].append(end_ns)
        return start_ns, end_ns


def sharing_of(machine: Machine) -> tuple[SharedPath, ...]:
    """Tell which lanes share a path on a machine, and how.

    A disk whose mixed rates nobody measured moves bytes in one direction at a time; the link
    between host and device in both.
    """
    paths = [SharedPath(lanes=("disk_read", "disk_write"), at_once=_disk_at_once(machine))]
    there, back = machine.link("host", "device"), machine.link("device", "host")
    if there is not None and back is not None:
        at_once = _at_once(there, back)
        if at_once is not None:
            paths.append(SharedPath(lanes=("copy_in", "copy_out"), at_once=at_once))
    return tuple(paths)


def stretch_of(path: SharedPath, program: Program, costs: CostModel) -> float:
    """How much longer a program's transfers take because mixing them is worse than turns.

    1 unless `at_once` is below 1. Of the busy time of both lanes, twice the shorter one can be
    mixed; that share of it takes 1 / `at_once` as long.
    """
    if path.at_once >= HALF_DUPLEX:
        return 1.0
    busy_ns = dict.fromkeys(path.lanes, 0)
    for task in program.tasks:
        if isinstance(task, Copy) and lane_of(task) in busy_ns:
            busy_ns[lane_of(task)] += costs.duration_ns(task)
    total_ns = sum(busy_ns.values())
    mixed = 2 * min(busy_ns.values()) / total_ns if total_ns else 0.0
    return 1 + mixed * (1 / max(path.at_once, _LEAST_AT_ONCE) - 1)


def _disk_at_once(machine: Machine) -> float:
    for near in ("host", "device"):
        read, write = machine.link("disk", near), machine.link(near, "disk")
        if read is not None and write is not None:
            at_once = _at_once(read, write)
            return HALF_DUPLEX if at_once is None else at_once
    return HALF_DUPLEX


def _at_once(one: Link, other: Link) -> float | None:
    if one.mixed_bytes_per_s is None or other.mixed_bytes_per_s is None:
        return None
    shares = (
        link.mixed_bytes_per_s / link.bytes_per_s for link in (one, other) if link.mixed_bytes_per_s
    )
    return min(sum(shares), FULL_DUPLEX)
