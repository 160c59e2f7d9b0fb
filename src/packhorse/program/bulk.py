"""Many values at once: the garbage collector waits while they are made.

Programs, proofs and timelines are millions of small values without a circle among them. While they
are made the collector looks through all of them again and again and finds nothing, which takes as
long as making them.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_waits() -> Generator[None, None, None]:
    """Look for no circles inside; what nobody refers to is freed at once all the same.

    Where the collector is off already it stays off. Threads that are inside together may find it on
    before they leave, never off after that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
