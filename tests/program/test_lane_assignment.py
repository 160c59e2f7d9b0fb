"""The lane of each task: a Free runs where its buffer was last touched."""

from __future__ import annotations

from packhorse.program.buffers import BufferId
from packhorse.program.lanes import assign_lanes, has_transfers
from packhorse.program.tasks import Copy, Emit, Forward, Free

CHUNK, VALUE = BufferId("param/0"), BufferId("value/h@0")


def test_a_free_runs_on_the_lane_that_touched_its_buffer_last() -> None:
    forward = Forward(block=0, microbatch=0, reads=(CHUNK,), writes=(VALUE,), workspace_bytes=0)
    tasks = (
        Copy(buffer=CHUNK, source="disk", target="device"),
        forward,
        Copy(buffer=CHUNK, source="device", target="disk"),
        Free(buffer=CHUNK, tier="device"),
        Emit(buffer=VALUE),
        Free(buffer=VALUE, tier="device"),
        Copy(buffer=CHUNK, source="disk", target="device"),
        Free(buffer=CHUNK, tier="device"),
    )
    assert assign_lanes(tasks) == (
        "disk_read",
        "compute",
        "disk_write",
        "disk_write",
        "compute",
        "compute",
        "disk_read",
        "disk_read",
    )


def test_only_copies_are_transfers() -> None:
    assert has_transfers((Copy(buffer=CHUNK, source="device", target="host"),))
    assert not has_transfers((Emit(buffer=VALUE), Free(buffer=VALUE, tier="device")))
