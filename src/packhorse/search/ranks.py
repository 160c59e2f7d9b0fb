"""The ranks of a pipeline and the links between them, as the search of stages sees them.

In: what each rank's hardware was found to do. Out: frozen values. Ranks may be unlike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

from packhorse.errors import InputError
from packhorse.profile.spec import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank: how fast it computes, and what it may hold.

    A body takes `time_factor` times as long as `profile` says. `budget_bytes` is for all that the
    rank holds in its device tier. `away_bytes_per_s` is the rate at which states that do not fit
    come and go, in each direction; None where they may lie nowhere else.
    """

    profile: Profile
    budget_bytes: int
    time_factor: float = 1.0
    away_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """A one-way path between two ranks.

    `core_ns_per_byte` is how long moving a byte keeps either end from computing, 0 where it does
    not.
    """

    bytes_per_s: float
    latency_ns: int = 0
    core_ns_per_byte: float = 0.0

    def transfer_ns(self, size_bytes: int) -> int:
        """How long a message is on its way; none at all takes nothing."""
        return self.latency_ns + round(size_bytes * 1e9 / self.bytes_per_s) if size_bytes else 0

    def core_ns(self, size_bytes: int) -> int:
        """How long a message keeps either end from computing."""
        return round(size_bytes * self.core_ns_per_byte)


Links = Mapping[tuple[int, int], RankLink]
"""The link from one rank to another, by both."""


def link_all(num_ranks: int, link: RankLink) -> Links:
    """Give every rank the same link to every other."""
    return dict.fromkeys(permutations(range(num_ranks), 2), link)


def find_link(links: Links, source: int, target: int) -> RankLink:
    """Find the link from one rank to another.

    Raises:
        InputError: there is none.
    """
    link = links.get((source, target))
    if link is None:
        raise InputError(
            f"there is no link from rank {source} to rank {target}",
            where="the links between ranks",
            fix="measure it, or place stages so that these two do not send to each other",
        )
    return link
