from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.machine.catalogue import load_known_machine
from packhorse.program.tasks import Copy
from packhorse.simulator.engine import OVERLAPPED, simulate_program
from packhorse.simulator.sharing import PathCalendar, SharedPath, sharing_of, stretch_of
from tests.simulator.random_programs import TableCosts, make_program

LANES = ("disk_read", "disk_write")


def path(at_once):
    return SharedPath(lanes=LANES, at_once=at_once)


def with_mixed(read=None, write=None, name="laptop-16gb"):
    """A machine whose disk keeps these shares of its rates while both ways are busy."""
    machine = load_known_machine(name)
    links = []
    for link in machine.links:
        share = read if link.source == "disk" else write if link.target == "disk" else None
        mixed = None if share is None else share * link.bytes_per_s
        links.append(replace(link, mixed_bytes_per_s=mixed))
    return replace(machine, links=tuple(links))


@pytest.mark.parametrize(
    ("at_once", "expected"),
    [
        (1.0, (100, 200)),  # in turns
        (0.5, (100, 200)),
        (1.5, (0, 150)),  # half of it beside the read
        (2.0, (0, 100)),
        (7.0, (0, 100)),
    ],
)
def test_a_write_beside_a_read(at_once, expected):
    calendar = PathCalendar(path(at_once))
    assert calendar.book("disk_read", 0, 100) == (0, 100)
    assert calendar.book("disk_write", 0, 100) == expected


def test_a_slow_transfer_uses_every_gap():
    calendar = PathCalendar(path(1.0))
    for start in (10, 30, 50):
        calendar.book("disk_read", start, 10)
    assert calendar.book("disk_write", 0, 25) == (0, 45)
    assert calendar.book("disk_write", 45, 20) == (45, 75)
    # The first to be booked is not moved by whoever comes later.
    assert calendar.book("disk_read", 60, 5) == (75, 80)


@given(
    at_once=st.floats(1, 2),
    reads=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    writes=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
)
def test_what_is_done_at_once_is_what_the_path_carries(at_once, reads, writes):
    calendar = PathCalendar(path(at_once))
    read_ends = write_ends = 0
    for duration in reads:
        _, read_ends = calendar.book("disk_read", read_ends, duration)
    for duration in writes:
        _, write_ends = calendar.book("disk_write", write_ends, duration)
    # The reads were booked first: beside them the writes move at `at_once - 1`, then alone.
    assert read_ends == sum(reads)
    total = sum(writes)
    beside = min(read_ends * (at_once - 1), total)
    exact = read_ends + total - beside if beside < total else total / (at_once - 1)
    assert abs(write_ends - exact) <= len(reads) + len(writes) + 1


def test_a_machine_says_how_its_disk_is_shared():
    unknown = load_known_machine("laptop-16gb")
    assert sharing_of(unknown) == (path(1.0),)
    assert sharing_of(with_mixed(read=1.0, write=1.0))[0].at_once == pytest.approx(2)
    assert sharing_of(with_mixed(read=0.7, write=0.5))[0].at_once == pytest.approx(1.2)
    assert sharing_of(with_mixed(read=1.3, write=1.0))[0].at_once == 2
    assert sharing_of(with_mixed(read=0.7, write=0.5, name="rtx-4090"))[0].at_once == (
        pytest.approx(1.2)
    )
    without = replace(unknown, links=())
    assert sharing_of(without) == (path(1.0),)


def test_the_link_to_a_device_is_shared_only_where_it_was_measured():
    machine = load_known_machine("rtx-4090")
    assert len(sharing_of(machine)) == 1
    links = tuple(
        link
        if "disk" in (link.source, link.target)
        else replace(link, mixed_bytes_per_s=0.6 * link.bytes_per_s)
        for link in machine.links
    )
    both = sharing_of(replace(machine, links=links))
    assert both[1].lanes == ("copy_in", "copy_out")
    assert both[1].at_once == pytest.approx(1.2)


def moves(num_reads, num_writes, duration=100):
    """A program that reads and writes buffers which have nothing to do with each other."""
    reads = [Copy(buffer=f"r{n}", source="disk", target="device") for n in range(num_reads)]
    writes = [Copy(buffer=f"w{n}", source="device", target="disk") for n in range(num_writes)]
    tasks = [task for pair in zip(reads, writes, strict=False) for task in pair]
    tasks += reads[num_writes:] + writes[num_reads:]
    homes = {task.buffer: task.source for task in tasks}
    program = make_program(tasks, dict.fromkeys(homes, 1), homes=homes, capacity=1000)
    return program, TableCosts(table=dict.fromkeys(tasks, duration))


@pytest.mark.parametrize(
    ("at_once", "num_writes", "makespan"),
    [(2.0, 4, 400), (1.0, 4, 800), (1.0, 0, 400), (0.5, 4, 1600), (0.5, 0, 400)],
)
def test_programs_take_as_long_as_their_mix(at_once, num_writes, makespan):
    program, costs = moves(4, num_writes)
    shared = [path(at_once)]
    timeline = simulate_program(program, costs=costs, workers=OVERLAPPED, shared=shared)
    assert timeline.makespan_ns == makespan


def test_between_the_two_the_path_carries_its_share():
    program, costs = moves(40, 40)
    timeline = simulate_program(program, costs=costs, workers=OVERLAPPED, shared=[path(1.6)])
    # 80 transfers of 100 ns, 1.6 of them at once; the last ones are alone.
    assert 5000 <= timeline.makespan_ns <= 5300


def test_only_what_is_mixed_is_stretched():
    program, costs = moves(3, 1)
    assert stretch_of(path(0.5), program, costs) == pytest.approx(1.5)
    assert stretch_of(path(1.0), program, costs) == 1
    program, costs = moves(3, 0)
    assert stretch_of(path(0.5), program, costs) == 1
    program, costs = moves(3, 3)
    assert stretch_of(path(0.0), program, costs) == pytest.approx(20)
