"""Run block bodies: find their arguments among the buffers of a task, keep what they leave.

In: a compute task, the tensors of the buffers that it declares, chunk memory. Out: the tensors of
the buffers that it writes. A body sees no buffer that its task does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from packhorse.errors import AuditError, MismatchError
from packhorse.graph.code import BackwardCode, BackwardVariant, BodyCode, HalvesCode
from packhorse.graph.direct import Direct, make_direct
from packhorse.graph.liveness import HeapUse
from packhorse.graph.trace import Traced
from packhorse.model.parts import number_globally
from packhorse.model.spec import Block, BlockId, ParameterName, ValueId
from packhorse.program.buffers import (
    BufferId,
    Layout,
    saved_id,
    stash_id,
    state_id,
    tied_grad_id,
    tied_sum_id,
    value_grad_id,
    value_id,
)
from packhorse.program.tasks import (
    Backward,
    Forward,
    InputGrad,
    Recompute,
    SumTied,
    Task,
    WeightGrad,
)
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.runtime.noise import NoiseKey, draw_noise

Payload = tuple[Tensor, ...]
Visible = Mapping[BufferId, Payload]
BackwardTask = Backward | InputGrad | WeightGrad


@dataclass(frozen=True, slots=True)
class _BlockArguments:
    """A block's parameters as views of chunk memory, with the chunks that hold them.

    `inputs` gives the names of the inputs by their place among the body's arguments; `sums` names
    what the block adds up of each of its parameters, were it tied.
    """

    parameters: tuple[Tensor, ...]
    sinks: Mapping[int, Tensor]
    param_chunks: tuple[tuple[BufferId, ...], ...]
    grad_chunks: Mapping[int, tuple[BufferId, ...]]
    inputs: Mapping[int, ValueId]
    sums: tuple[BufferId, ...]


class BodyRunner:
    """Runs forward, recompute and backward bodies of a traced model, and halves of backwards.

    Args:
        room: entered with a task and what it takes of the heap, while its body runs.
    """

    def __init__(
        self,
        traced: Traced,
        layout: Layout,
        memory: ChunkMemory,
        device: torch.device,
        room: Callable[[Task, HeapUse], AbstractContextManager[None]],
    ) -> None:
        self._room = room
        self._traced = traced
        self._directs: dict[fx.GraphModule, Direct] = {}
        numbers = number_globally(traced.model)
        self._device = device
        self._unused = torch.empty(0, device=device)
        self._constants = {
            block: tuple(tensor.to(device) for tensor in tensors)
            for block, tensors in traced.constants.items()
        }
        self._arguments = tuple(
            _find_arguments(block, numbers[block.id], traced, layout, memory)
            for block in traced.model.blocks
        )

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._traced.model.blocks)

    def plan_forward(self, block_index: int, microbatch: int) -> Forward:
        """Describe a forward that keeps nothing but its outputs."""
        block, _ = self._block(block_index)
        chunks = [c for found in self._arguments[block_index].param_chunks for c in found]
        inputs = [value_id(name, microbatch) for name in block.inputs]
        return Forward(
            block=block_index,
            microbatch=microbatch,
            reads=tuple(dict.fromkeys((*chunks, *inputs))),
            writes=tuple(value_id(name, microbatch) for name in block.outputs),
            workspace_bytes=0,
        )

    def forward(
        self, task: Forward, visible: Visible, key: NoiseKey | None
    ) -> dict[BufferId, Payload]:
        """Run a forward; `key` None means evaluation, without dropout."""
        block, code = self._block(task.block)
        keeps = saved_id(task.block, task.microbatch) in task.writes
        arguments = self._forward_arguments(block, task.microbatch, task.reads, visible)
        graph = code.keep if keeps else code.discard
        run = self._direct(code.evaluate if key is None else graph)
        with self._room(task, code.costs.forward_heap):
            noise = () if key is None else self._noise(block.id, code, key)
            results = run(*arguments, *noise)
        written: dict[BufferId, Payload] = {
            value_id(name, task.microbatch): (tensor,)
            for name, tensor in zip(block.outputs, results[: code.num_outputs], strict=True)
        }
        if keeps:
            written[saved_id(task.block, task.microbatch)] = tuple(results[code.num_outputs :])
        return written

    def recompute(
        self, task: Recompute, visible: Visible, key: NoiseKey
    ) -> dict[BufferId, Payload]:
        """Run a forward again for its saved values."""
        block, code = self._block(task.block)
        arguments = self._forward_arguments(block, task.microbatch, task.reads, visible)
        run = self._direct(code.keep)
        with self._room(task, code.costs.forward_heap):
            results = run(*arguments, *self._noise(block.id, code, key))
        return {saved_id(task.block, task.microbatch): tuple(results[code.num_outputs :])}

    def backward(self, task: BackwardTask, visible: Visible) -> dict[BufferId, Payload]:
        """Run a backward or one of its halves; parameter gradients go into their chunks."""
        match task:
            case Backward():
                return self._whole(task, visible)
            case InputGrad():
                return self._input_half(task, visible)
            case WeightGrad():
                return self._weight_half(task, visible)

    def _whole(self, task: Backward, visible: Visible) -> dict[BufferId, Payload]:
        block, code = self._block(task.block)
        assert code.backward is not None, f"block {block.name} has no backward"
        saved = self._saved(block, code, task, visible)
        chosen = self._choose(code.backward, task)
        with self._room(task, code.costs.backward_heap):
            return self._differentiate(code.backward, chosen, task, visible, saved)[0]

    def _input_half(self, task: InputGrad, visible: Visible) -> dict[BufferId, Payload]:
        block, code = self._block(task.block)
        halves = self._halves(block)
        assert halves.input is not None, f"block {block.name} has no gradients of inputs"
        saved = self._saved(block, code, task, visible)
        chosen = self._choose(halves.input, task)
        with self._room(task, halves.input_heap):
            written, stash = self._differentiate(halves.input, chosen, task, visible, saved)
        if halves.stash_bytes:
            written[stash_id(block.id, task.microbatch)] = stash
        return written

    def _weight_half(self, task: WeightGrad, visible: Visible) -> dict[BufferId, Payload]:
        block, code = self._block(task.block)
        halves = self._halves(block)
        assert halves.weight is not None, f"block {block.name} has no parameter to train"
        if halves.input is None:
            given = self._saved(block, code, task, visible)
        else:
            stash = stash_id(block.id, task.microbatch)
            given = _find_all(visible, stash, block) if halves.stash_bytes else ()
        chosen = self._choose(halves.weight, task)
        with self._room(task, halves.weight_heap):
            return self._differentiate(halves.weight, chosen, task, visible, given)[0]

    def _halves(self, block: Block) -> HalvesCode:
        if block.body not in self._traced.halves:
            raise MismatchError(
                f"the backward of block {block.name} runs in two halves, but it was traced whole",
                where=f"model {self._traced.model.name}",
                fix="cut the backwards of the traced model before its program runs",
            )
        return self._traced.halves[block.body]

    def _saved(self, block: Block, code: BodyCode, task: BackwardTask, visible: Visible) -> Payload:
        saved = saved_id(block.id, task.microbatch)
        return _find_all(visible, saved, block) if code.costs.saved_bytes else ()

    def _differentiate(
        self,
        backward: BackwardCode,
        chosen: tuple[BackwardVariant, Direct],
        task: BackwardTask,
        visible: Visible,
        given: Payload,
    ) -> tuple[dict[BufferId, Payload], Payload]:
        """Run a backward or a half of one on what was saved or stashed.

        Returns:
            What it writes, and the results behind that: the stash.
        """
        block, _ = self._block(task.block)
        own = self._arguments[block.id]
        variant, run = chosen
        sums = self._find_sums(block, variant, task, visible)
        arguments = self._backward_arguments(block, backward, variant, sums, task, visible)
        results = run(*given, *arguments)
        self._end_sums(block, sums, task)
        names = [value_grad_id(own.inputs[i], task.microbatch) for i in backward.input_grads]
        names += [
            tied_grad_id(block.parameters[i], task.microbatch) for i in variant.parameter_grads
        ]
        written: dict[BufferId, Payload] = {
            name: (tensor,) for name, tensor in zip(names, results, strict=False)
        }
        for index, tensor in sums.items():
            written[own.sums[index]] = (tensor,)
        return written, tuple(results[len(names) :])

    def sum_tied(self, task: SumTied, visible: Visible) -> None:
        """Add the sums of all users of a tied parameter into its chunks, in the task's order."""
        name = ParameterName(task.parameter)
        user = self._traced.model.blocks[self._traced.model.parameters[name].blocks[0]]
        index = user.parameters.index(name)
        own = self._arguments[user.id]
        _require(own.grad_chunks[index], task.writes, user)
        first, *others = (_find(visible, buffer, user) for buffer in task.reads)
        own.sinks[index].copy_(first)
        for tensor in others:
            own.sinks[index].add_(tensor)

    def _find_sums(
        self, block: Block, variant: BackwardVariant, task: BackwardTask, visible: Visible
    ) -> dict[int, Tensor]:
        """The block's own sums of tied parameters, by index; the first micro-batch makes them."""
        sums: dict[int, Tensor] = {}
        for index in variant.sinks:
            name = self._arguments[block.id].sums[index]
            if name in task.writes:
                made = torch.empty_like(self._arguments[block.id].sinks[index])
                sums[index] = _find(visible, name, block) if task.microbatch else made
        return sums

    def _end_sums(self, block: Block, sums: Mapping[int, Tensor], task: BackwardTask) -> None:
        """Add the sums to the chunks, if the task says so."""
        own = self._arguments[block.id]
        for index, tensor in sums.items():
            if not set(own.grad_chunks[index]).isdisjoint(task.writes):
                _require(own.grad_chunks[index], task.writes, block)
                own.sinks[index].add_(tensor)

    def _choose(self, backward: BackwardCode, task: BackwardTask) -> tuple[BackwardVariant, Direct]:
        """The form of a backward that a task runs, ready to be called: before it gets its room."""
        block, _ = self._block(task.block)
        variant = _choose_variant(block, self._arguments[block.id].sums, backward, task)
        return variant, self._direct(variant.graph)

    def _direct(self, graph: fx.GraphModule) -> Direct:
        """What runs a graph of the traced model, which lives as long as this."""
        found = self._directs.get(graph)
        if found is None:
            found = self._directs[graph] = make_direct(graph)
        return found

    def _block(self, index: int) -> tuple[Block, BodyCode]:
        block = self._traced.model.blocks[index]
        return block, self._traced.code[block.body]

    def _forward_arguments(
        self, block: Block, microbatch: int, reads: Sequence[BufferId], visible: Visible
    ) -> list[Tensor]:
        own = self._arguments[block.id]
        for chunks in own.param_chunks:
            _require(chunks, reads, block)
        code = self._traced.code[block.body]
        places = own.inputs
        inputs = [
            _find(visible, value_id(places[i], microbatch), block) if i in places else self._unused
            for i in range(code.num_inputs)
        ]
        return [*own.parameters, *self._constants[block.id], *inputs]

    def _backward_arguments(
        self,
        block: Block,
        backward: BackwardCode,
        variant: BackwardVariant,
        sums: Mapping[int, Tensor],
        task: BackwardTask,
        visible: Visible,
    ) -> list[Tensor]:
        own = self._arguments[block.id]
        microbatch = task.microbatch
        places = own.inputs
        for index in backward.parameters:
            _require(own.param_chunks[index], task.reads, block)
        for index in variant.sinks:
            if index in sums:
                continue
            _require(own.grad_chunks[index], task.writes, block)
        constants = self._constants[block.id]
        return [
            *(own.parameters[index] for index in backward.parameters),
            *(constants[index] for index in backward.constants),
            *(_find(visible, value_id(places[i], microbatch), block) for i in backward.inputs),
            *(
                _find(visible, value_id(block.outputs[i], microbatch), block)
                for i in backward.outputs
            ),
            *(
                _find(visible, value_grad_id(block.outputs[i], microbatch), block)
                for i in backward.tangents
            ),
            *(
                _find(visible, value_grad_id(places[i], microbatch), block)
                for i in backward.input_roots
            ),
            *(
                _find(visible, tied_grad_id(block.parameters[i], microbatch), block)
                for i in variant.parameter_roots
            ),
            *(sums.get(index, own.sinks[index]) for index in variant.sinks),
        ]

    def _noise(self, block: BlockId, code: BodyCode, key: NoiseKey) -> list[Tensor]:
        ordinals = self._traced.noise_ordinals[block]
        return [
            draw_noise(noise, key, ordinal).to(self._device)
            for noise, ordinal in zip(code.noise, ordinals, strict=True)
        ]


def _choose_variant(
    block: Block, sums: Sequence[BufferId], backward: BackwardCode, task: BackwardTask
) -> BackwardVariant:
    """Which variant a task means: that whose sums of tied parameters it declares."""
    declared = {*task.reads, *task.writes}
    if task.microbatch == 0:
        return backward.first if declared.isdisjoint(sums) else backward.apart_first
    handed = (*backward.later.parameter_roots, *backward.later.parameter_grads)
    running = (tied_grad_id(block.parameters[index], task.microbatch) for index in handed)
    return backward.apart_later if declared.isdisjoint(running) else backward.later


def _require(chunks: Sequence[BufferId], declared: Iterable[BufferId], block: Block) -> None:
    for chunk in chunks:
        if chunk not in declared:
            raise _undeclared(chunk, declared, block)


def _find(visible: Visible, buffer: BufferId, block: Block) -> Tensor:
    return _find_all(visible, buffer, block)[0]


def _find_all(visible: Visible, buffer: BufferId, block: Block) -> Payload:
    if not visible.get(buffer):
        raise _undeclared(buffer, visible, block)
    return visible[buffer]


def _undeclared(buffer: BufferId, declared: Iterable[BufferId], block: Block) -> AuditError:
    return AuditError(
        f"block {block.name} uses {buffer}, which its task does not declare",
        where=f"declared: {', '.join(declared)}",
        fix="this is a bug in the compiler, or the program was changed by hand",
    )


def _find_arguments(
    block: Block, number: BlockId, traced: Traced, layout: Layout, memory: ChunkMemory
) -> _BlockArguments:
    trained = {
        index: name
        for index, name in enumerate(block.parameters)
        if traced.model.parameters[name].trainable
    }

    def ids(state: str) -> Callable[[str], tuple[BufferId, ...]]:
        return lambda name: tuple(state_id(state, c.id) for c in layout.chunks_of(name))

    param_ids, grad_ids = ids("param"), ids("grad")
    return _BlockArguments(
        parameters=tuple(memory.parameter("param", name) for name in block.parameters),
        sinks={index: memory.parameter("grad", name) for index, name in trained.items()},
        param_chunks=tuple(param_ids(name) for name in block.parameters),
        grad_chunks={index: grad_ids(name) for index, name in trained.items()},
        inputs=dict(zip(traced.code[block.body].used_inputs, block.inputs, strict=True)),
        sums=tuple(tied_sum_id(name, number) for name in block.parameters),
    )
