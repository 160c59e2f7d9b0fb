"""Messages between ranks: Send and Recv tasks over a transport.

In: tasks, and the tensor that a Send hands over. Out: the tensor that a Recv fills; its shape and
dtype follow from the buffer's name. A tensor goes in the order of its elements, so it has to lie in
that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from packhorse.errors import ModelError
from packhorse.model.parts import find_counting, whole_of
from packhorse.model.spec import Model, ParameterName, ValueId
from packhorse.optim.norm import count_segments
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    BufferId,
    Layout,
    packed_norms_id,
    split_sum,
    split_value,
)
from packhorse.program.program import Program
from packhorse.program.tasks import Recv, Send, Task
from packhorse.runtime.transport.spec import Transport

Shape = tuple[tuple[int, ...], torch.dtype]


class Messages:
    """The messages of one rank.

    Args:
        transport: None where there is one rank.
        device: where received tensors are to lie.
        shapes: of all that is received.
        room: inside, a lane takes what a task makes.
    """

    def __init__(
        self,
        transport: Transport | None,
        device: torch.device,
        shapes: Mapping[BufferId, Shape],
        room: Callable[[Task], AbstractContextManager[None]],
    ) -> None:
        self._room = room
        self._transport = transport
        self._device = device
        self._shapes = shapes

    def send(self, task: Send, tensor: Tensor) -> None:
        """Hand a tensor over; blocks until it has been taken.

        Raises:
            ModelError: its elements do not lie in their order.
            PeerLostError: another rank is gone.
        """
        if not tensor.is_contiguous():
            raise ModelError(
                f"{task.buffer} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, and"
                " only what lies in order can go to another rank",
                fix="let the block return a contiguous tensor, or cut the model elsewhere",
            )
        assert self._transport is not None
        self._transport.send(tensor, task.peer)

    def receive(self, task: Recv) -> Tensor:
        """Take a tensor; blocks until it is there.

        Raises:
            PeerLostError: another rank is gone.
        """
        shape, dtype = self._shapes[task.buffer]
        assert self._transport is not None
        with self._room(task):
            made = torch.empty(shape, dtype=dtype, device=self._device)
            self._transport.receive(made, task.peer)
        return made

    def abort(self, reason: str, exit_code: int) -> None:
        """Tell all other ranks that this one has failed, and how they are to end."""
        if self._transport is not None:
            self._transport.abort(reason, exit_code)


def find_shapes(model: Model, layout: Layout, programs: Iterable[Program]) -> dict[BufferId, Shape]:
    """Give the shape of everything that programs receive."""
    found: dict[BufferId, Shape] = {}
    for program in programs:
        for task in program.tasks:
            if isinstance(task, Recv):
                found[task.buffer] = _shape_of(task.buffer, model, layout, program.num_microbatches)
    return found


def _shape_of(buffer: BufferId, model: Model, layout: Layout, num_microbatches: int) -> Shape:
    whole = whole_of(model)
    loss = whole.values[whole.loss]
    if buffer == NORM:
        return (), torch.float64
    if buffer == LOSSES:
        return (num_microbatches,), _dtype(loss.dtype)
    if buffer.startswith("norms@"):
        assert model.part is not None
        counts = find_counting(whole, model.part.owners)
        segments = (
            count_segments(whole.parameters[name].num_elements)
            for name, rank in counts.items()
            if packed_norms_id(rank) == buffer
        )
        return (sum(segments),), torch.float64
    if buffer.startswith("wsum/"):
        parameter = whole.parameters[ParameterName(split_sum(buffer)[0])]
        return parameter.shape, _dtype(layout.dtypes["grad"])
    value = whole.values[ValueId(split_value(buffer))]
    return value.shape, _dtype(value.dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
