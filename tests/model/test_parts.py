"""Parts of a model: blocks, values and parameters by rank, and what crosses between them."""

from __future__ import annotations

import pytest
from models import make_model

from packhorse.errors import InputError
from packhorse.model.parts import (
    cut_model,
    find_counting,
    find_gradient_hops,
    find_holders,
    find_shared,
    find_targets,
    number_globally,
    values_with_grad,
    whole_of,
)

MODEL = make_model(num_layers=4, tied_head=True, shared_layers=(1, 3, 4), skips=((0, 3), (1, 4)))
OWNERS = (0, 0, 1, 1, 2, 2)


def test_parts_have_all_blocks_each_once() -> None:
    parts = cut_model(MODEL, OWNERS)
    assert [number_globally(part) for part in parts] == [(0, 1), (2, 3), (4, 5)]
    for part in parts:
        assert [block.id for block in part.blocks] == list(range(len(part.blocks)))
        assert whole_of(part) is MODEL
        for block, number in zip(part.blocks, number_globally(part), strict=True):
            assert block.name == MODEL.blocks[number].name
            assert block.inputs == MODEL.blocks[number].inputs
        for value in part.values.values():
            assert value.producer is None or value.id in part.blocks[value.producer].outputs
            assert all(value.id in part.blocks[user].inputs for user in value.consumers)


def test_step_inputs_are_those_that_a_part_uses() -> None:
    first, second, last = cut_model(MODEL, OWNERS)
    assert MODEL.step_inputs == ("input_ids", "labels")
    assert (first.step_inputs, second.step_inputs, last.step_inputs) == (
        ("input_ids",),
        (),
        ("labels",),
    )
    assert MODEL.loss in last.values
    assert MODEL.loss not in first.values


def test_values_go_to_every_rank_that_uses_them() -> None:
    crossing = {
        value: targets for value in MODEL.values if (targets := find_targets(MODEL, OWNERS, value))
    }
    made = {MODEL.values[value].producer: targets for value, targets in crossing.items()}
    assert made == {0: (1,), 1: (1, 2), 3: (2,)}


def test_gradients_come_back_from_user_to_user() -> None:
    hops = [
        (MODEL.values[hop.value].producer, hop.after, hop.before, hop.source, hop.target)
        for hop in find_gradient_hops(MODEL, OWNERS)
    ]
    # What block 1 makes is used by 2 on rank 1 and by 4 on rank 2, which adds first.
    assert (1, 4, 2, 2, 1) in hops
    assert (1, 2, 1, 1, 0) in hops
    # What block 0 makes is used by 1 on its own rank and by 3: one way back.
    assert (0, 3, 1, 1, 0) in hops
    assert all(source != target for *_, source, target in hops)


def test_parameters_of_several_ranks_have_all_users_last_first() -> None:
    shared = find_shared(MODEL, OWNERS)
    assert shared == {"embed.weight": (5, 0), "shared.weight": (4, 3, 1)}
    assert find_holders(MODEL, OWNERS, "shared.weight") == (0, 1, 2)
    counting = find_counting(MODEL, OWNERS)
    assert counting["embed.weight"] == 0
    assert counting["shared.weight"] == 0
    first, second, last = cut_model(MODEL, OWNERS)
    assert first.parameters["shared.weight"].blocks == (1,)
    assert second.parameters["shared.weight"].blocks == (1,)
    assert last.parameters["embed.weight"].blocks == (1,)


def test_a_part_knows_which_of_its_values_have_gradients() -> None:
    for part in cut_model(MODEL, OWNERS):
        assert values_with_grad(part) == values_with_grad(MODEL) & part.values.keys()


def test_parameters_that_no_block_uses_go_to_the_first_rank() -> None:
    names = {name for part in cut_model(MODEL, OWNERS) for name in part.parameters}
    assert names == set(MODEL.parameters)


@pytest.mark.parametrize("owners", [(0, 0, 1, 1, 3, 3), (0,) * 5, (1,) * 6, ()])
def test_every_rank_needs_a_block(owners: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="blocks are given to ranks"):
        cut_model(MODEL, owners)
