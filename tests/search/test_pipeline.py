"""The choice among schedules: a short one that holds little, with reasons for it and others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import DoesNotFitError, InputError
from packhorse.machine.cluster import link_all
from packhorse.machine.spec import PeerLink
from packhorse.schedule.families import FAMILIES
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.timing import time_schedule
from packhorse.search.pipeline import find_pipeline
from packhorse.search.ranks import RankSpec
from tests.search.ranked_cases import FAST, draw_case, make_profile, make_ranks, own_bodies
from tests.search.toy_search import ADAMW
from tests.support.models import make_model

FEW = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def find(*factors, num_layers=6, num_microbatches=4, link=FAST, budgets=None, **more):
    model = own_bodies(make_model(num_layers=num_layers))
    profile = make_profile(model, [100_000] * (num_layers + 2))
    ranks = make_ranks(profile, *factors)
    if budgets is not None:
        pairs = zip(ranks, budgets, strict=True)
        ranks = tuple(replace(rank, budget_bytes=budget) for rank, budget in pairs)
    return find_pipeline(
        model,
        ranks,
        link_all(len(ranks), link),
        num_microbatches=num_microbatches,
        optimizer=ADAMW,
        **more,
    )


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 3), num_microbatches=st.integers(1, 5))
def test_what_is_found_is_right_fits_and_is_the_shortest(seed, num_ranks, num_microbatches):
    case = draw_case(seed, "1f1b", num_ranks, 7)
    try:
        found = find_pipeline(
            case.model,
            case.ranks,
            case.links,
            num_microbatches=num_microbatches,
            optimizer=ADAMW,
            names=FEW,
        )
    except DoesNotFitError:
        # What refusals say has tests of its own.
        return
    check_schedule(found.schedule)
    assert found.schedule.num_microbatches == num_microbatches
    assert found.schedule_name.value in FEW
    timing = time_schedule(found.schedule, found.costs)
    assert found.step_ns >= timing.makespan_ns
    assert found.step_ns >= num_microbatches * found.cuts.bottleneck_ns
    for rank, share in zip(case.ranks, found.cuts.shares, strict=True):
        assert share.need_bytes <= rank.budget_bytes
    assert len(found.owners) == len(case.model.blocks)
    for name in FEW:
        only = dict.fromkeys(each.name for each in found.rejected)
        assert name in only or name == found.schedule_name.value


def test_every_name_has_a_line():
    found = find(1, 1)
    names = {each.name for each in found.rejected} | {found.schedule_name.value}
    assert names == {*FAMILIES, "searched"}
    assert all(each.because for each in found.rejected)


def test_the_reasons_have_numbers():
    found = find(1, 1, names=("gpipe", "zb-h1"))
    assert found.schedule_name.value == "zb-h1"
    assert found.schedule_name.because == (
        "5.36 ms a step, 7.8 % idle: the shortest of 2 that fit; gpipe takes 6.00 ms"
    )
    assert found.bounds.value == (0, 4, 8)
    assert found.bounds.because == (
        "blocks by rank 4, 4: each takes 1.20 ms of each microbatch; 2.00 KiB cross the cuts"
    )
    assert found.recomputes[0].value is False
    assert found.recomputes[0].because.startswith("saved values fit: ")
    (rejected,) = found.rejected
    assert (rejected.name, rejected.num_stages) == ("gpipe", 2)
    assert rejected.because == "6.00 ms a step, 11.9 % longer"


def test_of_those_about_as_short_the_one_that_holds_the_least():
    many = {"num_microbatches": 64}
    both = find(1, 1, names=("1f1b", "looped-bfs"), **many)
    alone = {name: find(1, 1, names=(name,), **many) for name in ("1f1b", "looped-bfs")}
    gain = 1 - alone["looped-bfs"].step_ns / alone["1f1b"].step_ns
    assert 0 < gain < 0.02
    assert both.schedule_name.value == "1f1b"
    assert "the one that holds the least of those within 2.0 % of" in both.schedule_name.because
    assert "looped-bfs takes" in both.schedule_name.because
    looped = next(each for each in both.rejected if each.num_stages == 4)
    assert "shorter, but ranks hold " in looped.because


def test_a_shorter_one_is_worth_what_it_holds():
    few = find(1, 1, names=("1f1b", "looped-bfs"))
    assert few.schedule_name.value == "looped-bfs"
    assert "the shortest of" in few.schedule_name.because


def test_a_searched_schedule_is_no_longer_than_those_it_starts_from():
    named = find(1, 2, num_layers=7, names=FEW)
    searched = find(1, 2, num_layers=7, names=(*FEW, "searched"))
    assert searched.step_ns <= named.step_ns
    alone = find(1, 2, num_layers=7, names=("searched",))
    assert alone.schedule_name.value == "searched"
    assert alone.step_ns <= searched.step_ns


def test_two_ranks_one_twice_as_slow():
    found = find(1, 2, num_layers=10, names=FEW)
    assert [found.owners.count(rank) for rank in (0, 1)] == [8, 4]


def test_little_memory_takes_what_holds_fewer_microbatches():
    plenty = find(1, 1, num_microbatches=16, names=("gpipe",))
    assert plenty.cuts.shares[0].held_bytes == 16 * plenty.costs.parts[0].saved_bytes
    budget = find(1, 1, num_microbatches=16, names=("1f1b",)).cuts.shares[0].need_bytes
    tight = find(1, 1, num_microbatches=16, budgets=(budget, budget), names=("gpipe", "1f1b"))
    assert tight.schedule_name.value == "1f1b"
    (gpipe,) = tight.rejected
    assert gpipe.because.startswith("does not fit: rank 0, ")
    assert not any(each.value for each in tight.recomputes)


def test_a_rank_that_must_recompute_says_why():
    whole = find(1, 1, names=("1f1b",)).cuts.shares
    budget = min(share.need_bytes for share in whole) - 1
    found = find(1, 1, names=("1f1b",), budgets=(budget, budget))
    assert any(each.value for each in found.recomputes)
    for each in found.recomputes:
        wanted = "keeping would need " if each.value else "saved values fit: "
        assert each.because.startswith(wanted)
    # A rank with room takes a block more before the other one recomputes.
    first, last = (share.need_bytes for share in whole)
    roomy = find(1, 1, names=("1f1b",), budgets=(first - 4000, 2 * last))
    assert not any(each.value for each in roomy.recomputes)
    assert roomy.owners.count(0) < roomy.owners.count(1)


def test_what_does_not_fit_has_its_rank():
    whole = find(1, 1, names=("1f1b",)).cuts.shares[0].need_bytes
    with pytest.raises(DoesNotFitError) as error:
        find(1, 1, names=("gpipe", "1f1b"), budgets=(whole // 2, whole // 2))
    assert error.value.what == "no schedule of toy fits its ranks"
    lines = (error.value.where or "").splitlines()
    assert [line.split(":")[0] for line in lines] == ["gpipe, 2 stages", "1f1b, 2 stages"]
    assert ": does not fit: rank 0, " in lines[0]


def test_a_slow_link_is_what_a_step_waits_for():
    found = find(1, 1, link=PeerLink(peer=0, bytes_per_s=1e5, latency_ns=0), names=("1f1b", "zb-v"))
    assert found.cuts.bottleneck_ns == 1024 * 10**4
    assert "a link is busy the longest, 10.2 ms of each microbatch" in found.bounds.because
    assert found.step_ns >= 4 * 1024 * 10**4
    assert found.schedule_name.value == "1f1b"


def test_one_rank_and_few_blocks():
    one = find(1, num_layers=0)
    assert one.owners == (0, 0)
    assert one.bounds.because == "one rank has all blocks"
    assert one.schedule.num_ranks == 1
    two = find(1, 1, num_layers=0)
    assert two.owners == (0, 1)
    because = {each.name: each.because for each in two.rejected}
    assert because["zb-v"] == "toy has 2 blocks and cannot be cut into 4 stages"
    with pytest.raises(InputError, match="has 2 blocks, too few for 3 ranks") as error:
        find(1, 1, 1, num_layers=0)
    assert error.value.fix == "take at most 2 ranks"


def test_equal_inputs_give_equal_pipelines():
    assert find(1, 1.5, names=(*FEW, "searched")) == find(1, 1.5, names=(*FEW, "searched"))


def test_ranks_with_profiles_of_their_own():
    model = own_bodies(make_model(num_layers=4))
    quick, slow = (make_profile(model, [each] * 6) for each in (1000, 5000))
    ranks = [RankSpec(profile=each, budget_bytes=1 << 40) for each in (slow, quick)]
    found = find_pipeline(
        model, ranks, link_all(2, FAST), num_microbatches=3, optimizer=ADAMW, names=("1f1b",)
    )
    assert found.owners == (0, 1, 1, 1, 1, 1)


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match="there is no schedule 'zbv' to choose from") as error:
        find(1, 1, names=("zbv",))
    assert error.value.fix is not None
    assert "zb-v" in error.value.fix
