"""The traced model as a torch-free noun: blocks, values, parameters, ties and a fingerprint.

In: what `graph` found by tracing at one micro-batch shape. Out: a frozen `Model` that plans,
compiler, verifier and simulator read. Blocks are numbered in execution order; every value is
produced by one block (or is a step input) and is used only by later blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NewType

BlockId = NewType("BlockId", int)
BodyId = NewType("BodyId", str)
ValueId = NewType("ValueId", str)
ParameterName = NewType("ParameterName", str)

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter; tied names are one parameter with aliases.

    `blocks` are the users in execution order. `group` names the optimizer group it belongs to.
    """

    name: ParameterName
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: str
    aliases: tuple[str, ...]
    blocks: tuple[BlockId, ...]

    @property
    def num_elements(self) -> int:
        """Number of scalars."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses blocks, or a step input (`producer` is None).

    `needs_grad` says that a gradient of the same size flows back through it.
    """

    id: ValueId
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    needs_grad: bool
    producer: BlockId | None
    consumers: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What one half of a body's backward costs, and what it reads beside saved values or a stash.

    The tuples of indices name the block's parameters, inputs and outputs, and the outputs whose
    gradients it reads. Workspace is meant as in `Body`.
    """

    compute_flops: int
    moved_bytes: int
    workspace_bytes: int
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A body's backward cut in two.

    `input` gives the gradients of the block's inputs and is None where none flows: then `weight`
    is the whole backward and reads what was saved. `weight` gives the gradients of parameters and
    is None where none is trained. Where there are both, `stash_bytes` wait between them; what was
    saved is not needed any more then.
    """

    stash_bytes: int
    input: Half | None
    weight: Half | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What one distinct block costs at the model's micro-batch shape; equal blocks share it.

    Workspace is what a run of the body holds beyond its inputs and the buffers it leaves behind:
    `forward_workspace_bytes` when saved values are kept, `discard_workspace_bytes` when the
    forward keeps only its outputs, `backward_workspace_bytes` for the backward. The one of
    micro-batch 0 makes gradients in their chunks, where later ones make them beside and add them:
    it holds `first_backward_workspace_bytes`, None for as much as the others. The tuples of indices
    say which of the block's parameters, inputs and outputs the backward reads again. `halves` is
    None for a body without a backward, and where nobody asked for them.
    """

    id: BodyId
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    discard_workspace_bytes: int
    backward_workspace_bytes: int
    backward_parameters: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    num_random: int
    halves: Halves | None = None
    first_backward_workspace_bytes: int | None = None

    def workspace_of_backward(self, microbatch: int) -> int:
        """What the backward of a micro-batch holds beyond its inputs and what it leaves behind."""
        first = self.first_backward_workspace_bytes
        return self.backward_workspace_bytes if microbatch or first is None else first


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The unit of scheduling.

    `parameters` and `inputs` are in the order of the body's arguments, `outputs` in the order of
    its results. `has_backward` is False below the lowest trainable parameter.
    """

    id: BlockId
    name: str
    body: BodyId
    parameters: tuple[ParameterName, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    has_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Of which model a part is, and which part: the blocks that one rank computes.

    `owners` gives for each block of the whole model the rank that computes it. Blocks are numbered
    anew in a part; a number of the whole model is called global.
    """

    whole: Model
    owners: tuple[int, ...]
    rank: int

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """Global numbers of the part's blocks, in its order."""
        return tuple(block.id for block in self.whole.blocks if self.owners[block.id] == self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model traced for micro-batches of `rows` rows of `length` tokens, or a part of one.

    `loss` is the scalar output of the last block. `fingerprint` covers graph and shapes of the
    model, never values, and does not depend on `rows`, `length` or which parameters are frozen; a
    part has that of the whole. In a part `producer` and `consumers` of a value are blocks of the
    part alone, and one that another rank makes has no producer; `loss` may be another rank's.
    """

    name: str
    fingerprint: str
    rows: int
    length: int
    loss: ValueId
    blocks: tuple[Block, ...]
    bodies: Mapping[BodyId, Body]
    values: Mapping[ValueId, Value]
    parameters: Mapping[ParameterName, Parameter]
    part: Part | None = None

    @property
    def step_inputs(self) -> tuple[ValueId, ...]:
        """The values that are fed and used, in order."""
        made = self.values if self.part is None else self.part.whole.values
        return tuple(
            name
            for name, value in self.values.items()
            if value.consumers and made[name].producer is None
        )

    @property
    def num_parameters(self) -> int:
        """Number of distinct scalars, ties counted once."""
        return sum(parameter.num_elements for parameter in self.parameters.values())

    @property
    def num_trainable(self) -> int:
        """Number of scalars that are trained."""
        return sum(p.num_elements for p in self.parameters.values() if p.trainable)

    @property
    def summed_parameters(self) -> tuple[ParameterName, ...]:
        """The trained parameters that several blocks use: their gradients are summed over these."""
        return tuple(
            name for name, p in self.parameters.items() if p.trainable and len(p.blocks) > 1
        )

    def body_of(self, block: BlockId) -> Body:
        """The body of a block."""
        return self.bodies[self.blocks[block].body]

    def later_users(self, value: ValueId, block: BlockId) -> tuple[BlockId, ...]:
        """The blocks after `block` that use a value."""
        return tuple(user for user in self.values[value].consumers if user > block)

    def later_parameter_users(self, name: ParameterName, block: BlockId) -> tuple[BlockId, ...]:
        """The blocks after `block` that use a parameter (more than none only for tied ones)."""
        return tuple(user for user in self.parameters[name].blocks if user > block)
