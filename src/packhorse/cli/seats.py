"""Was this command started as one of several ranks?

In: torchrun's environment. Out: the rank's seat, or None where the command runs by itself.
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
