"""What other processes take of the cores while something is measured."""

from __future__ import annotations

import os
import time

import pytest

from packhorse.machine.contention import CoreClocks, read_core_clocks, say_busy


def look(at_s: float, busy_s: float, own_s: float, num_cores: int = 2) -> CoreClocks:
    return CoreClocks(at_s=at_s, busy_s=busy_s, own_s=own_s, num_cores=num_cores)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "num_cores", "num_threads", "others", "share"),
    [
        (20.0, 20.0, 2, 2, 0.0, 0.0),  # all ours
        (20.0, 10.0, 2, 2, 1.0, 0.5),  # one of two cores is taken
        (20.0, 10.0, 2, 1, 1.0, 0.0),  # what we do not use may be used by others
        (30.0, 10.0, 2, 1, 2.0, 1.0),
        (50.0, 10.0, 8, 4, 4.0, 0.0),
        (70.0, 10.0, 8, 4, 6.0, 0.5),
        (9.9, 10.0, 2, 2, 0.0, 0.0),  # clocks tick, so ours may be ahead
        (500.0, 10.0, 2, 2, 49.0, 1.0),
    ],
)
def test_what_others_took_costs_what_was_not_spare(
    busy_s, own_s, num_cores, num_threads, others, share
):
    before = look(100.0, 7.0, 3.0, num_cores)
    after = look(110.0, 7.0 + busy_s, 3.0 + own_s, num_cores)
    assert after.others_since(before) == pytest.approx(others)
    assert after.share_since(before, num_threads) == pytest.approx(share)


def test_nothing_is_said_of_a_moment():
    assert look(100.1, 9.0, 0.0).share_since(look(100.0, 0.0, 0.0), 2) == 0.0


def test_own_work_is_not_that_of_others():
    # Two looks around work of this process's own: whatever others do, ours is counted as ours.
    before = read_core_clocks()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after = read_core_clocks()
    assert after.own_s - before.own_s >= 0.28
    assert after.busy_s - before.busy_s >= 0.25
    assert 1 <= after.num_cores <= (os.cpu_count() or 1)


def test_a_busy_machine_is_said_in_one_line_with_what_to_do():
    fix = "measure again: packhorse probe --fresh"
    assert say_busy(0.09, what="the rates of this machine", fix=fix) is None
    said = say_busy(0.5, what="the rates of this machine", fix=fix)
    assert said == (
        "the machine was busy while the rates of this machine were measured: other processes took"
        " 50.0 % of the compute threads' time, so forecasts may be 2.0 x or more too long; when it"
        " is idle, measure again: packhorse probe --fresh"
    )
    assert "many times too long" in str(say_busy(1.0, what="blocks", fix=fix))
    known = str(say_busy(1.0, what="blocks", fix=fix, slowdown=60.7))
    assert "(they took 60.7 x what the machine's rates give), so forecasts may be many" in known
    assert "they took" not in str(say_busy(0.5, what="blocks", fix=fix, slowdown=1.3))
