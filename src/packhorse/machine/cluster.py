"""The machines of several ranks, and the links between them. Torch-free.

In: what a probe of all ranks measured, or a person's own file. Out: a frozen `Cluster`. Ranks may
be unlike, in speed, memory and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from packhorse.errors import InputError
from packhorse.machine.spec import Machine, PeerLink

Links = Mapping[tuple[int, int], PeerLink]
"""The link from one rank to another, by both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of ranks 0, 1, ... and the links between them.

    `hosts` names the computer of each rank; ranks of one host share its cores, memory and drives,
    and each one's machine says what it has of them. A machine's `peers` are the links that go out
    from its rank.
    """

    name: str
    ranks: tuple[Machine, ...]
    hosts: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def links(self) -> Links:
        """All links, by source and target."""
        return {
            (source, link.peer): link
            for source, machine in enumerate(self.ranks)
            for link in machine.peers
        }


def give_links(ranks: Sequence[Machine], links: Links) -> tuple[Machine, ...]:
    """Give each rank's machine its outgoing ones of `links`, in the order of peers."""
    return tuple(
        replace(
            machine,
            peers=tuple(
                replace(links[source, target], peer=target)
                for target in range(len(ranks))
                if (source, target) in links
            ),
        )
        for source, machine in enumerate(ranks)
    )


def link_all(num_ranks: int, link: PeerLink) -> Links:
    """Give every rank a link like this one to every other, whichever peer it names."""
    return {
        (source, target): replace(link, peer=target)
        for source, target in permutations(range(num_ranks), 2)
    }


def find_link(links: Links, source: int, target: int) -> PeerLink:
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
