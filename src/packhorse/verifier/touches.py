"""What each task touches, by number: looked up once for all rules.

In: a program whose buffers are all declared. Out: `Touches`, for each task the places that it reads
and writes. A *place* is a buffer in a tier. Of n buffers, number b is place b in the device, n + b
in the host and 2 n + b on the disk, so that a place tells its buffer: `place % n`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.program.buffers import BufferId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Free, accesses_of

TIERS: Final[tuple[TierName, ...]] = ("device", "host", "disk")

Places = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Touches:
    """The places that each task reads and writes; a Free reads the one that it drops.

    `names` are the buffers by number, `numbers` the inverse. `last_read` gives for a place the last
    task that reads it and is no Free.
    """

    names: tuple[BufferId, ...]
    numbers: Mapping[BufferId, int]
    reads: Sequence[Places]
    writes: Sequence[Places]
    last_read: Mapping[int, int]

    def place(self, buffer: BufferId, tier: TierName) -> int:
        """The number of a place."""
        return TIERS.index(tier) * len(self.names) + self.numbers[buffer]

    def buffer_at(self, place: int) -> BufferId:
        """The buffer of a place."""
        return self.names[place % len(self.names)]

    def tier_at(self, place: int) -> TierName:
        """The tier of a place."""
        return TIERS[place // len(self.names)]


def find_touches(program: Program) -> Touches:
    """Look up the places of every task."""
    names = tuple(program.buffers)
    numbers = {name: at for at, name in enumerate(names)}
    first = {tier: at * len(names) for at, tier in enumerate(TIERS)}
    find = numbers.__getitem__
    reads: list[Places] = []
    writes: list[Places] = []
    last_read: dict[int, int] = {}
    for index, task in enumerate(program.tasks):
        read_tier, read, write_tier, written = accesses_of(task)
        places = tuple(map(find, read))
        if read_tier != "device":
            places = tuple([first[read_tier] + place for place in places])
        reads.append(places)
        if not isinstance(task, Free):
            for place in places:
                last_read[place] = index
        places = tuple(map(find, written))
        if write_tier != "device":
            places = tuple([first[write_tier] + place for place in places])
        writes.append(places)
    return Touches(names=names, numbers=numbers, reads=reads, writes=writes, last_read=last_read)
