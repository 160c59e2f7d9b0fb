"""Norms and updates: what happens to a gradient chunk when its last gradient is in.

In: the compute order of a training step, and the tier in which each chunk is updated. Out: the same
with SegmentNorm, GradNorm, Update and the Emit of the global norm.

    clipping:   after the last Backward that writes a gradient chunk: SegmentNorm
                at the end: GradNorm, Emit; Update of every chunk, the latest one first, but in
                the host the earliest: its gradient is there already
    otherwise:  after the last Backward that writes a gradient chunk: SegmentNorm, Update
                (Update waits for the last task that reads the chunk's parameters)
                at the end: GradNorm, Emit

An Update that clips scales the gradient in place, so it writes it too. Norms are made in the
device; where chunks that clip are updated in the host, the global norm is taken there once.

An Update of parameters that have a master copy makes them anew: it reads them only where they are
there already. The residency pass brings what an Update reads to the tier where it happens, so
updates in the host and the copies of those in the device run beside each other, each on its lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.plan.spec import OptimizerPlan, Plan
from packhorse.program.buffers import (
    NORM,
    NORM_WORKSPACE_BYTES,
    BufferId,
    Chunk,
    ChunkId,
    Layout,
    TierName,
    norm_id,
    state_id,
)
from packhorse.program.tasks import (
    Copy,
    Emit,
    Free,
    GradNorm,
    SegmentNorm,
    Task,
    Update,
    reads_of,
    writes_of,
)

# Fused updates change parameter and states in place, element by element.
UPDATE_WORKSPACE_BYTES: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlace:
    """The tier where a chunk is updated, and whether its parameters are at home there."""

    tier: TierName
    parameters_home: bool


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
) -> tuple[Task, ...]:
    """Insert norms and updates for every trained chunk; `places` are those of all chunks."""
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    writes = _last_positions([tuple(buffer for buffer, _ in writes_of(task)) for task in tasks])
    reads = _last_positions([tuple(buffer for buffer, _ in reads_of(task)) for task in tasks])
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
            result.append(_segment_norm(chunk))
            finished.append(chunk)
            if chunk in ready:
                result.append(_update(chunk, optimizer, places))
        result += [
            _update(chunk, optimizer, places)
            for chunk in ready
            if chunk not in norm_at.get(position, [])
        ]
    result.append(GradNorm(reads=tuple(norm_id(chunk.id) for chunk in trained), writes=(NORM,)))
    result.append(Emit(buffer=NORM))
    if optimizer.clips:
        updates = [_update(chunk, optimizer, places) for chunk in _order_last(finished, places)]
        if takes_norm_to_host(optimizer, places, layout):
            result.append(Copy(buffer=NORM, source="device", target="host"))
            updates += [Free(buffer=NORM, tier="host"), Free(buffer=NORM, tier="device")]
        result += updates
    return tuple(result)


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


def _last_positions(touched: Sequence[tuple[BufferId, ...]]) -> Mapping[BufferId, int]:
    return {buffer: position for position, buffers in enumerate(touched) for buffer in buffers}
