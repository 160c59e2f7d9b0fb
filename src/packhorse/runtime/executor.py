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
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from packhorse.errors import AuditError, PackhorseError, RunFailedError, StuckError
from packhorse.program.audit import check_against_proof
from packhorse.program.buffers import BufferId, PoolId
from packhorse.program.program import Program
from packhorse.program.tasks import Lane
from packhorse.program.text import format_task
from packhorse.runtime.dependencies import History
from packhorse.runtime.lanes import DeviceFailedError, Lanes, LanesStuckError, Wanted
from packhorse.runtime.memory.ledger import Ledger
from packhorse.runtime.performing import Performer
from packhorse.runtime.prepared import Job, Prepared, Sizes
from packhorse.runtime.running import Running, StepWork
from packhorse.runtime.tiers import ChunkTiers


class _Issued:
    """A job on its way: what its lane does, and what is told when that is done.

    Many of them are under way at a time, so they are one object each: Python's garbage collector
    looks at all that lives whenever enough has been added.
    """

    __slots__ = ("_at", "_completed", "_free_ends_ns", "_job", "_performer", "_run")

    def __init__(
        self,
        run: Running,
        job: Job,
        performer: Performer,
        completed: Callable[[Running, Job, int], None],
    ) -> None:
        self._run = run
        self._job = job
        self._performer = performer
        self._completed = completed
        # Which of its tasks it is in.
        self._at = 0
        self._free_ends_ns: tuple[int, ...] = ()

    def perform(self) -> None:
        """Do the task."""
        run, job = self._run, self._job
        try:
            with torch.no_grad():
                self._performer.perform(
                    job.task, job.created, run.prepared.program, run.work, run.emitted
                )
        except RunFailedError as error:
            _name(error, self.describe())
            raise

    def free(self) -> None:
        """Do the frees that go along with it."""
        program = self._run.prepared.program
        try:
            for task in self._job.frees:
                self._at += 1
                self._performer.free(task, program)
                self._free_ends_ns += (time.perf_counter_ns(),)
        except RunFailedError as error:
            _name(error, self.describe())
            raise

    def done(self, start_ns: int, end_ns: int) -> None:
        """Book what is complete."""
        self._run.book(self._job, start_ns, end_ns, self._free_ends_ns)
        at_ns = self._free_ends_ns[-1] if self._free_ends_ns else end_ns
        self._completed(self._run, self._job, at_ns)

    def describe(self) -> str:
        """What it is in."""
        task = self._job.tasks[self._at]
        return f"task {self._job.index + self._at} of {self._run.work.name}: {format_task(task)}"


class Executor:
    """Holds the buffers of one rank and runs programs over them.

    Between programs exactly the states with a home are present, where their home is, once all that
    was issued is complete. `watch` is called between tasks, and ends the run when it raises.
    """

    def __init__(
        self,
        *,
        program: Program,
        performer: Performer,
        tiers: ChunkTiers,
        lanes: Lanes,
        audit: bool,
        watch: Callable[[], None],
    ) -> None:
        self._performer = performer
        self._tiers = tiers
        self._lanes = lanes
        self._watch = watch
        self._ledger = Ledger(program.pools)
        # In an audit, the ledger as if each task completed when it is issued: what the verifier's
        # replay saw.
        self._replay = Ledger(program.pools) if audit else None
        self._history = History()
        # What was issued and has not completed, by ascending numbers, with what it is; and how many
        # bytes of a pool its end gives back.
        self._pending: dict[int, Callable[[], str]] = {}
        self._releasing: dict[PoolId, dict[int, int]] = {pool.id: {} for pool in program.pools}
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

    def describe_running(self) -> tuple[str, ...]:
        """Say what each busy lane is in; any thread may ask."""
        busy = sorted(self._lanes.running.items())
        known = [(lane, self._pending.get(number)) for lane, number in busy]
        return tuple(f"lane {lane} in {say()}" for lane, say in known if say is not None)

    def quiesce(self) -> None:
        """Let what runs on the lanes end and drop the rest; nothing can be run any more."""
        self._lanes.close()

    def adopt(self, program: Program) -> None:
        """Take over the states at home on the disk: their bytes lie there already."""
        for buffer in program.buffers.values():
            if buffer.home == "disk":
                pool = buffer.pools["disk"]
                self._ledger.reserve(pool, buffer.size_bytes)
                if self._replay is not None:
                    self._replay.reserve(pool, buffer.size_bytes)
                self._tiers.create(buffer.id, "disk", pool)

    def issue(self, prepared: Prepared, work: StepWork) -> Running:
        """Issue every task of a program behind all that was issued before.

        Blocks while a reservation does not fit; the last tasks are still on their way afterwards.
        """
        dependencies = prepared.dependencies
        run = Running(prepared, work, first=self._next)
        first = run.first
        self._next += len(prepared.program.tasks)
        self._running.append(run)
        is_alone = self.is_idle
        self._note(time.perf_counter_ns())
        try:
            for job in prepared.jobs:
                self._watch()
                if job.reserved:
                    self._reserve(job.reserved)
                after = [first + other for other in dependencies.inner[job.index]]
                if not is_alone and job.index in dependencies.entering:
                    after.extend(self._history.before(dependencies.entering[job.index]))
                self._submit(run, job, after)
                if self._replay is not None:
                    self._check(self._replay, prepared, job)
        except (LanesStuckError, DeviceFailedError) as error:
            raise self._told(error) from error
        self._history.add(dependencies, first, self._pending.keys())
        self._end_complete()
        return run

    def await_values(self, run: Running) -> Mapping[BufferId, Tensor]:
        """Block until all that a program emits is there."""
        while run.missing_values:
            self._wait(run.missing_values.__contains__)
            # Much may have happened meanwhile, and the end of the step is still to come.
            self._watch()
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

        try:
            self._lanes.submit(number, lane, _naming(work, what), done, after)
        except (LanesStuckError, DeviceFailedError) as error:
            raise self._told(error) from error
        return number

    def _submit(self, run: Running, job: Job, after: Sequence[int]) -> None:
        number = run.first + job.index
        issued = _Issued(run, job, self._performer, self._complete)
        self._pending[number] = issued.describe
        for pool, size in job.released:
            self._releasing[pool][number] = size
        then = issued.free if job.frees else None
        self._lanes.submit(number, job.lane, issued.perform, issued.done, after, then)

    def _complete(self, run: Running, job: Job, at_ns: int) -> None:
        """Take a job that is complete off the books."""
        number = run.first + job.index
        del self._pending[number]
        for pool, size in job.released:
            self._ledger.release(pool, size)
            del self._releasing[pool][number]
        self._note(at_ns)
        self._end_complete()

    def _end_complete(self) -> None:
        """End the programs that are complete, in their order."""
        while self._running and self._running[0].is_complete:
            self._last_end_ns = self._running.pop(0).end(self._last_end_ns)

    def _wait(self, wanted: Wanted | None = None) -> None:
        """Block until one more task has completed; not for long, if it is none that is wanted."""
        try:
            self._lanes.wait_any(wanted)
        except (LanesStuckError, DeviceFailedError) as error:
            raise self._told(error) from error

    def _told(self, error: LanesStuckError | DeviceFailedError) -> PackhorseError:
        """Tell an error of lanes, which know tasks by their numbers, with the tasks' names."""
        if isinstance(error, LanesStuckError):
            return self._stuck(error)
        return RunFailedError(
            f"the device failed: {error}",
            where=f"lane {error.lane}, {self._pending[error.index]()}",
            fix="if its memory ran out: end other programs on it, grant a larger budget, or set"
            " PYTORCH_ALLOC_CONF=expandable_segments:True; else look at the kernel log, and"
            " set CUDA_LAUNCH_BLOCKING=1 to find the kernel",
        )

    def _note(self, at_ns: int) -> None:
        for run in self._running:
            run.note(at_ns, self._ledger.used_bytes)

    def _check(self, replay: Ledger, prepared: Prepared, job: Job) -> None:
        """Audit a job: let its tasks complete in the replay, and compare each with the proof."""
        for pool, size in job.reserved:
            replay.reserve(pool, size)
        for index, (task, sizes) in enumerate(job.each_released, job.index):
            for pool, size in sizes:
                replay.release(pool, size)
            try:
                check_against_proof(prepared.proof, index, task, replay.used_bytes)
            except AuditError:
                # What an earlier task, still running, may raise tells more.
                self._lanes.wait_all()
                raise

    def _until_fits(self, pool: PoolId, size_bytes: int) -> Wanted:
        """Which task, of those that complete from now on, makes a reservation fit."""
        short_bytes = self._ledger.shortfall(pool, size_bytes)
        releasing = self._releasing[pool]

        def fits_behind(number: int) -> bool:
            nonlocal short_bytes
            short_bytes -= releasing.get(number, 0)
            return short_bytes <= 0

        return fits_behind

    def _reserve(self, wanted: Sizes) -> None:
        """Reserve what a task creates and its workspace, waiting for releases while it must."""
        for pool, size in wanted:
            while self._pending and not self._ledger.fits(pool, size):
                self._wait(self._until_fits(pool, size))
            self._ledger.reserve(pool, size)
            self._tiers.shed(pool, self._ledger.used_bytes[pool])
        self._note(time.perf_counter_ns())

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


def _name(error: RunFailedError, what: str) -> None:
    """Let an error say what failed: later steps may be under way when it is told."""
    error.where = "\n".join(filter(None, (error.where, what)))


def _naming(work: Callable[[], None], what: str) -> Callable[[], None]:
    """Work whose errors say what failed."""

    def do() -> None:
        try:
            work()
        except RunFailedError as error:
            _name(error, what)
            raise

    return do
