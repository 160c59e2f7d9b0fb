"""What happens to each buffer that crosses between ranks, derived from the whole model alone.

In: a part of a model, what a program is for, its micro-batches. Out: for each such buffer its life
on this rank: who makes it or adds to it, from whom it comes, to whom it goes, in order.

    value      made by its block, sent to every other rank that uses it; received there
    gradient   users add to it from the last to the first, and it goes along with them from rank to
               rank, at last to the rank of the block that made the value
    sum        what one user of a parameter of several ranks adds up in a step: sent to all other
               ranks that hold the parameter after the last micro-batch
    norms      sent to the first rank; the global norm comes back from there
    losses     sent to all other ranks: in a training step all at once, in an evaluation one by one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final, Literal, NamedTuple, TypeVar

from packhorse.model.spec import BlockId, Model, Parameter, Part
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    NORM_SEGMENT_ELEMENTS,
    BufferId,
    packed_norms_id,
    tied_sum_id,
    value_grad_id,
    value_id,
)
from packhorse.program.program import ProgramKind

K = TypeVar("K", bound=str)
FIRST_RANK: Final = 0
Happening = Literal["made", "sent", "received"]


class Event(NamedTuple):
    """Something that happens to a buffer; `peer` is the other rank, None where it is made."""

    happening: Happening
    peer: int | None = None


MADE: Final = Event("made")
Life = tuple[Event, ...]


def derive_lives(part: Part, kind: ProgramKind, num_microbatches: int) -> Mapping[BufferId, Life]:
    """Derive the lives of all buffers that cross to or from a rank in a program."""
    if kind not in ("train_step", "evaluate"):
        return {}
    trains = kind == "train_step"
    losses = _from_to_all(part, part.owners[-1])
    values = {**dict(_lives_of_values(part)), **({} if trains else {part.whole.loss: losses})}
    gradients = dict(_lives_of_gradients(part)) if trains else {}
    lives: dict[BufferId, Life] = {}
    for microbatch in range(num_microbatches):
        lives |= {value_id(name, microbatch): life for name, life in _crossing(values)}
        lives |= {value_grad_id(name, microbatch): life for name, life in _crossing(gradients)}
    if trains:
        once = {**_lives_of_sums(part, num_microbatches), **_lives_of_norms(part), LOSSES: losses}
        lives |= _crossing(once)
    return lives


def _crossing(lives: Mapping[K, Life]) -> list[tuple[K, Life]]:
    # A buffer that is only made here does not cross.
    return [
        (name, life)
        for name, life in lives.items()
        if any(event.peer is not None for event in life)
    ]


def count_packed_segments(part: Part) -> Mapping[int, int]:
    """Segments of the gradients that count on each rank; a parameter counts on its first one."""
    counts: dict[int, int] = {}
    for parameter in part.whole.parameters.values():
        if parameter.trainable and parameter.blocks:
            rank = counting_rank(part, parameter)
            segments = ceil(parameter.num_elements / NORM_SEGMENT_ELEMENTS)
            counts[rank] = counts.get(rank, 0) + segments
    return counts


def counting_rank(part: Part, parameter: Parameter) -> int:
    """The rank on which a parameter of the whole model counts in the norm."""
    return min(part.owners[user] for user in parameter.blocks)


def shared_users(part: Part, parameter: Parameter) -> tuple[BlockId, ...]:
    """The users of a trained parameter that several ranks hold, last to first; else none."""
    if not parameter.trainable or len({part.owners[user] for user in parameter.blocks}) < 2:
        return ()
    blocks = part.whole.blocks
    return tuple(user for user in reversed(parameter.blocks) if blocks[user].has_backward)


def find_flowing(model: Model) -> frozenset[str]:
    """The values whose gradient is made: some user's backward is reached from the loss."""
    reached: set[BlockId] = set()
    flowing: set[str] = set()
    for block in reversed(model.blocks):
        if not block.has_backward:
            continue
        if any(value == model.loss or value in flowing for value in block.outputs):
            reached.add(block.id)
        for value in block.inputs:
            if model.values[value].needs_grad and block.id in reached:
                flowing.add(value)
    return frozenset(flowing)


def _lives_of_values(part: Part) -> Iterator[tuple[str, Life]]:
    for name, value in part.whole.values.items():
        if value.producer is None:
            continue
        maker = part.owners[value.producer]
        users = {part.owners[user] for user in value.consumers}
        if maker == part.rank:
            yield name, (MADE, *(Event("sent", rank) for rank in sorted(users - {maker})))
        elif part.rank in users:
            yield name, (Event("received", maker),)


def _lives_of_gradients(part: Part) -> Iterator[tuple[str, Life]]:
    flowing = find_flowing(part.whole)
    for name, value in part.whole.values.items():
        if name not in flowing:
            continue
        places = [
            part.owners[user]
            for user in reversed(value.consumers)
            if part.whole.blocks[user].has_backward
        ]
        num_users = len(places)
        if value.producer is not None:
            places.append(part.owners[value.producer])
        life: list[Event] = []
        for at, place in enumerate(places):
            before = places[at - 1] if at else place
            after = places[at + 1] if at + 1 < len(places) else place
            if place != part.rank:
                continue
            if before != place:
                life.append(Event("received", before))
            if at < num_users:
                life.append(MADE)
            if after != place:
                life.append(Event("sent", after))
        yield name, tuple(life)


def _lives_of_sums(part: Part, num_microbatches: int) -> dict[BufferId, Life]:
    lives: dict[BufferId, Life] = {}
    for name, parameter in part.whole.parameters.items():
        holders = {part.owners[user] for user in parameter.blocks}
        for user in shared_users(part, parameter):
            owner = part.owners[user]
            if owner == part.rank:
                sends = (Event("sent", rank) for rank in sorted(holders - {owner}))
                lives[tied_sum_id(name, user)] = (*[MADE] * num_microbatches, *sends)
            elif part.rank in holders:
                lives[tied_sum_id(name, user)] = (Event("received", owner),)
    return lives


def _lives_of_norms(part: Part) -> dict[BufferId, Life]:
    counting = [rank for rank in count_packed_segments(part) if rank != FIRST_RANK]
    if part.rank == FIRST_RANK:
        packed = {packed_norms_id(rank): (Event("received", rank),) for rank in counting}
    elif part.rank in counting:
        packed = {packed_norms_id(part.rank): (MADE, Event("sent", FIRST_RANK))}
    else:
        packed = {}
    return {**packed, NORM: _from_to_all(part, FIRST_RANK)}


def _from_to_all(part: Part, source: int) -> Life:
    if part.rank != source:
        return (Event("received", source),)
    ranks = range(max(part.owners) + 1)
    return (MADE, *(Event("sent", rank) for rank in ranks if rank != source))
