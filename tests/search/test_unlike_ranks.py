"""Plans of ranks that share a model: unlike ranks, budgets, pins, and their file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.ranks import cut_stages
from packhorse.errors import (
    DoesNotFitError,
    FileFormatError,
    InputError,
    MismatchError,
    RefusedError,
)
from packhorse.machine.cluster import Cluster, give_links, link_all
from packhorse.machine.spec import PeerLink
from packhorse.plan.pins import read_pins
from packhorse.plan.rank_files import format_rank_plans, parse_rank_plans
from packhorse.plan.spec import Choice
from packhorse.profile.analytic import estimate_profile
from packhorse.search.rank_plans import RankCandidate, find_rank_plans, fit_budgets
from tests.search.toy_search import ADAMW, ARITHMETIC, make_machine
from tests.support.models import make_model

LINK = PeerLink(peer=0, bytes_per_s=1e10, latency_ns=1_000)
FAST = {"schedule": "1f1b"}


def find(*machines, num_layers=6, total=4, pins=None, base_bytes=0, **model_options):
    model = make_model(num_layers=num_layers, halved=True, **model_options)
    cluster = Cluster(
        name="toy",
        ranks=give_links(machines, link_all(len(machines), LINK)),
        hosts=("here",) * len(machines),
    )
    candidate = RankCandidate(
        model=model,
        profiles=tuple(
            replace(estimate_profile(model, machine), base_bytes=base_bytes) for machine in machines
        ),
        loss_chunk_tokens=None,
    )
    return find_rank_plans(
        [candidate],
        cluster,
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        global_batch_rows=total,
        pins=read_pins(FAST if pins is None else pins),
    ).plans, model


def slow_down(machine, factor):
    matmul = tuple(
        replace(point, flops_per_s=point.flops_per_s / factor) for point in machine.matmul
    )
    rate = machine.memory_bytes_per_s / factor
    return replace(machine, matmul=matmul, memory_bytes_per_s=rate)


def test_a_rank_of_half_the_speed_has_fewer_blocks() -> None:
    plans, _ = find(make_machine(), slow_down(make_machine(), 2), num_layers=12)
    fast, slow = (plans.pipeline.owners.count(rank) for rank in (0, 1))
    assert slow < fast
    assert plans.idle is not None
    assert 0 < plans.idle < 0.5


def test_a_file_gives_the_same_plans_back() -> None:
    plans, _ = find(make_machine(), make_machine())
    assert parse_rank_plans(format_rank_plans(plans)) == plans


def test_ranks_of_other_numerics_are_refused_by_name() -> None:
    plans, _ = find(make_machine(), make_machine())
    content = json.loads(format_rank_plans(plans))
    content["ranks"][1]["numerics"]["tied_sum"] = "per_step"
    with pytest.raises(FileFormatError) as caught:
        parse_rank_plans(json.dumps(content), where="plan.json")
    assert "tied_sum is per_microbatch on rank 0 and per_step on rank 1" in str(caught.value)
    assert caught.value.where == "plan.json: ranks[1]"


def test_bounds_that_were_moved_alone_are_refused_with_the_rank() -> None:
    machines = make_machine(), make_machine()
    plans, model = find(*machines)
    bounds = replace(plans.pipeline.bounds, value=(0, 3, 8))
    assert plans.pipeline.bounds.value != bounds.value
    moved = replace(plans.pipeline, bounds=bounds)
    edited = replace(plans, ranks=tuple(replace(p, pipeline=moved) for p in plans.ranks))
    profile = estimate_profile(model, machines[0])
    cluster = Cluster(name="toy", ranks=machines, hosts=("here", "here"))
    with pytest.raises(MismatchError, match="rank 0 is given embed") as why:
        fit_budgets(edited, cut_stages(moved, model), [profile] * 2, cluster, where="plan.json")
    assert why.value.where == "plan.json: bounds and ranks[0].blocks"


def test_ranks_keep_no_steps() -> None:
    plans, model = find(make_machine(), make_machine())
    parts = cut_stages(plans.pipeline, model)
    edited = replace(plans.ranks[1], durable=Choice(value=2, because="by hand"))
    with pytest.raises(RefusedError, match="do not keep steps") as caught:
        lower_plan(edited, parts[1], "train_step")
    assert caught.value.where == "plan.durable"


def test_a_rank_that_cannot_hold_its_part_is_named_with_what_it_needs() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        find(make_machine(), make_machine(device_bytes=4_000, disk_bytes=0))
    assert "rank 1" in str(caught.value)
    assert "grant" in str(caught.value)


def test_more_ranks_than_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="3 blocks, too few for 4 ranks"):
        find(*[make_machine()] * 4, num_layers=1)


def test_a_block_whose_backward_is_all_weights_may_be_made_again() -> None:
    # Nothing flows back into block 1, so it has no InputGrad to be made again before.
    halves = {"schedule": "zb-h1"}
    machines = make_machine(), make_machine()
    kept, _ = find(*machines, pins=halves, frozen=("embed",))
    again, _ = find(*machines, pins=halves | {"recompute": "all"}, frozen=("embed",))
    assert kept.ranks[0].blocks[1].activations.value == "keep"
    assert again.ranks[0].blocks[1].activations.value == "recompute"
    assert again.step_ns > kept.step_ns


def test_what_a_process_holds_anyway_is_counted_once() -> None:
    base_bytes = 1 << 24
    plans, _ = find(make_machine(), make_machine(), base_bytes=base_bytes)
    needs = [sum(plan.prediction.peak_bytes["device"].values()) for plan in plans.ranks]
    assert base_bytes < max(needs) < 1.5 * base_bytes
    tight = [make_machine(device_bytes=round(need * 1.02), disk_bytes=0) for need in needs]
    again, _ = find(*tight, base_bytes=base_bytes)
    assert all(chunk.optimizer.value == "device" for p in again.ranks for chunk in p.chunks)
