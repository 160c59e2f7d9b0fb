"""Update chunks: an optimizer's step on the states that an Update task names.

In: the optimizer, a chunk's states in the tier of the task, the global norm when clipping. Out: the
states changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from packhorse.optim.groups import hyperparameters
from packhorse.optim.norm import clip_coefficient
from packhorse.optim.optimizers import Optimizer
from packhorse.optim.schedules import scale_rate
from packhorse.optim.update import update_shard
from packhorse.program.buffers import ChunkId, Layout
from packhorse.runtime.memory.chunks import ChunkMemory, chunk_table


class ChunkUpdates:
    """Updates the chunks of one rank.

    Args:
        max_grad_norm: None when the plan does not clip.
        memory: tells where parameters lie in a chunk.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_grad_norm: float | None,
        layout: Layout,
        memory: ChunkMemory,
    ) -> None:
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._memory = memory
        self._chunks = chunk_table(layout)
        self._groups = {
            chunk.group: hyperparameters(optimizer, chunk.group) for chunk in layout.chunks
        }

    def apply(
        self,
        chunk_id: ChunkId,
        tensors: Mapping[str, Tensor],
        norm: Tensor | None,
        *,
        step: int,
        learning_rate: float,
    ) -> None:
        """Update a chunk, whose states are given by name."""
        chunk = self._chunks[chunk_id]
        group = self._groups[chunk.group]
        coefficient = None
        if norm is not None and self._max_grad_norm is not None:
            coefficient = clip_coefficient(norm, self._max_grad_norm)
        master = tensors.get("master")
        update_shard(
            group,
            step=step,
            learning_rate=scale_rate(group.lr, self._optimizer.lr, learning_rate),
            param=tensors["param"] if master is None else master,
            grad=tensors["grad"],
            states={name: tensors[name] for name in self._optimizer.state_names},
            pieces=[(start, stop) for start, stop, _, _ in self._memory.pieces(chunk)],
            clip_coefficient=coefficient,
            compute_param=None if master is None else tensors["param"],
        )
