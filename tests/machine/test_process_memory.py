"""What this process holds, told once or again and again."""

from __future__ import annotations

import mmap

from packhorse.machine.process_memory import ResidentMeter, resident_bytes
from packhorse.units import MIB


def test_the_meter_tells_what_a_single_look_tells() -> None:
    meter = ResidentMeter()
    before = meter.read()
    assert abs(before - resident_bytes()) < 4 * MIB
    taken = mmap.mmap(-1, 32 * MIB)
    taken.write(b"1" * (32 * MIB))
    assert meter.read() - before > 24 * MIB
    taken.close()
    assert meter.read() - before < 24 * MIB
    meter.close()
    meter.close()
    assert meter.read() == 0
