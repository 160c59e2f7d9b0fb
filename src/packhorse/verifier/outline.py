"""The outline of a program: at which index each thing happens, for rules that look at the whole.

In: a program whose buffers are declared, and its model where there is one. Out: tables from block
and micro-batch, chunk or buffer to the indices of the tasks that deal with it, in program order;
and what each task touches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packhorse.model.spec import Model
from packhorse.program.buffers import BufferId, ChunkId, state_id
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Feed,
    Forward,
    Free,
    GradNorm,
    Import,
    InputGrad,
    PackLosses,
    PackNorms,
    Recompute,
    Recv,
    SegmentNorm,
    Send,
    SumTied,
    Update,
    WeightGrad,
)
from packhorse.verifier.touches import Touches, find_touches

Indices = Sequence[int]
BlockTable = Mapping[tuple[int, int], Indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Where each thing happens; block tables go by block and micro-batch.

    `begun` has what begins each backward: it whole, its InputGrad, or a WeightGrad that has none;
    `summed` what adds to gradients of parameters: a backward whole, or its WeightGrad. `gradients`
    lists, for each chunk, the tasks that write its gradient, SumTied among them.
    """

    program: Program
    model: Model | None
    touches: Touches
    feeds: Mapping[int, Indices]
    forwards: BlockTable
    recomputes: BlockTable
    backwards: BlockTable
    input_grads: BlockTable
    weight_grads: BlockTable
    begun: BlockTable
    summed: BlockTable
    gradients: Mapping[ChunkId, Indices]
    tied_sums: Mapping[str, Indices]
    segment_norms: Mapping[ChunkId, Indices]
    packs: Mapping[BufferId, Indices]
    grad_norms: Indices
    receives: Mapping[BufferId, Indices]
    updates: Mapping[ChunkId, Indices]
    emits: Mapping[BufferId, Indices]
    imports: Mapping[BufferId, Indices]
    exports: Mapping[BufferId, Indices]


def outline_program(program: Program, model: Model | None) -> Outline:
    """Walk the tasks once and note where each thing happens."""
    feeds: dict[int, list[int]] = defaultdict(list)
    forwards: dict[tuple[int, int], list[int]] = defaultdict(list)
    recomputes: dict[tuple[int, int], list[int]] = defaultdict(list)
    backwards: dict[tuple[int, int], list[int]] = defaultdict(list)
    input_grads: dict[tuple[int, int], list[int]] = defaultdict(list)
    weight_grads: dict[tuple[int, int], list[int]] = defaultdict(list)
    gradients: dict[ChunkId, list[int]] = defaultdict(list)
    tied_sums: dict[str, list[int]] = defaultdict(list)
    segment_norms: dict[ChunkId, list[int]] = defaultdict(list)
    packs: dict[BufferId, list[int]] = defaultdict(list)
    grad_norms: list[int] = []
    receives: dict[BufferId, list[int]] = defaultdict(list)
    updates: dict[ChunkId, list[int]] = defaultdict(list)
    emits: dict[BufferId, list[int]] = defaultdict(list)
    imports: dict[BufferId, list[int]] = defaultdict(list)
    exports: dict[BufferId, list[int]] = defaultdict(list)
    chunk_of_gradient = {state_id("grad", c.id): c.id for c in program.layout.chunks}
    for index, task in enumerate(program.tasks):
        match task:
            case Copy() | Free() | Send():
                pass
            case Recv():
                receives[task.buffer].append(index)
            case Forward():
                forwards[task.block, task.microbatch].append(index)
            case Recompute():
                recomputes[task.block, task.microbatch].append(index)
            case InputGrad():
                input_grads[task.block, task.microbatch].append(index)
            case Backward() | WeightGrad():
                table = backwards if isinstance(task, Backward) else weight_grads
                table[task.block, task.microbatch].append(index)
                for buffer in task.writes:
                    if buffer in chunk_of_gradient:
                        gradients[chunk_of_gradient[buffer]].append(index)
            case SumTied():
                tied_sums[task.parameter].append(index)
                for buffer in task.writes:
                    if buffer in chunk_of_gradient:
                        gradients[chunk_of_gradient[buffer]].append(index)
            case PackNorms() | PackLosses():
                for buffer in task.writes:
                    packs[buffer].append(index)
            case Feed():
                feeds[task.microbatch].append(index)
            case SegmentNorm():
                segment_norms[task.chunk].append(index)
            case GradNorm():
                grad_norms.append(index)
            case Update():
                updates[task.chunk].append(index)
            case Emit():
                emits[task.buffer].append(index)
            case Import():
                imports[task.buffer].append(index)
            case Export():
                exports[task.buffer].append(index)
    return Outline(
        program=program,
        model=model,
        touches=find_touches(program),
        feeds=dict(feeds),
        forwards=dict(forwards),
        recomputes=dict(recomputes),
        backwards=dict(backwards),
        input_grads=dict(input_grads),
        weight_grads=dict(weight_grads),
        begun=_merge(weight_grads, input_grads, backwards),
        summed=_merge(weight_grads, backwards),
        gradients=dict(gradients),
        tied_sums=dict(tied_sums),
        segment_norms=dict(segment_norms),
        packs=dict(packs),
        grad_norms=grad_norms,
        receives=dict(receives),
        updates=dict(updates),
        emits=dict(emits),
        imports=dict(imports),
        exports=dict(exports),
    )


def _merge(*tables: BlockTable) -> BlockTable:
    """Put tables into one, in program order; of equal keys the last table's counts."""
    merged = {key: indices for table in tables for key, indices in table.items()}
    return dict(sorted(merged.items(), key=lambda item: item[1][0]))
