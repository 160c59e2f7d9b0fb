"""A model cut and lowered for ranks that are not there: its plans, its programs, its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.runs import run_pipelined
from packhorse.errors import InputError
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import PeerLink
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.schedule.timing import time_schedule
from packhorse.search.dry_run import Fleet, cut_for, find_dtype, lower_cut
from packhorse.simulator.joint import simulate_ranks
from packhorse.verifier.joint import verify_ranks
from tests.search.toy_search import ADAMW
from tests.support.models import make_model

MACHINE = load_known_machine("rtx-4090")
LINK = PeerLink(peer=0, bytes_per_s=1e12, latency_ns=0)


def make_fleet(num_ranks, *, budget_bytes=None, num_replicas=1):
    tiers = MACHINE.tiers
    if budget_bytes is not None:
        tiers = tuple(
            replace(tier, budget_bytes=budget_bytes) if tier.name == "device" else tier
            for tier in tiers
        )
    return Fleet(
        machine=replace(MACHINE, tiers=tiers),
        link=LINK,
        num_ranks=num_ranks,
        num_replicas=num_replicas,
    )


def make_schedule(name, num_ranks, num_microbatches):
    return make_named(name, num_ranks, num_microbatches, even_costs(num_ranks))


MODEL = make_model(num_layers=14, hidden=2048, vocabulary=2048, length=2048, halved=True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipe-v"])
def test_programs_take_as_long_as_the_schedule_with_the_stages_costs(name):
    fleet = make_fleet(4)
    cut = cut_for(MODEL, fleet, make_schedule(name, 4, 12), optimizer=ADAMW)
    ranks = list(lower_cut(cut, fleet, optimizer=ADAMW))
    programs = [each.program for each in ranks]
    verify_ranks(programs, [each.part for each in ranks])
    timelines = simulate_ranks(programs, [each.costs for each in ranks])
    step_ns = max(t.makespan_ns for t in timelines) - max(t.since_ns for t in timelines)
    told_ns = time_schedule(cut.schedule, cut.costs).makespan_ns
    # On top come norms, updates, and what issuing a task takes.
    assert told_ns < step_ns < 1.1 * told_ns


def test_each_rank_has_its_own_blocks_and_all_states_in_its_device():
    fleet = make_fleet(4, num_replicas=8)
    cut = cut_for(MODEL, fleet, make_schedule("1f1b", 4, 6), optimizer=ADAMW)
    ranks = list(lower_cut(cut, fleet, optimizer=ADAMW))
    names = [block.name for each in ranks for block in each.part.blocks]
    assert names == [block.name for block in MODEL.blocks]
    for rank, each in enumerate(ranks):
        assert each.program.rank == rank
        assert each.program.num_microbatches == 6
        assert {buffer.home for buffer in each.program.buffers.values()} <= {None, "device"}
        assert each.plan.budget_bytes["device"] == fleet.budget_bytes


@pytest.mark.parametrize("name", ["gpipe", "zb-v"])
def test_a_program_follows_from_the_runs_that_concern_its_rank(name):
    model = make_model(
        num_layers=8, tied_head=True, skips=[(1, 8)], shared_layers=[2, 7], halved=True
    )
    fleet = make_fleet(3)
    cut = cut_for(model, fleet, make_schedule(name, 3, 5), optimizer=ADAMW)
    runs = run_pipelined(model, cut.pipeline)
    for each in lower_cut(cut, fleet, optimizer=ADAMW):
        assert lower_plan(each.plan, each.part, "train_step", runs=runs) == each.program


def test_every_block_of_a_rank_recomputes_that_has_something_to_recompute():
    cut = cut_for(MODEL, make_fleet(4), make_schedule("gpipe", 4, 16), optimizer=ADAMW)
    needed = min(share.kept_need_bytes for share in cut.cuts.shares)
    tight = make_fleet(4, budget_bytes=needed)
    cut = cut_for(MODEL, tight, make_schedule("gpipe", 4, 16), optimizer=ADAMW)
    ranks = list(lower_cut(cut, tight, optimizer=ADAMW))
    verify_ranks([each.program for each in ranks], [each.part for each in ranks])
    assert any(share.recomputes for share in cut.cuts.shares)
    for share, each in zip(cut.cuts.shares, ranks, strict=True):
        for block, planned in zip(each.part.blocks, each.plan.blocks, strict=True):
            saves = each.part.body_of(block.id).saved_bytes > 0
            assert (planned.activations.value == "recompute") == (share.recomputes and saves)


def test_a_machine_without_a_budget_is_refused():
    with pytest.raises(InputError, match="grants its device no memory"):
        cut_for(
            MODEL,
            make_fleet(2, budget_bytes=0),
            make_schedule("gpipe", 2, 2),
            optimizer=ADAMW,
        )


def test_the_dtype_of_a_model_is_that_of_most_of_it():
    assert find_dtype(MODEL) == "float32"
    assert find_dtype(make_model(dtype="bfloat16")) == "bfloat16"
