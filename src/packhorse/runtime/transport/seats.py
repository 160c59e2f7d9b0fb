"""Where a process sits among the ranks, as torchrun's environment says.

In: the environment. Out: a `Seat`; and the address at which gloo will listen here.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from packhorse.errors import InputError

LOOPBACK: Final = "127.0.0.1"
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_COUNTS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_FIX: Final = "start all ranks by torchrun, which sets RANK, WORLD_SIZE and what goes with them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process among others: rank `rank` of `num_ranks`, `local_rank` of `num_local` on its host.

    `place` is where all ranks meet, such as `node-0:29500`.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    place: str


def read_seat(environment: Mapping[str, str]) -> Seat:
    """Read torchrun's environment.

    Raises:
        InputError: something of it is missing or makes no sense.
    """
    found: dict[str, int] = {}
    for name in _COUNTS:
        text = environment.get(name, "")
        if not text.isdecimal():
            what = f"is {text!r}, not a number" if text else "is missing"
            raise InputError(f"{name} {what}", where="the environment", fix=_FIX)
        found[name] = int(text)
    for name, most in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if found[name] >= found[most]:
            raise InputError(
                f"{name} is {found[name]}, not below {most}, which is {found[most]}",
                where="the environment",
                fix=_FIX,
            )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise InputError(f"{name} is missing", where="the environment", fix=_FIX)
    return Seat(
        rank=found["RANK"],
        num_ranks=found["WORLD_SIZE"],
        local_rank=found["LOCAL_RANK"],
        num_local=found["LOCAL_WORLD_SIZE"],
        place=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
    )


def find_address(environment: Mapping[str, str]) -> str:
    """Find the address that gloo takes here.

    It is that of the named network interface, else the one that the host's name leads to, else the
    loopback.

    Raises:
        InputError: there is no such interface, or it has no address.
    """
    interface = environment.get(INTERFACE, "").partition(",")[0]
    if interface:
        return _address_of(interface)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return LOOPBACK
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            try:
                tried.bind((address[0], 0))
            except OSError:
                continue
            return str(address[0])
    return LOOPBACK


def _address_of(interface: str) -> str:
    known = psutil.net_if_addrs()
    for entry in known.get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return entry.address
    raise InputError(
        f"there is no network interface {interface!r} with an address",
        where=INTERFACE,
        fix=f"name one of {', '.join(sorted(known))}",
    )
