"""Keeping chunks between uses: never fuller, never out of date, and less is moved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.passes.cache import find_absences, keep_between_uses
from packhorse.compiler.peak import peak_of
from packhorse.program.tasks import Copy
from packhorse.search.cache import simulate_cache, trace_accesses
from packhorse.verifier.rules import verify_program
from tests.compiler.step_replay import StepReplay
from tests.support.models import make_model, make_plan

AWAY = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
ORDERS = {
    "depth-first, keep": {"activations": "keep"},
    "depth-first, recompute": {"activations": "recompute"},
    "layered": {"activations": "recompute", "order": "layered", "tied_sum": "per_step"},
}
HUGE = 1 << 50


def lower(model, **options):
    return lower_plan(make_plan(model, **options), model, "train_step")


def keep(program, limits):
    tasks = keep_between_uses(
        program.tasks,
        program.buffers,
        workspace_pool=program.workspace_pool,
        limit_bytes=limits,
    )
    return replace(program, tasks=tasks)


def moved_bytes(program):
    return sum(
        program.buffers[task.buffer].size_bytes for task in program.tasks if isinstance(task, Copy)
    )


def with_room(program, more_bytes):
    return {pool: peak + more_bytes for pool, peak in peak_of(program).items() if pool != "disk"}


@settings(max_examples=60)
@given(
    st.sampled_from(list(ORDERS)),
    st.sampled_from(["keep", "map"]),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 60_000),
    st.lists(st.sampled_from(["device", "disk"]), min_size=3, max_size=3),
    st.sampled_from([{}, {"tied_head": True, "shared_layers": (1, 3)}, {"frozen": ["layers.2"]}]),
)
def test_what_stays_is_right_and_fits(order, heap, clips, count, room, tiers, shape):
    model = make_model(num_layers=4, length=32, **shape)
    program = lower(
        model,
        parameters=[tiers[0], "disk"],
        gradients=[tiers[1], "disk"],
        optimizer=tiers[2],
        heap=heap,
        clips=clips,
        num_microbatches=count,
        **ORDERS[order],
    )
    limits = with_room(program, room)
    kept = keep(program, limits)
    verify_program(kept, model)
    replay = StepReplay(kept, model)
    replay.fill()
    replay.run()
    replay.check_at_home()
    peaks = peak_of(kept)
    assert all(peaks[pool] <= limit for pool, limit in limits.items())
    assert moved_bytes(kept) <= moved_bytes(program)
    assert kept.tasks == keep(program, limits).tasks


@pytest.mark.parametrize(("order", "clips"), list(product(ORDERS, [True, False])))
def test_with_all_room_as_little_moves_as_with_a_boundless_cache(order, clips):
    model = make_model(num_layers=4)
    program = lower(model, num_microbatches=3, clips=clips, **AWAY, **ORDERS[order])
    kept = keep(program, with_room(program, HUGE))
    assert not find_absences(kept.tasks, kept.buffers)
    accesses = trace_accesses(program.tasks, program.layout)
    least = simulate_cache(accesses, capacity_bytes=HUGE, policy="belady")
    assert moved_bytes(kept) == least.moved_bytes < moved_bytes(program)


@pytest.mark.parametrize("order", ORDERS)
def test_valleys_beneath_the_peak_are_used(order):
    """One pool for all: activations leave room that no chunk could have for the whole step."""
    model = make_model(num_layers=8, length=64)
    program = lower(model, num_microbatches=2, heap="map", **AWAY, **ORDERS[order])
    kept = keep(program, with_room(program, 0))
    assert peak_of(kept)["device"] == peak_of(program)["device"]
    assert moved_bytes(kept) < 0.9 * moved_bytes(program)


def test_without_room_nothing_stays():
    model = make_model(num_layers=4)
    program = lower(model, num_microbatches=2, **AWAY)
    assert keep(program, {}).tasks == program.tasks
    assert find_absences(program.tasks, program.buffers)


def test_what_saves_most_for_its_room_stays_first():
    model = make_model(num_layers=6, vocabulary=32)
    program = lower(model, clips=True, heap="map", **AWAY)
    absences = find_absences(program.tasks, program.buffers)
    # A gradient that waits for its update saves two transfers, a parameter one.
    assert {a.num_moves for a in absences if a.buffer.startswith("grad/")} == {2}
    assert {a.num_moves for a in absences if a.buffer.startswith("param/")} == {1}
    kept = keep(program, with_room(program, 0))
    left = find_absences(kept.tasks, kept.buffers)
    assert 0 < len(left) < len(absences)
    stayed = {(a.buffer, a.brought - a.freed) for a in absences} - {
        (a.buffer, a.brought - a.freed) for a in left
    }
    assert stayed
