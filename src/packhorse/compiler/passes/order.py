"""Compute tasks in their order, and what each reads and writes.

In: a model or a rank's part of one, its layout, a list of runs, which blocks recompute. Out: Feed,
Forward, Recompute, Backward or its halves, what ranks send each other, and the Emit of each loss;
everything is in the device tier, nothing is moved between tiers or freed yet.

    for each run, whoever's it is:
        forward       if it is this rank's: (Feed;) Forward; (Emit the loss)
        backward      if it is this rank's: Recompute if so chosen, Backward
        input_grad    the same with InputGrad; nothing in a block to whose inputs no gradient flows
        weight_grad   if it is this rank's: WeightGrad, and Recompute before it where there is no
                      InputGrad; nothing in a block of which no parameter is trained
        what it makes for other ranks: Send on its rank, Recv on theirs
    at the end: the losses and the sums of parameters that several ranks use

So a block is recomputed once for each micro-batch, and any order with both halves fits any block.

All ranks' lists are projections of one total order, in which each message stands right behind the
run that makes it: both ends of a channel see the same sequence, and no rank waits in a circle.

A value or parameter with several users gets its gradient from the last user first; earlier users
add to it as an extra root, on whichever rank they are. The first Backward that touches a gradient
chunk creates it.

A tied parameter whose sum is per micro-batch is summed in its chunk in micro-batch 0; in later ones
the chunk holds earlier micro-batches, so the sum is apart until the first user adds it to the
chunk. Where its sum is per step, the last user adds up its micro-batches in the chunk, every other
user apart, until its Backward of the last micro-batch adds what it has to the chunk. Where users
are on several ranks, each has its sum apart; all of them go to every rank that holds the parameter,
and are added into its chunk, the last user's first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from packhorse.compiler.layout import find_chunks
from packhorse.compiler.passes.exchange import Exchange, find_exchange
from packhorse.compiler.runs import Run, Runs
from packhorse.errors import RefusedError
from packhorse.model.parts import number_globally, values_with_grad
from packhorse.model.spec import (
    ITEM_BYTES,
    Block,
    BlockId,
    Half,
    Halves,
    Model,
    Parameter,
    ValueId,
)
from packhorse.plan.spec import TiedSum
from packhorse.program.buffers import (
    LOSSES,
    BufferId,
    ChunkId,
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
    Emit,
    Feed,
    Forward,
    InputGrad,
    PackLosses,
    Recompute,
    Recv,
    Send,
    SumTied,
    Task,
    WeightGrad,
)

ChunksOf = Mapping[str, tuple[ChunkId, ...]]


def order_train_step(
    model: Model,
    layout: Layout,
    runs: Runs,
    *,
    recomputed: Collection[BlockId],
    num_microbatches: int,
    tied_sum: TiedSum = "per_microbatch",
) -> tuple[Task, ...]:
    """Order a training step.

    A block of `recomputed` whose Backward follows its Forward directly keeps its saved values
    instead: the memory is the same, the work less. A body that saves nothing is not run again.

    Args:
        runs: in the total order of all ranks.

    Raises:
        RefusedError: a backward is to run in halves, but the model's bodies have none.
    """
    kept = [b.id for b in model.blocks if b.has_backward and _saves(model, b.id)]
    directly = _find_direct(model, runs)
    again = {block for block in kept if block in recomputed and block not in directly}
    step = _Step(
        model=model,
        exchange=find_exchange(model),
        chunks_of=_chunks_of(layout),
        with_grad=values_with_grad(model),
        keeping=frozenset(block for block in kept if block not in again),
        again=frozenset(again),
        sums_per_step=tied_sum == "per_step",
        num_microbatches=num_microbatches,
        evaluates=False,
    )
    return (*step.order(runs), *step.hand_out_losses(), *step.sum_shared())


def order_evaluation(
    model: Model, layout: Layout, runs: Runs, *, num_microbatches: int
) -> tuple[Task, ...]:
    """Order the forward of every micro-batch; nothing is kept but what later blocks use."""
    step = _Step(
        model=model,
        exchange=find_exchange(model),
        chunks_of=_chunks_of(layout),
        with_grad=frozenset(),
        keeping=frozenset(),
        again=frozenset(),
        sums_per_step=False,
        num_microbatches=num_microbatches,
        evaluates=True,
    )
    return tuple(step.order(runs))


def _find_direct(model: Model, runs: Runs) -> frozenset[BlockId]:
    # The blocks of a model whose every backward, or its first half, follows its own forward with
    # none in between.
    local = {block: at for at, block in enumerate(number_globally(model))}
    own: list[Run] = []
    begun: set[tuple[BlockId, int]] = set()
    for run in runs:
        if run.block in local and (run.block, run.microbatch) not in begun:
            own.append(run)
            if run.direction != "forward":
                begun.add((run.block, run.microbatch))
    direct = {
        (after.block, after.microbatch)
        for before, after in pairwise(own)
        if (before.block, before.microbatch) == (after.block, after.microbatch)
    }
    late = {block for block, _ in begun - direct}
    return frozenset(BlockId(local[block]) for block, _ in begun if block not in late)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    # What all tasks of a program have in common: `keeping` are the blocks whose Forward saves,
    # `again` those that recompute.
    model: Model
    exchange: Exchange
    chunks_of: ChunksOf
    with_grad: frozenset[ValueId]
    keeping: frozenset[BlockId]
    again: frozenset[BlockId]
    sums_per_step: bool
    num_microbatches: int
    evaluates: bool

    def order(self, runs: Runs) -> list[Task]:
        """Give the tasks of all runs of this rank, and the messages of all runs that concern it."""
        tasks: list[Task] = []
        created: set[BufferId] = set()
        fed: set[int] = set()
        for run in runs:
            at = self.exchange.local.get(run.block)
            if at is not None:
                block = self.model.blocks[at]
                if run.direction == "forward":
                    if run.microbatch not in fed:
                        fed.add(run.microbatch)
                        tasks += self._feed(run.microbatch)
                    tasks.append(self._forward(block, run.microbatch))
                    if self.model.loss in block.outputs:
                        tasks.append(Emit(buffer=self._loss_of(run)))
                else:
                    tasks += self._backwards(block, run, created)
            messages = self._messages(run)
            received = [task.buffer for task in messages if isinstance(task, Recv)]
            created.update(received)
            tasks += messages
            tasks += [Emit(buffer=name) for name in received if name == self._loss_of(run)]
        return tasks

    def hand_out_losses(self) -> list[Task]:
        """Send the losses of all micro-batches to every rank that does not compute them."""
        source = self.exchange.owners[self.exchange.last]
        if self.exchange.num_ranks == 1:
            return []
        if source != self.exchange.rank:
            return [Recv(buffer=LOSSES, peer=source), Emit(buffer=LOSSES)]
        losses = tuple(value_id(self.model.loss, each) for each in range(self.num_microbatches))
        return [
            PackLosses(reads=losses, writes=(LOSSES,)),
            *(Send(buffer=LOSSES, peer=rank) for rank in self.exchange.other_ranks(source)),
        ]

    def sum_shared(self) -> list[Task]:
        """Add up the sums of all users of each parameter that several ranks use."""
        return [
            SumTied(
                parameter=name,
                reads=tuple(tied_sum_id(name, user) for user in users),
                writes=tuple(state_id("grad", chunk) for chunk in self.chunks_of[name]),
            )
            for name, users in self.exchange.shared.items()
            if name in self.model.parameters
        ]

    def _loss_of(self, run: Run) -> BufferId:
        return value_id(self.model.loss, run.microbatch)

    def _messages(self, run: Run) -> list[Task]:
        exchange, rank = self.exchange, self.exchange.rank
        found: list[tuple[BufferId, int, int]] = []
        source = exchange.owner_of(run.block)
        if run.direction == "forward":
            for value, targets in exchange.values_from(run.block):
                name = value_id(value, run.microbatch)
                found += [(name, source, target) for target in targets]
            if self.evaluates and run.block == exchange.last:
                others = exchange.other_ranks(source)
                found += [(self._loss_of(run), source, target) for target in others]
        if run.direction in ("backward", "input_grad"):
            for value, target in exchange.gradients_from(run.block):
                found.append((value_grad_id(value, run.microbatch), source, target))
        is_last = run.microbatch == self.num_microbatches - 1
        if run.direction in ("backward", "weight_grad") and is_last:
            for parameter, targets in exchange.sums_from(run.block):
                name = tied_sum_id(parameter, run.block)
                found += [(name, source, target) for target in targets]
        return [
            Send(buffer=name, peer=target) if source == rank else Recv(buffer=name, peer=source)
            for name, source, target in found
            if rank in (source, target)
        ]

    def _backwards(self, block: Block, run: Run, created: set[BufferId]) -> list[Task]:
        # `created` are buffers that exist, and gets what is created here.
        task, begins = self._run_back(block, run, created)
        if task is None:
            return []
        created.update(task.writes)
        again = begins and block.id in self.again
        return [*([self._recompute(block, run.microbatch)] if again else []), task]

    def _run_back(
        self, block: Block, run: Run, created: Collection[BufferId]
    ) -> tuple[Backward | InputGrad | WeightGrad | None, bool]:
        # A backward or a half of one, if there is something to do, and whether it comes first.
        if run.direction == "backward":
            return self._backward(block, run.microbatch, created), True
        halves = self._halves(block)
        if run.direction == "input_grad":
            if halves.input is None:
                return None, True
            return self._input_grad(block, halves.input, run.microbatch, created), True
        if halves.weight is None:
            return None, False
        task = self._weight_grad(block, halves.weight, run.microbatch, created)
        return task, halves.input is None

    def _feed(self, microbatch: int) -> list[Task]:
        fed = tuple(value_id(value, microbatch) for value in self.model.step_inputs)
        return [Feed(microbatch=microbatch, writes=fed)] if fed else []

    def _forward(self, block: Block, microbatch: int) -> Forward:
        body = self.model.bodies[block.body]
        keeps = block.id in self.keeping
        outputs = [value_id(value, microbatch) for value in block.outputs]
        return Forward(
            block=block.id,
            microbatch=microbatch,
            reads=self._forward_reads(block, microbatch),
            writes=_unique(outputs + ([saved_id(block.id, microbatch)] if keeps else [])),
            workspace_bytes=(
                body.forward_workspace_bytes if keeps else body.discard_workspace_bytes
            ),
        )

    def _forward_reads(self, block: Block, microbatch: int) -> tuple[BufferId, ...]:
        parameters = [
            state_id("param", chunk) for name in block.parameters for chunk in self.chunks_of[name]
        ]
        return _unique(parameters + [value_id(value, microbatch) for value in block.inputs])

    def _recompute(self, block: Block, microbatch: int) -> Recompute:
        # The outputs are made and dropped, so they count as workspace.
        dropped = sum(self.model.values[value].size_bytes for value in block.outputs)
        return Recompute(
            block=block.id,
            microbatch=microbatch,
            reads=self._forward_reads(block, microbatch),
            writes=(saved_id(block.id, microbatch),),
            workspace_bytes=self.model.bodies[block.body].forward_workspace_bytes + dropped,
        )

    def _backward(self, block: Block, microbatch: int, created: Collection[BufferId]) -> Backward:
        body = self.model.bodies[block.body]
        reads = self._saved(block, microbatch)
        writes = self._flowing(block, microbatch)
        for index in body.backward_parameters:
            reads += [state_id("param", chunk) for chunk in self.chunks_of[block.parameters[index]]]
        again = [block.inputs[index] for index in body.backward_inputs]
        again += [block.outputs[index] for index in body.backward_outputs]
        reads += [value_id(value, microbatch) for value in again]
        arriving = [value for value in block.outputs if value in self.with_grad]
        reads += [value_grad_id(value, microbatch) for value in arriving]
        accumulated, started, held_bytes = self._block_grads(block, microbatch)
        reads += accumulated
        writes += started
        # What an earlier task created is added to, so it is read as well.
        reads += [buffer for buffer in writes if buffer in created]
        return Backward(
            block=block.id,
            microbatch=microbatch,
            reads=_unique(reads),
            writes=_unique(writes),
            workspace_bytes=body.workspace_of_backward(microbatch) + held_bytes,
        )

    def _input_grad(
        self, block: Block, half: Half, microbatch: int, created: Collection[BufferId]
    ) -> InputGrad:
        reads = self._saved(block, microbatch) + self._half_reads(block, half, microbatch)
        writes = self._flowing(block, microbatch)
        reads += [buffer for buffer in writes if buffer in created]
        return InputGrad(
            block=block.id,
            microbatch=microbatch,
            reads=_unique(reads),
            writes=_unique(writes + self._stash(block, microbatch)),
            workspace_bytes=half.workspace_bytes,
        )

    def _weight_grad(
        self, block: Block, half: Half, microbatch: int, created: Collection[BufferId]
    ) -> WeightGrad:
        cut = self._halves(block).input is not None
        reads = self._stash(block, microbatch) if cut else self._saved(block, microbatch)
        reads += self._half_reads(block, half, microbatch)
        accumulated, started, held_bytes = self._block_grads(block, microbatch)
        reads += accumulated
        reads += [buffer for buffer in started if buffer in created]
        return WeightGrad(
            block=block.id,
            microbatch=microbatch,
            reads=_unique(reads),
            writes=_unique(started),
            workspace_bytes=half.workspace_bytes + held_bytes,
        )

    def _halves(self, block: Block) -> Halves:
        halves = self.model.bodies[block.body].halves
        if halves is None:
            raise RefusedError(
                f"the backward of block {block.name} is to run in two halves, but its model has"
                " no halves",
                where=f"model {self.model.name}",
                fix="cut the backwards of the traced model, or run them whole",
            )
        return halves

    def _half_reads(self, block: Block, half: Half, microbatch: int) -> list[BufferId]:
        reads: list[BufferId] = []
        for index in half.parameters:
            reads += [state_id("param", chunk) for chunk in self.chunks_of[block.parameters[index]]]
        reads += [value_id(block.inputs[index], microbatch) for index in half.inputs]
        reads += [value_id(block.outputs[index], microbatch) for index in half.outputs]
        reads += [value_grad_id(block.outputs[index], microbatch) for index in half.tangents]
        return reads

    def _saved(self, block: Block, microbatch: int) -> list[BufferId]:
        saves = self.model.bodies[block.body].saved_bytes > 0
        return [saved_id(block.id, microbatch)] if saves else []

    def _stash(self, block: Block, microbatch: int) -> list[BufferId]:
        return [stash_id(block.id, microbatch)] if self._halves(block).stash_bytes else []

    def _flowing(self, block: Block, microbatch: int) -> list[BufferId]:
        flowing = [value for value in block.inputs if value in self.with_grad]
        return [value_grad_id(value, microbatch) for value in flowing]

    def _block_grads(
        self, block: Block, microbatch: int
    ) -> tuple[list[BufferId], list[BufferId], int]:
        # Of all trained parameters: what is read beyond what is written, what is written, and the
        # bytes of gradients that exist only until they are added.
        accumulated: list[BufferId] = []
        started: list[BufferId] = []
        held_bytes = 0
        for name in block.parameters:
            parameter = self.model.parameters[name]
            if parameter.trainable:
                read, written = self._parameter_grads(parameter, block, microbatch)
                accumulated += read
                started += written
                held_bytes += self._held_bytes(parameter, block, microbatch)
        return accumulated, started, held_bytes

    def _parameter_grads(
        self, parameter: Parameter, block: Block, microbatch: int
    ) -> tuple[list[BufferId], list[BufferId]]:
        # What is read beyond what is written, and what is written.
        users = self._users(parameter)
        chunks = [state_id("grad", chunk) for chunk in self.chunks_of[parameter.name]]
        if parameter.name in self.exchange.shared:
            return [], [tied_sum_id(parameter.name, self.exchange.numbers[block.id])]
        if len(users) == 1:
            return [], chunks
        if self.sums_per_step:
            if block.id == users[-1]:
                return [], chunks
            apart = [tied_sum_id(parameter.name, self.exchange.numbers[block.id])]
            return [], apart + (chunks if microbatch == self.num_microbatches - 1 else [])
        if microbatch == 0:
            return [], chunks
        running = tied_grad_id(parameter.name, microbatch)
        return ([running], chunks) if block.id == users[0] else ([], [running])

    def _held_bytes(self, parameter: Parameter, block: Block, microbatch: int) -> int:
        # The last user's gradient is a running sum from micro-batch 1 on; where its sum is per
        # step it exists only until it is added to the chunk: as workspace.
        users = self._users(parameter)
        shared = self.exchange.shared.get(parameter.name, ())
        if shared:
            is_last = self.exchange.numbers[block.id] == shared[0]
        else:
            is_last = self.sums_per_step and len(users) > 1 and block.id == users[-1]
        if microbatch == 0 or not is_last:
            return 0
        return parameter.num_elements * ITEM_BYTES[parameter.dtype]

    def _users(self, parameter: Parameter) -> list[BlockId]:
        return [user for user in parameter.blocks if self.model.blocks[user].has_backward]


def _saves(model: Model, block: BlockId) -> bool:
    return model.body_of(block).saved_bytes > 0


def _chunks_of(layout: Layout) -> ChunksOf:
    return {name: tuple([each.id for each in held]) for name, held in find_chunks(layout).items()}


def _unique(buffers: list[BufferId]) -> tuple[BufferId, ...]:
    return tuple(dict.fromkeys(buffers))
