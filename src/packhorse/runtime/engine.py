"""One rank's training engine: a traced model, its proved programs, and the memory they run in.

In: `Traced`, programs with proofs, an optimizer. Out: loaded states, training steps, evaluations
and states handed out again, each by running the program made for it. Training steps run into each
other: a step gives its values back while its last writes are on their way, and the next one is
issued behind them. Whatever else is asked for comes after all of them are complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from packhorse.errors import (
    InputError,
    MismatchError,
    PackhorseError,
    PeerLostError,
    StoppedError,
)
from packhorse.graph.trace import Traced
from packhorse.model.spec import ParameterName
from packhorse.optim.optimizers import Optimizer
from packhorse.program.buffers import NORM, BufferId, ChunkId, Layout, split_state
from packhorse.program.program import Program, ProgramKind, Proof
from packhorse.runtime.bodies import BodyRunner
from packhorse.runtime.disk import DiskTier, Keeping
from packhorse.runtime.disk_places import find_places
from packhorse.runtime.emulation import Pace, PacedLanes
from packhorse.runtime.executor import Executor
from packhorse.runtime.hardware import find_own_pools, make_lanes, make_tiers
from packhorse.runtime.keeper import StepKeeper
from packhorse.runtime.lanes import LanesStuckError
from packhorse.runtime.memory.chunks import chunk_table
from packhorse.runtime.memory.process_heap import ProcessHeap
from packhorse.runtime.memory.spare import plan_spare_pages
from packhorse.runtime.messages import Messages, find_shapes
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.norms import Norms
from packhorse.runtime.payloads import Payloads
from packhorse.runtime.performing import Performer
from packhorse.runtime.prepared import prepare_program
from packhorse.runtime.running import NO_WORK, Running, StepWork
from packhorse.runtime.saved_values import SpareMemory
from packhorse.runtime.spoilt import SpoiltError, explain_spoilt
from packhorse.runtime.step_result import StepResult, find_losses
from packhorse.runtime.tiers import ChunkTiers
from packhorse.runtime.transport.spec import Transport
from packhorse.runtime.updates import ChunkUpdates
from packhorse.storage.kept_state import KeptState
from packhorse.storage.scratch_space import Scratch
from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece:
    """Elements [start, stop) of a parameter, as a 1-D view of the chunk that holds them.

    The view is valid only during the call that hands it out.
    """

    parameter: ParameterName
    start: int
    stop: int
    tensor: Tensor


StateTransfer = Callable[[str, ParameterPiece], None]


class Engine:
    """Runs the programs of one rank.

    Args:
        traced: the model at the plan's micro-batch shape.
        programs: at least `load`; `train_step`, `evaluate` and `save` as needed.
        proofs: the verifier's proof of each program.
        max_grad_norm: None when the plan does not clip.
        seed: of the dropout noise.
        scratch: folder of the disk tier, or all of them and how their bytes move.
        keeping: how finished steps are kept; None: they are not.
        resumed: kept state that this engine goes on from.
        watch: called between tasks; when it raises, the engine can only be closed.
        num_threads: intra-op threads of the compute lane.
        heap: how the C heap treats large blocks.
        process_bytes: what this process may hold; None: what it holds now, and its pools.
        device: `cpu`, or a CUDA device, for which the model was traced.
        pace: how long tasks take on the machine that is emulated; None: as long as they take.
        audit: check every task against what it declares.
        transport: to the other ranks, where the model is a part.

    Raises:
        MismatchError: a program was compiled for another model.
        StorageError: the scratch space cannot be made.
    """

    def __init__(
        self,
        *,
        traced: Traced,
        programs: Mapping[ProgramKind, Program],
        proofs: Mapping[ProgramKind, Proof],
        optimizer: Optimizer,
        max_grad_norm: float | None,
        seed: int,
        scratch: Path | Scratch | None,
        num_threads: int,
        heap: Literal["keep", "map"],
        process_bytes: int | None = None,
        device: str = "cpu",
        pace: Pace | None = None,
        audit: bool = False,
        keeping: Keeping | None = None,
        resumed: KeptState | None = None,
        watch: Callable[[], None] = lambda: None,
        transport: Transport | None = None,
    ) -> None:
        for kind, program in programs.items():
            if program.model != traced.model.fingerprint:
                raise MismatchError(
                    f"the {kind} program was compiled for model {program.model}, "
                    f"this is {traced.model.fingerprint}",
                    fix="make the plan again for this model",
                )
        torch.set_num_threads(num_threads)
        self._failed = ""
        # When the last step had its values, while something of it is on its way.
        self._values_ns: int | None = None
        # Steps that are not complete, and who wants to hear of it.
        self._unseen: list[tuple[Running, Callable[[Timeline], None]]] = []
        self._traced = traced
        self._seed = seed
        self._layout = next(iter(programs.values())).layout
        self._chunks = chunk_table(self._layout)
        self._prepared = {
            kind: prepare_program(program, proofs[kind]) for kind, program in programs.items()
        }
        buffers = {b.id: b for program in programs.values() for b in program.buffers.values()}
        places = find_places(traced, programs.values())
        self._disk = DiskTier(buffers, scratch, keeping, resumed, places)
        with ExitStack() as undo:
            undo.callback(self._disk.close)
            self._device = torch.device(device)
            pools = programs["load"].pools
            self._tiers = make_tiers(self._layout, self._device, pools, scratch)
            for memory in self._tiers.values():
                undo.callback(memory.close)
            self._memory = self._tiers["device"]
            self._updates = ChunkUpdates(optimizer, max_grad_norm, self._layout, self._memory)
            tiers = ChunkTiers(
                self._layout,
                memory=self._tiers,
                disk=self._disk,
                pools=pools,
                spare=plan_spare_pages(pools, programs.values(), proofs.values()),
                audit=audit,
            )
            own = find_own_pools(pools, self._device)
            # In a mapped heap values and chunks share their room.
            self._spare = spare = SpareMemory(keeps=heap == "keep")
            undo.callback(spare.close)
            self._heap = ProcessHeap(
                heap, own, programs.values(), process_bytes, tiers.unfilled_bytes, spare.drop
            )
            undo.callback(self._heap.close)
            room = self._heap.room
            shapes = find_shapes(traced.model, self._layout, programs.values())
            self._messages = Messages(transport, self._device, shapes, room)
            lanes = make_lanes(programs.values(), self._device, num_threads)
            self._paced = None if pace is None else PacedLanes(lanes, pace)
            self._performer = Performer(
                runner=BodyRunner(traced, self._layout, self._memory, self._device, room),
                tiers=tiers,
                payloads=Payloads(
                    self._device, self._disk, room, audit=audit, saved=places.saved, spare=spare
                ),
                norms=Norms(traced.model, self._layout, self._memory),
                messages=self._messages,
            )
            self._executor = Executor(
                program=programs["load"],
                performer=self._performer,
                tiers=tiers,
                lanes=self._paced or lanes,
                audit=audit,
                watch=watch,
            )
            self.keeper = StepKeeper(
                self._disk,
                self._memory,
                self._chunks,
                kinds=programs.keys(),
                run=self._transfer,
                executor=self._executor,
                adopt=lambda: self._executor.adopt(programs["load"]),
            )
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self._tell_others(error)
            elif not self._failed:
                self.settle()
        finally:
            self.close()

    @property
    def layout(self) -> Layout:
        """Where parameters lie."""
        return self._layout

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file."""
        return self._disk.size_bytes

    @property
    def overrun_ns(self) -> int:
        """By how much tasks took longer than on the emulated machine, all of them together."""
        return 0 if self._paced is None else self._paced.overrun_ns

    @property
    def scratch_path(self) -> Path | None:
        """The scratch file, or its first part, where there is one."""
        return self._disk.path

    def describe_running(self) -> tuple[str, ...]:
        """Say what each busy lane is in; any thread may ask."""
        return self._executor.describe_running()

    def load(self, source: StateTransfer) -> None:
        """Fill every state, one chunk at a time; blocks until all are filled.

        Args:
            source: called as source(state, piece) for `param`, `master` and optimizer states; it
                fills `piece.tensor`, which holds zeros.
        """
        self._transfer("load", partial(self._fill, source))

    def restore(self, source: StateTransfer) -> None:
        """Fill every state from the reopened scratch file; frozen ones in memory from `source`."""
        self.keeper.restore(partial(self._fill, source))

    def save(self, sink: StateTransfer) -> None:
        """Hand out every state, one chunk at a time; the sink must not keep the tensors."""

        def drain(buffer: BufferId) -> None:
            state, chunk = split_state(buffer)
            for piece in self._pieces(state, chunk):
                sink(state, piece)

        self._transfer("save", drain)

    def train_step(
        self,
        feeds: Sequence[Mapping[str, Tensor]],
        *,
        step: int,
        learning_rate: float,
        completed: Callable[[Timeline], None] = lambda _: None,
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of a global batch.

        Blocks until the step's values are there and all that was issued before it is complete; of
        its own tasks some may still be on their way. The feeds are used up then.

        Args:
            feeds: per micro-batch the step inputs by name.
            step: number of this optimizer step; the first is 1.
            learning_rate: from the schedule; a group's own rate keeps its ratio to the base.
            completed: called once the step is complete, in this call, a later one or `settle`.

        Raises:
            NonFiniteError: a loss, or the gradient norm, is NaN or infinite. With clipping no
                state has been changed; without, updates run before the norm is known. The engine
                can only be closed.
            StorageError: the disk is full or fails; names the step whose task failed, which may be
                the one before.
        """

        def update(chunk: ChunkId, tensors: Mapping[str, Tensor], norm: Tensor | None) -> None:
            self._updates.apply(chunk, tensors, norm, step=step, learning_rate=learning_rate)

        self._heap.keep_as_is()  # it is as large as that of an evaluation
        run, result = self._step("train_step", feeds, step=step, update=update)
        self._values_ns = None if self._executor.is_idle else time.perf_counter_ns()
        self._unseen.append((run, completed))
        self._tell_completed()
        return result

    def settle(self) -> None:
        """Block until everything that was asked for is complete.

        Raises:
            StorageError: the disk is full or fails; names the step whose task failed.
        """
        self._check_going()
        with self._failing():
            self._executor.wait_for(self._executor.next_number)
        self._values_ns = None
        self._tell_completed()

    def evaluate(self, feeds: Sequence[Mapping[str, Tensor]]) -> StepResult:
        """Run the forward of every micro-batch, without dropout, once all steps are complete.

        The first one lets a kept heap take its pages, so that many batches peak where few do.
        """
        self.settle()
        prepared = self._prepared["evaluate"]
        self._heap.settle(prepared.program, prepared.proof)
        run, result = self._step("evaluate", feeds, step=None, update=NO_WORK.update)
        self._complete(run)
        return result

    def quiesce(self) -> None:
        """Let what runs now end and drop the rest; the engine can only be closed."""
        self._failed = self._failed or "it was given up"
        with suppress(LanesStuckError):  # what a stuck lane still writes counts for nothing
            self._executor.quiesce()

    def close(self) -> None:
        """Give all memory back, and the scratch file, but for one that keeps a step.

        What is still on its way is dropped: call `settle` before where it counts. A lane that
        does not come back keeps its memory and the file: it may still write.
        """
        self._failed = self._failed or "it was closed"
        try:
            self._executor.quiesce()
        except LanesStuckError:
            return
        finally:
            # No lane takes room any more; one that is stuck never will.
            self._heap.close()
        self._spare.close()
        self._disk.close()
        for memory in self._tiers.values():
            memory.close()

    def _step(
        self,
        kind: Literal["train_step", "evaluate"],
        feeds: Sequence[Mapping[str, Tensor]],
        *,
        step: int | None,
        update: Callable[[ChunkId, Mapping[str, Tensor], Tensor | None], None],
    ) -> tuple[Running, StepResult]:
        began_ns = time.perf_counter_ns() if self._values_ns is None else self._values_ns
        expected = self._prepared[kind].program.num_microbatches
        if len(feeds) != expected:
            raise MismatchError(
                f"{len(feeds)} micro-batches were given, the program has {expected}",
                fix="cut the global batch as the plan says",
            )

        def noise(microbatch: int) -> NoiseKey | None:
            if step is None:
                return None
            return NoiseKey(seed=self._seed, step=step, microbatch=microbatch)

        def inspect(buffer: BufferId, value: Tensor, spoilt: tuple[str, ...]) -> None:
            if step is not None and not (finite := value.isfinite()).all():
                raise SpoiltError(buffer, float(value[~finite].flatten()[0]), spoilt)

        def to_device(microbatch: int) -> dict[str, Tensor]:
            return {name: x.to(self._device) for name, x in feeds[microbatch].items()}

        work = replace(
            NO_WORK,
            name="the evaluation" if step is None else f"step {step}",
            feeds=to_device,
            noise=noise,
            update=update,
            inspect=inspect,
        )
        try:
            with self._failing():
                run = self._issue(kind, work)
                emitted = self._executor.await_values(run)
                # So no more than two are ever on their way.
                self._executor.wait_for(run.first - 1)
        except SpoiltError as error:
            # Other lanes may be ahead; what is looked at below must not move any more.
            self.quiesce()
            assert step is not None

            def find_block(microbatch: int) -> int | None:
                key = NoiseKey(seed=self._seed, step=step, microbatch=microbatch)
                return self._performer.find_non_finite(to_device(microbatch), key, microbatch)

            found = explain_spoilt(error, self._traced.model, step=step, find_block=find_block)
            self._failed = found.what
            raise found from None
        losses = find_losses(emitted, self._traced.model.loss, len(feeds))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        norm = emitted.get(NORM)
        return run, StepResult(
            loss=float(total),
            losses=tuple(float(loss) for loss in losses),
            grad_norm=None if norm is None else float(norm),
            began_ns=began_ns,
            peak_bytes=run.peak_bytes,
            disk_read_bytes=self._prepared[kind].disk_read_bytes,
            disk_written_bytes=self._prepared[kind].disk_written_bytes,
            complete=partial(self._complete, run),
        )

    def _issue(self, kind: ProgramKind, work: StepWork) -> Running:
        self._check_going()
        if self._paced is not None:
            self._paced.begin(self._prepared[kind].program, self._executor.next_number)
        return self._executor.issue(self._prepared[kind], work)

    def _check_going(self) -> None:
        if self._failed:
            raise InputError(
                f"this run has ended: {self._failed}",
                fix="begin again, or resume from a checkpoint",
            )

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Remember what went wrong inside: nothing can be run after it."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or _first_line(error)
            self._tell_others(error)
            raise

    def _tell_others(self, error: BaseException) -> None:
        # Other ranks wait for what does not come any more. What is lost was not lost here, and a
        # stop is agreed on.
        if not isinstance(error, PeerLostError | StoppedError):
            kind = error if isinstance(error, PackhorseError) else PackhorseError
            self._messages.abort(_first_line(error), kind.exit_code)

    def _complete(self, run: Running) -> Timeline:
        if not run.is_over:
            self._check_going()
            with self._failing():
                self._executor.complete(run)
            self._tell_completed()
        return run.timeline()

    def _tell_completed(self) -> None:
        while self._unseen and self._unseen[0][0].is_over:
            run, completed = self._unseen.pop(0)
            completed(run.timeline())

    def _transfer(self, kind: ProgramKind, work: Callable[[BufferId], None]) -> None:
        """Run a program that fills states or hands them out.

        Steps that are kept are written behind: nobody waits for that program.
        """
        if kind != "persist":
            self.settle()
        with self._failing():
            run = self._issue(kind, replace(NO_WORK, name=kind, fill=work, drain=work))
            if kind != "persist":
                self._executor.complete(run)

    def _fill(self, source: StateTransfer, buffer: BufferId) -> None:
        state, chunk = split_state(buffer)
        self._memory.tensor(state, self._chunks[chunk]).zero_()
        for piece in self._pieces(state, chunk):
            source(state, piece)

    def _pieces(self, state: str, chunk: ChunkId) -> list[ParameterPiece]:
        tensor = self._memory.tensor(state, self._chunks[chunk])
        return [
            ParameterPiece(
                parameter=ParameterName(slot.parameter),
                start=first,
                stop=first + stop - start,
                tensor=tensor[start:stop],
            )
            for start, stop, slot, first in self._memory.pieces(self._chunks[chunk])
        ]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
