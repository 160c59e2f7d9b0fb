"""`torchrun -m packhorse probe`: the machines of all ranks, and the links between them.

In: what was typed, on every rank. Out: on rank 0 the table and one file for all; the others are
silent. One rank of each host measures it for all ranks there, then pairs of ranks measure the links
between hosts, one after another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.errors import PeerLostError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.cli.screen import Screen, Tell
    from packhorse.machine.cluster import Cluster, Links
    from packhorse.machine.spec import Machine, PeerLink
    from packhorse.runtime.transport.meeting import Meeting

LINK_WAIT: Final = timedelta(seconds=30)
"""How long a message of a link's measurement may take."""

_ALL_PAIRS_NS: Final = 120 * 10**9
_MOST_LINES: Final = 16

Measure = Callable[[int, "Tell | None"], "Machine"]
"""Measures this host, given how many threads a rank computes with and who is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProbe:
    """How all ranks are measured.

    `measure_wait` is how long a host may take, `pair_limit_ns` how long a pair of ranks.
    """

    measure: Measure
    measure_wait: timedelta
    pair_limit_ns: int


def probe_ranks(meeting: Meeting, probe: RanksProbe, screen: Screen) -> Cluster:
    """Measure all ranks and their links; every rank gets the same cluster.

    Raises:
        PeerLostError: another rank has failed, or is silent.
    """
    from packhorse.machine.cluster import Cluster, give_links

    shown = screen.progress("measuring the ranks") if meeting.rank == 0 else nullcontext()
    with shown as tell:
        ranks = _probe_hosts(meeting, probe, tell)
        links = _probe_links(meeting, ranks, probe.pair_limit_ns, tell)
    ranks = give_links(ranks, links)
    num_hosts = len(set(meeting.hosts))
    name = f"{meeting.num_ranks} ranks on {num_hosts} host{'' if num_hosts == 1 else 's'}"
    return Cluster(name=name, ranks=ranks, hosts=meeting.hosts)


def _probe_hosts(meeting: Meeting, probe: RanksProbe, tell: Tell | None) -> tuple[Machine, ...]:
    from packhorse.machine.files import format_machine, parse_machine
    from packhorse.machine.limits import find_core_limit
    from packhorse.machine.rank_shares import share_machine, share_threads

    hosts = meeting.hosts
    found = ""
    if hosts.index(meeting.host) == meeting.rank:
        # The first rank of its host; the others of it wait, so that nothing disturbs.
        num_local = hosts.count(meeting.host)
        threads = share_threads(find_core_limit().num_cores, num_local)
        found = format_machine(share_machine(probe.measure(threads, tell), num_local))
    texts = meeting.gather(found, wait=probe.measure_wait)
    return tuple(
        parse_machine(texts[hosts.index(host)], where=f"what host {host} measured")
        for host in hosts
    )


def _probe_links(
    meeting: Meeting, ranks: Sequence[Machine], pair_limit_ns: int, tell: Tell | None
) -> Links:
    from packhorse.machine.probe_links import (
        PeerRates,
        choose_pairs,
        format_rates,
        measure_peer,
        parse_rates,
        serve_peer,
        spread_links,
    )
    from packhorse.runtime.transport.processes import ProcessTransport

    pairs = choose_pairs(meeting.hosts)
    ways = [(rank, peer) for pair in pairs for rank, peer in (pair, pair[::-1])]
    channels = ProcessTransport(ways, meeting.store, wait=LINK_WAIT)
    # Many hosts make many pairs, and nobody waits an hour for them.
    limit_ns = min(pair_limit_ns, _ALL_PAIRS_NS // max(1, len(pairs)))
    rates: dict[tuple[int, int], PeerRates] = {}
    for at, (rank, peer) in enumerate(ways):
        if tell is not None and at % 2 == 0:
            tell(f"messages between rank {rank} and rank {peer}", at // 2, len(pairs))
        if meeting.rank == rank:
            with naming_peer(meeting, peer):
                rates[rank, peer] = measure_peer(
                    channels, peer, num_threads=ranks[rank].num_threads, limit_ns=limit_ns
                )
        elif meeting.rank == peer:
            with naming_peer(meeting, rank):
                serve_peer(channels, rank)
        # One pair at a time; a slow link takes longer than it was given.
        meeting.barrier(wait=4 * LINK_WAIT)
    channels.close()
    return spread_links(meeting.hosts, parse_rates(meeting.gather(format_rates(rates))))


@contextmanager
def naming_peer(meeting: Meeting, peer: int) -> Generator[None]:
    """Inside, an error about a peer says who that is, and where."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(
            f"no more messages between {meeting.attendees[meeting.rank]} and"
            f" {meeting.attendees[peer]}: {error.what}",
            where=error.where,
            fix="look at what that rank said last, and at the network between the two hosts",
            peer=peer,
        ) from error


def cluster_table(cluster: Cluster) -> RenderableType:
    """Render ranks that are alike and the links between hosts, a line for each."""
    from rich.console import Group

    from packhorse.report.tables import plain_table
    from packhorse.units import format_bytes, format_ns, format_percent

    ranks = plain_table()
    for name in ("rank", "host", "machine"):
        ranks.add_column(name, overflow="fold")
    for name in ("threads", "to use of each tier"):
        ranks.add_column(name)
    shown = zip(range(cluster.num_ranks), cluster.hosts, cluster.ranks, strict=True)
    for (host, _), group in groupby(shown, key=lambda each: (each[1], each[2].fingerprint)):
        alike = list(group)
        machine = alike[0][2]
        tiers = ", ".join(
            f"{tier.name} {format_bytes(tier.budget_bytes)}" for tier in machine.tiers
        )
        numbers = _say_range(alike[0][0], alike[-1][0])
        ranks.add_row(numbers, host, machine.name, str(machine.num_threads), tiers)
    links = plain_table()
    for name in ("link", "rate", "latency", "of a core"):
        links.add_column(name)
    lines = _find_sorts(cluster)
    for name, link in lines[:_MOST_LINES]:
        share = link.core_ns_per_byte * link.bytes_per_s / 1e9
        links.add_row(
            name,
            f"{format_bytes(link.bytes_per_s)}/s",
            format_ns(link.latency_ns),
            format_percent(share),
        )
    if len(lines) > _MOST_LINES:
        links.add_row(f"and {len(lines) - _MOST_LINES} more in the file")
    return Group(ranks, "", links) if lines else ranks


def _find_sorts(cluster: Cluster) -> list[tuple[str, PeerLink]]:
    """One link from each host to each, itself included, with words for it."""
    sorts: dict[tuple[str, str], PeerLink] = {}
    for (source, target), link in cluster.links.items():
        sorts.setdefault((cluster.hosts[source], cluster.hosts[target]), link)
    return [
        (f"within {source}" if source == target else f"{source} -> {target}", link)
        for (source, target), link in sorts.items()
    ]


def _say_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def write_cluster_file(cluster: Cluster, out: Path, screen: Screen) -> None:
    """Show the cluster and write its file: what rank 0 does at the end."""
    from packhorse.cli.machines import warn_of_busy
    from packhorse.cli.outputs import write_output
    from packhorse.machine.cluster_files import format_cluster

    text = format_cluster(cluster)
    for host in dict.fromkeys(cluster.hosts):
        warn_of_busy(
            screen,
            cluster.ranks[cluster.hosts.index(host)].busy_share,
            what=f"the rates of {host}",
            fix="measure again with --fresh",
        )
    write_output(out, text)
    screen.show(cluster_table(cluster))
    screen.wrote(out)
    screen.answer({"file": str(out), "cluster": json.loads(text)})
