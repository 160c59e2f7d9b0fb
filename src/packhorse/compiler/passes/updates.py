"""Norms and updates: what happens to a gradient chunk when its last gradient is in.

In: the compute order of a training step, and the tier in which each chunk is updated. Out: the same
with SegmentNorm, GradNorm, Update and the Emit of the global norm.

    clipping:   after the last Backward that writes a gradient chunk: SegmentNorm
                at the end: GradNorm, Emit; Update of every chunk, the latest one first, but in
                the host the earliest: its gradient is there already
    otherwise:  after the last Backward that writes a gradient chunk: SegmentNorm, Update
                (Update waits for the last task that reads the chunk's parameters)
                at the end: GradNorm, Emit

Where a model lies on several ranks, each sums its own chunks; one of them gets all segment norms,
makes the global norm and hands it to the others. A parameter that several ranks hold counts on the
first.

An Update that clips scales the gradient in place, so it writes it too. Norms are made in the
device; where chunks that clip are updated in the host, the global norm is taken there once.

An Update of parameters that have a master copy makes them anew: it reads them only where they are
there already. The residency pass brings what an Update reads to the tier where it happens, so
updates in the host and the copies of those in the device run beside each other, each on its lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from packhorse.compiler.passes.exchange import NORM_RANK
from packhorse.model.parts import find_counting
from packhorse.model.spec import Model
from packhorse.plan.spec import OptimizerPlan, Plan
from packhorse.program.buffers import (
    NORM,
    NORM_SEGMENT_ELEMENTS,
    NORM_WORKSPACE_BYTES,
    BufferId,
    Chunk,
    ChunkId,
    Layout,
    TierName,
    norm_id,
    packed_norms_id,
    state_id,
)
from packhorse.program.tasks import (
    Copy,
    Emit,
    Free,
    GradNorm,
    PackNorms,
    Recv,
    SegmentNorm,
    Send,
    Task,
    Update,
    accesses_of,
)

# Fused updates change parameter and states in place, element by element.
UPDATE_WORKSPACE_BYTES: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlace:
    """The tier where a chunk is updated, and whether its parameters are at home there."""

    tier: TierName
    parameters_home: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NormExchange:
    """How ranks come to the global norm.

    `counting` gives for each rank with gradients that count, but the one that makes the norm, the
    number of their segments; `copies` are the parameters whose gradient counts on another rank.
    """

    rank: int
    num_ranks: int
    counting: Mapping[int, int]
    copies: frozenset[str]

    def counts_elsewhere(self, chunk: Chunk, layout: Layout) -> bool:
        """Whether a chunk holds a copy; then it holds nothing else."""
        return bool(self.copies) and any(
            slot.parameter in self.copies for slot in layout.slots_of(chunk)
        )


ALONE: Final = NormExchange(rank=NORM_RANK, num_ranks=1, counting={}, copies=frozenset())


def find_norm_exchange(model: Model) -> NormExchange:
    """Find who sends segment norms to whom."""
    if model.part is None:
        return ALONE
    whole, owners = model.part.whole, model.part.owners
    counts = find_counting(whole, owners)
    segments = dict.fromkeys(sorted(set(counts.values()) - {NORM_RANK}), 0)
    for name, rank in counts.items():
        if rank != NORM_RANK:
            segments[rank] += ceil(whole.parameters[name].num_elements / NORM_SEGMENT_ELEMENTS)
    return NormExchange(
        rank=model.part.rank,
        num_ranks=max(owners) + 1,
        counting=segments,
        copies=frozenset[str](name for name, rank in counts.items() if rank != model.part.rank),
    )


def place_updates(plan: Plan) -> tuple[UpdatePlace, ...]:
    """Where each chunk is updated."""
    return tuple(
        UpdatePlace(tier=tier, parameters_home=chunk.parameters.value == tier)
        for tier, chunk in zip(plan.update_tiers, plan.chunks, strict=True)
    )


def add_updates(
    tasks: Sequence[Task],
    layout: Layout,
    optimizer: OptimizerPlan,
    places: Sequence[UpdatePlace],
    norms: NormExchange = ALONE,
) -> tuple[Task, ...]:
    """Insert norms and updates for every trained chunk; `places` are those of all chunks."""
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    counted = {c.id: norm_id(c.id) for c in trained if not norms.counts_elsewhere(c, layout)}
    reads, writes = _last_positions(tasks)
    norm_at: dict[int, list[Chunk]] = {}
    update_at: dict[int, list[Chunk]] = {}
    for chunk in trained:
        summed = writes[state_id("grad", chunk.id)]
        unused = max(summed, reads.get(state_id("param", chunk.id), summed))
        norm_at.setdefault(summed, []).append(chunk)
        update_at.setdefault(unused, []).append(chunk)
    result: list[Task] = []
    finished: list[Chunk] = []
    for position, task in enumerate(tasks):
        result.append(task)
        ready = update_at.get(position, []) if not optimizer.clips else []
        for chunk in norm_at.get(position, []):
            if chunk.id in counted:
                result.append(_segment_norm(chunk))
            finished.append(chunk)
            if chunk in ready:
                result.append(_update(chunk, optimizer, places))
        result += [
            _update(chunk, optimizer, places)
            for chunk in ready
            if chunk not in norm_at.get(position, [])
        ]
    result += _find_norm(tuple(counted.values()), norms)
    result.append(Emit(buffer=NORM))
    if optimizer.clips:
        updates = [_update(chunk, optimizer, places) for chunk in _order_last(finished, places)]
        if takes_norm_to_host(optimizer, places, layout):
            result.append(Copy(buffer=NORM, source="device", target="host"))
            updates += [Free(buffer=NORM, tier="host"), Free(buffer=NORM, tier="device")]
        result += updates
    return tuple(result)


def _find_norm(own: tuple[BufferId, ...], norms: NormExchange) -> list[Task]:
    if norms.rank != NORM_RANK:
        packed = packed_norms_id(norms.rank)
        sent = [PackNorms(reads=own, writes=(packed,)), Send(buffer=packed, peer=NORM_RANK)]
        return [*(sent if own else []), Recv(buffer=NORM, peer=NORM_RANK)]
    return [
        *(Recv(buffer=packed_norms_id(rank), peer=rank) for rank in norms.counting),
        GradNorm(reads=(*own, *map(packed_norms_id, norms.counting)), writes=(NORM,)),
        *(Send(buffer=NORM, peer=rank) for rank in range(norms.num_ranks) if rank != NORM_RANK),
    ]


def takes_norm_to_host(
    optimizer: OptimizerPlan, places: Sequence[UpdatePlace], layout: Layout
) -> bool:
    """Whether some update in the host clips; then this pass also frees the norm."""
    return optimizer.clips and any(
        place.tier == "host"
        for place, chunk in zip(places, layout.chunks, strict=True)
        if chunk.trainable
    )


def updated_states(optimizer: OptimizerPlan) -> tuple[str, ...]:
    """The states of a trained chunk that an update changes, the parameters first."""
    return ("param", *(("master",) if optimizer.master else ()), *optimizer.states)


def _order_last(finished: Sequence[Chunk], places: Sequence[UpdatePlace]) -> Iterator[Chunk]:
    """Order the updates at the end of a step; those in the host keep their turns among the rest."""
    hosted = (chunk for chunk in finished if places[chunk.id].tier == "host")
    for chunk in reversed(finished):
        yield next(hosted) if places[chunk.id].tier == "host" else chunk


def _segment_norm(chunk: Chunk) -> SegmentNorm:
    return SegmentNorm(
        chunk=chunk.id,
        reads=(state_id("grad", chunk.id),),
        writes=(norm_id(chunk.id),),
        workspace_bytes=NORM_WORKSPACE_BYTES,
    )


def _update(chunk: Chunk, optimizer: OptimizerPlan, places: Sequence[UpdatePlace]) -> Update:
    place = places[chunk.id]
    states = _states(chunk.id, optimizer)
    made_anew = optimizer.master and place.tier == "host" and not place.parameters_home
    grad = state_id("grad", chunk.id)
    norm = (NORM,) if optimizer.clips else ()
    return Update(
        chunk=chunk.id,
        where=place.tier,
        reads=(*(states[1:] if made_anew else states), grad, *norm),
        writes=(*states, grad) if optimizer.clips else states,
        workspace_bytes=UPDATE_WORKSPACE_BYTES,
    )


def _states(chunk: ChunkId, optimizer: OptimizerPlan) -> tuple[BufferId, ...]:
    return tuple(state_id(state, chunk) for state in updated_states(optimizer))


def _last_positions(tasks: Sequence[Task]) -> tuple[dict[BufferId, int], dict[BufferId, int]]:
    # Where each buffer is read and written last.
    reads: dict[BufferId, int] = {}
    writes: dict[BufferId, int] = {}
    for position, task in enumerate(tasks):
        _, read, _, written = accesses_of(task)
        for buffer in read:
            reads[buffer] = position
        for buffer in written:
            writes[buffer] = position
    return reads, writes
