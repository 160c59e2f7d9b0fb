"""Was this command started as one of several ranks, and how is one started so?

In: torchrun's environment, or the number of ranks. Out: the rank's seat, or None where the command
runs by itself; whether it speaks for its host; the words that start a command.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.runtime.transport.seats import Seat


def find_seat() -> Seat | None:
    """Find the seat of this process; a launcher of a single rank leaves it by itself.

    Raises:
        InputError: something of torchrun's environment is missing or makes no sense.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from packhorse.runtime.transport.seats import read_seat

    return read_seat(os.environ)


def speaks_for_host() -> bool:
    """Whether this process is to say what all ranks of its host would say alike."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def spell_launcher(seat: Seat | None) -> tuple[str, ...]:
    """The words that start as many ranks again, before `packhorse`."""
    if seat is None:
        return ()
    num_hosts = seat.num_ranks // seat.num_local
    hosts = () if num_hosts == 1 else ("--nnodes", str(num_hosts))
    return ("torchrun", *hosts, "--nproc-per-node", str(seat.num_local), "-m")


def spell_start(num_ranks: int, num_hosts: int = 1) -> str:
    """Spell what comes before a command's name: packhorse by itself, or torchrun for ranks.

    Of several hosts torchrun has to be told where they meet, which only the user knows.
    """
    if num_ranks == 1:
        return "packhorse"
    options = f"--nproc-per-node {num_ranks}" if num_hosts == 1 else "..."
    return f"torchrun {options} -m packhorse"
