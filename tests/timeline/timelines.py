"""A small timeline with every oddity that files and pictures must keep."""

from packhorse.program.buffers import PoolId
from packhorse.timeline.spec import MemoryPoint, Span, Timeline


def make_timeline(*, source="simulated", rank=0):
    rows = (
        ("copy param/0 disk -> device", "disk_read", "disk_read", 0, 1500),
        ("forward 0@0", "forward", "compute", 1500, 4001),
        ("backward 0@0", "backward", "compute", 4001, 9000),
        ("free param/0 device", "free", "compute", 9000, 9000),
    )
    return Timeline(
        source=source,
        rank=rank,
        spans=tuple(
            Span(index=n, name=name, kind=kind, lane=lane, start_ns=start, end_ns=end)
            for n, (name, kind, lane, start, end) in enumerate(rows)
        ),
        memory={
            PoolId("device"): (
                MemoryPoint(at_ns=0, used_bytes=0),
                MemoryPoint(at_ns=0, used_bytes=4096),
                MemoryPoint(at_ns=9000, used_bytes=0),
            ),
            PoolId("disk"): (MemoryPoint(at_ns=0, used_bytes=8192),),
        },
    )
