"""Which bodies are run when seconds are few, and what is made of those that are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from models import make_model

from packhorse.machine.catalogue import load_known_machine
from packhorse.profile import measure
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.measure import RUNS, measure_profile
from packhorse.profile.scaling import find_ratio_near, scale_time, total_ns
from packhorse.profile.spec import BodyTime

MODEL = make_model(num_layers=8, hidden=64, length=64)
MACHINE = load_known_machine("laptop-16gb")
ESTIMATED = estimate_profile(MODEL, MACHINE).bodies
LAYER = MODEL.blocks[1].body


@pytest.fixture
def ran(monkeypatch):
    """Bodies take three times their estimate; which ran, and how often beside warming up."""
    ran = []

    def run(traced, body, num_runs):
        ran.append((body, num_runs))
        return scale_time(ESTIMATED[body], 3.0)

    monkeypatch.setattr(measure, "_measure_body", run)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return ran


def test_what_a_step_spends_most_of_its_time_in_is_run_first(ran):
    found = measure_profile(SimpleNamespace(model=MODEL), MACHINE, limit_s=60.0)
    assert sum(block.body == LAYER for block in MODEL.blocks) > 1
    assert ran[0] == (LAYER, RUNS)
    assert {body for body, _ in ran} == set(ESTIMATED)
    assert found.num_measured == found.num_bodies == len(ESTIMATED)


def test_a_body_runs_once_where_there_is_no_time_for_more(ran):
    limit_s = 1.4 * total_ns(ESTIMATED[LAYER]) / 1e9
    measure_profile(SimpleNamespace(model=MODEL), MACHINE, limit_s=limit_s)
    assert ran[0] == (LAYER, 0)


def test_nothing_is_run_that_does_not_fit_into_the_time(ran):
    found = measure_profile(SimpleNamespace(model=MODEL), MACHINE, limit_s=0.0)
    assert ran == []
    assert dict(found.profile.bodies) == dict(ESTIMATED)
    assert found.profile.source == "analytic"


def test_a_lookup_says_nothing_of_matrix_products():
    small, large = (BodyTime(forward_ns=n, discard_ns=n, backward_ns=n) for n in (10, 1000))
    estimated = {"small": small, "large": large}
    assert find_ratio_near(large, {"small": scale_time(small, 0.4)}, estimated) == 1.0
    assert find_ratio_near(small, {"large": scale_time(large, 3)}, estimated) == 3
    measured = {"small": scale_time(small, 0.4), "large": scale_time(large, 3)}
    assert find_ratio_near(large, measured, estimated) == 3
