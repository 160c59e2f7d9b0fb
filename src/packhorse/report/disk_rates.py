"""Which rates of the disk a plan counts on, in words.

In: a machine, and how much a plan puts on its disk. Out: one line, None where there is no disk to
speak of. It says whether the rates are sustained, and with how large a file they were measured: a
drive may be several times slower at a size that no cache holds.
"""

from __future__ import annotations

from typing import Final

from packhorse.machine.spec import Link, Machine
from packhorse.units import format_bytes

# A file is about as large as the scratch down to this share of it.
_NEAR: Final = 0.5


def describe_disk_rates(machine: Machine, scratch_bytes: int) -> str | None:
    """Say which rates a plan counts on that puts `scratch_bytes` on the disk."""
    read, write = _find_links(machine)
    if read is None or write is None or not scratch_bytes:
        return None
    text = f"read {_rate(read.bytes_per_s)}, write {_rate(write.bytes_per_s)}"
    if write.burst_bytes_per_s is not None:
        text += f" sustained ({_rate(write.burst_bytes_per_s)} at first)"
    if read.mixed_bytes_per_s is not None and write.mixed_bytes_per_s is not None:
        text += f"; {_rate(read.mixed_bytes_per_s + write.mixed_bytes_per_s)} both at once"
    disk = machine.tier("disk")
    measured = min((d.measured_bytes for d in disk.drives), default=0) if disk else 0
    if not measured:
        return f"{text}; from {_SOURCES[machine.source]}"
    text += f"; measured on {format_bytes(measured)}"
    if write.burst_bytes_per_s is None and measured < _NEAR * scratch_bytes:
        text += (
            f", for {format_bytes(scratch_bytes)} of scratch: `packhorse probe --sustained` tells"
            " what the drive does in the long run"
        )
    return text


_SOURCES: Final = {
    "probe": "a probe",
    "catalogue": "data sheets, never measured",
    "hand": "a file written by hand",
}


def _find_links(machine: Machine) -> tuple[Link | None, Link | None]:
    for near in ("host", "device"):
        read, write = machine.link("disk", near), machine.link(near, "disk")
        if read is not None and write is not None:
            return read, write
    return None, None


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"
