"""What a rank exchanges with others, looked up once for all micro-batches.

In: a model, or a rank's part of one. Out: an `Exchange`: by global number of a block, what its
forward and backward make for other ranks. A whole model exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.model.parts import (
    find_gradient_hops,
    find_holders,
    find_shared,
    find_targets,
    number_globally,
)
from packhorse.model.spec import BlockId, Model, ParameterName, ValueId

NORM_RANK: Final = 0
"""The rank that makes the global norm: the first one ends its backward last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The exchanges of all ranks, as one of them sees them.

    `numbers` are the global numbers of this rank's blocks, `local` is the inverse. `values` and
    `gradients` go by the block that makes them, `sums` by the user of a parameter: what goes, and
    to which ranks. `shared` are the parameters that several ranks use, with their users from the
    last to the first.
    """

    rank: int
    num_ranks: int
    owners: Sequence[int]
    numbers: Sequence[BlockId]
    local: Mapping[BlockId, int]
    values: Mapping[BlockId, Sequence[tuple[ValueId, Sequence[int]]]]
    gradients: Mapping[BlockId, Sequence[tuple[ValueId, int]]]
    sums: Mapping[BlockId, Sequence[tuple[ParameterName, Sequence[int]]]]
    shared: Mapping[ParameterName, Sequence[BlockId]]

    @property
    def last(self) -> BlockId:
        """The block that makes the loss."""
        return BlockId(len(self.owners) - 1)

    def other_ranks(self, rank: int) -> list[int]:
        """All ranks but one."""
        return [each for each in range(self.num_ranks) if each != rank]

    def owner_of(self, block: BlockId) -> int:
        """The rank that computes a block."""
        return self.owners[block]

    def values_from(self, block: BlockId) -> Sequence[tuple[ValueId, Sequence[int]]]:
        """What the forward of a block makes for which ranks."""
        return self.values.get(block, ())

    def gradients_from(self, block: BlockId) -> Sequence[tuple[ValueId, int]]:
        """What the backward of a block hands on to which rank."""
        return self.gradients.get(block, ())

    def sums_from(self, block: BlockId) -> Sequence[tuple[ParameterName, Sequence[int]]]:
        """Which sums of a block every other holder of the parameter gets, after the last one."""
        return self.sums.get(block, ())


def find_concerned(model: Model) -> Mapping[BlockId, frozenset[int]]:
    """The ranks that compute a block, or get anything that its runs in a training step make.

    Args:
        model: any part of the whole.
    """
    exchange = find_exchange(model)
    return {
        block: frozenset(
            [
                owner,
                *(rank for _, ranks in exchange.values_from(block) for rank in ranks),
                *(rank for _, rank in exchange.gradients_from(block)),
                *(rank for _, ranks in exchange.sums_from(block) for rank in ranks),
            ]
        )
        for block, owner in ((BlockId(at), owner) for at, owner in enumerate(exchange.owners))
    }


def find_channels(model: Model) -> tuple[tuple[int, int], ...]:
    """Every (source, target) over which a step or an evaluation of a model's ranks sends."""
    exchange = find_exchange(model)
    loss_rank = exchange.owners[exchange.last]
    found: set[tuple[int, int]] = set()
    for block, values in exchange.values.items():
        found |= {(exchange.owners[block], rank) for _, ranks in values for rank in ranks}
    for block, gradients in exchange.gradients.items():
        found |= {(exchange.owners[block], rank) for _, rank in gradients}
    for block, sums in exchange.sums.items():
        found |= {(exchange.owners[block], rank) for _, ranks in sums for rank in ranks}
    found |= {(loss_rank, rank) for rank in exchange.other_ranks(loss_rank)}
    for rank in exchange.other_ranks(NORM_RANK):
        found |= {(rank, NORM_RANK), (NORM_RANK, rank)}
    return tuple(sorted(found))


def find_exchange(model: Model) -> Exchange:
    """Find what crosses between the ranks of a model."""
    numbers = number_globally(model)
    local = {number: at for at, number in enumerate(numbers)}
    if model.part is None:
        # A search asks this for every order that it tries.
        return Exchange(
            rank=0,
            num_ranks=1,
            owners=(0,) * len(numbers),
            numbers=numbers,
            local=local,
            values={},
            gradients={},
            sums={},
            shared={},
        )
    whole, owners = model.part.whole, model.part.owners
    values: dict[BlockId, list[tuple[ValueId, Sequence[int]]]] = {}
    for value in whole.values.values():
        targets = find_targets(whole, owners, value.id)
        if value.producer is not None and targets:
            values.setdefault(value.producer, []).append((value.id, targets))
    gradients: dict[BlockId, list[tuple[ValueId, int]]] = {}
    for hop in find_gradient_hops(whole, owners):
        gradients.setdefault(hop.after, []).append((hop.value, hop.target))
    shared = find_shared(whole, owners)
    sums: dict[BlockId, list[tuple[ParameterName, Sequence[int]]]] = {}
    for name, users in shared.items():
        for user in users:
            others = [rank for rank in find_holders(whole, owners, name) if rank != owners[user]]
            sums.setdefault(user, []).append((name, others))
    return Exchange(
        rank=model.part.rank,
        num_ranks=max(owners) + 1,
        owners=owners,
        numbers=numbers,
        local=local,
        values=values,
        gradients=gradients,
        sums=sums,
        shared=shared,
    )
