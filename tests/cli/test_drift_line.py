"""What `train` says of lanes that are not as fast as planned, without training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from models import make_model

from packhorse.cli.drift import machine_as_measured, watch_drift
from packhorse.compiler.lower import lower_plan
from packhorse.compiler.ranks import cut_stages
from packhorse.errors import DoesNotFitError
from packhorse.machine.cluster import Cluster, give_links, link_all
from packhorse.machine.files import read_machine
from packhorse.machine.spec import PeerLink
from packhorse.model.files import read_model
from packhorse.plan.files import read_plan
from packhorse.plan.pins import Pins
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.files import read_profile
from packhorse.search import search
from packhorse.search.rank_plans import RankCandidate, find_rank_plans, predict_ranks
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run
from packhorse.timeline.drift import NUM_STEPS, LaneDrift, busy_times, find_drift
from packhorse.units import format_ns
from tests.search.toy_search import ADAMW, ARITHMETIC, make_machine


class Site:
    """A planned run without a trainer, and its step at other paces."""

    def __init__(self, folder) -> None:
        self.model = read_model(folder / "model.json")
        self.machine = read_machine(folder / "machine.json")
        self.profile = read_profile(folder / "profile.json")
        self.plan = read_plan(folder / "plan.json")
        self.program = lower_plan(self.plan, self.model, "train_step")
        self.predicted = self.simulate(self.machine)

    def simulate(self, machine):
        costs = TaskCosts(
            machine=machine,
            profile=self.profile,
            model=self.model,
            program=self.program,
            heap=self.plan.heap.value,
        )
        return simulate_run(self.program, costs=costs)

    def watch(self, **pins):
        planned = SimpleNamespace(
            plan=self.plan,
            machine=self.machine,
            profile=self.profile,
            traced=SimpleNamespace(model=self.model),
            prepared=SimpleNamespace(recipe=SimpleNamespace(pins=Pins(**pins))),
            joint=None,
        )
        return watch_drift(planned, self.program, self.predicted)

    def slow_disk(self, factor):
        links = tuple(
            replace(link, bytes_per_s=link.bytes_per_s * factor) for link in self.machine.links
        )
        return self.simulate(replace(self.machine, links=links))


def said(watch, timeline, steps=NUM_STEPS + 1):
    return [text for text in (watch(timeline) for _ in range(steps)) if text is not None]


def test_a_run_as_planned_says_nothing(plan_folder):
    site = Site(plan_folder)
    assert said(site.watch(), site.predicted, 3 * NUM_STEPS) == []


def test_a_slow_disk_is_told_once_with_what_a_new_plan_would_give(plan_folder):
    site = Site(plan_folder)
    (line,) = said(site.watch(), site.slow_disk(0.1), 3 * NUM_STEPS)
    assert "\n" not in line
    assert "over 20 steps not as planned: read from disk: planned " in line
    assert "write to disk: planned " in line
    assert "compute" not in line
    # All of it fits in memory, so the search finds better than a disk at a tenth of its rate.
    now, _, new = line.partition(" a step, a new one would take ")
    assert "at these rates this plan takes " in now
    assert "compare RUN --machine-out FILE" in new


def test_a_slow_core_slows_all_that_computes_and_no_step_is_shorter_than_its_compute(plan_folder):
    site = Site(plan_folder)
    slow = replace(
        site.machine,
        compute_scale=site.machine.compute_scale * 5,
        updates=tuple(
            replace(each, parameters_per_s=each.parameters_per_s / 5)
            for each in site.machine.updates
        ),
    )
    timeline = site.simulate(slow)
    (line,) = said(site.watch(), timeline)
    assert "compute: planned " in line
    drifts = find_drift(
        busy_times(site.predicted), [busy_times(timeline)], step_ns=timeline.step_ns, moved={}
    )
    again = site.simulate(machine_as_measured(site.machine, drifts))
    assert again.step_ns >= busy_times(timeline)["compute"]
    assert again.step_ns == pytest.approx(timeline.step_ns, rel=0.05)
    assert f"at these rates this plan takes {format_ns(again.step_ns)} a step" in line


def test_a_plan_that_is_pinned_cannot_be_better(plan_folder):
    site = Site(plan_folder)
    pins = {
        "parameters": (("*", "disk"),),
        "optimizer": (("*", "disk"),),
        "recompute": ("*",),
        "durable": "off",
        "order": "depth_first",
    }
    (line,) = said(site.watch(**pins), site.slow_disk(0.1))
    assert "a new one would not be faster" in line


def test_where_nothing_else_fits_the_line_still_comes(plan_folder, monkeypatch):
    def refuse(*_: object, **__: object):
        raise DoesNotFitError("it is too large")

    monkeypatch.setattr(search, "find_plan", refuse)
    site = Site(plan_folder)
    (line,) = said(site.watch(), site.slow_disk(0.1))
    assert "and no other fits" in line


def test_of_several_ranks_a_step_of_all_is_told():
    model = make_model(num_layers=4, hidden=512, length=256)
    links = link_all(2, PeerLink(peer=0, bytes_per_s=1e9, latency_ns=10_000))
    machines = give_links([make_machine()] * 2, links)
    cluster = Cluster(name="two", ranks=machines, hosts=("here", "here"))
    profiles = (estimate_profile(model, machines[0]),) * 2
    plans = find_rank_plans(
        [RankCandidate(model=model, profiles=profiles, loss_chunk_tokens=None)],
        cluster,
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        global_batch_rows=4,
        pins=Pins(schedule="1f1b"),
    ).plans
    parts = cut_stages(plans.pipeline, model)

    def simulate(first):
        return predict_ranks(plans.ranks, parts, profiles, (first, machines[1]))[0]

    planned = SimpleNamespace(
        plan=plans.ranks[0],
        machine=machines[0],
        joint=SimpleNamespace(
            plans=plans, cluster=cluster, profiles=profiles, whole=SimpleNamespace(model=model)
        ),
    )
    program = lower_plan(plans.ranks[0], parts[0], "train_step")
    slow = simulate(replace(machines[0], compute_scale=3.0))
    (line,) = said(watch_drift(planned, program, simulate(machines[0])), slow)
    assert "over 20 steps not as planned: compute: planned " in line
    assert "with the first rank as it is, a step of all ranks takes " in line


def test_rates_as_measured(plan_folder):
    machine = Site(plan_folder).machine
    drifts = [
        LaneDrift(lane="disk_read", planned_ns=1, measured_ns=2, size_bytes=0),
        LaneDrift(lane="compute", planned_ns=3, measured_ns=1, size_bytes=0),
    ]
    slow = machine_as_measured(machine, drifts)
    assert slow.compute_scale == pytest.approx(1 / 3)
    for before, after in zip(machine.links, slow.links, strict=True):
        factor = 0.5 if before.source == "disk" else 1
        assert after.bytes_per_s == before.bytes_per_s * factor
