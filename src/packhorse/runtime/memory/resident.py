"""How much memory this process holds now.

In: nothing. Out: bytes, as the kernel counts them, within some tens of pages.
"""

from __future__ import annotations

from pathlib import Path

from packhorse.storage.mapping import PAGE_BYTES

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Tell the resident memory; 0 where the kernel does not say."""
    try:
        return int(_STATM.read_bytes().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
