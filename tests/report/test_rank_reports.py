"""What is said of the plans of several ranks: in short, in full, and of how they went."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from packhorse.compiler.ranks import cut_stages
from packhorse.plan.spec import Choice
from packhorse.profile.analytic import estimate_profile
from packhorse.report.compare import compare_timelines
from packhorse.report.rank_compare import idle_as_dict, rank_comparison_table
from packhorse.report.rank_explain import explain_rank_plans, fold_rank_choices, say_ranks
from packhorse.report.rank_loads import busy_links, find_busiest, say_busiest, say_busiest_link
from packhorse.report.rank_plans import rank_plans_as_dict, rank_plans_table
from packhorse.report.run import MeasuredSteps
from packhorse.report.tables import comparison_table
from packhorse.search.rank_plans import predict_ranks
from packhorse.timeline.spec import Span, Timeline
from packhorse.units import format_ns
from tests.report.samples import render
from tests.support.rank_sets import find_plans, make_case, make_pair

CASE = make_case(pins={})
PLANS = CASE.plans
PARTS = cut_stages(PLANS.pipeline, CASE.model)
PROFILES = (estimate_profile(CASE.model, CASE.cluster.ranks[0]),) * 2
TIMELINES = predict_ranks(PLANS.ranks, PARTS, PROFILES, CASE.cluster.ranks)


def span(lane, start_ns, end_ns, name="task"):
    return Span(index=0, name=name, kind="x", lane=lane, start_ns=start_ns, end_ns=end_ns)


def line(rank, *spans, source="simulated"):
    return Timeline(source=source, rank=rank, spans=spans, memory={})


def slow_down(timeline, factor):
    """What a computer takes that is so many times slower than it was planned."""
    spans = tuple(
        replace(each, start_ns=each.start_ns * factor, end_ns=each.end_ns * factor)
        for each in timeline.spans
    )
    return replace(timeline, source="measured", spans=spans, since_ns=timeline.since_ns * factor)


def test_a_run_that_goes_on_is_told_how_far_it_is():
    so_far = MeasuredSteps(
        num_done=2, num_steps=4, num_recent=2, step_ns=3_000_000_000, by_this_plan=True
    )
    told = " ".join(render(rank_plans_table(PLANS, so_far=so_far), width=300).split())
    assert "so far 2 of 4 steps are done; the last 2 steps took 3.00 s each" in told
    assert f"the plan says {format_ns(PLANS.step_ns)} a step" in told
    done = replace(so_far, num_done=4)
    assert "so far all 4 steps are done" in " ".join(
        render(rank_plans_table(PLANS, so_far=done), width=300).split()
    )


def test_golden_texts(golden):
    table = rank_plans_table(PLANS, timelines=TIMELINES)
    golden("report/rank_plans_table.txt", render(table, encoding="ascii"))
    explained = explain_rank_plans(PLANS, timelines=TIMELINES)
    golden("report/rank_explain.txt", render(explained, encoding="ascii"))


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    comparisons = [compare_timelines(each, slow_down(each, 2)) for each in TIMELINES]
    for shown in (
        rank_plans_table(PLANS, timelines=TIMELINES),
        explain_rank_plans(PLANS, timelines=TIMELINES),
        rank_comparison_table(comparisons),
    ):
        lines = render(shown, width=width, encoding="ascii").splitlines()
        assert max(map(len, lines)) <= width


def test_every_rank_schedule_and_reason_is_there():
    text = " ".join(render(explain_rank_plans(PLANS, timelines=TIMELINES), width=200).split())
    assert PLANS.pipeline.name.because in text
    assert PLANS.pipeline.bounds.because in text
    for rank in (0, 1):
        assert f"Rank {rank}, blocks" in text
    for each in PLANS.rejected:
        assert each.because in text
    for plan in PLANS.ranks:
        assert plan.heap.because in text


def test_without_what_lies_beside_them_and_without_predictions():
    text = " ".join(render(explain_rank_plans(PLANS)).split())
    assert "which are not beside it" in text
    ranks = tuple(replace(plan, prediction=None) for plan in PLANS.ranks)
    unpredicted = replace(PLANS, ranks=ranks, step_ns=None, compute_ns=())
    assert "no prediction" in render(explain_rank_plans(unpredicted))
    assert "step  " not in render(rank_plans_table(unpredicted))


def test_unlike_machines_are_named():
    assert "machine" not in render(rank_plans_table(PLANS)).split()
    other = replace(PLANS.ranks[1], machine="small")
    table = render(rank_plans_table(replace(PLANS, ranks=(PLANS.ranks[0], other))))
    assert "machine" in table
    assert "small" in table


def test_what_spares_memory_is_spelled():
    pins = {"schedule": "1f1b", "optimizer": "disk", "recompute": "all"}
    table = render(rank_plans_table(find_plans(CASE.model, make_pair(), pins=pins)), width=160)
    assert "optimizer states on disk" in table
    assert "recomputes" in table
    assert "nothing" in render(rank_plans_table(PLANS))


def test_the_dict_says_the_same():
    document = json.loads(json.dumps(rank_plans_as_dict(PLANS, timelines=TIMELINES)))
    assert document["schedule"] == PLANS.pipeline.name.value
    assert document["schedule_because"] == PLANS.pipeline.name.because
    assert document["owners"] == list(PLANS.pipeline.owners)
    assert len(document["rejected"]) == len(PLANS.rejected)
    assert [rank["peak_bytes"] for rank in document["ranks"]] == [
        plan.prediction.peak_bytes for plan in PLANS.ranks
    ]
    assert {(link["source"], link["target"]) for link in document["links"]} == {(0, 1), (1, 0)}
    assert rank_plans_as_dict(PLANS)["bottleneck"] is None


def test_choices_of_all_ranks_stand_once():
    groups = fold_rank_choices(PLANS)
    heaps = [group for group in groups if group.choice == "C heap"]
    assert len({(plan.heap.value, plan.heap.because) for plan in PLANS.ranks}) == len(heaps)
    first = replace(PLANS.ranks[0], heap=Choice(value="map", because="tried"))
    last = replace(PLANS.ranks[1], heap=Choice(value="keep", because="fits"))
    groups = fold_rank_choices(replace(PLANS, ranks=(first, last)))
    heaps = [(g.value, g.where) for g in groups if g.choice == "C heap"]
    assert heaps == [("map", "rank 0"), ("keep", "rank 1")]
    (order,) = [group for group in groups if group.choice == "order"]
    assert (order.value, order.where) == ("scheduled", "")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "rank 0"), ((1, 0), "ranks 0-1"), ((0, 1, 2, 5, 7, 8), "ranks 0-2, 5, 7-8")],
)
def test_ranks_that_count_up_are_ranges(ranks, text):
    assert say_ranks(ranks) == text


def test_the_busiest_lane_and_link():
    timelines = (
        line(0, span("compute", 0, 60), span("send 1", 10, 90)),
        line(1, span("compute", 20, 100), span("receive 0", 10, 90), span("send 0", 90, 95)),
    )
    busiest = find_busiest(timelines)
    assert (busiest.rank, busiest.lane, busiest.lane_ns) == (1, "compute", 80)
    assert (busiest.link, busiest.link_ns) == ((0, 1), 80)
    assert busy_links(timelines) == {(0, 1): 80, (1, 0): 5}
    assert say_busiest(busiest) == "busiest: compute of rank 1, 80.0 % of the step"
    assert say_busiest_link(busiest) == "busiest link: rank 0 to 1, 80.0 %"
    alone = find_busiest((line(0, span("disk_read", 0, 10)),))
    assert say_busiest(alone) == "busiest: read from disk of rank 0, 100.0 % of the step"
    assert say_busiest_link(alone) == "nothing is sent"


def test_ranks_that_are_slower_than_planned():
    measured = (slow_down(TIMELINES[0], 1), slow_down(TIMELINES[1], 2))
    comparisons = [
        compare_timelines(predicted, each, num_tasks=3)
        for predicted, each in zip(TIMELINES, measured, strict=True)
    ]
    text = render(rank_comparison_table(comparisons, num_tasks=3))
    rows = text.split("computing")[1].split("idle")[0]
    assert "+0.0 pp" in text
    assert rows.splitlines()[1].endswith("0.0 %")
    assert rows.splitlines()[2].endswith("-50.0 %")
    tasks = text.split("tasks that differ most")[1]
    assert "rank 1: " in tasks
    assert "rank 0: " not in tasks
    # They wait for the other rank: what they take says nothing of themselves.
    assert "send" not in tasks
    assert "receive" not in tasks
    assert "has the wait for the other rank in it" in render(comparison_table(comparisons[1]))
    idle = idle_as_dict(comparisons[1])
    assert idle["predicted"] == pytest.approx(idle["measured"])
    other = compare_timelines(TIMELINES[0], TIMELINES[1])
    words = " ".join(render(rank_comparison_table([other])).split())
    assert "The two timelines of rank 0 are of different tasks" in words
