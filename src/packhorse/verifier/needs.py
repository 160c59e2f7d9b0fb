"""What each task of a model must read and write, derived from model and layout alone.

In: a model, a layout, and how tied parameters are summed. Out: a `Needs` that gives the reads and
writes of each kind of task as sets of names, and the bytes that each name stands for.

    F  reads   chunks of the block's parameters, its inputs
       writes  its outputs, and what it saves if it saves
    R  reads   as F
       writes  what it saves
    B  reads   what was saved; chunks, inputs and outputs that its backward uses again; gradients
               of its outputs (the loss has none: it is 1); what it adds to
       writes  gradients of its inputs, and of its trained parameters: into chunks, but from
               micro-batch 1 on, while an earlier block uses a parameter too, into the
               parameter's running gradient

    I  reads   what was saved; what its half of the backward uses again; gradients of values that
               it adds to
       writes  gradients of its inputs, and a stash if something is left over
    W  reads   the stash (what was saved, where there is no I); what its half uses again; gradients
               of parameters that it adds to
       writes  gradients of its trained parameters, as B

Where tied parameters are summed once a step, the last user of one adds to its chunk in every
micro-batch; any other user adds to a sum of its own, and in the last micro-batch that goes to the
chunk as well.

What a Backward adds to is what an earlier Backward made: the gradient of a value by a later user,
a running gradient by a later user, a sum of its own by its earlier micro-batches, a chunk's
gradient by any earlier Backward of the step. The same holds of halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from packhorse.model.spec import (
    ITEM_BYTES,
    Block,
    BlockId,
    Half,
    Model,
    ParameterName,
    ValueId,
)
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    NORM_SEGMENT_ELEMENTS,
    BufferId,
    Chunk,
    ChunkId,
    Layout,
    norm_id,
    packed_norms_id,
    saved_id,
    stash_id,
    state_id,
    tied_grad_id,
    tied_sum_id,
    value_grad_id,
    value_id,
)
from packhorse.verifier.lives import count_packed_segments, find_flowing, shared_users

NORM_ITEM_BYTES: Final = 8  # sums of squares are float64

Stems = tuple[str, ...]
"""Names of buffers of a micro-batch, but for its number at their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfNeeds:
    """What one half of a block's backward uses again, and its workspace."""

    parameters: frozenset[BufferId]
    values: Stems
    workspace_bytes: int

    def reads(self, microbatch: int) -> set[str]:
        """The names of what it uses again."""
        return {*self.parameters, *_names(self.values, microbatch)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNeeds:
    """What the tasks of one block need, but for the micro-batch.

    Values and their gradients are given by stems; `backward_reads` are those that a Backward uses
    again and those of gradients of outputs. `value_grads_added` are inputs whose gradient a later
    user has begun. `running_begun`, `running_added` and `running_ended` are the tied parameters
    whose last, middle and first user the block is; `gradients` are the chunks that its Backward
    adds to, `tied_gradients` those that hold parameters whose running sum it begins or adds to: in
    micro-batch 0 that sum is in them.

    Where tied parameters are summed once a step: `last_gradients` are the chunks of parameters that
    it uses alone or last, `sums` its own sums of the others, whose chunks are `sum_gradients`.
    `handed_bytes` are those of gradients that it makes of tied parameters as their last user.
    `saved` and `stash` have no stem where there is nothing; halves that it does not have are None.

    `shared_sums` are its own sums of parameters that several ranks use, whoever uses them last;
    `shared_handed_bytes` the same bytes for those.
    """

    parameters: frozenset[BufferId]
    backward_parameters: frozenset[BufferId]
    inputs: Stems
    outputs: Stems
    saved: Stems
    stash: Stems
    backward_reads: Stems
    value_grads_written: Stems
    value_grads_added: Stems
    running_begun: tuple[str, ...]
    running_added: tuple[str, ...]
    running_ended: tuple[str, ...]
    gradients: frozenset[BufferId]
    tied_gradients: frozenset[BufferId]
    last_gradients: frozenset[BufferId]
    sums: frozenset[BufferId]
    sum_gradients: frozenset[BufferId]
    handed_bytes: int
    input_half: HalfNeeds | None
    weight_half: HalfNeeds | None
    shared_sums: frozenset[BufferId]
    shared_handed_bytes: int

    def gradients_at(self, microbatch: int) -> frozenset[BufferId]:
        """The chunks whose gradient its Backward of a micro-batch adds to."""
        return self.gradients | self.tied_gradients if microbatch == 0 else self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What all blocks need, and what is fed to the first ones.

    `last_summed` is the micro-batch in which the sums of a step's tied parameters are added, None
    where they are summed in every micro-batch.
    """

    blocks: tuple[BlockNeeds, ...]
    step_inputs: Stems
    last_summed: int | None

    def gradients_at(self, block: int, microbatch: int) -> frozenset[BufferId]:
        """The chunks whose gradient a Backward adds to."""
        needs = self.blocks[block]
        if self.last_summed is None:
            return needs.gradients_at(microbatch)
        if microbatch < self.last_summed:
            return needs.last_gradients
        return needs.last_gradients | needs.sum_gradients

    def backward_workspace_bytes(self, block: int, microbatch: int) -> int:
        """What a Backward holds beyond its body: gradients that it adds to chunks and drops."""
        if microbatch == 0:
            return 0
        needs = self.blocks[block]
        own_bytes = 0 if self.last_summed is None else needs.handed_bytes
        return own_bytes + needs.shared_handed_bytes

    def fed(self, microbatch: int) -> set[str]:
        """What Feed writes."""
        return set(_names(self.step_inputs, microbatch))

    def forward_reads(self, block: int, microbatch: int) -> set[str]:
        """What Forward and Recompute read."""
        needs = self.blocks[block]
        return {*needs.parameters, *_names(needs.inputs, microbatch)}

    def forward_writes(self, block: int, microbatch: int) -> set[str]:
        """What Forward writes, but for what it may save."""
        return set(_names(self.blocks[block].outputs, microbatch))

    def backward_reads(self, block: int, microbatch: int, begun: set[BufferId]) -> set[str]:
        """What Backward reads; `begun` are the chunk gradients that exist already."""
        needs = self.blocks[block]
        return {
            *needs.backward_parameters,
            *_names(needs.backward_reads, microbatch),
            *_names(needs.value_grads_added, microbatch),
            *_names(needs.saved, microbatch),
            *self._parameter_grads_read(block, microbatch, begun),
        }

    def backward_writes(self, block: int, microbatch: int) -> set[str]:
        """What Backward writes."""
        written = _names(self.blocks[block].value_grads_written, microbatch)
        return {*written, *self.parameter_grads_written(block, microbatch)}

    def input_half(self, block: int) -> HalfNeeds:
        """What InputGrad uses again."""
        half = self.blocks[block].input_half
        assert half is not None, "coverage knows which halves a block has"
        return half

    def weight_half(self, block: int) -> HalfNeeds:
        """What WeightGrad uses again."""
        half = self.blocks[block].weight_half
        assert half is not None, "coverage knows which halves a block has"
        return half

    def input_reads(self, block: int, microbatch: int) -> set[str]:
        """What InputGrad reads."""
        needs = self.blocks[block]
        kept = _names(needs.value_grads_added + needs.saved, microbatch)
        return {*self.input_half(block).reads(microbatch), *kept}

    def input_writes(self, block: int, microbatch: int) -> set[str]:
        """What InputGrad writes."""
        needs = self.blocks[block]
        return set(_names(needs.value_grads_written + needs.stash, microbatch))

    def weight_reads(self, block: int, microbatch: int, begun: set[BufferId]) -> set[str]:
        """What WeightGrad reads; `begun` as in `backward_reads`."""
        needs = self.blocks[block]
        kept = _names(needs.saved if needs.input_half is None else needs.stash, microbatch)
        half = self.weight_half(block).reads(microbatch)
        return {*kept, *half, *self._parameter_grads_read(block, microbatch, begun)}

    def _parameter_grads_read(
        self, block: int, microbatch: int, begun: set[BufferId]
    ) -> set[BufferId]:
        needs = self.blocks[block]
        found = set(self.gradients_at(block, microbatch) & begun)
        if microbatch > 0:
            found |= needs.shared_sums
        if self.last_summed is not None and microbatch > 0:
            found |= needs.sums
        elif microbatch > 0:
            running = (*needs.running_added, *needs.running_ended)
            found.update(tied_grad_id(name, microbatch) for name in running)
        return found

    def parameter_grads_written(self, block: int, microbatch: int) -> set[BufferId]:
        """What Backward or WeightGrad writes of gradients of parameters."""
        needs = self.blocks[block]
        found = {*self.gradients_at(block, microbatch), *needs.shared_sums}
        if self.last_summed is not None:
            found |= needs.sums
        elif microbatch > 0:
            running = (*needs.running_begun, *needs.running_added)
            found.update(tied_grad_id(name, microbatch) for name in running)
        return found


def derive_needs(model: Model, layout: Layout, *, last_summed: int | None = None) -> Needs:
    """Derive what every block needs.

    Args:
        last_summed: the last micro-batch, where tied parameters are summed once a step.
    """
    chunks = chunks_by_parameter(layout)
    flowing = find_flowing(model if model.part is None else model.part.whole)
    makers = model.values if model.part is None else model.part.whole.values
    return Needs(
        blocks=tuple(_derive_block(model, block, chunks, flowing) for block in model.blocks),
        step_inputs=_stems(
            value_id,
            (
                value.id
                for value in model.values.values()
                if value.consumers and makers[value.id].producer is None
            ),
        ),
        last_summed=last_summed,
    )


def chunks_by_parameter(layout: Layout) -> Mapping[str, tuple[ChunkId, ...]]:
    """Find the chunks of every parameter in one sweep; slots and chunks stand in a valid layout."""
    found: dict[str, tuple[ChunkId, ...]] = {}
    chunks = layout.chunks
    first = 0
    for slot in sorted(layout.slots.values(), key=lambda slot: slot.start):
        while first < len(chunks) and _stop(chunks[first]) <= slot.start:
            first += 1
        last = first
        while last < len(chunks) and chunks[last].start < slot.stop:
            last += 1
        found[slot.parameter] = tuple(chunk.id for chunk in chunks[first:last])
    return found


def _stop(chunk: Chunk) -> int:
    return chunk.start + chunk.num_elements


def derive_sizes(model: Model, layout: Layout, num_microbatches: int) -> Mapping[BufferId, int]:
    """Derive the bytes of every name that a program of this model may declare."""
    sizes: dict[BufferId, int] = {NORM: NORM_ITEM_BYTES}
    num_segments = _count_segments(layout)
    for chunk in layout.chunks:
        for state, dtype in layout.dtypes.items():
            sizes[state_id(state, chunk.id)] = chunk.num_elements * ITEM_BYTES[dtype]
        sizes[norm_id(chunk.id)] = num_segments.get(chunk.id, 0) * NORM_ITEM_BYTES
    for microbatch in range(num_microbatches):
        for value in model.values.values():
            sizes[value_id(value.id, microbatch)] = value.size_bytes
            sizes[value_grad_id(value.id, microbatch)] = value.size_bytes
        for block in model.blocks:
            body = model.body_of(block.id)
            sizes[saved_id(block.id, microbatch)] = body.saved_bytes
            if body.halves is not None:
                sizes[stash_id(block.id, microbatch)] = body.halves.stash_bytes
        for parameter in model.parameters.values():
            if parameter.trainable and len(parameter.blocks) > 1:
                name = tied_grad_id(parameter.name, microbatch)
                sizes[name] = parameter.num_elements * ITEM_BYTES[parameter.dtype]
    for parameter in model.parameters.values():
        if parameter.trainable:
            sum_bytes = parameter.num_elements * ITEM_BYTES[layout.dtypes["grad"]]
            for block in _shared_users(model, parameter.name) or (
                _number(model, user) for user in parameter.blocks[:-1]
            ):
                sizes[tied_sum_id(parameter.name, block)] = sum_bytes
    return {**sizes, **_exchanged_sizes(model, num_microbatches)}


def _exchanged_sizes(model: Model, num_microbatches: int) -> Mapping[BufferId, int]:
    # What only ranks that are several have.
    if model.part is None:
        return {}
    whole = model.part.whole
    loss_bytes = whole.values[whole.loss].size_bytes
    packed = count_packed_segments(model.part)
    return {
        LOSSES: num_microbatches * loss_bytes,
        **{value_id(whole.loss, each): loss_bytes for each in range(num_microbatches)},
        **{packed_norms_id(rank): count * NORM_ITEM_BYTES for rank, count in packed.items()},
    }


def _count_segments(layout: Layout) -> Mapping[ChunkId, int]:
    # A cut lies at a multiple of the segment length, so the pieces' segments are the parameter's.
    by_id: dict[ChunkId, Chunk] = {chunk.id: chunk for chunk in layout.chunks}
    counts: dict[ChunkId, int] = {}
    for name, chunk_ids in chunks_by_parameter(layout).items():
        slot = layout.slots[name]
        for chunk_id in chunk_ids:
            chunk = by_id[chunk_id]
            start = max(chunk.start, slot.start)
            stop = min(_stop(chunk), slot.stop)
            num_segments = -((start - stop) // NORM_SEGMENT_ELEMENTS)
            counts[chunk_id] = counts.get(chunk_id, 0) + num_segments
    return counts


def _stems(name: Callable[[str, int], BufferId], values: Iterable[str]) -> Stems:
    # The number of the micro-batch stands at the end of a name.
    return tuple([name(value, 0).removesuffix("0") for value in values])


def _names(stems: Stems, microbatch: int) -> list[str]:
    number = str(microbatch)
    return [stem + number for stem in stems]


def _derive_block(
    model: Model,
    block: Block,
    chunks: Mapping[str, tuple[ChunkId, ...]],
    flowing: frozenset[str],
) -> BlockNeeds:
    body = model.body_of(block.id)
    again = [block.parameters[index] for index in body.backward_parameters]
    values = [block.inputs[index] for index in body.backward_inputs]
    values += [block.outputs[index] for index in body.backward_outputs]
    written = tuple(value for value in dict.fromkeys(block.inputs) if value in flowing)
    begun: list[str] = []
    added: list[str] = []
    ended: list[str] = []
    gradients: set[BufferId] = set()
    tied: set[BufferId] = set()
    last: set[BufferId] = set()
    summed: set[BufferId] = set()
    sums: set[BufferId] = set()
    handed_bytes = 0
    shared: set[BufferId] = set()
    shared_handed_bytes = 0
    number = _number(model, block.id)
    stashes = body.halves is not None and body.halves.stash_bytes > 0
    for name in dict.fromkeys(block.parameters):
        parameter = model.parameters[name]
        users = parameter.blocks
        if not parameter.trainable:
            continue
        others = _shared_users(model, name)
        if others:
            shared.add(tied_sum_id(name, number))
            if number == others[0]:
                shared_handed_bytes += parameter.num_elements * ITEM_BYTES[parameter.dtype]
            continue
        if block.id == users[-1]:
            last.update(state_id("grad", chunk) for chunk in chunks[name])
            if block.id != users[0]:
                handed_bytes += parameter.num_elements * ITEM_BYTES[parameter.dtype]
        else:
            summed.update(state_id("grad", chunk) for chunk in chunks[name])
            sums.add(tied_sum_id(name, number))
        if block.id == users[0]:
            gradients.update(state_id("grad", chunk) for chunk in chunks[name])
            if len(users) > 1:
                ended.append(name)
            continue
        tied.update(state_id("grad", chunk) for chunk in chunks[name])
        if block.id == users[-1]:
            begun.append(name)
        else:
            added.append(name)
    return BlockNeeds(
        parameters=_states(block.parameters, chunks),
        backward_parameters=_states(again, chunks),
        inputs=_stems(value_id, block.inputs),
        outputs=_stems(value_id, block.outputs),
        saved=(_stem_of_block(saved_id, block.id),) if body.saved_bytes else (),
        stash=(_stem_of_block(stash_id, block.id),) if stashes else (),
        backward_reads=(
            *_stems(value_id, dict.fromkeys(values)),
            *_stems(value_grad_id, (value for value in block.outputs if value in flowing)),
        ),
        value_grads_written=_stems(value_grad_id, written),
        value_grads_added=_stems(
            value_grad_id,
            (value for value in written if _has_later_user(model, value, block.id)),
        ),
        running_begun=tuple(begun),
        running_added=tuple(added),
        running_ended=tuple(ended),
        gradients=frozenset(gradients),
        tied_gradients=frozenset(tied),
        last_gradients=frozenset(last),
        sums=frozenset(sums),
        sum_gradients=frozenset(summed),
        handed_bytes=handed_bytes,
        input_half=_derive_half(block, body.halves.input if body.halves else None, chunks),
        weight_half=_derive_half(block, body.halves.weight if body.halves else None, chunks),
        shared_sums=frozenset(shared),
        shared_handed_bytes=shared_handed_bytes,
    )


def _derive_half(
    block: Block, half: Half | None, chunks: Mapping[str, tuple[ChunkId, ...]]
) -> HalfNeeds | None:
    if half is None:
        return None
    values = [block.inputs[index] for index in half.inputs]
    values += [block.outputs[index] for index in half.outputs]
    return HalfNeeds(
        parameters=_states((block.parameters[index] for index in half.parameters), chunks),
        values=(
            *_stems(value_id, values),
            *_stems(value_grad_id, (block.outputs[index] for index in half.tangents)),
        ),
        workspace_bytes=half.workspace_bytes,
    )


def _stem_of_block(name: Callable[[int, int], BufferId], block: int) -> str:
    return name(block, 0).removesuffix("0")


def _number(model: Model, block: BlockId) -> BlockId:
    # Of a block in the whole model.
    return block if model.part is None else model.part.blocks[block]


def _shared_users(model: Model, name: ParameterName) -> tuple[BlockId, ...]:
    if model.part is None:
        return ()
    return shared_users(model.part, model.part.whole.parameters[name])


def _has_later_user(model: Model, value: ValueId, block: BlockId) -> bool:
    # On any rank, with a backward.
    whole = model if model.part is None else model.part.whole
    users = whole.later_users(value, _number(model, block))
    return any(whole.blocks[user].has_backward for user in users)


def _states(names: Iterable[str], chunks: Mapping[str, tuple[ChunkId, ...]]) -> frozenset[BufferId]:
    return frozenset(state_id("param", chunk) for name in names for chunk in chunks[name])
