from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch

from packhorse.errors import PeerLostError
from packhorse.machine import probe_links
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.probe_links import (
    PeerRates,
    choose_pairs,
    format_rates,
    measure_peer,
    parse_rates,
    serve_peer,
    spread_links,
)
from packhorse.machine.rank_shares import share_machine, share_threads
from packhorse.machine.spec import Drive, Machine
from packhorse.runtime.transport.loopback import LoopbackGroup


def rates(**other: float) -> PeerRates:
    return PeerRates(
        **{
            "latency_ns": 100,
            "push_bytes_per_s": 1e9,
            "pull_bytes_per_s": 1e9,
            "push_core_ns_per_byte": 0.1,
            "pull_core_ns_per_byte": 0.2,
            **other,
        }
    )


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ("a", ()),
        ("ab", ((0, 1),)),
        ("aaaa", ((0, 1),)),
        ("aaab", ((0, 1), (0, 3))),
        ("abab", ((0, 1), (0, 2), (1, 3))),
        ("abc", ((0, 1), (0, 2), (1, 2))),
    ],
)
def test_every_two_hosts_have_one_pair(hosts: str, pairs: tuple[tuple[int, int], ...]) -> None:
    assert choose_pairs(hosts) == pairs
    # So the links of all ranks are known.
    measured = {way: rates() for pair in pairs for way in (pair, pair[::-1])}
    links = spread_links(hosts, measured)
    assert set(links) == set(permutations(range(len(hosts)), 2))
    assert all(link.peer == target for (_, target), link in links.items())


def test_a_link_is_what_both_its_ends_saw() -> None:
    here = rates(push_bytes_per_s=4e9, pull_bytes_per_s=9e9, latency_ns=300)
    there = rates(push_bytes_per_s=4e9, pull_bytes_per_s=1e9, push_core_ns_per_byte=0.7)
    links = spread_links("abb", {(0, 1): here, (1, 0): there, (1, 2): rates(), (2, 1): rates()})
    assert links[0, 1].bytes_per_s == pytest.approx(2e9)
    assert links[1, 0].bytes_per_s == pytest.approx(6e9)
    assert links[0, 2].latency_ns == links[2, 0].latency_ns == 200
    assert (links[0, 1].core_ns_per_byte, links[1, 0].core_ns_per_byte) == (0.2, 0.7)
    assert links[1, 2].bytes_per_s == pytest.approx(1e9)


def test_rates_are_said_as_text() -> None:
    said = [{(0, 1): rates()}, {}, {(2, 0): rates(latency_ns=7), (2, 1): rates()}]
    heard = parse_rates([format_rates(each) for each in said])
    assert heard == said[0] | said[2]


class SlowGroup(LoopbackGroup):
    """Messages that take at least so long for a byte, by a clock of their own."""

    def __init__(self, ns_per_byte: float) -> None:
        super().__init__(2, wait_s=20)
        self._ns_per_byte = ns_per_byte
        self.now_ns = 0
        self.largest = 0

    def receive(self, tensor: torch.Tensor, source: int, target: int) -> None:
        super().receive(tensor, source, target)
        self.now_ns += 1000 + round(tensor.nbytes * self._ns_per_byte)
        self.largest = max(self.largest, tensor.nbytes)


def measure_pair(group: LoopbackGroup, limit_ns: int) -> PeerRates:
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_peer, group.end_of(1), 0)
        found = measure_peer(group.end_of(0), 1, num_threads=1, limit_ns=limit_ns)
        served.result()
    return found


def test_an_end_measures_while_the_other_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SlowGroup(0.5)
    monkeypatch.setattr(probe_links.time, "perf_counter_ns", lambda: group.now_ns)
    monkeypatch.setattr(probe_links, "measure_core_ns_per_byte", lambda *_: 0.25)
    found = measure_pair(group, 4 * 10**9)
    # Headers have 16 bytes; half of there and back is one of them.
    assert found.latency_ns == 1008
    # Beside its bytes a message takes the microsecond that any takes.
    for rate in (found.push_bytes_per_s, found.pull_bytes_per_s):
        assert rate == pytest.approx(2e9, rel=1e-2)
    assert (found.push_core_ns_per_byte, found.pull_core_ns_per_byte) == (0.25, 0.25)
    assert group.largest == probe_links.SIZES[-1]


def test_a_slow_link_gets_no_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SlowGroup(1000)
    monkeypatch.setattr(probe_links.time, "perf_counter_ns", lambda: group.now_ns)
    monkeypatch.setattr(probe_links, "measure_core_ns_per_byte", lambda *_: 0.25)
    found = measure_pair(group, 4 * 10**9)
    assert found.push_bytes_per_s == pytest.approx(1e6, rel=1e-2)
    assert group.largest == probe_links.SIZES[0]


def test_what_messages_take_of_a_core_is_measured() -> None:
    found = measure_pair(LoopbackGroup(2, wait_s=20), 10**8)
    for rate, cost in (
        (found.push_bytes_per_s, found.push_core_ns_per_byte),
        (found.pull_bytes_per_s, found.pull_core_ns_per_byte),
    ):
        assert rate > 0
        assert cost > 0


def test_a_peer_that_is_gone_ends_the_measurement() -> None:
    group = LoopbackGroup(2, wait_s=0.2)
    with pytest.raises(PeerLostError):
        measure_peer(group.end_of(0), 1, num_threads=1, limit_ns=10**8)
    group.abort("gone")
    with pytest.raises(PeerLostError, match="gone"):
        serve_peer(group.end_of(1), 0)


def drives(machine: Machine) -> tuple[Drive, ...]:
    tier = machine.tier("disk")
    assert tier is not None
    return tier.drives


def test_ranks_of_a_computer_share_it() -> None:
    whole = load_known_machine("laptop-16gb")
    assert share_machine(whole, 1) == whole
    part = share_machine(whole, 4)
    for tier, own in zip(whole.tiers, part.tiers, strict=True):
        assert (own.budget_bytes, own.total_bytes) == (
            tier.budget_bytes // 4,
            tier.total_bytes // 4,
        )
    for link, own in zip(whole.links, part.links, strict=True):
        assert own.bytes_per_s == link.bytes_per_s / 4
        assert own.core_ns_per_byte == link.core_ns_per_byte
    assert part.num_cores == max(1, whole.num_cores // 4)
    assert part.matmul == whole.matmul
    assert [drive.budget_bytes for drive in drives(part)] == [
        drive.budget_bytes // 4 for drive in drives(whole)
    ]
    assert (share_threads(8, 3), share_threads(2, 4)) == (2, 1)


def test_a_gpu_is_a_ranks_own() -> None:
    whole = load_known_machine("rtx-4090")
    part = share_machine(whole, 2)
    budgets = {tier.name: tier.budget_bytes for tier in part.tiers}
    for tier in whole.tiers:
        share = 1 if tier.name == "device" else 2
        assert budgets[tier.name] == tier.budget_bytes // share
    assert part.link("host", "device") == whole.link("host", "device")
    disk = part.link("host", "disk")
    whole_disk = whole.link("host", "disk")
    assert disk is not None
    assert whole_disk is not None
    assert disk.bytes_per_s == whole_disk.bytes_per_s / 2
