"""The cache simulation against the optimum by brute force, on random traces and real orders."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.compiler.lower import lower_plan
from packhorse.program.buffers import BufferId
from packhorse.program.tasks import Copy, Update
from packhorse.search.cache import (
    POLICIES,
    Access,
    State,
    simulate_cache,
    trace_accesses,
    widest_bytes,
)
from tests.support.models import make_model, make_plan


def make_states(sizes, lasts=True):
    return [
        State(id=BufferId(f"param/{index}"), size_bytes=size, lasts=lasts)
        for index, size in enumerate(sizes)
    ]


def make_trace(groups, *, sizes=None, changed=()):
    """Accesses by number of state, one group for each task; `changed` has (task, state)."""
    states = make_states(sizes or [1] * (1 + max(max(group) for group in groups)))
    return [
        [
            Access(state=states[index], changes=(task, index) in changed, creates=False)
            for index in dict.fromkeys(group)
        ]
        for task, group in enumerate(groups)
    ]


groups_of_states = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=24
)
short_groups = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), min_size=1, max_size=9
)


def fewest_loads(groups, num_slots):
    """Try every way to make room."""

    @cache
    def fewest(task, present):
        if task == len(groups):
            return 0
        held = frozenset(groups[task])
        loads = len(held - present)
        others = sorted(present - held)
        room = num_slots - len(held)
        ways = subsets(others, min(room, len(others)))
        return loads + min(fewest(task + 1, held | kept) for kept in ways)

    return fewest(0, frozenset())


def subsets(items, most):
    found = [frozenset()]
    for item in items:
        found += [kept | {item} for kept in found if len(kept) < most]
    return found


@settings(deadline=None, derandomize=True)
@given(short_groups, st.integers(0, 3))
def test_belady_loads_the_fewest_possible(groups, spare):
    trace = make_trace(groups)
    num_slots = widest_bytes(trace) + spare
    found = simulate_cache(trace, capacity_bytes=num_slots, policy="belady")
    assert found.num_loads == fewest_loads(groups, num_slots)


@settings(deadline=None, derandomize=True)
@given(groups_of_states, st.integers(0, 5))
def test_belady_loads_no_more_than_lru_and_lru_no_more_than_without(groups, spare):
    trace = make_trace(groups)
    capacity = widest_bytes(trace) + spare
    loads = [
        simulate_cache(trace, capacity_bytes=capacity, policy=policy).num_loads
        for policy in POLICIES
    ]
    assert loads == sorted(loads)
    assert loads[-1] == sum(len(group) for group in groups)
    assert loads[0] >= len({index for group in groups for index in group})


@settings(deadline=None, derandomize=True)
@given(groups_of_states, st.integers(0, 4))
def test_more_room_never_moves_more(groups, spare):
    trace = make_trace(groups)
    least = widest_bytes(trace)
    loads = [
        simulate_cache(trace, capacity_bytes=least + spare + more, policy=policy).num_loads
        for policy in ("belady", "lru")
        for more in (0, 1)
    ]
    assert loads[0] >= loads[1]
    assert loads[2] >= loads[3]


@settings(deadline=None, derandomize=True)
@given(
    groups_of_states,
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.sets(st.tuples(st.integers(0, 23), st.integers(0, 5))),
    st.integers(0, 20),
)
def test_bytes_of_several_sizes_and_of_changes(groups, sizes, changed, spare):
    trace = make_trace(groups, sizes=sizes, changed=changed)
    capacity = widest_bytes(trace) + spare
    touched = {index for group in groups for index in group}
    dirty = {
        index for task, group in enumerate(groups) for index in group if (task, index) in changed
    }
    without = simulate_cache(trace, capacity_bytes=capacity, policy="none")
    for policy in POLICIES:
        found = simulate_cache(trace, capacity_bytes=capacity, policy=policy)
        assert found == simulate_cache(trace, capacity_bytes=capacity, policy=policy)
        assert found.loaded_bytes >= sum(sizes[index] for index in touched)
        assert found.stored_bytes >= sum(sizes[index] for index in dirty)
        assert found.loaded_bytes <= without.loaded_bytes
        assert found.stored_bytes <= without.stored_bytes
        assert found.moved_bytes == found.loaded_bytes + found.stored_bytes
        assert found.num_moves == found.num_loads + found.num_stores
    whole = simulate_cache(trace, capacity_bytes=sum(sizes), policy="belady")
    assert (whole.num_loads, whole.num_stores) == (len(touched), len(dirty))


def test_equal_choices_spare_the_changed_one():
    # At the third task 0 and 1 are equally far: both are used next by the last one.
    trace = make_trace([[0], [1], [2], [0, 1]], changed={(0, 0)})
    found = simulate_cache(trace, capacity_bytes=2, policy="belady")
    assert (found.num_loads, found.num_stores) == (4, 1)


def test_what_lives_inside_a_step_is_neither_loaded_nor_stored_where_it_stays():
    gradient, other = make_states([1, 1], lasts=False)
    trace = [
        [Access(state=gradient, changes=True, creates=True)],
        [Access(state=other, changes=True, creates=True)],
        [Access(state=gradient, changes=True, creates=False)],
    ]
    assert simulate_cache(trace, capacity_bytes=2, policy="belady").num_moves == 0
    away = simulate_cache(trace, capacity_bytes=1, policy="belady")
    assert (away.num_loads, away.num_stores) == (1, 1)


def test_a_cache_smaller_than_a_task_is_refused():
    with pytest.raises(ValueError, match="1 bytes cannot hold the 2 bytes"):
        simulate_cache(make_trace([[0, 1]]), capacity_bytes=1, policy="belady")


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_without_a_cache_as_much_moves_as_under_a_plan_without_neighbours(
    activations, clips, num_microbatches
):
    """No state touched by two tasks in a row would be moved in between; the rest is the plan's."""
    model = make_model(num_layers=4)
    plan = make_plan(
        model,
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        activations=activations,
        clips=clips,
        num_microbatches=num_microbatches,
    )
    program = lower_plan(plan, model, "train_step")
    accesses = trace_accesses(program.tasks, program.layout)
    moved = sum(
        program.buffers[task.buffer].size_bytes for task in program.tasks if isinstance(task, Copy)
    )
    widest = widest_bytes(accesses)
    without = simulate_cache(accesses, capacity_bytes=widest, policy="none")
    least = simulate_cache(accesses, capacity_bytes=1 << 40, policy="belady")
    assert least.moved_bytes < moved < without.moved_bytes
    updates = sum(isinstance(task, Update) for task in program.tasks)
    # Everything that lasts is loaded once and, as the update changes it, stored once.
    assert least.num_loads == least.num_stores == 3 * updates
