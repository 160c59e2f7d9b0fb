"""Issue the tasks of programs in order under the memory contract.

In: programs and their proofs, the tensors and tiers behind their buffers. Out: every task done,
what it emits, and a measured timeline.

    for each task, in program order, from one thread:
        reserve what it creates, and its workspace; wait for releases while that does not fit
        submit its work to its lane, behind the tasks that it depends on
        when the work is done: record the span, release workspace and what it freed

The verifier has shown that each task fits once all earlier ones have completed, so waiting always
ends. A program ends in the state in which it began, so that holds for programs in a row too: one is
issued behind the other, and nobody waits between them but for values or for an end. What a task
creates gets its place on the task's own lane, in its turn: an earlier Free of the same buffer may
still be waiting when the task is issued. In audit mode absent buffers are poisoned, every payload
is measured against its declared size, and after each task the ledger, as it would be if tasks
completed when they are issued, is compared with the proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import assert_never

import torch
from torch import Tensor

from packhorse.errors import AuditError, RunFailedError, StuckError
from packhorse.program.audit import check_against_proof
from packhorse.program.buffers import (
    NORM,
    BufferId,
    PoolId,
    TierName,
    state_id,
    value_id,
)
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
    Lane,
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
    workspace_of,
    writes_of,
)
from packhorse.program.text import format_task
from packhorse.runtime.bodies import BodyRunner, Payload
from packhorse.runtime.dependencies import History, Place
from packhorse.runtime.lanes import DeviceFailedError, Lanes, LanesStuckError
from packhorse.runtime.memory.ledger import Ledger
from packhorse.runtime.messages import Messages
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.norms import Norms
from packhorse.runtime.payloads import Payloads
from packhorse.runtime.running import Prepared, Running, StepWork
from packhorse.runtime.tiers import ChunkTiers


class Executor:
    """Holds the buffers of one rank and runs programs over them.

    Between programs exactly the states with a home are present, where their home is, once all that
    was issued is complete. `watch` is called between tasks, and ends the run when it raises.
    """

    def __init__(
        self,
        *,
        program: Program,
        runner: BodyRunner,
        tiers: ChunkTiers,
        lanes: Lanes,
        payloads: Payloads,
        norms: Norms,
        messages: Messages,
        audit: bool,
        watch: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self._lanes = lanes
        self._norms = norms
        self._messages = messages
        self._audit = audit
        self._watch = watch
        self._ledger = Ledger(program.pools)
        self._payloads = payloads
        # What will be there once every issued task has completed: reservations follow the order of
        # issue, while tiers and payloads change when tasks run.
        self._issued: set[Place] = set()
        # The ledger as if each task completed when it is issued: what the verifier's replay saw.
        self._replay = Ledger(program.pools)
        self._history = History()
        # What was issued and has not completed, by ascending numbers, with what it is.
        self._pending: dict[int, Callable[[], str]] = {}
        self._next = 0
        self._running: list[Running] = []
        self._last_end_ns = 0

    @property
    def used_bytes(self) -> Mapping[PoolId, int]:
        """The ledger."""
        return self._ledger.used_bytes

    @property
    def next_number(self) -> int:
        """Number of the task that is issued next; they count on from program to program."""
        return self._next

    @property
    def is_idle(self) -> bool:
        """Whether all that was issued is complete."""
        return not self._pending

    def quiesce(self) -> None:
        """Let what runs on the lanes end and drop the rest; nothing can be run any more."""
        self._lanes.close()

    def adopt(self, program: Program) -> None:
        """Take over the states at home on the disk: their bytes lie there already."""
        for buffer in program.buffers.values():
            if buffer.home == "disk":
                pool = buffer.pools["disk"]
                self._issued.add((buffer.id, "disk"))
                self._ledger.reserve(pool, buffer.size_bytes)
                self._replay.reserve(pool, buffer.size_bytes)
                self._tiers.create(buffer.id, "disk", pool)

    def issue(self, prepared: Prepared, work: StepWork) -> Running:
        """Issue every task of a program behind all that was issued before.

        Blocks while a reservation does not fit; the last tasks are still on their way afterwards.
        """
        program, dependencies = prepared.program, prepared.dependencies
        run = Running(prepared, work, first=self._next)
        self._next += len(program.tasks)
        self._running.append(run)
        is_alone = self.is_idle
        for index, task in enumerate(program.tasks):
            self._watch()
            created = self._reserve(task, program)
            self._note()
            after = [run.first + other for other in dependencies.inner[index]]
            if not is_alone and index in dependencies.entering:
                after.extend(self._history.before(dependencies.entering[index]))
            self._submit(run, index, created, after)
            self._release(self._replay, task, program)
            if self._audit:
                self._check(prepared, index)
        self._history.add(dependencies, run.first, self._pending.keys())
        self._end_complete()
        return run

    def await_values(self, run: Running) -> Mapping[BufferId, Tensor]:
        """Block until all that a program emits is there."""
        while not run.has_values:
            self._watch()
            self._wait()
        return run.emitted

    def complete(self, run: Running) -> None:
        """Block until a program, and all before it, are complete."""
        while not run.is_over:
            self._wait()

    def wait_for(self, number: int) -> None:
        """Block until all up to a number are complete."""
        # Numbers ascend, so the first one is the least.
        while self._pending and next(iter(self._pending)) <= number:
            self._watch()
            self._wait()

    def follow(self, lane: Lane, work: Callable[[], None], what: str) -> int:
        """Run work on a lane once all that was issued before is complete; gives its number.

        What is issued later for this lane comes after it. Nothing is reserved for it.
        """
        number = self._next
        self._next += 1
        after = tuple(self._pending)
        self._pending[number] = lambda: what

        def done(start_ns: int, end_ns: int) -> None:
            del start_ns, end_ns
            del self._pending[number]

        with self._told():
            self._lanes.submit(number, lane, _naming(work, lambda: what), done, after)
        return number

    def _submit(
        self, run: Running, index: int, created: Sequence[Place], after: Sequence[int]
    ) -> None:
        program, task = run.prepared.program, run.prepared.program.tasks[index]
        number = run.first + index

        def describe() -> str:
            return f"task {index} of {run.work.name}: {format_task(task)}"

        def do() -> None:
            with torch.no_grad():
                self._create(created, program)
                self._perform(task, program, run.work, run.emitted)
            for name, tier in created:
                if name in self._tiers:
                    self._tiers.fill(name, tier, program.buffers[name].pools[tier])

        def done(start_ns: int, end_ns: int) -> None:
            del self._pending[number]
            run.book(index, start_ns, end_ns)
            self._release(self._ledger, task, program)
            self._note()
            self._end_complete()

        self._pending[number] = describe
        lane = run.prepared.lanes[index]
        with self._told():
            self._lanes.submit(number, lane, _naming(do, describe), done, after)

    def _end_complete(self) -> None:
        """End the programs that are complete, in their order."""
        while self._running and self._running[0].is_complete:
            self._last_end_ns = self._running.pop(0).end(self._last_end_ns)

    def _wait(self) -> None:
        """Block until one more task has completed."""
        with self._told():
            self._lanes.wait_any()

    @contextmanager
    def _told(self) -> Generator[None]:
        """Tell errors of lanes, which know tasks by their numbers, with the tasks' names."""
        try:
            yield
        except LanesStuckError as error:
            raise self._stuck(error) from error
        except DeviceFailedError as error:
            raise RunFailedError(
                f"the device failed: {error}",
                where=f"lane {error.lane}, {self._pending[error.index]()}",
                fix="if its memory ran out: end other programs on it, grant a larger budget, or set"
                " PYTORCH_ALLOC_CONF=expandable_segments:True; else look at the kernel log, and"
                " set CUDA_LAUNCH_BLOCKING=1 to find the kernel",
            ) from error

    def _note(self) -> None:
        at_ns = time.perf_counter_ns()
        for run in self._running:
            run.note(at_ns, self._ledger.used_bytes)

    def _check(self, prepared: Prepared, index: int) -> None:
        task = prepared.program.tasks[index]
        try:
            check_against_proof(prepared.proof, index, task, self._replay.used_bytes)
        except AuditError:
            # What an earlier task, still running, may raise tells more.
            with self._told():
                self._lanes.wait_all()
            raise

    def _reserve(self, task: Task, program: Program) -> tuple[Place, ...]:
        """Reserve what a task creates and its workspace, waiting for releases while it must.

        Returns:
            The places that the task creates.
        """
        wanted: dict[PoolId, int] = {}
        created: list[Place] = []
        if isinstance(task, Free):
            self._issued.discard((task.buffer, task.tier))
        for name, tier in writes_of(task):
            if (name, tier) in self._issued:
                continue
            self._issued.add((name, tier))
            buffer = program.buffers[name]
            pool = buffer.pools[tier]
            wanted[pool] = wanted.get(pool, 0) + buffer.size_bytes
            created.append((name, tier))
        workspace = workspace_of(task)
        if workspace:
            pool = program.workspace_pool
            wanted[pool] = wanted.get(pool, 0) + workspace
        for pool, size in wanted.items():
            while self._pending and not self._ledger.fits(pool, size):
                self._wait()
            self._ledger.reserve(pool, size)
            self._replay.reserve(pool, size)
            self._tiers.shed(pool, self._ledger.used_bytes[pool])
        return tuple(created)

    def _create(self, created: Sequence[Place], program: Program) -> None:
        """Make places for what a task is about to write; runs on its lane, in its turn."""
        for name, tier in created:
            if name in self._tiers:
                self._tiers.create(name, tier, program.buffers[name].pools[tier])
            else:
                self._payloads.create(name, tier)

    def _release(self, ledger: Ledger, task: Task, program: Program) -> None:
        workspace = workspace_of(task)
        if workspace:
            ledger.release(program.workspace_pool, workspace)
        if isinstance(task, Free):
            buffer = program.buffers[task.buffer]
            ledger.release(buffer.pools[task.tier], buffer.size_bytes)

    def _stuck(self, error: LanesStuckError) -> StuckError:
        places = [
            f"lane {lane} is in {self._pending[number]()}"
            for lane, number in sorted(error.running.items())
        ]
        return StuckError(
            f"the run is stuck: {error.what}",
            where="\n".join([*places, *self._tiers.describe_files()]) or "no lane is in a task",
            fix="look at the drive or process that the task waits for (kernel log, free space),"
            " then resume",
        )

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
                self._free(task, program)
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

    def _free(self, task: Free, program: Program) -> None:
        self._require_present(task.buffer, task.tier)
        if task.buffer in self._tiers:
            self._tiers.remove(program.buffers[task.buffer], task.tier)
        else:
            self._payloads.free(task.buffer, task.tier)


def _naming(work: Callable[[], None], describe: Callable[[], str]) -> Callable[[], None]:
    """Work whose errors say what failed: later steps may be under way when they are told."""

    def do() -> None:
        try:
            work()
        except RunFailedError as error:
            error.where = "\n".join(filter(None, (error.where, describe())))
            raise

    return do
