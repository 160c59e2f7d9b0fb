"""Parts of a model: which rank computes which blocks, and what crosses between them.

In: a model, and the rank of every block. Out: a `Model` for each rank, with its blocks numbered
anew; and, from a part, what it receives and what it hands on. Which values cross follows from the
dataflow alone: any value from any block to any later one.

    value      from the rank that makes it to every other rank with a block that uses it
    gradient   of a value that one flows back through: from the rank of its last user to that of
               the user before, which adds its own, and so on, at last to the rank that made the
               value. That is the order in which one process adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from packhorse.errors import InputError
from packhorse.model.spec import Block, BlockId, Model, Parameter, ParameterName, Part, ValueId


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientHop:
    """A gradient that goes from one rank to another.

    `after` is the block, by its global number, whose backward adds to it last before it goes;
    `before` the block that needs it next: an earlier user of the value, or the one that made it.
    """

    value: ValueId
    after: BlockId
    before: BlockId
    source: int
    target: int


def cut_model(model: Model, owners: Sequence[int]) -> tuple[Model, ...]:
    """Give each rank its part of a model.

    Args:
        owners: the rank of every block; ranks are 0 to the largest, each with a block.

    Raises:
        InputError: a rank has no block, or a block no rank.
    """
    num_ranks = max(owners, default=-1) + 1
    if len(owners) != len(model.blocks) or set(owners) != set(range(num_ranks)):
        raise InputError(
            f"{len(model.blocks)} blocks are given to ranks {sorted(set(owners))} by"
            f" {len(owners)} numbers",
            where=f"model {model.name}",
            fix="give every block a rank, and every rank from 0 on a block",
        )
    return tuple(_take_part(model, tuple(owners), rank) for rank in range(num_ranks))


def whole_of(model: Model) -> Model:
    """The model that a part is of; a whole one is of itself."""
    return model if model.part is None else model.part.whole


def rank_of(model: Model) -> int:
    """The rank that a part is computed by; a whole model is by the first."""
    return 0 if model.part is None else model.part.rank


def number_globally(model: Model) -> tuple[BlockId, ...]:
    """Global numbers of a model's blocks, in its order."""
    return tuple(b.id for b in model.blocks) if model.part is None else model.part.blocks


def find_targets(model: Model, owners: Sequence[int], value: ValueId) -> tuple[int, ...]:
    """The ranks, but that of its maker, which use a value that some block of the whole makes."""
    found = model.values[value]
    if found.producer is None:
        return ()
    users = {owners[user] for user in found.consumers}
    return tuple(sorted(users - {owners[found.producer]}))


def find_gradient_hops(model: Model, owners: Sequence[int]) -> tuple[GradientHop, ...]:
    """Every gradient that crosses between ranks, value by value, in the order of a backward."""
    hops: list[GradientHop] = []
    flowing = values_with_grad(model)
    for value, found in model.values.items():
        if value not in flowing:
            continue
        users = [user for user in found.consumers if model.blocks[user].has_backward]
        makers = [] if found.producer is None else [found.producer]
        for after, before in pairwise([*sorted(users, reverse=True), *makers]):
            if owners[after] != owners[before]:
                hops.append(
                    GradientHop(
                        value=value,
                        after=after,
                        before=before,
                        source=owners[after],
                        target=owners[before],
                    )
                )
    return tuple(hops)


def find_shared(model: Model, owners: Sequence[int]) -> Mapping[ParameterName, tuple[BlockId, ...]]:
    """The trained parameters that blocks of several ranks use, with the users that add to it.

    Users go from the last to the first: the order in which one process adds their sums.
    """
    shared: dict[ParameterName, tuple[BlockId, ...]] = {}
    for name in model.summed_parameters:
        users = model.parameters[name].blocks
        if len({owners[user] for user in users}) > 1:
            adding = (user for user in users if model.blocks[user].has_backward)
            shared[name] = tuple(sorted(adding, reverse=True))
    return shared


def find_holders(model: Model, owners: Sequence[int], name: ParameterName) -> tuple[int, ...]:
    """The ranks that hold a parameter, each a copy of it."""
    return tuple(sorted({owners[user] for user in model.parameters[name].blocks}))


def find_counting(model: Model, owners: Sequence[int]) -> Mapping[ParameterName, int]:
    """The rank on which each trained parameter counts in the norm: the first that holds it."""
    return {
        name: find_holders(model, owners, name)[0]
        for name, parameter in model.parameters.items()
        if parameter.trainable and parameter.blocks
    }


def values_with_grad(model: Model) -> frozenset[ValueId]:
    """The values that a gradient flows back through: some later user leads it from the loss.

    The loss has none: its gradient is 1. Those of a part are the whole model's that it knows.
    """
    if model.part is not None:
        return values_with_grad(model.part.whole) & model.values.keys()
    found: set[ValueId] = set()
    for block in reversed(model.blocks):
        rooted = any(value == model.loss or value in found for value in block.outputs)
        if block.has_backward and rooted:
            found.update(value for value in block.inputs if model.values[value].needs_grad)
    return frozenset(found)


def _take_part(model: Model, owners: tuple[int, ...], rank: int) -> Model:
    part = Part(whole=model, owners=owners, rank=rank)
    local = {block: BlockId(at) for at, block in enumerate(part.blocks)}
    blocks = tuple(replace(model.blocks[block], id=at) for block, at in local.items())
    touched = {value for block in blocks for value in (*block.inputs, *block.outputs)}
    return replace(
        model,
        blocks=blocks,
        bodies={body: model.bodies[body] for body in dict.fromkeys(b.body for b in blocks)},
        values={
            name: replace(
                value,
                producer=None if value.producer is None else local.get(value.producer),
                consumers=tuple(local[user] for user in value.consumers if user in local),
            )
            for name, value in model.values.items()
            if name in touched
        },
        parameters=_take_parameters(model, blocks, local, rank),
        part=part,
    )


def _take_parameters(
    model: Model, blocks: Sequence[Block], local: Mapping[BlockId, BlockId], rank: int
) -> dict[ParameterName, Parameter]:
    # One that no block uses goes to the first rank.
    used = {name for block in blocks for name in block.parameters}
    return {
        name: replace(
            parameter, blocks=tuple(local[user] for user in parameter.blocks if user in local)
        )
        for name, parameter in model.parameters.items()
        if name in used or (rank == 0 and not parameter.blocks)
    }
