"""What each task does with the tensors behind its buffers; runs on lanes.

In: a task, what the step brings from outside, the places that the task creates. Out: tensors
written, moved, emitted or dropped. Nothing is reserved here and nobody waits but for a drive, a
device or another rank: whoever issues has seen to the order. A task sees no buffer that it does not
declare, and what it reads has to be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from packhorse.errors import AuditError
from packhorse.program.buffers import NORM, BufferId, TierName, state_id, value_id
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
    Task,
    Update,
    WeightGrad,
)
from packhorse.runtime.bodies import BodyRunner, Payload
from packhorse.runtime.dependencies import Place
from packhorse.runtime.messages import Messages
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.norms import Norms
from packhorse.runtime.payloads import Payloads
from packhorse.runtime.running import StepWork
from packhorse.runtime.tiers import ChunkTiers


class Performer:
    """Performs the tasks of one rank; lanes call it at the same time."""

    def __init__(
        self,
        *,
        runner: BodyRunner,
        tiers: ChunkTiers,
        payloads: Payloads,
        norms: Norms,
        messages: Messages,
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self._payloads = payloads
        self._norms = norms
        self._messages = messages

    def perform(
        self,
        task: Task,
        created: Sequence[Place],
        program: Program,
        work: StepWork,
        emitted: dict[BufferId, Tensor],
    ) -> None:
        """Make places for what a task is about to write, in its turn, and do what it says."""
        states: list[Place] = []
        for place in created:
            name, tier = place
            if name in self._tiers:
                self._tiers.create(name, tier, program.buffers[name].pools[tier])
                states.append(place)
            else:
                self._payloads.create(name, tier)
        self._perform(task, program, work, emitted)
        for name, tier in states:
            self._tiers.fill(name, tier, program.buffers[name].pools[tier])

    def free(self, task: Free, program: Program) -> None:
        """Drop a buffer from a tier."""
        self._require_present(task.buffer, task.tier)
        if task.buffer in self._tiers:
            self._tiers.remove(program.buffers[task.buffer], task.tier)
        else:
            self._payloads.free(task.buffer, task.tier)

    def find_non_finite(
        self, feed: Mapping[str, Tensor], key: NoiseKey, microbatch: int
    ) -> int | None:
        """Run the forward again, block by block, after a run that ended on a bad loss.

        All buffers of the step are given up; memory may exceed its budget by a block's parameters.

        Returns:
            The first block with an output that is not finite, or None if there is none.
        """
        self._payloads.clear()
        values: dict[BufferId, Payload] = {
            value_id(name, microbatch): (tensor,) for name, tensor in feed.items()
        }
        for block in range(self._runner.num_blocks):
            task = self._runner.plan_forward(block, microbatch)
            chunks = [buffer for buffer in task.reads if buffer in self._tiers]
            borrowed = [buffer for buffer in chunks if self._tiers.borrow(buffer)]
            with torch.no_grad():
                values |= self._runner.forward(task, values, key)
            for buffer in borrowed:
                self._tiers.give_back(buffer)
            if any(not values[output][0].isfinite().all() for output in task.writes):
                return block
        return None

    def _is_present(self, buffer: BufferId, tier: TierName) -> bool:
        if buffer in self._tiers:
            return self._tiers.is_present(buffer, tier)
        return self._payloads.is_present(buffer, tier)

    def _perform(
        self, task: Task, program: Program, work: StepWork, emitted: dict[BufferId, Tensor]
    ) -> None:
        match task:
            case Feed():
                feed = work.feeds(task.microbatch)
                for buffer in task.writes:
                    name = buffer.removeprefix("value/").rpartition("@")[0]
                    self._payloads.keep(program.buffers[buffer], (feed[name].clone(),))
            case Forward():
                visible = self._look(task.reads)
                self._keep_all(
                    program, self._runner.forward(task, visible, work.noise(task.microbatch))
                )
            case Recompute():
                key = work.noise(task.microbatch)
                assert key is not None
                self._keep_all(program, self._runner.recompute(task, self._look(task.reads), key))
            case Backward() | InputGrad() | WeightGrad():
                self._keep_all(program, self._runner.backward(task, self._look(task.reads)))
            case SumTied():
                self._runner.sum_tied(task, self._look(task.reads))
            case SegmentNorm():
                self._require_present(state_id("grad", task.chunk))
                self._keep_all(program, {task.writes[0]: (self._norms.segments(task.chunk),)})
            case PackNorms():
                packed = self._norms.pack(self._look_at_one(task.reads))
                self._keep_all(program, {task.writes[0]: (packed,)})
            case PackLosses():
                losses = self._look_at_one(task.reads)
                packed = torch.stack([losses[name].reshape(()) for name in task.reads])
                self._keep_all(program, {task.writes[0]: (packed,)})
            case GradNorm():
                norm, spoilt = self._norms.combine(self._look_at_one(task.reads))
                self._payloads.keep(program.buffers[NORM], (norm,))
                work.inspect(NORM, norm, spoilt)
            case Update():
                self._update(task, work)
            case Copy():
                if task.buffer in self._tiers:
                    self._tiers.copy(task)
                else:
                    self._payloads.copy(program.buffers[task.buffer], task)
            case Free():
                self.free(task, program)
            case Send():
                self._require_present(task.buffer)
                self._messages.send(task, self._payloads.get(task.buffer)[0])
            case Recv():
                self._keep_all(program, {task.buffer: (self._messages.receive(task),)})
            case Emit():
                emitted[task.buffer] = self._payloads.get(task.buffer)[0].clone()
                work.inspect(task.buffer, emitted[task.buffer], ())
            case Import():
                work.fill(task.buffer)
            case Export():
                self._require_present(task.buffer)
                work.drain(task.buffer)
            case _:
                assert_never(task)

    def _look(self, reads: tuple[BufferId, ...]) -> dict[BufferId, Payload]:
        """The tensors of the declared buffers, and nothing else."""
        visible: dict[BufferId, Payload] = {}
        for buffer in reads:
            self._require_present(buffer)
            if buffer not in self._tiers:
                visible[buffer] = self._payloads.get(buffer)
        return visible

    def _look_at_one(self, reads: tuple[BufferId, ...]) -> dict[BufferId, Tensor]:
        return {buffer: tensor for buffer, (tensor,) in self._look(reads).items()}

    def _require_present(self, buffer: BufferId, tier: TierName = "device") -> None:
        if not self._is_present(buffer, tier):
            raise AuditError(
                f"{buffer} is read in the {tier} tier, but it is not there",
                fix="run the program that was verified",
            )

    def _keep_all(self, program: Program, written: Mapping[BufferId, Payload]) -> None:
        for buffer, payload in written.items():
            self._payloads.keep(program.buffers[buffer], payload)

    def _update(self, task: Update, work: StepWork) -> None:
        """Update a chunk on the states that lie in the task's tier, and only on those."""
        tensors: dict[str, Tensor] = {}
        for buffer in dict.fromkeys((*task.reads, *task.writes)):
            self._require_present(buffer, task.where)
            if buffer in self._tiers:
                state, _ = self._tiers.place_of(buffer)
                tensors[state] = self._tiers.tensor(buffer, task.where)
        norm = self._payloads.get(NORM, task.where)[0] if NORM in task.reads else None
        work.update(task.chunk, tensors, norm)
