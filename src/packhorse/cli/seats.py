"""Was this command started as one of several ranks?

In: torchrun's environment. Out: the rank's seat, or None where the command runs by itself; and what
follows from it for what a rank says.
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
