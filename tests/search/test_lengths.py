"""Which chunk lengths are tried: those that move soonest, and that which needs least."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from packhorse.compiler.chunks import pack_chunks
from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError
from packhorse.plan.pins import read_pins
from packhorse.search.cache import trace_accesses
from packhorse.search.lengths import (
    LONGEST_SHARE,
    NEAR,
    SHORTEST_SHARE,
    Lengths,
    cost_ns,
    list_lengths,
)
from packhorse.search.space import Problem
from packhorse.units import GIB, MIB
from tests.search.toy_search import (
    ADAMW,
    ARITHMETIC,
    make_candidates,
    make_machine,
    search,
)
from tests.support.models import make_model, make_plan

WIDE = {"num_layers": 8, "hidden": 2048, "vocabulary": 2000, "length": 32}


def choose(candidate, machine, pins=None, total=4):
    problem = Problem(
        machine=machine,
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        pins=read_pins(pins or {}),
        global_batch_rows=total,
    )
    return Lengths(problem).choose(candidate)


def states_bytes(candidate):
    return 16 * candidate.model.num_parameters


def with_latency(machine, latency_ns):
    links = tuple(replace(link, latency_ns=latency_ns) for link in machine.links)
    return replace(machine, links=links)


@pytest.mark.parametrize("size", [1, MIB, 600 * MIB, 5 * GIB, 300 * GIB])
def test_lengths_that_come_into_question(size):
    lengths = list_lengths(size)
    assert lengths == tuple(sorted(set(lengths), reverse=True))
    assert all(length % (2 * MIB) == 0 for length in lengths)
    assert lengths[0] <= max(min(size // LONGEST_SHARE, GIB), 2 * MIB)
    assert lengths[-1] >= min(size // SHORTEST_SHARE, GIB)


def test_small_models_and_pins_leave_nothing_to_choose():
    small = make_candidates()[0]
    assert choose(small, make_machine()) == (2 * MIB,)
    assert choose(small, make_machine(), {"chunk_bytes": 4096}) == (4096,)


def test_where_all_fits_or_nothing_can_leave_the_longest_is_taken():
    (candidate,) = make_candidates(**WIDE)
    longest = list_lengths(4 * candidate.model.num_parameters)[:1]
    assert choose(candidate, make_machine(2 * states_bytes(candidate))) == longest
    machine = make_machine(states_bytes(candidate) // 2)
    alone = replace(machine, tiers=machine.tiers[:1], links=())
    assert choose(candidate, alone) == longest


def test_latency_makes_chunks_longer_and_a_small_budget_makes_them_shorter():
    (candidate,) = make_candidates(**WIDE)
    found = {}
    for share in (2, 3, 4):
        for latency_ns in (0, 50_000_000):
            machine = with_latency(make_machine(states_bytes(candidate) // share), latency_ns)
            found[share, latency_ns] = choose(candidate, machine)
    assert all(max(found[share, 0]) <= max(found[share, 50_000_000]) for share in (2, 3, 4))
    assert max(found[4, 0]) < max(found[4, 50_000_000])
    assert max(len(lengths) for lengths in found.values()) <= 3


def test_the_chosen_lengths_are_near_the_cheapest():
    (candidate,) = make_candidates(**WIDE)
    budget = states_bytes(candidate) // 3
    machine = make_machine(budget)
    costs = {}
    for length in list_lengths(4 * candidate.model.num_parameters):
        plan = make_plan(candidate.model, chunk_bytes=length, num_microbatches=3)
        program = lower_plan(plan, candidate.model, "train_step")
        accesses = trace_accesses(program.tasks, program.layout)
        costs[length] = cost_ns(accesses, machine, "disk", room_bytes=budget)
    chosen = choose(candidate, machine)
    # Activations are small beside the states here, so both ends have nearly the whole budget.
    assert min(costs[length] for length in chosen) <= min(costs.values()) * (1 + NEAR) * 1.02


def test_more_room_costs_no_more_and_too_little_costs_infinitely_much():
    model = make_model(**WIDE)
    plan = make_plan(model, chunk_bytes=2 * MIB, num_microbatches=2)
    program = lower_plan(plan, model, "train_step")
    accesses = trace_accesses(program.tasks, program.layout)
    machine = make_machine()
    costs = [
        cost_ns(accesses, machine, "disk", room_bytes=size * MIB) for size in range(0, 400, 20)
    ]
    assert costs[0] == inf
    assert costs[-1] < inf
    assert costs == sorted(costs, reverse=True)
    no_link = replace(machine, links=())
    assert cost_ns(accesses, no_link, "disk", room_bytes=400 * MIB) == inf


@pytest.mark.parametrize("budget_mib", [0, 1, 20])
def test_a_budget_without_room_is_refused_and_the_advised_one_works(budget_mib):
    candidates = make_candidates(**WIDE)
    with pytest.raises(DoesNotFitError) as refused:
        search(candidates, make_machine(budget_mib * MIB))
    advised = refused.value.least_bytes["device"]
    plan = search(candidates, make_machine(advised))
    assert plan.budget_bytes["device"] == advised
    with pytest.raises(DoesNotFitError):
        search(candidates, make_machine(advised - MIB))


def test_a_tied_parameter_shares_its_chunk_with_no_other_at_any_length():
    model = make_model(tied_head=True, shared_layers=(2, 5), **WIDE)
    for length in list_lengths(4 * model.num_parameters):
        for chunk in pack_chunks(model, length):
            names = {piece.parameter for piece in chunk.pieces}
            assert len(names) == 1 or not names & {"embed.weight", "shared.weight"}
