"""Norms and updates: what happens to a gradient chunk when its last gradient is in.

In: the compute order of a training step. Out: the same with SegmentNorm, GradNorm, Update and
the Emit of the global norm.

    clipping:   after the last Backward that writes a gradient chunk: SegmentNorm
                at the end: GradNorm, Emit; Update of every chunk, the latest one first
    otherwise:  after the last Backward that writes a gradient chunk: SegmentNorm, Update
                (Update waits for the last task that reads the chunk's parameters)
                at the end: GradNorm, Emit

An Update that clips scales the gradient in place, so it writes it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from packhorse.plan.spec import OptimizerPlan
from packhorse.program.buffers import (
    NORM,
    NORM_WORKSPACE_BYTES,
    BufferId,
    Chunk,
    ChunkId,
    Layout,
    norm_id,
    state_id,
)
from packhorse.program.tasks import (
    Emit,
    GradNorm,
    SegmentNorm,
    Task,
    Update,
    reads_of,
    writes_of,
)

# Fused updates change parameter and states in place, element by element.
UPDATE_WORKSPACE_BYTES: Final = 0


def add_updates(
    tasks: Sequence[Task], layout: Layout, optimizer: OptimizerPlan
) -> tuple[Task, ...]:
    """Insert norms and updates for every trained chunk."""
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
                result.append(_update(chunk, optimizer))
        result += [
            _update(chunk, optimizer) for chunk in ready if chunk not in norm_at.get(position, [])
        ]
    result.append(GradNorm(reads=tuple(norm_id(chunk.id) for chunk in trained), writes=(NORM,)))
    result.append(Emit(buffer=NORM))
    if optimizer.clips:
        result += [_update(chunk, optimizer) for chunk in reversed(finished)]
    return tuple(result)


def updated_states(optimizer: OptimizerPlan) -> tuple[str, ...]:
    """The states of a trained chunk that an update changes, the parameters first."""
    return ("param", *(("master",) if optimizer.master else ()), *optimizer.states)


def _segment_norm(chunk: Chunk) -> SegmentNorm:
    return SegmentNorm(
        chunk=chunk.id,
        reads=(state_id("grad", chunk.id),),
        writes=(norm_id(chunk.id),),
        workspace_bytes=NORM_WORKSPACE_BYTES,
    )


def _update(chunk: Chunk, optimizer: OptimizerPlan) -> Update:
    states = _states(chunk.id, optimizer)
    grad = state_id("grad", chunk.id)
    norm = (NORM,) if optimizer.clips else ()
    return Update(
        chunk=chunk.id,
        where="device",
        reads=(*states, grad, *norm),
        writes=(*states, grad) if optimizer.clips else states,
        workspace_bytes=UPDATE_WORKSPACE_BYTES,
    )


def _states(chunk: ChunkId, optimizer: OptimizerPlan) -> tuple[BufferId, ...]:
    return tuple(state_id(state, chunk) for state in updated_states(optimizer))


def _last_positions(touched: Sequence[tuple[BufferId, ...]]) -> Mapping[BufferId, int]:
    return {buffer: position for position, buffers in enumerate(touched) for buffer in buffers}
