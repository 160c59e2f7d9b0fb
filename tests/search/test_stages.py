"""Cuts of models into stages: exact where that is promised, and never out of a rank's memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import DoesNotFitError, InputError
from packhorse.machine.cluster import link_all
from packhorse.machine.spec import PeerLink
from packhorse.search.ranks import RankSpec
from packhorse.search.stages import cut_stages, make_cutter, place_cuts
from tests.search.ranked_cases import (
    FAST,
    draw_case,
    list_cuts,
    make_profile,
    make_ranks,
    make_schedule,
    own_bodies,
    rate_cuts,
)
from tests.search.toy_search import ADAMW
from tests.support.models import make_model


def best_of(case):
    """The least bottleneck of all cuts, and the least bytes of those; None where nothing fits."""
    known = {}
    rated = [rate_cuts(case, bounds, known) for bounds in list_cuts(case)]
    return min((each for each in rated if each[0] is not None), default=None)


def cut_case(case):
    try:
        return cut_stages(case.cutter, case.schedule)
    except DoesNotFitError:
        return None


def cut_layers(name, *factors, num_layers=16, num_stages=None, **more):
    """Cut a model of equal layers, embedding and head included."""
    model = make_model(num_layers=num_layers)
    profile = make_profile(own_bodies(model), [1000] * (num_layers + 2))
    ranks = make_ranks(profile, *factors, **more)
    cutter = make_cutter(own_bodies(model), ranks, link_all(len(ranks), FAST), optimizer=ADAMW)
    return cut_stages(cutter, make_schedule(name, len(ranks), num_stages=num_stages))


def count_blocks(cuts):
    return [cuts.owners.count(rank) for rank in range(len(cuts.shares))]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    num_ranks=st.integers(1, 4),
    num_blocks=st.integers(4, 8),
)
def test_one_stage_a_rank_is_exact(seed, name, num_ranks, num_blocks):
    case = draw_case(seed, name, num_ranks, num_blocks)
    cuts, best = cut_case(case), best_of(case)
    if best is None:
        assert cuts is None
    else:
        assert (cuts.bottleneck_ns, cuts.crossing_bytes) == (ceil(best[0]), best[1])
        assert rate_cuts(case, cuts.bounds, {})[1] == best[1]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["zb-v", "v-half", "interleaved", "looped-bfs", "dualpipe-v"]),
    num_ranks=st.integers(1, 3),
    num_blocks=st.integers(6, 8),
)
def test_few_cuts_of_several_stages_a_rank_are_exact(seed, name, num_ranks, num_blocks):
    case = draw_case(seed, name, num_ranks, num_blocks)
    cuts, best = cut_case(case), best_of(case)
    if best is None:
        assert cuts is None
    else:
        assert (cuts.bottleneck_ns, cuts.crossing_bytes) == (ceil(best[0]), best[1])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages", "num_blocks"),
    [("zb-v", 2, 4, 16), ("interleaved", 2, 4, 16), ("interleaved", 3, 6, 13), ("zb-v", 3, 6, 13)],
)
def test_many_cuts_of_several_stages_a_rank_are_near(seed, name, num_ranks, num_stages, num_blocks):
    case = draw_case(seed, name, num_ranks, num_blocks)
    case = replace(
        case, ranks=tuple(replace(rank, budget_bytes=2 * rank.budget_bytes) for rank in case.ranks)
    )
    assert case.schedule.num_stages == num_stages
    cuts, best = cut_stages(case.cutter, case.schedule), best_of(case)
    assert best[0] <= cuts.bottleneck_ns <= 1.02 * best[0] + 1


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["1f1b", "zb-v", "interleaved"]),
    num_blocks=st.integers(8, 12),
)
def test_every_block_has_one_stage_and_every_stage_a_block(seed, name, num_blocks):
    case = draw_case(seed, name, 3, num_blocks)
    cuts = cut_case(case)
    if cuts is not None:
        assert cuts == cut_stages(case.cutter, case.schedule)
        assert cuts == place_cuts(case.cutter, case.schedule, cuts.bounds)
        assert (cuts.bounds[0], cuts.bounds[-1]) == (0, num_blocks)
        assert all(first < stop for first, stop in pairwise(cuts.bounds))
        assert len(cuts.owners) == num_blocks
        for rank, share in zip(case.ranks, cuts.shares, strict=True):
            assert share.need_bytes <= rank.budget_bytes
            assert share.held_bytes <= share.room_bytes


def test_more_stages_than_blocks():
    with pytest.raises(InputError) as found:
        cut_layers("1f1b", 1, 1, 1, num_layers=0)
    assert found.value.what == "toy has 2 blocks and cannot be cut into 3 stages"
    assert found.value.fix == "take at most 2 stages"
    assert count_blocks(cut_layers("1f1b", 1, 1, num_layers=0)) == [1, 1]


def test_uneven_is_allowed_and_nothing_is_dropped():
    assert sorted(count_blocks(cut_layers("1f1b", 1, 1, 1, num_layers=15))) == [5, 6, 6]
    assert sorted(count_blocks(cut_layers("zb-v", 1, 1, 1, num_layers=15))) == [5, 6, 6]


@pytest.mark.parametrize(
    ("name", "num_stages"), [("1f1b", 2), ("zb-v", 4), ("interleaved", 4), ("interleaved", 6)]
)
def test_a_rank_that_is_twice_as_slow_gets_half_as_much(name, num_stages):
    more = {"num_stages": num_stages} if name == "interleaved" else {}
    assert count_blocks(cut_layers(name, 1, 2, num_layers=16, **more)) == [12, 6]
    assert count_blocks(cut_layers(name, 2, 1, num_layers=16, **more)) == [6, 12]


def test_a_rank_may_have_a_profile_of_its_own():
    model = own_bodies(make_model(num_layers=4))
    quick = make_profile(model, [100] * 6)
    no_head = make_profile(model, [100] * 5 + [1000])
    for first, second, counts in ((quick, no_head, [5, 1]), (no_head, quick, [3, 3])):
        ranks = tuple(RankSpec(profile=each, budget_bytes=1 << 40) for each in (first, second))
        cutter = make_cutter(model, ranks, link_all(2, FAST), optimizer=ADAMW)
        assert count_blocks(cut_stages(cutter, make_schedule("1f1b", 2))) == counts


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_a_rank_with_a_third_of_the_memory_gets_what_fits(name):
    plenty = cut_layers(name, 1, 1)
    assert count_blocks(plenty) == [9, 9]
    model = own_bodies(make_model(num_layers=16))
    profile = make_profile(model, [1000] * 18)
    for small in (0, 1):
        whole = plenty.shares[small].need_bytes
        ranks = [RankSpec(profile=profile, budget_bytes=2 * whole) for _ in range(2)]
        ranks[small] = replace(ranks[small], budget_bytes=whole // 3)
        cutter = make_cutter(model, ranks, link_all(2, FAST), optimizer=ADAMW)
        cuts = cut_stages(cutter, make_schedule(name, 2))
        assert 2 <= count_blocks(cuts)[small] <= 4
        assert cuts.shares[small].need_bytes <= whole // 3
        assert not cuts.shares[1 - small].recomputes


def test_states_that_may_lie_elsewhere_let_a_small_rank_take_more():
    model = own_bodies(make_model(num_layers=16))
    profile = make_profile(model, [1000] * 18)
    whole = cut_layers("1f1b", 1, 1).shares[0].need_bytes
    ranks = [RankSpec(profile=profile, budget_bytes=2 * whole) for _ in range(2)]

    def cut(rate):
        small = replace(ranks[0], budget_bytes=whole // 2, away_bytes_per_s=rate)
        cutter = make_cutter(model, (small, ranks[1]), link_all(2, FAST), optimizer=ADAMW)
        return cut_stages(cutter, make_schedule("1f1b", 2))

    fast, slow, none = cut(1e15), cut(1e9), cut(None)
    assert count_blocks(fast) == [9, 9]
    assert fast.shares[0].moved_bytes > whole // 3
    assert none.shares[0].moved_bytes == 0
    assert count_blocks(none)[0] < count_blocks(slow)[0] < 9
    assert slow.bottleneck_ns > fast.bottleneck_ns


def test_blocks_recompute_only_on_ranks_that_must():
    kept = cut_layers("gpipe", 1, 1)
    assert not any(share.recomputes for share in kept.shares)
    budget = max(share.need_bytes for share in kept.shares) - 1
    tight = cut_layers("gpipe", 1, 1, budget_bytes=budget)
    assert any(share.recomputes for share in tight.shares)
    assert not all(share.recomputes for share in tight.shares)
    for share in tight.shares:
        assert share.recomputes == (share.kept_need_bytes > budget)
        assert share.need_bytes <= budget
    assert tight.bottleneck_ns > kept.bottleneck_ns


def test_no_cut_that_fits_names_the_rank_and_what_it_needs():
    with pytest.raises(DoesNotFitError) as found:
        cut_layers("1f1b", 1, 1, budget_bytes=100_000)
    assert found.value.what == "toy does not fit its 2 ranks, cut into 2 stages"
    assert found.value.where is not None
    assert "has 97.7 KiB" in found.value.where
    assert found.value.fix is not None


def test_a_slow_link_takes_the_narrowest_cut():
    # The value that skips from block 1 to block 4 lies over the cuts between.
    model = own_bodies(make_model(num_layers=5, skips=[(1, 4)]))
    profile = make_profile(model, [100] * 7)
    ranks = make_ranks(profile, 1, 1)
    width = model.values["h0"].size_bytes

    def cut(rate):
        links = link_all(2, PeerLink(peer=0, bytes_per_s=rate, latency_ns=0))
        return cut_stages(
            make_cutter(model, ranks, links, optimizer=ADAMW), make_schedule("1f1b", 2)
        )

    fast, slow = cut(1e15), cut(1e8)
    assert fast.bounds in ((0, 3, 7), (0, 4, 7))
    assert fast.crossing_bytes == 4 * width
    assert slow.bounds in ((0, 1, 7), (0, 2, 7), (0, 5, 7), (0, 6, 7))
    assert slow.crossing_bytes == 2 * width
    assert slow.bottleneck_ns == width * 10


def test_no_gradient_comes_back_to_what_is_frozen():
    model = own_bodies(make_model(num_layers=4, frozen=("embed", "layers.1.", "layers.2.")))
    tables = make_cutter(
        model, make_ranks(make_profile(model, [1] * 6), 1), {}, optimizer=ADAMW
    ).stretches
    width = model.values["h0"].size_bytes
    assert tables.forward_bytes.tolist() == [0, *[width] * 5, 0]
    assert tables.gradient_bytes.tolist() == [0, 0, 0, 0, width, width, 0]


def test_equal_cuts_go_to_fewer_bytes_then_to_the_more_even():
    model = own_bodies(make_model(num_layers=6, skips=[(2, 5)]))
    # The head alone takes as long as all the rest, so every cut in front of it is as good.
    profile = make_profile(model, [1] * 7 + [100])
    cutter = make_cutter(model, make_ranks(profile, 1, 1, 1), link_all(3, FAST), optimizer=ADAMW)
    # At 4 and 5 the skip crosses too; 1, 2 and 6 are less even.
    assert cut_stages(cutter, make_schedule("1f1b", 3)).bounds == (0, 3, 7, 8)


def test_tied_parameters_count_on_every_rank_that_has_them():
    model = own_bodies(make_model(num_layers=4, tied_head=True))
    ranks = make_ranks(make_profile(model, [100] * 6), 1, 1)
    cutter = make_cutter(model, ranks, link_all(2, FAST), optimizer=ADAMW)
    tied_bytes = 16 * model.parameters["embed.weight"].num_elements
    rest_bytes = 16 * model.num_parameters - tied_bytes
    chain = cut_stages(cutter, make_schedule("1f1b", 2))
    assert sum(share.states_bytes for share in chain.shares) == rest_bytes + 2 * tied_bytes
    vee = cut_stages(cutter, make_schedule("zb-v", 2))
    assert sum(share.states_bytes for share in vee.shares) == rest_bytes + tied_bytes


def test_a_profile_of_another_shape_is_refused():
    model = make_model(num_layers=2)
    profile = make_profile(own_bodies(model), [1] * 4)
    with pytest.raises(InputError, match="no times for block embed"):
        make_cutter(model, make_ranks(profile, 1), {}, optimizer=ADAMW)
    other = replace(profile, rows=2)
    with pytest.raises(InputError, match="is of 2 x 8 tokens, not of toy at 1 x 8"):
        make_cutter(own_bodies(model), make_ranks(other, 1), {}, optimizer=ADAMW)
    other = replace(profile, model="other")
    with pytest.raises(InputError, match="is of another model"):
        make_cutter(own_bodies(model), make_ranks(other, 1), {}, optimizer=ADAMW)


def test_a_missing_link_is_named():
    model = own_bodies(make_model(num_layers=2))
    ranks = make_ranks(make_profile(model, [1] * 4), 1, 1)
    cutter = make_cutter(model, ranks, {(0, 1): FAST}, optimizer=ADAMW)
    with pytest.raises(InputError, match="no link from rank 1 to rank 0"):
        cut_stages(cutter, make_schedule("1f1b", 2))


def test_placements_and_bounds_that_are_none():
    model = own_bodies(make_model(num_layers=2))
    ranks = make_ranks(make_profile(model, [1] * 4), 1, 1)
    cutter = make_cutter(model, ranks, link_all(2, FAST), optimizer=ADAMW)
    schedule = make_schedule("1f1b", 2)
    assert place_cuts(cutter, schedule, (0, 3, 4)).owners == (0, 0, 0, 1)
    for bounds in ((0, 4), (0, 0, 4), (0, 4, 4), (1, 2, 4), (0, 2, 3), (0, 1, 2, 4)):
        with pytest.raises(InputError, match="are not the bounds of 2 stages") as found:
            place_cuts(cutter, schedule, bounds)
        assert found.value.fix == "give 3 numbers that rise from 0 to 4"
    with pytest.raises(InputError, match="stage 1 has 2 ranks"):
        cut_stages(cutter, replace(schedule, placement={0: (0,), 1: (0, 1)}))
    with pytest.raises(InputError, match="rank 1 has no stage"):
        cut_stages(cutter, replace(schedule, placement={0: (0,), 1: (0,)}))
