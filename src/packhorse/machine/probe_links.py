"""Measures the links between ranks, by messages of the kind that a run sends.

In: this rank's channels, and which peer. Out: what one end of a pair sees of both its ways; and the
links between all ranks, from one pair for every two hosts.

    the one end measures and says each time what it wants      the other end serves
      latency    a few bytes there and back, half of it
      push       a message of some size goes, a short answer comes: size over time, less latencies
      pull       a message is asked for, and comes
      core       what computing loses beside pushing, and beside pulling
    then they change places: what a message takes of the cores is another thing at its other end
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, permutations
from typing import Final, Protocol

import torch
from torch import Tensor

from packhorse.machine.cluster import Links
from packhorse.machine.probe_crowding import measure_core_ns_per_byte
from packhorse.machine.probe_passes import Moved
from packhorse.machine.spec import PeerLink
from packhorse.units import MIB

SIZES: Final = (MIB, 4 * MIB, 16 * MIB)
"""Of messages, as values between stages often are."""

DEFAULT_LIMIT_NS: Final = 3 * 10**9
"""What a pair may take, both ends together."""

_PINGS: Final = 51
_LEAST_MESSAGES: Final = 3
# Of a pair's time: each way at each size, and each way beside computing, at both ends.
_RATE_SHARE: Final = 0.05
_CORE_SHARE: Final = 0.15

_STOP, _ECHO, _PUSH, _PULL = range(4)


class Channels(Protocol):
    """This rank's ends of the channels to and from its peers."""

    def send(self, tensor: Tensor, peer: int) -> None:
        """Hand a tensor to a peer; blocks."""
        ...

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Fill a tensor with a peer's next message; blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRates:
    """What one end sees: `push` is the way to its peer, `pull` the way back.

    The times of a core are of this end alone.
    """

    latency_ns: int
    push_bytes_per_s: float
    pull_bytes_per_s: float
    push_core_ns_per_byte: float
    pull_core_ns_per_byte: float


def format_rates(rates: Mapping[tuple[int, int], PeerRates]) -> str:
    """Render what a rank measured, to be said to all others."""
    return json.dumps([[*pair, asdict(each)] for pair, each in rates.items()])


def parse_rates(texts: Sequence[str]) -> dict[tuple[int, int], PeerRates]:
    """Read what all ranks measured."""
    return {
        (rank, peer): PeerRates(**values)
        for text in texts
        for rank, peer, values in json.loads(text)
    }


def choose_pairs(hosts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Choose two ranks for every two hosts, and for every host with several ranks.

    Args:
        hosts: the host of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    pairs: list[tuple[int, int]] = []
    for first, second in combinations_with_replacement(ranks.values(), 2):
        if first is not second:
            pairs.append((first[0], second[0]))
        elif len(first) > 1:
            pairs.append((first[0], first[1]))
    return tuple(sorted(pairs))


def spread_links(hosts: Sequence[str], rates: Mapping[tuple[int, int], PeerRates]) -> Links:
    """Give every two ranks the link that was measured between their hosts.

    Args:
        hosts: the host of each rank.
        rates: by rank and peer, of both ends of the pairs of `choose_pairs`.
    """
    known: dict[tuple[str, str], PeerLink] = {}
    for (rank, peer), here in rates.items():
        there = rates[peer, rank]
        link = PeerLink(
            peer=peer,
            # Each way was pushed from its source, and pulled from its target.
            bytes_per_s=statistics.geometric_mean((here.push_bytes_per_s, there.pull_bytes_per_s)),
            latency_ns=(here.latency_ns + there.latency_ns) // 2,
            core_ns_per_byte=max(here.push_core_ns_per_byte, there.pull_core_ns_per_byte),
        )
        # Within a host both ways are one sort of link; the first is as good as the other.
        known.setdefault((hosts[rank], hosts[peer]), link)
    return {
        (source, target): PeerLink(
            peer=target,
            bytes_per_s=link.bytes_per_s,
            latency_ns=link.latency_ns,
            core_ns_per_byte=link.core_ns_per_byte,
        )
        for source, target in permutations(range(len(hosts)), 2)
        for link in (known[hosts[source], hosts[target]],)
    }


def measure_peer(
    channels: Channels, peer: int, *, num_threads: int, limit_ns: int = DEFAULT_LIMIT_NS
) -> PeerRates:
    """Measure both ways between this rank and a peer, which serves meanwhile.

    Args:
        num_threads: what computes here.
        limit_ns: of the pair, of which this end takes half.

    Raises:
        PeerLostError: the channels' own, where the peer is gone.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    end = _ActiveEnd(channels, peer)
    try:
        latency_ns = end.echo_ns()
        rate_ns, core_ns = round(limit_ns * _RATE_SHARE), round(limit_ns * _CORE_SHARE)
        rates: list[float] = []
        costs: list[float] = []
        # A push is answered, a pull is asked for: what goes the other way is one latency.
        for move, extra in ((end.push, 2), (end.pull, 1)):
            rate, size_bytes = _measure_rate(move, extra * latency_ns, rate_ns)
            rates.append(rate)
            costs.append(measure_core_ns_per_byte(_repeat(move, size_bytes), core_ns))
    finally:
        torch.set_num_threads(before)
    end.stop()
    return PeerRates(
        latency_ns=latency_ns,
        push_bytes_per_s=rates[0],
        pull_bytes_per_s=rates[1],
        push_core_ns_per_byte=costs[0],
        pull_core_ns_per_byte=costs[1],
    )


def serve_peer(channels: Channels, peer: int) -> None:
    """Be the other end of a peer's measurement, until it is done.

    Raises:
        PeerLostError: the channels' own, where the peer is gone.
    """
    header, payload = _make_header(), _make_payload()
    while True:
        channels.receive(header, peer)
        wish, size_bytes = int(header[0]), int(header[1])
        if wish == _STOP:
            return
        if wish == _PULL:
            channels.send(payload[:size_bytes], peer)
            continue
        if wish == _PUSH:
            channels.receive(payload[:size_bytes], peer)
        channels.send(header, peer)


class _ActiveEnd:
    # The end that says what is wanted; all of its calls block.
    def __init__(self, channels: Channels, peer: int) -> None:
        self._channels = channels
        self._peer = peer
        self._header, self._payload = _make_header(), _make_payload()

    def echo_ns(self) -> int:
        """Half of what a few bytes take there and back."""
        took_ns: list[int] = []
        for _ in range(_PINGS):
            began_ns = time.perf_counter_ns()
            self._say(_ECHO, 0)
            self._channels.receive(self._header, self._peer)
            took_ns.append(time.perf_counter_ns() - began_ns)
        return round(statistics.median(took_ns) / 2)

    def push(self, size_bytes: int) -> None:
        """Send a message and wait until the peer has it."""
        self._say(_PUSH, size_bytes)
        self._channels.send(self._payload[:size_bytes], self._peer)
        self._channels.receive(self._header, self._peer)

    def pull(self, size_bytes: int) -> None:
        """Ask for a message and wait until it is here."""
        self._say(_PULL, size_bytes)
        self._channels.receive(self._payload[:size_bytes], self._peer)

    def stop(self) -> None:
        """Let the peer go."""
        self._say(_STOP, 0)

    def _say(self, wish: int, size_bytes: int) -> None:
        self._header[0], self._header[1] = wish, size_bytes
        self._channels.send(self._header, self._peer)


def _make_header() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _make_payload() -> Tensor:
    # Filled, so that its pages are there.
    return torch.ones(SIZES[-1], dtype=torch.uint8)


def _measure_rate(move: Callable[[int], None], extra_ns: int, limit_ns: int) -> tuple[float, int]:
    """Give the middle of the rates at all sizes, and the size that took about the limit at most.

    Sizes from which on a message takes longer than the limit are left out.
    """
    found: list[float] = []
    largest = SIZES[0]
    for size_bytes in SIZES:
        took_ns: list[int] = []
        move(size_bytes)
        began_ns = time.perf_counter_ns()
        while len(took_ns) < _LEAST_MESSAGES or time.perf_counter_ns() - began_ns < limit_ns:
            at_ns = time.perf_counter_ns()
            move(size_bytes)
            took_ns.append(time.perf_counter_ns() - at_ns)
        whole_ns = statistics.median(took_ns)
        # A message of this size takes longer than one of a few bytes, however noisy that was.
        found.append(size_bytes * 1e9 / max(whole_ns - extra_ns, whole_ns / 2))
        if whole_ns * _LEAST_MESSAGES <= limit_ns:
            largest = size_bytes
        else:
            break
    return statistics.median(found), largest


def _repeat(move: Callable[[int], None], size_bytes: int) -> Callable[[int], Moved]:
    def move_on(limit_ns: int) -> Moved:
        began_ns = time.perf_counter_ns()
        moved_bytes = 0
        while True:
            move(size_bytes)
            moved_bytes += size_bytes
            took_ns = time.perf_counter_ns() - began_ns
            if took_ns >= limit_ns:
                return Moved(size_bytes=moved_bytes, duration_ns=took_ns)

    return move_on
