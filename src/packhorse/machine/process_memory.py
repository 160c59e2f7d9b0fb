"""How much memory this process takes, as the kernel counts it, libraries included.

In: nothing. Out: bytes, within some tens of pages; 0 where the kernel does not say.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from packhorse.units import KIB

_NOW: Final = Path("/proc/self/statm")
_STATUS: Final = Path("/proc/self/status")


def resident_bytes() -> int:
    """Tell the resident memory that it has now."""
    try:
        return int(_NOW.read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def largest_resident_bytes() -> int:
    """Tell the largest resident memory that it ever had (VmHWM)."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    return 0
