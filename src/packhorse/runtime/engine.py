"""One rank's training engine: a traced model, its proved programs, and the memory they run in.

In: `Traced`, programs with proofs, an optimizer. Out: loaded states, training steps, evaluations
and states handed out again, each by running the program made for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import torch
from torch import Tensor

from packhorse.errors import InputError, MismatchError, NonFiniteError
from packhorse.graph.trace import Traced
from packhorse.model.spec import ParameterName
from packhorse.optim.groups import hyperparameters
from packhorse.optim.norm import clip_coefficient
from packhorse.optim.optimizers import Optimizer
from packhorse.optim.update import update_shard
from packhorse.program.buffers import NORM, BufferId, ChunkId, Layout, value_id
from packhorse.program.program import Program, ProgramKind, Proof
from packhorse.runtime.bodies import BodyRunner
from packhorse.runtime.disk import DiskTier, Keeping
from packhorse.runtime.emulation import Pace, PacedLanes
from packhorse.runtime.executor import Executor, Outcome, StepWork, prepare_program
from packhorse.runtime.hardware import make_lanes, make_tiers
from packhorse.runtime.keeper import StepKeeper
from packhorse.runtime.kept_heap import find_kept_bytes
from packhorse.runtime.lanes import LanesStuckError
from packhorse.runtime.memory.chunks import chunk_table
from packhorse.runtime.memory.heap import open_holes, seal_holes, set_heap_mode, settle_heap
from packhorse.runtime.memory.spare import find_limits
from packhorse.runtime.noise import NoiseKey
from packhorse.runtime.payloads import Payloads
from packhorse.runtime.tiers import ChunkTiers
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


_FIX_NON_FINITE: Final = (
    "lower learning_rate, lengthen warmup_steps, set max_grad_norm: 1.0, or look at the rows of"
    " this batch;\nthe last checkpoint is from before"
)
StateTransfer = Callable[[str, ParameterPiece], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gives back.

    `loss` is the float32 sum of `losses` in micro-batch order; `grad_norm` is the global norm
    before clipping.
    """

    loss: float
    losses: tuple[float, ...]
    grad_norm: float | None
    timeline: Timeline
    disk_read_bytes: int
    disk_written_bytes: int


class _SpoiltError(Exception):
    # A loss or the norm is not finite; `parameters` have gradients that are not.
    def __init__(self, buffer: BufferId, value: float, parameters: tuple[str, ...]) -> None:
        self.buffer = buffer
        self.value = value
        self.parameters = parameters
        super().__init__(f"{buffer} is {value}")


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
        device: `cpu`, or a CUDA device, for which the model was traced.
        pace: how long tasks take on the machine that is emulated; None: as long as they take.
        audit: check every task against what it declares.

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
        device: str = "cpu",
        pace: Pace | None = None,
        audit: bool = False,
        keeping: Keeping | None = None,
        resumed: KeptState | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        for kind, program in programs.items():
            if program.model != traced.model.fingerprint:
                raise MismatchError(
                    f"the {kind} program was compiled for model {program.model}, "
                    f"this is {traced.model.fingerprint}",
                    fix="make the plan again for this model",
                )
        torch.set_num_threads(num_threads)
        set_heap_mode(heap)
        self._heap = heap
        self._sealed = seal_holes() if heap == "map" else ()
        self._settled = False
        self._failed = ""
        self._traced = traced
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        self._layout = next(iter(programs.values())).layout
        self._chunks = chunk_table(self._layout)
        self._groups = {
            chunk.group: hyperparameters(optimizer, chunk.group) for chunk in self._layout.chunks
        }
        self._prepared = {
            kind: prepare_program(program, proofs[kind]) for kind, program in programs.items()
        }
        buffers = {
            buffer.id: buffer
            for program in programs.values()
            for buffer in program.buffers.values()
        }
        self._disk = DiskTier(buffers, scratch, keeping, resumed)
        self._device = torch.device(device)
        pools = programs["load"].pools
        self._tiers = make_tiers(self._layout, self._device, {pool.tier for pool in pools}, scratch)
        self._memory = self._tiers["device"]
        lanes = make_lanes(programs.values(), self._device, num_threads)
        self._paced = None if pace is None else PacedLanes(lanes, pace)
        self._executor = Executor(
            program=programs["load"],
            runner=BodyRunner(traced, self._layout, self._memory, self._device),
            memory=self._memory,
            tiers=ChunkTiers(
                self._layout,
                memory=self._tiers,
                disk=self._disk,
                pools=pools,
                limits=find_limits(programs.values(), proofs.values()),
                audit=audit,
            ),
            lanes=self._paced or lanes,
            payloads=Payloads(self._device, self._disk, audit=audit),
            parameter_order=tuple(traced.model.parameters),
            audit=audit,
            watch=watch,
        )

        self.keeper = StepKeeper(
            self._disk,
            self._memory,
            self._chunks,
            kinds=programs.keys(),
            run=self._transfer,
            adopt=lambda: self._executor.adopt(programs["load"]),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def load(self, source: StateTransfer) -> None:
        """Fill every state, one chunk at a time.

        Args:
            source: called as source(state, piece) for `param`, `master` and optimizer states; it
                fills `piece.tensor`, which holds zeros.
        """
        self._run("load", fill=partial(self._fill, source))

    def restore(self, source: StateTransfer) -> None:
        """Fill every state from the reopened scratch file; frozen ones in memory from `source`."""
        self.keeper.restore(partial(self._fill, source))

    def save(self, sink: StateTransfer) -> None:
        """Hand out every state, one chunk at a time; the sink must not keep the tensors."""

        def drain(buffer: BufferId) -> None:
            state = buffer.partition("/")[0]
            for piece in self._pieces(state, _chunk_of(buffer)):
                sink(state, piece)

        self._run("save", drain=drain)

    def train_step(
        self, feeds: Sequence[Mapping[str, Tensor]], *, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step over the micro-batches of a global batch.

        Args:
            feeds: per micro-batch the step inputs by name.
            step: number of this optimizer step; the first is 1.
            learning_rate: from the schedule; a group's own rate keeps its ratio to the base.

        Raises:
            NonFiniteError: a loss, or the gradient norm, is NaN or infinite. With clipping no
                state has been changed; without, updates run before the norm is known. The engine
                can only be closed.
        """

        def update(chunk: ChunkId, tensors: Mapping[str, Tensor], norm: Tensor | None) -> None:
            self._update(chunk, tensors, norm, step, learning_rate)

        self._settled = True  # its heap is as large
        return self._step("train_step", feeds, step=step, update=update)

    def evaluate(self, feeds: Sequence[Mapping[str, Tensor]]) -> StepResult:
        """Run the forward of every micro-batch, without dropout.

        The first one lets a kept heap take its pages, so that many batches peak where few do.
        """
        if self._heap == "keep" and not self._settled:
            prepared = self._prepared["evaluate"]
            kept_bytes = find_kept_bytes(prepared.program, prepared.proof)
            self._sealed += settle_heap(*kept_bytes)
        self._settled = True
        return self._step("evaluate", feeds, step=None, update=_no_update)

    def close(self) -> None:
        """Give all memory back, and the scratch file, but for one that keeps a step.

        A lane that does not come back keeps its memory and the file: it may still write.
        """
        open_holes(self._sealed)
        self._sealed = ()
        try:
            self._executor.quiesce()
        except LanesStuckError:
            return
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
    ) -> StepResult:
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
            if step is not None and not math.isfinite(float(value)):
                raise _SpoiltError(buffer, float(value), spoilt)

        def to_device(microbatch: int) -> dict[str, Tensor]:
            return {name: x.to(self._device) for name, x in feeds[microbatch].items()}

        before = self._disk.counters
        try:
            outcome = self._run(kind, feeds=to_device, inspect=inspect, noise=noise, update=update)
        except _SpoiltError as error:
            # Other lanes may be ahead; what is looked at below must not move any more.
            self._executor.quiesce()
            assert step is not None
            if error.buffer == NORM:
                found = self._bad_gradient(error.value, step, error.parameters)
            else:
                microbatch = int(error.buffer.rpartition("@")[2])
                found = self._bad_loss(error.value, step, microbatch, to_device(microbatch))
            self._failed = found.what
            raise found from None
        moved = self._disk.counters.since(before)
        losses = [outcome.emitted[value_id(self._traced.model.loss, m)] for m in range(len(feeds))]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        norm = outcome.emitted.get(NORM)
        return StepResult(
            loss=float(total),
            losses=tuple(float(loss) for loss in losses),
            grad_norm=None if norm is None else float(norm),
            timeline=outcome.timeline,
            disk_read_bytes=moved.read_bytes,
            disk_written_bytes=moved.written_bytes,
        )

    def _run(
        self,
        kind: ProgramKind,
        *,
        feeds: Callable[[int], Mapping[str, Tensor]] = lambda _: {},
        noise: Callable[[int], NoiseKey | None] = lambda _: None,
        update: Callable[[ChunkId, Mapping[str, Tensor], Tensor | None], None] | None = None,
        fill: Callable[[BufferId], None] | None = None,
        drain: Callable[[BufferId], None] | None = None,
        inspect: Callable[[BufferId, Tensor, tuple[str, ...]], None] | None = None,
    ) -> Outcome:
        work = StepWork(
            feeds=feeds,
            noise=noise,
            update=update or _no_update,
            fill=fill or _no_transfer,
            drain=drain or _no_transfer,
            inspect=inspect or _accept,
        )
        if self._failed:
            raise InputError(
                f"this run ended with an error: {self._failed}",
                fix="close it and begin again, or resume from a checkpoint",
            )
        if self._paced is not None:
            self._paced.begin(self._prepared[kind].program)
        try:
            return self._executor.run(self._prepared[kind], work)
        except BaseException as error:
            self._failed = str(error).partition("\n")[0] or type(error).__name__
            raise

    def _bad_loss(
        self, loss: float, step: int, microbatch: int, feed: Mapping[str, Tensor]
    ) -> NonFiniteError:
        key = NoiseKey(seed=self._seed, step=step, microbatch=microbatch)
        blocks = self._traced.model.blocks
        found = self._executor.find_non_finite(len(blocks), feed, key, microbatch)
        place = "no block by itself" if found is None else f"block {blocks[found].name}"
        return NonFiniteError(
            f"the loss became {loss} in step {step}",
            where=f"step {step}, micro-batch {microbatch}, first in {place}",
            fix=_FIX_NON_FINITE,
        )

    def _bad_gradient(self, norm: float, step: int, spoilt: tuple[str, ...]) -> NonFiniteError:
        model = self._traced.model
        last = max(
            (block for name in spoilt for block in model.parameters[ParameterName(name)].blocks),
            default=None,
        )
        place = "no single parameter" if last is None else f"block {model.blocks[last].name}"
        return NonFiniteError(
            f"the gradient norm became {norm} in step {step}",
            where=f"step {step}, all micro-batches, first in {place}"
            + (f"\nparameters: {', '.join(spoilt[:3])}" if spoilt else "")
            + (f" and {len(spoilt) - 3} more" if len(spoilt) > 3 else ""),
            fix=_FIX_NON_FINITE,
        )

    def _transfer(self, kind: ProgramKind, work: Callable[[BufferId], None]) -> None:
        self._run(kind, fill=work, drain=work)

    def _fill(self, source: StateTransfer, buffer: BufferId) -> None:
        state, chunk = buffer.partition("/")[0], self._chunks[_chunk_of(buffer)]
        self._memory.tensor(state, chunk).zero_()
        for piece in self._pieces(state, chunk.id):
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

    def _update(
        self,
        chunk_id: ChunkId,
        tensors: Mapping[str, Tensor],
        norm: Tensor | None,
        step: int,
        learning_rate: float,
    ) -> None:
        chunk = self._chunks[chunk_id]
        group = self._groups[chunk.group]
        coefficient = None
        if norm is not None and self._max_grad_norm is not None:
            coefficient = clip_coefficient(norm, self._max_grad_norm)
        master = tensors.get("master")
        update_shard(
            group,
            step=step,
            learning_rate=_rate_of(group.lr, self._optimizer.lr, learning_rate),
            param=tensors["param"] if master is None else master,
            grad=tensors["grad"],
            states={name: tensors[name] for name in self._optimizer.state_names},
            pieces=[(start, stop) for start, stop, _, _ in self._memory.pieces(chunk)],
            clip_coefficient=coefficient,
            compute_param=None if master is None else tensors["param"],
        )


def _rate_of(own: float, base: float, scheduled: float) -> float:
    """A group's rate now; at the base rate it is the group's own in every bit."""
    if own == base:
        return scheduled
    return own * (scheduled / base) if base else own


def _chunk_of(buffer: BufferId) -> ChunkId:
    return ChunkId(int(buffer.rpartition("/")[2]))


def _no_update(chunk: ChunkId, _tensors: Mapping[str, Tensor], _norm: Tensor | None) -> None:
    raise AssertionError(f"chunk {chunk} is updated outside a training step")


def _accept(buffer: BufferId, value: Tensor, spoilt: tuple[str, ...]) -> None:
    """Take whatever is emitted."""
    del buffer, value, spoilt


def _no_transfer(buffer: BufferId) -> None:
    raise AssertionError(f"{buffer} is filled or handed out outside a load or save")
