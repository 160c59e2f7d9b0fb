"""What every stretch of a model's blocks holds, and what crosses at every cut.

In: a model and what its optimizer keeps. Out: `Stretches`, tables with the first block of a
stretch as the row and the block behind its last one as the column. They are exact for any
dataflow:

    states    16 bytes for each scalar that AdamW trains in float32; one that several blocks use
              counts once in a stretch, and `tied` says where, so that it counts once on a rank
    saved     what a microbatch holds between its forward and its backward: with values kept, what
              bodies save and the inputs and outputs that their backwards read again; where blocks
              recompute, their inputs
    crossing  every value that is made before a cut and used behind it, so a skip crosses several
              cuts; and the gradients of those that one flows back through

Step inputs cross nothing: every rank is fed those that its blocks use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from packhorse.model.spec import ITEM_BYTES, Block, Model, Parameter, Value, ValueId
from packhorse.plan.spec import OptimizerPlan

Ints = npt.NDArray[np.int64]
FULL_BYTES: Final = ITEM_BYTES["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """All states of a parameter of several blocks, and the stretches that use it."""

    states_bytes: int
    is_used: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Tables over all stretches of a model's blocks, and columns over all its cuts.

    `states_bytes` leaves tied parameters out. `least_bytes` is what the block with the most
    parameters needs of them in memory at once, the rest of the states being away. `kept_bytes` and
    `remade_bytes` are saved by a microbatch whose blocks keep or recompute, `opened_bytes` on top
    of the latter between the halves of a backward. The workspaces are those of the fullest block,
    which for blocks that recompute includes what it saves. Cut `k` is that in front of block `k`.
    """

    states_bytes: Ints
    tied: tuple[Tied, ...]
    least_bytes: Ints
    kept_bytes: Ints
    remade_bytes: Ints
    opened_bytes: Ints
    kept_workspace_bytes: Ints
    remade_workspace_bytes: Ints
    forward_bytes: Ints
    gradient_bytes: Ints

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.forward_bytes) - 1


def measure_stretches(model: Model, optimizer: OptimizerPlan) -> Stretches:
    """Fill the tables of a model."""
    blocks = model.blocks
    tied = [each for each in model.parameters.values() if len(set(each.blocks)) > 1]
    single = [each for each in model.parameters.values() if len(set(each.blocks)) == 1]
    states = [0] * len(blocks)
    for parameter in single:
        states[parameter.blocks[0]] += _count_states(parameter, optimizer)
    bodies = [model.body_of(block.id) for block in blocks]
    saved = [
        body.saved_bytes if block.has_backward else 0
        for body, block in zip(bodies, blocks, strict=True)
    ]
    values = [_list_kept(model, block) for block in blocks]
    inputs = [_list_inputs(model, block) for block in blocks]
    return Stretches(
        states_bytes=add_up(states),
        tied=tuple(
            Tied(
                states_bytes=_count_states(parameter, optimizer),
                is_used=np.minimum(
                    add_up([int(block.id in parameter.blocks) for block in blocks]), 1
                ),
            )
            for parameter in tied
        ),
        least_bytes=_take_largest([_count_least(model, block) for block in blocks]),
        kept_bytes=add_up(saved) + _count_distinct(model, values),
        remade_bytes=_count_distinct(model, inputs),
        opened_bytes=add_up(saved),
        kept_workspace_bytes=_take_largest(
            [max(body.forward_workspace_bytes, body.backward_workspace_bytes) for body in bodies]
        ),
        remade_workspace_bytes=_take_largest(
            [
                max(
                    body.discard_workspace_bytes,
                    own + body.forward_workspace_bytes,
                    own + body.backward_workspace_bytes,
                )
                for body, own in zip(bodies, saved, strict=True)
            ]
        ),
        forward_bytes=_count_crossing(model, lambda _: True),
        gradient_bytes=_count_crossing(model, lambda value: value.needs_grad),
    )


def add_up(column: Sequence[int]) -> Ints:
    """Add what blocks have over every stretch."""
    sums = np.concatenate(([0], np.cumsum(np.asarray(column, dtype=np.int64))))
    return np.maximum(sums[None, :] - sums[:, None], 0)


def _take_largest(column: Sequence[int]) -> Ints:
    size = len(column) + 1
    table = np.zeros((size, size), dtype=np.int64)
    for first in range(len(column)):
        table[first, first + 1 :] = np.maximum.accumulate(column[first:])
    return table


def _count_distinct(model: Model, values: Sequence[Sequence[ValueId]]) -> Ints:
    """Add the bytes of blocks' values over every stretch, each value once."""
    size = len(values) + 1
    table = np.zeros((size, size), dtype=np.int64)
    for first in range(len(values)):
        seen = set[ValueId]()
        total = 0
        for block in range(first, len(values)):
            for name in values[block]:
                if name not in seen:
                    seen.add(name)
                    total += model.values[name].size_bytes
            table[first, block + 1] = total
    return table


def _count_crossing(model: Model, wanted: Callable[[Value], bool]) -> Ints:
    column = np.zeros(len(model.blocks) + 1, dtype=np.int64)
    for value in model.values.values():
        if value.producer is not None and value.consumers and wanted(value):
            column[value.producer + 1 : max(value.consumers) + 1] += value.size_bytes
    return column


def _count_states(parameter: Parameter, optimizer: OptimizerPlan) -> int:
    own_bytes = ITEM_BYTES[parameter.dtype]
    if not parameter.trainable:
        return own_bytes * parameter.num_elements
    others = 1 + len(optimizer.states) + int(optimizer.master)
    return (own_bytes + others * FULL_BYTES) * parameter.num_elements


def _count_least(model: Model, block: Block) -> int:
    """Count a block's parameters and their gradients."""
    parameters = [model.parameters[name] for name in block.parameters]
    return sum(
        (ITEM_BYTES[each.dtype] + (FULL_BYTES if each.trainable else 0)) * each.num_elements
        for each in parameters
    )


def _list_inputs(model: Model, block: Block) -> list[ValueId]:
    return _list_made(model, block.inputs) if block.has_backward else []


def _list_kept(model: Model, block: Block) -> list[ValueId]:
    if not block.has_backward:
        return []
    body = model.body_of(block.id)
    read = [block.inputs[at] for at in body.backward_inputs]
    return _list_made(model, [*read, *(block.outputs[at] for at in body.backward_outputs)])


def _list_made(model: Model, names: Iterable[ValueId]) -> list[ValueId]:
    return [name for name in names if model.values[name].producer is not None]
