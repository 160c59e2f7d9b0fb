"""`packhorse` with short measurements: what torchrun starts in tests of the probe of ranks."""

from __future__ import annotations

from packhorse.cli.main import main
from packhorse.machine import probe, probe_compute, probe_links
from packhorse.machine.spec import Heap
from packhorse.units import MIB

if __name__ == "__main__":
    probe_compute._POINT_NS = 1_000_000
    probe_compute._CPU_SIZES = (64, 128)
    probe_compute._COPY_BYTES = MIB
    probe_compute._UPDATE_PARAMETERS = MIB
    probe.measure_heap = lambda _: Heap(map_cost=0.2, keep_slack=0.1)
    probe_links.DEFAULT_LIMIT_NS = 2 * 10**8
    main()
