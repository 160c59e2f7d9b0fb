"""How much memory this process took, as the kernel counts it.

In: nothing. Out: bytes of this process, beside the ledger that the runtime keeps of its pools.
"""

from __future__ import annotations

from pathlib import Path

from packhorse.units import KIB


def largest_resident_bytes() -> int:
    """Tell the largest resident memory that this process ever had (VmHWM), libraries included."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    return 0
