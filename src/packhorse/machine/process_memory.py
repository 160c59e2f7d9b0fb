"""How much memory this process takes, as the kernel counts it, libraries included.

In: nothing. Out: bytes, within some tens of pages; 0 where the kernel does not say.
"""

from __future__ import annotations

import mmap
import os
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


class ResidentMeter:
    """Tells the resident memory of this process again and again, in a tenth of the time."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(_NOW, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def read(self) -> int:
        """The resident memory now; 0 where the kernel does not say, and once it is closed."""
        if self._file is None:
            return 0
        return int(os.pread(self._file, 256, 0).split()[1]) * mmap.PAGESIZE

    def close(self) -> None:
        """Tell nothing any more. Closing twice is harmless."""
        if self._file is not None:
            os.close(self._file)
        self._file = None


def largest_resident_bytes() -> int:
    """Tell the largest resident memory that it ever had (VmHWM)."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    return 0
