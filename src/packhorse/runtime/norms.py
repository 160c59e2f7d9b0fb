"""Norms of gradients: sums of squares over fixed segments, combined in the order of parameters.

In: chunk memory, and the segment norms that tasks made on this rank or others. Out: those of a
chunk, those of a rank in one tensor, and the global norm. Float64 throughout; the order is that of
the whole model's parameters, whatever the chunks and ranks, so the bits are the same under every
plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from packhorse.model.parts import find_counting, whole_of
from packhorse.model.spec import Model
from packhorse.optim.norm import combine_norm, count_segments, segment_squares
from packhorse.program.buffers import BufferId, ChunkId, Layout, packed_norms_id, split_state
from packhorse.runtime.memory.chunks import ChunkMemory, chunk_table

Parts = dict[str, list[tuple[int, Tensor]]]


class Norms:
    """Makes the norms of one rank.

    Args:
        model: the rank's; where it is a part, norms of other ranks' parameters come packed.
    """

    def __init__(self, model: Model, layout: Layout, memory: ChunkMemory) -> None:
        self._memory = memory
        self._chunks = chunk_table(layout)
        parameters = whole_of(model).parameters
        self._order = tuple(parameters)
        self._packed: dict[BufferId, list[tuple[str, int]]] = {}
        if model.part is not None:
            for name, rank in find_counting(model.part.whole, model.part.owners).items():
                held = self._packed.setdefault(packed_norms_id(rank), [])
                held.append((name, count_segments(parameters[name].num_elements)))

    def segments(self, chunk_id: ChunkId) -> Tensor:
        """Sum the squares of a chunk's gradient, segment by segment."""
        chunk = self._chunks[chunk_id]
        grad = self._memory.tensor("grad", chunk)
        return segment_squares(
            [grad[start:stop] for start, stop, _, _ in self._memory.pieces(chunk)]
        )

    def pack(self, norms: Mapping[BufferId, Tensor]) -> Tensor:
        """Put the segment norms of this rank's chunks behind each other, parameter by parameter."""
        return torch.cat(list(self._in_order(self._sort(norms))))

    def combine(self, norms: Mapping[BufferId, Tensor]) -> tuple[Tensor, tuple[str, ...]]:
        """Give the global norm; where it is not finite, the parameters that make it so as well."""
        parts = self._sort(norms)
        norm = combine_norm(self._in_order(parts))
        if math.isfinite(float(norm)):
            return norm, ()
        return norm, tuple(
            name
            for name in self._order
            if any(not segments.isfinite().all() for _, segments in parts.get(name, []))
        )

    def _sort(self, norms: Mapping[BufferId, Tensor]) -> Parts:
        # Runs of segments by parameter, each with the element of it where the run begins.
        parts: Parts = {}
        for buffer, segments in norms.items():
            offset = 0
            for name, first, count in self._runs_of(buffer):
                parts.setdefault(name, []).append((first, segments[offset : offset + count]))
                offset += count
        return parts

    def _runs_of(self, buffer: BufferId) -> Sequence[tuple[str, int, int]]:
        if buffer in self._packed:
            return [(name, 0, count) for name, count in self._packed[buffer]]
        chunk = self._chunks[split_state(buffer)[1]]
        return [
            (slot.parameter, first, count_segments(stop - start))
            for start, stop, slot, first in self._memory.pieces(chunk)
        ]

    def _in_order(self, parts: Parts) -> Iterator[Tensor]:
        for name in self._order:
            for _, segments in sorted(parts.get(name, []), key=lambda part: part[0]):
                yield segments
