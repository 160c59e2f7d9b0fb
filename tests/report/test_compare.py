import json
from dataclasses import replace

import pytest

from packhorse.report.compare import Difference, compare_timelines, comparison_as_dict
from packhorse.report.tables import comparison_table
from tests.report.samples import DEVICE, MIB, make_step, render


def test_errors_are_relative_to_the_measured_side():
    assert Difference(name="x", predicted=90, measured=100).error == pytest.approx(-0.1)
    assert Difference(name="x", predicted=5, measured=0).error is None
    assert Difference(name="x", predicted=0, measured=0).error == 0


def test_equal_timelines_have_no_errors():
    step = make_step()
    comparison = compare_timelines(step, step)
    everything = (
        comparison.step,
        *comparison.lanes,
        *comparison.kinds,
        *comparison.pools,
    )
    assert all(each.error == 0 for each in everything)
    assert comparison.same_tasks
    assert comparison.tasks == ()


def test_sums_are_those_of_the_timelines():
    predicted, measured = make_step(), make_step(slowness=2, source="measured")
    comparison = compare_timelines(predicted, measured)
    assert comparison.step.predicted == predicted.makespan_ns
    assert comparison.step.measured == measured.makespan_ns
    kinds = {each.name: each for each in comparison.kinds}
    assert kinds["backward"].predicted == 4 * 43_000_000
    assert kinds["backward"].measured == 8 * 43_000_000
    assert [each.name for each in comparison.lanes] == ["compute", "disk_read", "disk_write"]
    assert sum(each.measured for each in comparison.kinds) == sum(
        each.measured for each in comparison.lanes
    )
    peaks = {each.name: each.predicted for each in comparison.pools}
    assert peaks["device"] == predicted.peak_bytes[DEVICE] > 32 * MIB
    assert comparison.tasks[0].name == "9 backward 3@0"
    assert abs(comparison.tasks[0].excess) == 43_000_000
    assert len(comparison.tasks) == 5


def test_different_tasks_are_not_paired():
    step = make_step()
    fewer = replace(step, spans=step.spans[:-1])
    comparison = compare_timelines(step, fewer)
    assert not comparison.same_tasks
    assert comparison.tasks == ()
    assert "single tasks are not compared" in render(comparison_table(comparison))


def test_the_process_stands_beside_the_ledger():
    step = make_step()
    process = Difference(name="peak", predicted=90 * MIB, measured=100 * MIB)
    comparison = compare_timelines(step, step, process=process)
    lines = render(comparison_table(comparison)).splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("process, libraries left"))
    assert lines[title + 1].split() == ["peak", "90.0", "MiB", "100", "MiB", "-10.0", "%"]
    assert comparison_as_dict(comparison)["process_bytes"] == {
        "predicted": 90 * MIB,
        "measured": 100 * MIB,
        "error": pytest.approx(-0.1),
    }
    assert comparison_as_dict(compare_timelines(step, step))["process_bytes"] is None


def test_the_table_and_the_dict(golden):
    comparison = compare_timelines(make_step(), make_step(slowness=2, source="measured"))
    golden("report/comparison.txt", render(comparison_table(comparison)))
    as_dict = json.loads(json.dumps(comparison_as_dict(comparison)))
    assert as_dict["step_ns"]["error"] == comparison.step.error
    assert as_dict["kinds_ns"]["forward"] == {
        "predicted": 84_000_000,
        "measured": 168_000_000,
        "error": -0.5,
    }
