"""A plan at work in a loop of one's own: `packhorse.Run`.

In: a module, an optimizer, a plan. Out: losses, step by step, and the weights at the end. The run
owns the parameters: the module's become `meta` when the first batch comes, until `state_dict` or
`save` hands them back; the next step makes them `meta` again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from packhorse.checkpoint.manifest import MANIFEST_NAME, RunState
from packhorse.checkpoint.resume import SavedRun
from packhorse.checkpoint.save import AddFiles, CheckpointWriter, ModelWriter
from packhorse.checkpoint.tensor_plan import TensorPlan, plan_tensors
from packhorse.errors import InputError, MismatchError, RecipeError
from packhorse.graph.export import describe_parameters, is_transformers_model
from packhorse.machine.budget import DEFAULT_SCRATCH
from packhorse.model.spec import Model
from packhorse.optim.groups import assign_groups, find_module_kinds, hyperparameters
from packhorse.optim.optimizers import AdamW, Optimizer
from packhorse.plan.spec import Plan
from packhorse.program.program import ProgramKind
from packhorse.runtime.scratch import choose_scratch
from packhorse.runtime.step_result import StepResult
from packhorse.timeline.spec import Timeline
from packhorse.trainer.candidates import TracingRequest, trace_plan
from packhorse.trainer.counting import Denominators, make_denominators, watch_loss
from packhorse.trainer.frozen_values import FrozenValues, SavedWeights, ValueSource
from packhorse.trainer.hand_over import give_back, map_saved, move_to_meta
from packhorse.trainer.numerics import COMPUTE_DTYPES, describe_numerics, list_changes
from packhorse.trainer.run_program import RunProgram
from packhorse.trainer.session import Session
from packhorse.trainer.weight_files import FolderWeights
from packhorse.trainer.weights import ModuleWeights, WeightSource


class Run:
    """Trains a module by a plan; a context manager.

    Args:
        model: the module that the plan was found for; parameters may be on `meta` with `weights`.
        plan: from `find_plan`, or read from a file.
        optimizer: of the kind that the plan is for; by default `AdamW()`.
        weights: a Hugging Face folder to stream the weights from; by default the module's own.
        max_grad_norm: clip gradients to this global norm; None exactly when the plan does not.
        seed: of dropout.
        scratch: folder of the disk tier; by default those that the plan was made with.
        audit: check every task against what it declares (slow).

    The model is traced when the first batch comes; the errors of `Session` come then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        optimizer: Optimizer | None = None,
        weights: str | Path | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        scratch: str | Path | None = None,
        audit: bool = False,
    ) -> None:
        self._module = model
        self._plan = plan
        self._optimizer = AdamW() if optimizer is None else optimizer
        self._folder = None if weights is None else Path(weights)
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        self._scratch = choose_scratch(scratch, plan.drives, plan.scratch or DEFAULT_SCRATCH)
        self._audit = audit
        self._learning_rate = self._optimizer.lr
        self._step = 0
        self._session: Session | None = None
        self._denominators: Denominators | None = None
        self._dtypes: Mapping[str, str] = {}
        # Kept open while the run holds frozen parameters rounded.
        self._frozen: FrozenValues | None = None
        self._last: StepResult | None = None
        self._closed = False
        # Whether the module's parameters are the run's newest.
        self._handed_back = False
        _check_groups(model, plan, self._optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        try:
            if session is not None:
                session.__exit__(kind, error, trace)
        finally:
            self.close()

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._plan

    @property
    def model(self) -> Model:
        """The traced model; after the first batch."""
        return self._running().model

    @property
    def programs(self) -> Mapping[ProgramKind, RunProgram]:
        """The proved programs; after the first batch."""
        session = self._running()
        return {
            kind: RunProgram(program=program, model=session.model)
            for kind, program in session.programs.items()
        }

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are finished."""
        return self._step

    @property
    def learning_rate(self) -> float:
        """Rate of the next step; the optimizer's `lr` until it is set."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise InputError(f"the learning rate cannot be {value}", fix="give 0 or more")
        self._learning_rate = value

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping, where the plan computes it."""
        return None if self._last is None else self._last.grad_norm

    @property
    def timeline(self) -> Timeline | None:
        """What the last step did when; blocks until its last write is done."""
        return None if self._last is None else self._last.timeline

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Run one optimizer step over a global batch and give its loss.

        The last writes of the step may go on behind the next one. The batch is used up.

        Args:
            batch: rows first, of the shape that the plan was found for.

        Raises:
            InputError: the batch has another shape, or nothing to learn from.
            NonFiniteError: the loss or gradient is NaN or infinite.
        """
        session, denominators = self._prepare(batch)
        denominator = denominators.find(batch)
        self._take_again()
        self._last = session.train_step(
            batch,
            denominator=denominator,
            step=self._step + 1,
            learning_rate=self._learning_rate,
        )
        self._step += 1
        return self._last.loss

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """Give the loss of a global batch without dropout; nothing changes.

        Raises:
            InputError: the batch has another shape, or nothing to learn from.
        """
        session, denominators = self._prepare(batch)
        return session.evaluate(batch, denominator=denominators.find(batch)).loss

    def state_dict(self) -> dict[str, Tensor]:
        """Copy parameters and buffers, under the module's own names, ties included.

        The module gets its parameters back: they share the copies' memory until the next step.

        Raises:
            InputError: there are no values: no batch came yet, or the run is closed.
        """
        if self._session is not None:
            copies = self._session.copy_parameters()
            give_back(self._module, copies)
            self._handed_back = True
            for spec in describe_parameters(self._module).values():
                copies |= dict.fromkeys(spec.aliases, copies[spec.name])
        else:
            state = self._module.state_dict()
            if any(tensor.is_meta for tensor in state.values()):
                self._running()
            copies = {}
        return {
            name: copies[name] if name in copies else tensor.clone()
            for name, tensor in self._module.state_dict().items()
        }

    def save(self, folder: str | Path) -> Path:
        """Save the model, tensor by tensor, in its source's dtype.

        A transformers model becomes a folder for `from_pretrained`; another module a folder with
        model.safetensors under its parameters' names. Frozen parameters are read again from the
        folder that they came from; the module's own are saved in the dtype that they are used in,
        for their exact values are not kept. The module gets its parameters back, mapped
        from the saved files: they take memory only where they are used.

        Raises:
            InputError: no batch came yet, or the run is closed.
            StorageError: the disk is full or unwritable.
        """
        session = self._running()
        with ModelWriter(Path(folder), self._tensors(), add_files=self._add_files()) as writer:
            self._hand_out(session, writer)
            saved = writer.commit()
        give_back(self._module, map_saved(saved))
        self._handed_back = True
        return saved

    def save_checkpoint(self, folder: str | Path, *, save_total_limit: int | None = None) -> Path:
        """Save everything to resume from, in `folder/checkpoint-N`; see `load`.

        Raises:
            StorageError: the disk is full or unwritable; earlier checkpoints are untouched.
        """
        session = self._running()
        state = RunState(
            model=session.model.fingerprint,
            step=self._step,
            workers=self._plan.numerics.num_workers,
            data_position={"step": self._step},
            random={"seed": self._seed},
            numerics=describe_numerics(self._plan.numerics),
            optimizer={"name": self._plan.optimizer.name},
            trainer={"learning_rate": self._learning_rate},
        )
        with CheckpointWriter(
            Path(folder), state, self._tensors(), add_files=self._add_files()
        ) as writer:
            self._hand_out(session, writer)
            return writer.commit(save_total_limit=save_total_limit)

    def load(
        self, folder: str | Path, batch: Mapping[str, Tensor] | None = None
    ) -> tuple[str, ...]:
        """Load a checkpoint with its step and optimizer states, or a model folder's weights alone.

        Args:
            batch: one of the batches to come, where no batch came yet; the model is traced by it.

        Returns:
            What the checkpoint was computed with otherwise than this run's plan does, in words;
            where there is anything, the curve goes on with other roundings.

        Raises:
            InputError: no batch came yet and none is given.
            FileFormatError: a file is missing or damaged.
            MismatchError: it is of another model, optimizer or seed.
        """
        path = Path(folder)
        session = self._running() if batch is None else self._prepare(batch)[0]
        self._take_again()
        if (path / MANIFEST_NAME).is_file():
            with SavedRun(path) as saved:
                self._check_state(path, saved.run)
                session.resume(saved)
                self._keep_source(session, SavedWeights(path))
                self._step = saved.run.step
                rate = saved.run.trainer.get("learning_rate")
                if isinstance(rate, int | float):
                    self._learning_rate = float(rate)
                return list_changes(saved.run.numerics, describe_numerics(self._plan.numerics))
        source = FolderWeights(self._module, path)
        try:
            session.begin(source)
        except BaseException:
            source.close()
            raise
        self._keep_source(session, source)
        self._step = 0
        return ()

    def close(self) -> None:
        """Give all memory and the scratch space back. Closing twice is harmless."""
        self._closed = True
        if self._frozen is not None:
            self._frozen.close()
            self._frozen = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def _prepare(self, batch: Mapping[str, Tensor]) -> tuple[Session, Denominators]:
        if self._closed:
            raise InputError("the run is closed", fix="use it inside its `with` block")
        if self._session is None or self._denominators is None:
            self._open(batch)
        assert self._session is not None
        assert self._denominators is not None
        return self._session, self._denominators

    def _open(self, batch: Mapping[str, Tensor]) -> None:
        check_batch(self._module, batch)
        numerics = self._plan.numerics
        rows, count = numerics.microbatch_rows.value, numerics.num_microbatches
        found = next(iter(batch.values())).shape[0]
        if found != rows * count:
            raise InputError(
                f"the batch has {found} rows, the plan is for {rows * count} ({rows} x {count})",
                where="batch",
                fix="give batches of the planned size, or make a plan for this one",
            )
        example = {name: tensor[:rows] for name, tensor in batch.items()}
        with watch_loss(self._module) as watcher:
            traced = trace_plan(
                self._module,
                example,
                TracingRequest(
                    name=type(self._module).__name__,
                    groups=_planned_groups(self._plan),
                    compute_dtype=COMPUTE_DTYPES[numerics.compute_dtype],
                    device=numerics.device,
                ),
                rows=rows,
                loss_chunk_tokens=numerics.loss_chunk_tokens.value,
            )
        self._denominators = make_denominators(
            self._module, watcher.kind, example, rows=rows, num_microbatches=count
        )
        weights: WeightSource
        if self._folder is None:
            weights = ModuleWeights(self._module)
        else:
            weights = FolderWeights(self._module, self._folder)
        session = Session(
            traced,
            self._plan,
            optimizer=self._optimizer,
            max_grad_norm=self._max_grad_norm,
            seed=self._seed,
            scratch=self._scratch,
            audit=self._audit,
        )
        try:
            session.begin(weights)
        except BaseException:
            session.close()
            weights.close()
            raise
        self._dtypes = weights.dtypes
        self._keep_source(session, weights)
        move_to_meta(self._module)
        self._session = session

    def _keep_source(self, session: Session, source: ValueSource) -> None:
        """Keep open where the values came from if saves have to read it again; else close it."""
        if self._frozen is not None:
            self._frozen.close()
            self._frozen = None
        frozen = FrozenValues(session.model, session.layout, self._dtypes, source)
        if isinstance(source, ModuleWeights):
            # Kept, they would take memory that no plan counts.
            held = {parameter: session.layout.dtypes[state] for parameter, state in frozen.states}
            self._dtypes = {**self._dtypes, **held}
        elif frozen.states:
            source.release()
            self._frozen = frozen
            return
        source.close()

    def _hand_out(self, session: Session, writer: CheckpointWriter | ModelWriter) -> None:
        frozen = self._frozen
        session.hand_out(writer.states - (frozen.states if frozen else frozenset()), writer.write)
        if frozen:
            frozen.hand_out(writer.write)

    def _take_again(self) -> None:
        """Drop what was handed back: it is about to be out of date."""
        if self._handed_back:
            move_to_meta(self._module)
            self._handed_back = False

    def _check_state(self, folder: Path, state: RunState) -> None:
        name, seed = state.optimizer.get("name"), state.random.get("seed")
        if name != self._plan.optimizer.name:
            raise MismatchError(
                f"the checkpoint is of the optimizer {name}, this run's is"
                f" {self._plan.optimizer.name}",
                where=str(folder),
                fix="resume with the same optimizer, or begin from the checkpoint's weights alone:"
                " Run(weights=FOLDER)",
            )
        if seed != self._seed:
            raise MismatchError(
                f"the checkpoint's seed is {seed}, this run's is {self._seed}",
                where=str(folder),
                fix=f"give the seed that the run began with: Run(seed={seed})",
            )

    def _running(self) -> Session:
        if self._closed:
            raise InputError(
                "the run is closed, and its weights are gone with it",
                fix="call state_dict() or save() before the end of the `with` block",
            )
        if self._session is None:
            raise InputError(
                "no batch came yet, so the model is not traced",
                fix="call step(batch) or evaluate(batch) first; load takes batch=",
            )
        return self._session

    def _tensors(self) -> TensorPlan:
        session = self._running()
        return plan_tensors(session.model, session.layout, saved_dtypes=self._dtypes)

    def _add_files(self) -> AddFiles:
        def add(target: Path) -> None:
            for name in ("config", "generation_config"):
                config: Any = getattr(self._module, name, None)  # transformers' own classes
                if hasattr(config, "save_pretrained"):
                    config.save_pretrained(str(target))

        return add


def check_batch(module: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Refuse what is no batch for a module.

    Raises:
        InputError: names the tensor and what is wrong with it.
    """
    if not batch:
        raise InputError("the batch is empty", where="batch", fix="give a dict of tensors")
    sizes = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in batch.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        raise InputError(
            f"the tensors of a batch must have the same number of rows, first: {listed}",
            where="batch",
            fix="put the rows first in every tensor",
        )
    if is_transformers_model(module) and "labels" not in batch:
        raise InputError(
            "the batch has no labels, so the model gives no loss",
            where=f"batch: {', '.join(batch)}",
            fix="add labels, for causal language models a copy of input_ids",
        )


def _planned_groups(plan: Plan) -> dict[str, str]:
    return {piece.parameter: chunk.group for chunk in plan.chunks for piece in chunk.pieces}


def _check_groups(module: nn.Module, plan: Plan, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would treat a parameter otherwise than its chunk's group is."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    kinds = find_module_kinds(module)
    wanted = assign_groups([n for n, _ in module.named_parameters()], optimizer, module_kinds=kinds)
    planned = _planned_groups(plan)
    for name in trained:
        if name in planned and not _is_same(optimizer, wanted[name], planned[name]):
            raise InputError(
                f"the parameter {name} is in group {wanted[name]!r} of this optimizer, but the plan"
                f" keeps it in a chunk of group {planned[name]!r}",
                where="optimizer",
                fix="give find_plan the optimizer that Run is given",
            )


def _is_same(optimizer: Optimizer, wanted: str, planned: str) -> bool:
    if wanted == planned:
        return True
    try:
        return hyperparameters(optimizer, planned) == hyperparameters(optimizer, wanted)
    except RecipeError:
        # The plan was made for an optimizer with other groups.
        return False
