"""Issue a program's tasks in order under the memory contract.

In: a program and its proof, the tensors and tiers behind its buffers. Out: every task done, what
it emits, and a measured timeline.

    for each task, in program order, from one thread:
        reserve what it creates, and its workspace; wait for releases while that does not fit
        submit its work to its lane, behind the tasks that it depends on
        when the work is done: record the span, release workspace and what it freed

The verifier has shown that each task fits once all earlier ones have completed, so waiting always
ends. What a task creates gets its place on the task's own lane, in its turn: an earlier Free of
the same buffer may still be waiting when the task is issued. In audit mode absent buffers are
poisoned, every payload is measured against its declared size, and after each task the ledger, as
it would be if tasks completed when they are issued, is compared with the proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from packhorse.errors import AuditError, StuckError
from packhorse.optim.norm import combine_norm, count_segments, segment_squares
from packhorse.program.audit import check_against_proof, check_same_tasks
from packhorse.program.buffers import (
    NORM,
    BufferId,
    ChunkId,
    PoolId,
    TierName,
    state_id,
    value_id,
)
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program, Proof
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
    Lane,
    Recompute,
    SegmentNorm,
    Task,
    Update,
    workspace_of,
    writes_of,
)
from packhorse.program.text import format_task
from packhorse.runtime.bodies import BodyRunner, Payload
from packhorse.runtime.dependencies import Place, find_dependencies
from packhorse.runtime.lanes import Lanes, LanesStuckError
from packhorse.runtime.memory.chunks import ChunkMemory, chunk_table
from packhorse.runtime.memory.ledger import Ledger
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.payloads import Payloads
from packhorse.runtime.tiers import ChunkTiers
from packhorse.timeline.names import kind_of, name_of
from packhorse.timeline.spec import MemoryPoint, Span, Timeline

ChunkWork = Callable[[BufferId], None]
UpdateWork = Callable[[ChunkId, Mapping[str, Tensor], Tensor | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step brings from outside.

    `feeds` gives each micro-batch's inputs by value name; `noise` its key, None without dropout;
    `update` applies the optimizer to a chunk's states (with the norm, when clipping);
    `fill` and `drain` serve Import and Export. `inspect` sees what is emitted before the next task
    is issued, so that it can end the run while the states are still good; for the norm it also
    gets the parameters whose gradient is not finite.
    """

    feeds: Callable[[int], Mapping[str, Tensor]]
    noise: Callable[[int], NoiseKey | None]
    update: UpdateWork
    fill: ChunkWork
    drain: ChunkWork
    inspect: Callable[[BufferId, Tensor, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program made ready to run many times."""

    program: Program
    proof: Proof
    dependencies: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program run emitted, and when its tasks ran."""

    emitted: Mapping[BufferId, Tensor]
    timeline: Timeline


def prepare_program(program: Program, proof: Proof) -> Prepared:
    """Find dependencies and names once.

    Raises:
        AuditError: the proof is of another program.
    """
    check_same_tasks(proof, program)
    return Prepared(
        program=program,
        proof=proof,
        dependencies=find_dependencies(program.tasks),
        lanes=assign_lanes(program.tasks),
        names=tuple(name_of(task) for task in program.tasks),
    )


class Executor:
    """Holds the buffers of one rank and runs programs over them.

    Between programs exactly the states with a home are present, where their home is. `watch` is
    called between tasks, and ends the run when it raises.
    """

    def __init__(
        self,
        *,
        program: Program,
        runner: BodyRunner,
        memory: ChunkMemory,
        tiers: ChunkTiers,
        lanes: Lanes,
        payloads: Payloads,
        parameter_order: tuple[str, ...],
        audit: bool,
        watch: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._tiers = tiers
        self._lanes = lanes
        self._order = parameter_order
        self._audit = audit
        self._watch = watch
        self._ledger = Ledger(program.pools)
        self._chunks = chunk_table(program.layout)
        self._payloads = payloads
        # What will be there once every issued task has completed: reservations follow the order of
        # issue, while tiers and payloads change when tasks run.
        self._issued: set[Place] = set()
        # The ledger as if each task completed when it is issued: what the verifier's replay saw.
        self._replay = Ledger(program.pools)

    @property
    def used_bytes(self) -> Mapping[PoolId, int]:
        """The ledger."""
        return self._ledger.used_bytes

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

    def run(self, prepared: Prepared, work: StepWork, *, rank: int = 0) -> Outcome:
        """Run every task of a program; blocks until all have completed."""
        program = prepared.program
        spans: list[Span] = []
        curves: dict[PoolId, list[MemoryPoint]] = {pool.id: [] for pool in program.pools}
        emitted: dict[BufferId, Tensor] = {}
        begin = time.perf_counter_ns()

        def note(at_ns: int) -> None:
            for pool, points in curves.items():
                used = self._ledger.used_bytes[pool]
                if not points or points[-1].used_bytes != used:
                    points.append(MemoryPoint(at_ns=at_ns, used_bytes=used))

        def submit(index: int, task: Task, created: Sequence[Place]) -> None:
            def do() -> None:
                with torch.no_grad():
                    self._create(created, program)
                    self._perform(task, program, work, emitted)

            def done(start_ns: int, end_ns: int) -> None:
                span = Span(
                    index=index,
                    name=prepared.names[index],
                    kind=kind_of(task),
                    lane=prepared.lanes[index],
                    start_ns=start_ns - begin,
                    end_ns=end_ns - begin,
                )
                spans.append(span)
                self._release(self._ledger, task, program)
                note(time.perf_counter_ns() - begin)

            self._lanes.submit(index, prepared.lanes[index], do, done, prepared.dependencies[index])

        try:
            for index, task in enumerate(program.tasks):
                self._watch()
                created = self._reserve(task, program)
                note(time.perf_counter_ns() - begin)
                submit(index, task, created)
                self._release(self._replay, task, program)
                if self._audit:
                    self._check(prepared, index)
            while self._lanes.wait_any():
                self._watch()
            self._lanes.wait_all()
        except LanesStuckError as error:
            raise self._stuck(error, program) from error
        spans.sort(key=lambda span: span.index)
        return Outcome(
            emitted=emitted,
            timeline=Timeline(
                source="measured",
                rank=rank,
                spans=tuple(spans),
                memory={pool: tuple(points) for pool, points in curves.items()},
            ),
        )

    def _check(self, prepared: Prepared, index: int) -> None:
        task = prepared.program.tasks[index]
        try:
            check_against_proof(prepared.proof, index, task, self._replay.used_bytes)
        except AuditError:
            # What an earlier task, still running, may raise tells more.
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
            while not self._ledger.fits(pool, size) and self._lanes.wait_any():
                pass
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

    def _stuck(self, error: LanesStuckError, program: Program) -> StuckError:
        places = [
            f"lane {lane} is in task {index}: {format_task(program.tasks[index])}"
            for lane, index in sorted(error.running.items())
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
            case Backward():
                self._keep_all(program, self._runner.backward(task, self._look(task.reads)))
            case SegmentNorm():
                self._norm_segments(task, program)
            case GradNorm():
                norm, spoilt = self._combine(task)
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
            case Emit():
                emitted[task.buffer] = self._payloads.get(task.buffer)[0].clone()
                if task.buffer != NORM:
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

    def _require_present(self, buffer: BufferId, tier: TierName = "device") -> None:
        if not self._is_present(buffer, tier):
            raise AuditError(
                f"{buffer} is read in the {tier} tier, but it is not there",
                fix="run the program that was verified",
            )

    def _keep_all(self, program: Program, written: Mapping[BufferId, Payload]) -> None:
        for buffer, payload in written.items():
            self._payloads.keep(program.buffers[buffer], payload)

    def _norm_segments(self, task: SegmentNorm, program: Program) -> None:
        chunk = self._chunks[task.chunk]
        self._require_present(state_id("grad", chunk.id))
        grad = self._memory.tensor("grad", chunk)
        pieces = [grad[start:stop] for start, stop, _, _ in self._memory.pieces(chunk)]
        self._payloads.keep(program.buffers[task.writes[0]], (segment_squares(pieces),))

    def _combine(self, task: GradNorm) -> tuple[Tensor, tuple[str, ...]]:
        """Put the segments of all chunks in the order of the parameters and combine them."""
        visible = self._look(task.reads)
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for buffer, (segments,) in visible.items():
            chunk = self._chunks[ChunkId(int(buffer.rpartition("/")[2]))]
            offset = 0
            for start, stop, slot, first in self._memory.pieces(chunk):
                count = count_segments(stop - start)
                parts.setdefault(slot.parameter, []).append(
                    (first, segments[offset : offset + count])
                )
                offset += count
        ordered = [
            segments
            for name in self._order
            for _, segments in sorted(parts.get(name, []), key=lambda part: part[0])
        ]
        norm = combine_norm(ordered)
        if math.isfinite(float(norm)):
            return norm, ()
        return norm, tuple(
            name
            for name in self._order
            if any(not segments.isfinite().all() for _, segments in parts.get(name, []))
        )

    def find_non_finite(
        self, num_blocks: int, feed: Mapping[str, Tensor], key: NoiseKey, microbatch: int
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
        for block in range(num_blocks):
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
