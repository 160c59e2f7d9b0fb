"""What schedules are timed with: the stages' own costs, to the nanosecond and byte."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packhorse.errors import DoesNotFitError
from packhorse.machine.cluster import link_all
from packhorse.machine.spec import MESSAGE_CORE_NS, PeerLink
from packhorse.schedule.spec import WeightGrad
from packhorse.schedule.timing import time_schedule
from packhorse.search.block_times import share_weights, time_blocks
from packhorse.search.stage_costs import cost_stages
from packhorse.search.stages import cut_stages, make_cutter, place_cuts
from tests.search.ranked_cases import (
    draw_case,
    make_profile,
    make_ranks,
    make_schedule,
    own_bodies,
)
from tests.search.toy_search import ADAMW
from tests.support.models import make_model


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["1f1b", "zb-v", "interleaved", "zb-h1"]),
    num_ranks=st.integers(1, 3),
)
def test_stages_of_a_rank_add_up_to_what_it_computes(seed, name, num_ranks):
    case = draw_case(seed, name, num_ranks, 8)
    cutter = case.cutter
    try:
        cuts = cut_stages(cutter, case.schedule)
    except DoesNotFitError:
        assume(False)
        return
    costs = cost_stages(cutter, case.schedule, cuts)
    assert costs.cut(case.schedule.num_stages) == costs.parts
    timing = time_schedule(case.schedule, costs)
    count = case.schedule.num_microbatches
    for rank, share in enumerate(cuts.shares):
        mine = [part for part, home in zip(costs.parts, cuts.rank_of, strict=True) if home == rank]
        assert sum(each.forward_ns + each.backward_ns for each in mine) == share.compute_ns
        # A weight half that runs for itself takes what cutting the backward costs, too.
        halves = [task for task in case.schedule.orders[rank] if isinstance(task, WeightGrad)]
        split_ns = sum(costs.parts[task.stage].split_ns for task in halves)
        assert timing.ranks[rank].busy_ns == count * share.compute_ns + split_ns
        assert costs.cap_bytes is not None
        assert costs.cap_bytes[rank] == share.room_bytes
        if not share.recomputes:
            assert timing.ranks[rank].peak_bytes == share.held_bytes
        else:
            assert timing.ranks[rank].peak_bytes <= share.held_bytes
    assert timing.makespan_ns >= count * max(share.compute_ns for share in cuts.shares)


def cut_at(*bounds, name="1f1b", num_ranks=2, budget_bytes=1 << 40, link=None, **options):
    model = own_bodies(make_model(**{"num_layers": 4, **options}))
    profile = make_profile(model, [100, 200, 300, 400, 500, 600])
    ranks = make_ranks(profile, *[1] * num_ranks, budget_bytes=budget_bytes)
    links = link_all(num_ranks, link or PeerLink(peer=0, bytes_per_s=1e9, latency_ns=7))
    cutter = make_cutter(model, ranks, links, optimizer=ADAMW)
    schedule = make_schedule(name, num_ranks)
    cuts = place_cuts(cutter, schedule, bounds)
    return cutter, cuts, cost_stages(cutter, schedule, cuts)


def test_a_chain_of_uneven_stages():
    cutter, cuts, costs = cut_at(0, 4, 6)
    assert [part.forward_ns for part in costs.parts] == [1000, 1100]
    assert [part.backward_ns for part in costs.parts] == [2000, 2200]
    width = cutter.model.values["h0"].size_bytes
    assert [(each.forward_ns, each.gradient_ns) for each in costs.crossings] == [
        (width + 7, width + 7)
    ]
    assert cuts.owners == (0, 0, 0, 0, 1, 1)
    assert costs.parts[0].saved_bytes == cutter.stretches.kept_bytes[0, 4]


def test_messages_within_a_rank_take_nothing():
    _, _, costs = cut_at(0, 1, 3, 4, 6, name="zb-v")
    assert [each.forward_ns > 0 for each in costs.crossings] == [True, False, True]


def test_what_messages_take_of_the_cores_is_computed():
    _, _, costs = cut_at(
        0, 3, 6, link=PeerLink(peer=0, bytes_per_s=1e9, core_ns_per_byte=0.5, latency_ns=0)
    )
    _, _, free = cut_at(0, 3, 6, link=PeerLink(peer=0, bytes_per_s=1e9, latency_ns=0))
    for part, without in zip(costs.parts, free.parts, strict=True):
        assert part.forward_ns - without.forward_ns == MESSAGE_CORE_NS + 1024 // 2
        assert part.input_grad_ns - without.input_grad_ns == MESSAGE_CORE_NS + 1024 // 2
        assert part.weight_grad_ns == without.weight_grad_ns


def test_a_rank_that_recomputes_does_so_before_its_gradients():
    cutter, cuts, kept = cut_at(0, 3, 6)
    budget = cuts.shares[0].need_bytes - 1
    cutter, cuts, costs = cut_at(0, 3, 6, budget_bytes=budget)
    assert [share.recomputes for share in cuts.shares] == [True, False]
    # The embedding saves nothing, and is not computed again.
    assert costs.parts[0].forward_ns == kept.parts[0].forward_ns
    assert costs.parts[0].input_grad_ns == kept.parts[0].input_grad_ns + 200 + 300
    assert costs.parts[0].weight_grad_ns == kept.parts[0].weight_grad_ns
    assert costs.parts[0].saved_bytes == cutter.stretches.remade_bytes[0, 3]
    assert costs.parts[1] == kept.parts[1]


def test_the_last_block_is_not_computed_again_where_its_backward_is_next():
    _, cuts, kept = cut_at(0, 3, 6)
    budget = min(share.need_bytes for share in cuts.shares) - 1
    _, cuts, costs = cut_at(0, 3, 6, budget_bytes=budget)
    assert [share.recomputes for share in cuts.shares] == [True, True]
    assert costs.parts[1].backward_ns == kept.parts[1].backward_ns + 400 + 500


def test_halves_of_a_backward_are_told_by_operations():
    model = make_model(num_layers=2, hidden=32, vocabulary=64)
    embed, layer, _, head = model.blocks
    assert share_weights(model, embed) == 1
    # The toy counts two operations for biases and norms too, and twice as many backward.
    assert share_weights(model, layer) == Fraction(32 * 32, 2 * 32 * 34)
    assert share_weights(model, head) == Fraction(1, 2)
    frozen = make_model(num_layers=2, frozen=("layers.2.",))
    assert share_weights(frozen, frozen.blocks[2]) == 0
    lowest = make_model(num_layers=2, frozen=("embed",))
    assert share_weights(lowest, lowest.blocks[1]) == 1


def test_no_product_of_a_routed_block_takes_more_than_its_forward():
    model = make_model(num_layers=1)
    block = model.blocks[1]
    body = replace(model.bodies[block.body], forward_flops=1000, backward_flops=2500)
    routed = replace(model, bodies={**model.bodies, block.body: body})
    assert share_weights(routed, block) == Fraction(2, 5)


def test_halves_add_up_to_the_whole_on_a_slower_rank():
    model = own_bodies(make_model(num_layers=2, frozen=("embed", "layers.1.")))
    profile = make_profile(model, [101, 103, 107, 109])
    (rank,) = make_ranks(profile, 1.7)
    times = time_blocks(model, rank)
    assert [each.forward_ns for each in times] == [172, 175, 182, 185]
    assert [each.kept_ns - each.forward_ns for each in times] == [0, 0, 364, 371]
    assert [each.recomputes for each in times] == [False, False, True, True]
    assert times[2].input_grad_ns == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_equal_inputs_give_equal_costs(name):
    bounds = (0, 3, 6) if name == "1f1b" else (0, 1, 3, 4, 6)
    assert cut_at(*bounds, name=name)[1:] == cut_at(*bounds, name=name)[1:]
