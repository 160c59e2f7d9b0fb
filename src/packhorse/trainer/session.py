"""A plan at work: lowered, proved, with its engine and its states.

In: a traced model and a plan for it. Out: training steps and evaluations of whole batches, and the
states handed to whoever saves them. A session is the same for a recipe and for a loop in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from packhorse.checkpoint.kept_run import KeptRun, describe_kept, kept_state_of
from packhorse.checkpoint.manifest import RunState
from packhorse.checkpoint.resume import SavedRun
from packhorse.checkpoint.save import Piece
from packhorse.compiler.durability import keeps_steps, list_kinds, states_with_slots
from packhorse.compiler.lower import lower_plan
from packhorse.errors import InputError
from packhorse.graph.export import DENOMINATOR
from packhorse.graph.trace import Traced
from packhorse.model.parts import whole_of
from packhorse.model.spec import Model
from packhorse.optim.optimizers import Optimizer
from packhorse.plan.identity import check_plan
from packhorse.plan.spec import Plan
from packhorse.program.buffers import Layout
from packhorse.program.program import Program, ProgramKind, Proof
from packhorse.runtime.disk import Keeping
from packhorse.runtime.emulation import Pace
from packhorse.runtime.engine import Engine, ParameterPiece
from packhorse.runtime.hardware import limited_allocator
from packhorse.runtime.step_result import StepResult
from packhorse.runtime.transport.spec import Transport
from packhorse.storage.kept_state import KeptState
from packhorse.storage.scratch_space import Scratch
from packhorse.timeline.spec import Timeline
from packhorse.trainer.device_memory import find_allocator_bytes
from packhorse.trainer.weights import WeightSource
from packhorse.verifier.rules import verify_program

_VALUES: Final = ("param", "master")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The proved programs of one rank, and the way to the others; None where it is alone."""

    programs: Mapping[ProgramKind, Program]
    proofs: Mapping[ProgramKind, Proof]
    transport: Transport | None


class Session:
    """Runs a plan; made ready, it waits for `begin` or `resume`.

    Args:
        max_grad_norm: None exactly when the plan does not clip.
        seed: of dropout.
        scratch: folder of the disk tier, or all of them and how their bytes move; None where the
            plan uses no disk.
        pace: how long tasks take on the machine that is emulated; None: as long as they take.
        audit: check every task against what it declares (slow).
        owner: the run folder for which steps are kept as the plan says; None: none are.
        resumed: kept state of that run; see `is_reopened`.
        watch: called between tasks; when it raises, the session can only be closed.
        baseline_bytes: what the process held before it planned; the budget comes on top of it.
        joint: the programs of this rank, proved together with those of the others, and the way to
            them; None where there is one rank.

    Raises:
        MismatchError: the plan was made for another model or shape.
        RuleError: a program of the plan breaks a rule.
        InputError: plan and arguments disagree, or the scratch folder is in use.
        StorageError: the scratch space cannot be made.
    """

    def __init__(
        self,
        traced: Traced,
        plan: Plan,
        *,
        optimizer: Optimizer,
        max_grad_norm: float | None,
        seed: int,
        scratch: Path | Scratch | None,
        pace: Pace | None = None,
        audit: bool = False,
        owner: Path | None = None,
        resumed: KeptState | None = None,
        watch: Callable[[], None] = lambda: None,
        baseline_bytes: int | None = None,
        joint: Joint | None = None,
    ) -> None:
        check_plan(plan, traced.model)
        _check_optimizer(plan, optimizer, max_grad_norm)
        self.plan = plan
        self.model: Model = traced.model
        proved = joint or _prove_alone(traced.model, plan)
        self.programs: Mapping[ProgramKind, Program] = proved.programs
        self.proofs: Mapping[ProgramKind, Proof] = proved.proofs
        keeping = None
        if owner is not None and keeps_steps(plan):
            layout = self.programs["load"].layout
            keeping = Keeping(
                sizes_bytes={
                    name: buffer.size_bytes
                    for name, buffer in states_with_slots(plan, layout).items()
                },
                description=describe_kept(owner, traced.model, layout),
            )
        uses_disk = keeping is not None or any(
            "disk" in buffer.pools
            for program in self.programs.values()
            for buffer in program.buffers.values()
        )
        device = torch.device(plan.numerics.device)
        limit_bytes = find_allocator_bytes(plan, self.programs["load"])
        with ExitStack() as held:
            held.enter_context(limited_allocator(device, limit_bytes))
            self._engine = Engine(
                traced=traced,
                programs=self.programs,
                proofs=self.proofs,
                optimizer=optimizer,
                max_grad_norm=max_grad_norm,
                seed=seed,
                scratch=scratch if uses_disk else None,
                num_threads=plan.numerics.num_threads,
                heap=plan.heap.value,
                process_bytes=_find_process_bytes(plan, baseline_bytes),
                device=plan.numerics.device,
                pace=pace,
                audit=audit,
                keeping=keeping,
                resumed=resumed,
                watch=watch,
                transport=proved.transport,
            )
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._held:
            self._engine.__exit__(kind, error, trace)

    @property
    def layout(self) -> Layout:
        """Where parameters lie; every state repeats it."""
        return self._engine.layout

    @property
    def global_rows(self) -> int:
        """Rows of a batch."""
        numerics = self.plan.numerics
        return numerics.microbatch_rows.value * numerics.num_microbatches

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file."""
        return self._engine.scratch_bytes

    @property
    def scratch_path(self) -> Path | None:
        """The scratch file, where there is one."""
        return self._engine.scratch_path

    @property
    def step_flops(self) -> int:
        """Operations of forward and backward of a whole batch, without what is recomputed.

        They are those of all ranks together.
        """
        whole = whole_of(self.model)
        bodies = [whole.body_of(block.id) for block in whole.blocks]
        once = sum(body.forward_flops + body.backward_flops for body in bodies)
        return once * self.plan.numerics.num_microbatches

    def describe_running(self) -> tuple[str, ...]:
        """Say what each busy lane is in; any thread may ask."""
        return self._engine.describe_running()

    def begin(self, weights: WeightSource) -> None:
        """Fill the parameters; optimizer states begin as zeros."""

        def fill(state: str, piece: ParameterPiece) -> None:
            if state in _VALUES:
                weights.read_into(piece.parameter, piece.start, piece.stop, piece.tensor)

        self._engine.load(fill)

    def resume(self, saved: SavedRun) -> None:
        """Fill every state from a checkpoint of this model, whatever plan it was saved under.

        Raises:
            MismatchError: it is of another model.
            FileFormatError: a state is missing or a file is damaged.
        """
        saved.check_model(whole_of(self.model), self.layout)

        def fill(state: str, piece: ParameterPiece) -> None:
            trained = self.model.parameters[piece.parameter].trainable
            if trained or state in _VALUES:
                saved.read_into(piece.parameter, state, piece.start, piece.stop, piece.tensor)

        self._engine.load(fill)

    @property
    def keeps(self) -> bool:
        """Whether finished steps are kept in the scratch folder."""
        return self._engine.keeper.is_on

    @property
    def is_reopened(self) -> bool:
        """Whether the scratch file itself holds the states to go on from: see `reopen`.

        False when the plan lays it out otherwise: then `resume_kept` reads the old file.
        """
        return self._engine.keeper.is_reopened

    def reopen(self, weights: WeightSource) -> None:
        """Go on from the scratch file: what lies on the disk stays there, the rest is read.

        Frozen parameters in memory come from `weights` again.
        """

        def fill(state: str, piece: ParameterPiece) -> None:
            if state in _VALUES:
                weights.read_into(piece.parameter, piece.start, piece.stop, piece.tensor)

        self._engine.restore(fill)

    def resume_kept(self, saved: KeptRun, weights: WeightSource) -> None:
        """Fill every state from kept state of another plan; see `resume`."""
        saved.check_model(self.model, self.layout)

        def fill(state: str, piece: ParameterPiece) -> None:
            trained = self.model.parameters[piece.parameter].trainable
            if trained or (state in _VALUES and saved.holds(piece.parameter, state)):
                saved.read_into(piece.parameter, state, piece.start, piece.stop, piece.tensor)
            elif state in _VALUES:
                weights.read_into(piece.parameter, piece.start, piece.stop, piece.tensor)

        self._engine.load(fill)

    def finish_step(self, run: RunState) -> None:
        """Keep the state after a finished step when its turn has come, in the background.

        Raises:
            StorageError: the disk is full or fails.
        """
        every = self.plan.durable.value
        if self.keeps and every != "off" and run.step % every == 0:
            self._engine.keeper.keep(run.step, kept_state_of(run))

    def hold_promise(self, step: int) -> None:
        """Block until no more than the plan states is lost if the process dies after `step`.

        What is kept of steps before is on its way to the disk by then, as a rule for a whole step.

        Raises:
            StorageError: the disk is full or fails.
        """
        every = self.plan.durable.value
        if self.keeps and every != "off":
            self._engine.keeper.settle((step - 1) // every * every)

    def keeps_step(self, step: int) -> bool:
        """Whether the state after `step` is kept, or will be without anything more to be done."""
        return self._engine.keeper.has_kept(step)

    def give_up(self, step: int) -> int:
        """Drop what is under way, a step that does not count; the session can only be closed.

        Args:
            step: kept, or about to be: its last writes are waited for unless the one before is
                kept as well.

        Returns:
            The newest step that is kept.
        """
        keeper = self._engine.keeper
        if not self.keeps_step(step - 1):
            keeper.await_commit(step)
        self._engine.quiesce()
        newest = keeper.newest_step
        assert newest is not None
        return newest

    def keep_now(self, run: RunState) -> None:
        """Keep the state after the last finished step; blocks until it is on the disk.

        Raises:
            StorageError: the disk is full or fails.
        """
        keeper = self._engine.keeper
        if not keeper.has_kept(run.step):
            keeper.keep(run.step, kept_state_of(run))
        keeper.settle(run.step)

    def discard_kept(self) -> None:
        """Let kept state go when the session closes: it is elsewhere too."""
        self._engine.keeper.discard()

    def train_step(
        self,
        inputs: Mapping[str, Tensor],
        *,
        denominator: float,
        step: int,
        learning_rate: float,
        completed: Callable[[Timeline], None] = lambda _: None,
    ) -> StepResult:
        """Run one optimizer step over a whole batch; its last writes may go on behind it.

        Args:
            inputs: the batch, rows first, as planned; it is used up when this returns.
            denominator: what the summed loss is divided by.
            step: number of this step; the first is 1.
            completed: called once the step is complete, in this call, a later one or `settle`.

        Raises:
            InputError: the batch has another shape than planned.
            NonFiniteError: the loss or the gradient is NaN or infinite; names the block. The
                session can only be closed.
        """
        feeds = self._cut(inputs, denominator)
        return self._engine.train_step(
            feeds, step=step, learning_rate=learning_rate, completed=completed
        )

    def settle(self) -> None:
        """Block until all steps are complete.

        Raises:
            StorageError: the disk is full or fails; names the step whose write failed.
        """
        self._engine.settle()

    def peaks_of(self, result: StepResult) -> Mapping[str, int]:
        """The largest use of each tier's pools in a training step."""
        peaks: dict[str, int] = {}
        tiers = {pool.id: pool.tier for pool in self.programs["train_step"].pools}
        for pool, peak in result.peak_bytes.items():
            peaks[tiers[pool]] = peaks.get(tiers[pool], 0) + peak
        return peaks

    def evaluate(self, inputs: Mapping[str, Tensor], *, denominator: float) -> StepResult:
        """Run the forward of a whole batch, without dropout; see `train_step`."""
        return self._engine.evaluate(self._cut(inputs, denominator))

    def hand_out(self, states: frozenset[tuple[str, str]], take: Callable[[Piece], None]) -> None:
        """Give every piece of the wanted (parameter, state) pairs to `take`, which copies it."""

        def drain(state: str, piece: ParameterPiece) -> None:
            if (piece.parameter, state) in states:
                take(
                    Piece(
                        parameter=piece.parameter,
                        state=state,
                        start=piece.start,
                        values=piece.tensor,
                    )
                )

        self._engine.save(drain)

    def copy_parameters(self) -> dict[str, Tensor]:
        """Copy all parameters, the exact ones where there are masters, in their shapes."""
        exact = "master" if "master" in self.layout.dtypes else "param"
        dtypes = {state: getattr(torch, name) for state, name in self.layout.dtypes.items()}
        copies: dict[str, Tensor] = {}
        for name, parameter in self.model.parameters.items():
            dtype: torch.dtype = dtypes[exact if parameter.trainable else "param"]
            copies[str(name)] = torch.empty(parameter.shape, dtype=dtype)
        wanted = frozenset(
            (str(name), exact if parameter.trainable else "param")
            for name, parameter in self.model.parameters.items()
        )

        def take(piece: Piece) -> None:
            flat = copies[piece.parameter].view(-1)
            flat[piece.start : piece.start + piece.values.numel()].copy_(piece.values)

        self.hand_out(wanted, take)
        return copies

    def close(self) -> None:
        """Give all memory and the scratch space back."""
        with self._held:
            self._engine.close()

    def _cut(self, inputs: Mapping[str, Tensor], denominator: float) -> list[dict[str, Tensor]]:
        rows = self.plan.numerics.microbatch_rows.value
        self._check_inputs(inputs)
        divisor = torch.tensor(float(denominator), dtype=torch.float32)
        return [
            {
                DENOMINATOR: divisor,
                **{name: tensor[first : first + rows] for name, tensor in inputs.items()},
            }
            for first in range(0, self.global_rows, rows)
        ]

    def _check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        planned = {
            str(value.id): value
            for value in whole_of(self.model).values.values()
            if value.producer is None and value.id != DENOMINATOR
        }
        if set(inputs) != set(planned):
            raise _other_batch(
                f"it has {', '.join(sorted(inputs))}; planned were {', '.join(sorted(planned))}"
            )
        for name, value in planned.items():
            found = tuple(inputs[name].shape)
            wanted = (self.global_rows, *value.shape[1:])
            if found != wanted:
                raise _other_batch(f"{name} has shape {list(found)}, planned was {list(wanted)}")
            dtype = str(inputs[name].dtype).removeprefix("torch.")
            if dtype != value.dtype:
                raise _other_batch(f"{name} is {dtype}, planned was {value.dtype}")


def _prove_alone(model: Model, plan: Plan) -> Joint:
    programs: dict[ProgramKind, Program] = {
        kind: lower_plan(plan, model, kind) for kind in list_kinds(plan)
    }
    return Joint(
        programs=programs,
        proofs={kind: verify_program(program, model) for kind, program in programs.items()},
        transport=None,
    )


def _find_process_bytes(plan: Plan, baseline_bytes: int | None) -> int | None:
    """What the process may hold, where its memory is the device tier; a host tier is on top."""
    if baseline_bytes is None or plan.numerics.device != "cpu":
        return None
    return baseline_bytes + plan.budget_bytes["device"] + plan.budget_bytes.get("host", 0)


def _check_optimizer(plan: Plan, optimizer: Optimizer, max_grad_norm: float | None) -> None:
    planned = plan.optimizer
    name = type(optimizer).__name__.lower()
    if planned.name != name or planned.states != optimizer.state_names:
        raise InputError(
            f"the plan is for {planned.name} with states {', '.join(planned.states) or 'none'},"
            f" this is {name} with {', '.join(optimizer.state_names) or 'none'}",
            where="optimizer",
            fix="make the plan again for this optimizer",
        )
    if planned.clips != (max_grad_norm is not None):
        raise InputError(
            f"the plan {'clips' if planned.clips else 'does not clip'} gradients, but"
            f" max_grad_norm is {max_grad_norm}",
            where="max_grad_norm",
            fix="make the plan again with this setting",
        )


def _other_batch(what: str) -> InputError:
    return InputError(
        f"the batch is not the planned one: {what}",
        where="batch",
        fix="give batches of the planned shape, or make a plan for this one",
    )
