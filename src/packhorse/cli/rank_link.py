"""The link between two ranks, as people type it: `--link 25GB,5us`.

In: a text, or none, and the machine. Out: a `PeerLink` and words that say where it is from. Without
a text it is the slowest link to another rank that the machine knows; without any of those, what a
network of 100 Gbit/s does.
"""

from __future__ import annotations

import re
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.spec import Machine, PeerLink
from packhorse.units import format_ns, parse_bytes

ASSUMED: Final = PeerLink(peer=0, bytes_per_s=12.5e9, latency_ns=10_000)
_UNITS_NS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000}
_LATENCY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms)")


def choose_link(text: str | None, machine: Machine) -> tuple[PeerLink, str]:
    """Give the link, and say what it is and why.

    Raises:
        InputError: the text is no rate, with or without a latency.
    """
    if text is not None:
        link = read_link(text)
        return link, describe_link(link)
    if machine.peers:
        slowest = min(machine.peers, key=lambda peer: peer.bytes_per_s)
        link = PeerLink(peer=0, bytes_per_s=slowest.bytes_per_s, latency_ns=slowest.latency_ns)
        return link, f"{describe_link(link)}, the slowest of {machine.name}"
    return ASSUMED, f"{describe_link(ASSUMED)}, assumed: give --link"


def read_link(text: str) -> PeerLink:
    """Read a rate in each direction and, behind a comma, a latency.

    Raises:
        InputError: it is neither.
    """
    rate, comma, latency = (part.strip() for part in text.partition(","))
    try:
        bytes_per_s = parse_bytes(rate.removesuffix("/s"))
    except ValueError:
        bytes_per_s = 0
    found = _LATENCY.fullmatch(latency)
    if not bytes_per_s or (comma and found is None):
        raise InputError(
            f"{text!r} is no link between ranks",
            where="--link",
            fix="write bytes per second in each direction, and a latency: 25GB,5us",
        )
    latency_ns = 0 if found is None else round(float(found[1]) * _UNITS_NS[found[2]])
    return PeerLink(peer=0, bytes_per_s=bytes_per_s, latency_ns=latency_ns)


def describe_link(link: PeerLink) -> str:
    """Say a link's rate and latency."""
    latency = f" after {format_ns(link.latency_ns)}" if link.latency_ns else ""
    return f"{link.bytes_per_s / 1e9:.3g} GB/s each way{latency}"
