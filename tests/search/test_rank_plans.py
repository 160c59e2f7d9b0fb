"""Plans of ranks that share a model: they fit, are tightened until they do, or name the rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.ranks import cut_stages
from packhorse.errors import DoesNotFitError, InputError, RecipeError
from packhorse.profile.analytic import estimate_profile
from packhorse.schedule.finding import NAMES
from packhorse.search import rank_plans
from packhorse.search.pipeline import find_pipeline
from packhorse.search.rank_plans import (
    fit_budgets,
    merge_predictions,
    predict_ranks,
)
from packhorse.units import KIB, MIB
from tests.support.rank_sets import find_plans, make_case, make_layers, make_pair

MODEL = make_layers()
SCHEDULE = """
from packhorse.schedule.placements import place_vee
from packhorse.schedule.spec import Backward, Forward, Schedule


def vee(ranks, microbatches, costs):
    def order(rank):
        there, back = rank, 2 * ranks - 1 - rank
        times = range(microbatches)
        return [
            *(Forward(stage=there, microbatch=m) for m in times),
            *(Forward(stage=back, microbatch=m) for m in times),
            *(Backward(stage=back, microbatch=m) for m in times),
            *(Backward(stage=there, microbatch=m) for m in times),
        ]

    return Schedule(placement=place_vee(ranks), orders=[order(r) for r in range(ranks)])


def fewer(ranks, microbatches, costs):
    return vee(ranks, microbatches - 1, costs)
"""


def profiles_of(cluster, model=MODEL):
    return (estimate_profile(model, cluster.ranks[0]),) * cluster.num_ranks


def need_of(plan):
    return sum(plan.prediction.peak_bytes["device"].values())


def test_every_rank_fits_and_all_share_one_pipeline():
    case = make_case(3)
    plans = case.plans
    assert len(plans.ranks) == 3
    assert [plan.pipeline for plan in plans.ranks] == [plans.pipeline] * 3
    assert {plan.order.value for plan in plans.ranks} == {"scheduled"}
    assert {plan.numerics.microbatch_rows.value for plan in plans.ranks} == {1}
    for plan in plans.ranks:
        assert need_of(plan) <= plan.budget_bytes["device"] == 64 * MIB


def test_what_is_promised_is_the_joint_simulation():
    case = make_case()
    parts = cut_stages(case.plans.pipeline, case.model)
    timelines = predict_ranks(
        case.plans.ranks, parts, profiles_of(case.cluster), case.cluster.ranks
    )
    step_ns = max(timeline.step_ns for timeline in timelines)
    assert case.plans.step_ns == step_ns
    assert {plan.prediction.step_ns for plan in case.plans.ranks} == {step_ns}
    assert case.plans.compute_ns == tuple(each.busy_ns("compute") for each in timelines)
    busy = sum(case.plans.compute_ns) / (2 * step_ns)
    assert case.plans.idle == pytest.approx(1 - busy)


def test_all_schedules_are_looked_at_where_none_is_pinned():
    plans = find_plans(MODEL, make_pair(), pins={})
    names = {each.name for each in plans.rejected} | {plans.pipeline.name.value}
    assert names == set(NAMES)


def test_a_rank_with_less_memory_gets_less_or_spares_it():
    plenty = find_plans(MODEL, make_pair())
    least = min(map(need_of, plenty.ranks))
    tight = find_plans(MODEL, make_pair((round(least * 0.75), 64 * MIB)))
    assert need_of(tight.ranks[0]) <= tight.ranks[0].budget_bytes["device"]
    blocks = [len(plan.blocks) for plan in tight.ranks]
    away = any(chunk.optimizer.value != "device" for plan in tight.ranks for chunk in plan.chunks)
    again = any(b.activations.value != "keep" for plan in tight.ranks for b in plan.blocks)
    assert blocks[0] < blocks[1] or away or again


def test_a_rank_that_does_not_fit_after_all_is_cut_for_less(monkeypatch):
    budgets: list[list[int]] = []

    def watch(model, ranks, links, **options):
        budgets.append([rank.budget_bytes for rank in ranks])
        return find_pipeline(model, ranks, links, **options)

    def refuse_first(candidates, machine, **options):
        if len(budgets) == 1 and machine is cluster.ranks[1]:
            raise DoesNotFitError("it needs more", where="tier device", fix="grant more")
        return found(candidates, machine, **options)

    cluster = make_pair()
    found = rank_plans.find_plan
    monkeypatch.setattr(rank_plans, "find_pipeline", watch)
    monkeypatch.setattr(rank_plans, "find_plan", refuse_first)
    plans = find_plans(MODEL, cluster)
    assert len(plans.ranks) == 2
    first, second = budgets
    assert second[0] == first[0]
    assert second[1] == round(first[1] * rank_plans.TIGHTER)


def test_a_refusal_names_the_rank_that_lacks_memory(monkeypatch):
    def refuse(candidates, machine, **options):
        if machine is cluster.ranks[1]:
            raise DoesNotFitError("it needs more", where="tier device", fix="grant more")
        return found(candidates, machine, **options)

    cluster = make_pair()
    found = rank_plans.find_plan
    monkeypatch.setattr(rank_plans, "find_plan", refuse)
    with pytest.raises(DoesNotFitError) as refused:
        find_plans(MODEL, cluster)
    assert refused.value.what == "rank 1 of 2: it needs more"
    assert refused.value.fix == "grant more"


def test_a_refusal_of_every_cut_says_of_each_schedule_which_rank():
    with pytest.raises(DoesNotFitError) as refused:
        find_plans(MODEL, make_pair((64 * MIB, 16 * KIB), disk_bytes=0))
    assert "no schedule of toy fits its ranks" in refused.value.what
    assert "1f1b, 2 stages: does not fit: rank 1" in refused.value.where


def test_a_schedule_is_pinned_by_name():
    plans = find_plans(MODEL, make_pair(), pins={"schedule": "zb-v"})
    assert plans.pipeline.name.value == "zb-v"
    assert plans.pipeline.schedule.num_stages == 4
    assert plans.rejected == ()
    assert all("schedule" in plan.pins for plan in plans.ranks)


def test_a_schedule_is_pinned_by_a_function_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SCHEDULE)
    plans = find_plans(MODEL, make_pair(), pins={"schedule": f"{file}:vee"})
    assert plans.pipeline.name.value == f"{file}:vee"
    assert plans.pipeline.schedule.placement[3] == (0,)
    assert plans.pipeline.owners[0] == plans.pipeline.owners[-1] == 0
    with pytest.raises(InputError, match="of 2 ranks and 3 microbatches, not of 2 and 4"):
        find_plans(MODEL, make_pair(), pins={"schedule": f"{file}:fewer"})
    with pytest.raises(InputError, match="no function 'vees'"):
        find_plans(MODEL, make_pair(), pins={"schedule": f"{file}:vees"})


def test_an_order_that_is_pinned_is_refused():
    with pytest.raises(RecipeError) as refused:
        find_plans(MODEL, make_pair(), pins={"order": "layered"})
    assert "order is pinned to layered" in refused.value.what
    assert refused.value.where == "recipe: plan.order"
    assert "schedule" in refused.value.fix


def test_more_ranks_than_blocks():
    with pytest.raises(InputError, match="8 blocks, too few for 9 ranks"):
        find_plans(MODEL, make_pair((64 * MIB,) * 9))


def test_given_plans_are_predicted_anew_or_refused_with_the_rank():
    case = make_case()
    parts = cut_stages(case.plans.pipeline, case.model)
    believed = replace(case.plans, step_ns=1)
    profiles = profiles_of(case.cluster)
    fitted = fit_budgets(believed, parts, profiles, case.cluster, where="p.json").plans
    assert fitted.step_ns == case.plans.step_ns
    need = need_of(case.plans.ranks[1])
    smaller = make_pair((64 * MIB, round(need * 0.9)))
    with pytest.raises(DoesNotFitError) as refused:
        fit_budgets(case.plans, parts, profiles_of(smaller), smaller, where="p.json")
    assert refused.value.what.startswith("rank 1 needs more than its budget allows: device: need")
    assert refused.value.where == "p.json"


def test_the_run_counts_the_disks_of_all_ranks():
    plans = find_plans(MODEL, make_pair(), pins={"schedule": "1f1b", "optimizer": "disk"})
    merged = merge_predictions(plans).prediction
    each = [plan.prediction for plan in plans.ranks]
    assert merged.disk_read_bytes == sum(one.disk_read_bytes for one in each) > 0
    assert merged.scratch_bytes == sum(one.scratch_bytes for one in each) > 0
    unpredicted = replace(plans, ranks=tuple(replace(p, prediction=None) for p in plans.ranks))
    assert merge_predictions(unpredicted).prediction is None
