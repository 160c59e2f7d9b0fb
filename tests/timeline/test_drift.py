import pytest

from packhorse.program.tasks import Copy, Forward
from packhorse.timeline.drift import (
    NUM_STEPS,
    DriftWatch,
    LaneDrift,
    busy_times,
    find_drift,
    moved_bytes,
    say_drift,
)
from packhorse.timeline.spec import Span, Timeline
from packhorse.units import GIB
from tests.simulator.random_programs import make_program

MOVED = {"disk_read": GIB, "disk_write": GIB // 2}


def step(read=0, write=0, compute=0, update=0):
    """A timeline whose lanes are busy for so long, one beside the other."""
    lanes = {"disk_read": read, "disk_write": write, "compute": compute, "update": update}
    spans = tuple(
        Span(index=at, name=lane, kind=lane, lane=lane, start_ns=0, end_ns=busy)
        for at, (lane, busy) in enumerate(lanes.items())
        if busy
    )
    return Timeline(source="measured", rank=0, spans=spans, memory={})


def drift_of(planned, *measured, step_ns=1000):
    return find_drift(
        busy_times(planned), [busy_times(each) for each in measured], step_ns=step_ns, moved=MOVED
    )


def test_busy_times_and_bytes():
    assert busy_times(step(read=3, compute=5, update=7)) == {
        "disk_read": 3,
        "disk_write": 0,
        "compute": 5,
    }
    tasks = [
        Copy(buffer="a", source="disk", target="device"),
        Forward(block=0, microbatch=0, reads=("a",), writes=(), workspace_bytes=0),
        Copy(buffer="a", source="device", target="disk"),
        Copy(buffer="b", source="device", target="disk"),
    ]
    program = make_program(tasks, {"a": 3, "b": 4}, homes={"a": "disk", "b": "device"}, capacity=9)
    assert moved_bytes(program) == {"disk_read": 3, "disk_write": 7}


@pytest.mark.parametrize(
    ("read", "off"), [(500, False), (590, False), (626, True), (410, True), (430, False)]
)
def test_a_fifth_is_too_much(read, off):
    found = drift_of(step(read=500), step(read=read))
    assert [drift.lane for drift in found] == (["disk_read"] if off else [])


def test_the_mean_of_the_steps_counts():
    planned = step(read=500, write=100, compute=400)
    slow, fast = step(read=1400, write=100, compute=300), step(read=100, write=100, compute=300)
    assert [drift.lane for drift in drift_of(planned, slow, fast)] == ["disk_read", "compute"]
    assert drift_of(planned, fast, slow, fast, fast) != drift_of(planned, slow, fast)
    (drift, _) = drift_of(planned, slow, fast)
    assert (drift.planned_ns, drift.measured_ns, drift.size_bytes) == (500, 750, GIB)
    assert drift.factor == pytest.approx(2 / 3)


def test_what_nobody_would_notice_is_not_told():
    assert drift_of(step(read=10), step(read=25), step_ns=1000) == ()
    assert len(drift_of(step(read=10), step(read=30), step_ns=1000)) == 1
    # A lane that was not planned, or did nothing, has no rate to be off.
    assert drift_of(step(), step(read=500)) == ()
    assert drift_of(step(read=500), step()) == ()
    assert drift_of(step(read=500)) == ()


def test_a_watch_speaks_once_after_enough_steps():
    watch = DriftWatch(step(read=500, compute=500), MOVED)
    assert watch.add(step(read=99_999, compute=1)) == ()  # the first step warms up
    for _ in range(NUM_STEPS):
        assert watch.add(step(read=510, compute=490)) == ()
    for _ in range(NUM_STEPS - 1):
        assert watch.add(step(read=900, compute=490)) == ()
    (drift,) = watch.add(step(read=900, compute=490))
    assert (drift.lane, drift.measured_ns) == ("disk_read", 900)
    for _ in range(3 * NUM_STEPS):
        assert watch.add(step(read=5000, compute=490)) == ()


def test_the_words():
    drifts = [
        LaneDrift(lane="disk_read", planned_ns=10**9, measured_ns=2 * 10**9, size_bytes=GIB),
        LaneDrift(lane="compute", planned_ns=10**9, measured_ns=3 * 10**9, size_bytes=0),
    ]
    assert say_drift(drifts) == (
        "over 20 steps not as planned: read from disk: planned 1.00 GiB/s, measured 512 MiB/s;"
        " compute: planned 1.00 s a step, measured 3.00 s"
    )
