"""What benches conclude from their measurements: intervals, the disk's least time, curves."""

from __future__ import annotations

from math import comb
from statistics import median
from xml.etree import ElementTree as ET

import pytest

from bench.curves import draw_curves
from bench.outofcore import disk_alone_ns
from bench.overhead import lower_end
from bench.turns import NUM_WARM_TURNS, take_turns
from packhorse.machine.probe_disk import DiskRates


@pytest.mark.parametrize("count", range(1, 30))
def test_the_interval_is_as_narrow_as_its_confidence_allows(count: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    rank = int(lower_end(values[::-1]))

    def risk(place: int) -> float:
        # That fewer than `place` of all values lie below the true median.
        return sum(comb(count, heads) for heads in range(place)) / 2**count

    assert risk(rank) <= 0.025 or rank == 1
    assert risk(rank + 1) > 0.025
    assert values[rank - 1] <= median(values)


def rates(read: float, write: float, mixed: tuple[float, float] | None) -> DiskRates:
    mixed_read, mixed_write = mixed or (None, None)
    return DiskRates(
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_read_bytes_per_s=mixed_read,
        mixed_write_bytes_per_s=mixed_write,
        read_latency_ns=0,
        write_latency_ns=0,
        measured_bytes=1,
        drives=(),
    )


def test_the_disk_moves_both_ways_at_once_and_then_what_is_left() -> None:
    found = [rates(100.0, 50.0, (60.0, 30.0))]
    assert disk_alone_ns(found, 60, 30) == pytest.approx(1e9)
    assert disk_alone_ns(found, 160, 30) == pytest.approx(2e9)
    assert disk_alone_ns(found, 60, 80) == pytest.approx(2e9)
    assert disk_alone_ns(found, 100, 0) == pytest.approx(1e9)
    assert disk_alone_ns([rates(100.0, 50.0, None)], 100, 50) == pytest.approx(1e9)
    twice = [rates(50.0, 50.0, (50.0, 50.0)), rates(150.0, 50.0, (150.0, 50.0))]
    assert disk_alone_ns(twice, 200, 0) == pytest.approx(2e9)


def test_turns_are_taken_one_by_one_and_begin_with_each_side_in_turn() -> None:
    order: list[str] = []
    pairs = take_turns(lambda _: order.append("a"), lambda _: order.append("b"), 4)
    assert len(pairs) == 4
    assert "".join(order) == "abba" * ((4 + NUM_WARM_TURNS) // 2)
    assert all(taken.wall_ns >= 0 for pair in pairs for taken in pair)


def test_curves_are_well_formed_and_rise_to_the_left() -> None:
    text = draw_curves(
        {"a < b": [(1 << 30, 2 * 10**9), (1 << 31, 10**9)], "c": [(1 << 30, 3 * 10**9)]},
        title="Steps & budgets",
        size_name="budget",
    )
    root = ET.fromstring(text)
    line = next(part for part in root.iter() if part.tag.endswith("polyline"))
    (x1, y1), (x2, y2) = (tuple(map(float, p.split(","))) for p in line.attrib["points"].split())
    assert x1 < x2
    assert y1 < y2
