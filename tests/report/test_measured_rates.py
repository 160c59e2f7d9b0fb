from dataclasses import replace

import pytest

from packhorse.machine.rescale import RateFactors
from packhorse.report.compare import compare_timelines
from packhorse.report.measured_rates import factors_as_dict, find_factors, say_factors
from tests.report.samples import make_step


def stretch(timeline, **times):
    """Make the tasks of some kinds take longer."""
    return replace(
        timeline,
        spans=tuple(
            replace(span, end_ns=span.start_ns + span.duration_ns * times.get(span.kind, 1))
            for span in timeline.spans
        ),
    )


def test_each_rate_has_the_ratio_of_its_own_tasks():
    step = make_step()
    slow = stretch(step, disk_read=4, forward=2, backward=2, recompute=2, norm=7)
    factors = find_factors(compare_timelines(step, slow))
    assert factors == RateFactors(disk_read=0.25, disk_write=1.0, compute=0.5, update=1.0)


def test_bodies_count_by_their_time():
    step = make_step()
    slow = stretch(step, backward=2)
    kinds = {kind.name: kind.predicted for kind in compare_timelines(step, step).kinds}
    bodies = sum(kinds.get(name, 0) for name in ("forward", "backward", "recompute"))
    expected = bodies / (bodies + kinds["backward"])
    assert find_factors(compare_timelines(step, slow)).compute == pytest.approx(expected)


def test_what_the_step_did_not_do_stays():
    step = make_step()
    none = replace(step, spans=tuple(s for s in step.spans if s.kind != "disk_read"))
    assert find_factors(compare_timelines(none, none)).disk_read == 1
    assert find_factors(compare_timelines(step, none)).disk_read == 1


def test_the_words():
    factors = RateFactors(disk_read=0.5, compute=1.25)
    assert say_factors(factors) == (
        "reading from disk at 50.0 %, writing to disk at 100.0 %, compute at 125.0 %, updates at"
        " 100.0 % of the planned rates"
    )
    assert factors_as_dict(factors)["update"] == 1
