"""Saves of a run: checkpoints by step, and the model at the end.

In: a session, what the run is made of, a step. Out: folders that `from_pretrained` loads; from a
checkpoint any plan of the same model can resume bitwise. The model lies in its source's dtype.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from packhorse.checkpoint.folders import find_checkpoints
from packhorse.checkpoint.json_values import JsonObject, JsonValue
from packhorse.checkpoint.manifest import RunState
from packhorse.checkpoint.save import (
    AddFiles,
    CheckpointWriter,
    ModelWriter,
    Piece,
    copy_model_files,
)
from packhorse.checkpoint.tensor_plan import TensorPlan, plan_tensors
from packhorse.errors import MismatchError
from packhorse.model.parts import whole_of
from packhorse.plan.spec import Plan
from packhorse.storage.space import ensure_space
from packhorse.trainer.crew import ALONE, Crew
from packhorse.trainer.frozen_values import FrozenValues, ValueSource
from packhorse.trainer.gathering import gather_states
from packhorse.trainer.model_sources import CONFIG_NAME
from packhorse.trainer.numerics import describe_numerics, list_changes
from packhorse.trainer.preparation import PreparedRun
from packhorse.trainer.run_folder import refuse_complete
from packhorse.trainer.save_sizes import size_tensors
from packhorse.trainer.session import Session


class RunSaver:
    """Saves one run.

    Args:
        dtypes: of the parameters at their source, by canonical name.
        source: where the run's values come from; read at each save where `reads_source`.
        crew: all ranks save together: the first one writes what the others hand over.
    """

    def __init__(
        self,
        session: Session,
        prepared: PreparedRun,
        plan: Plan,
        *,
        dtypes: Mapping[str, str],
        source: ValueSource,
        crew: Crew = ALONE,
    ) -> None:
        self._session = session
        self._prepared = prepared
        self._plan = plan
        self._crew = crew
        whole = whole_of(session.model)
        self._tensors = plan_tensors(whole, session.layout, saved_dtypes=dtypes)
        self._sizes = size_tensors(self._tensors, model_only=prepared.recipe.save_only_model)
        self._frozen = FrozenValues(whole, session.layout, dtypes, source)

    @property
    def reads_source(self) -> bool:
        """Whether saves read the source again: the run holds frozen parameters rounded."""
        return bool(self._frozen.states)

    @property
    def is_resumable(self) -> bool:
        """Whether a run can go on from a checkpoint: it holds more than the model."""
        return not self._prepared.recipe.save_only_model

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint."""
        return self._sizes.checkpoint_bytes

    @property
    def model_bytes(self) -> int:
        """Size of the model at the end."""
        return self._sizes.model_bytes

    def refuse_complete(self) -> None:
        """Refuse to begin a run anew that is complete.

        Raises:
            InputError: all its steps are done and its model is saved.
        """
        if self._crew.rank:
            return
        refuse_complete(self._prepared.recipe.run_folder, self._prepared.data.num_steps)

    def ensure_space(self, *, first_step: int, num_steps: int) -> None:
        """Refuse a run whose checkpoints and final model will not fit on the disk.

        Raises:
            StorageError: with need and have.
        """
        recipe = self._prepared.recipe
        num_saves = 0
        if recipe.save_steps is not None:
            num_saves = num_steps // recipe.save_steps - (first_step - 1) // recipe.save_steps
            num_saves += bool(num_steps % recipe.save_steps)
        there = len(find_checkpoints(recipe.run_folder))
        limit = recipe.save_total_limit
        # A new checkpoint is complete before the oldest one goes.
        most = there + num_saves if limit is None else min(there + num_saves, limit + 1)
        need_bytes = max(0, most - there) * self.checkpoint_bytes + self.model_bytes
        ensure_space(recipe.run_folder, need_bytes, "what this run saves")

    def save_checkpoint(self, step: int) -> Path:
        """Save the state after `step` optimizer steps; blocks until it is on the disk.

        Raises:
            StorageError: the disk is full or fails; earlier checkpoints are untouched.
        """
        recipe = self._prepared.recipe
        if self._crew.rank:
            self._hand_over(model_only=recipe.save_only_model)
            return Path(self._crew.lead(str))
        with CheckpointWriter(
            recipe.run_folder,
            self.describe_state(step),
            self._tensors,
            add_files=self._add_files(),
            model_only=recipe.save_only_model,
        ) as writer:
            self._hand_out(writer.states, writer.write)
            limit = recipe.save_total_limit
            # Others wait: nobody is to be in the next step while this one brings files to the disk.
            return Path(self._crew.lead(lambda: str(writer.commit(save_total_limit=limit))))

    def save_model(self) -> Path:
        """Save the model at the top of the run folder; blocks until it is on the disk.

        Raises:
            StorageError: the disk is full or fails.
        """
        folder = self._prepared.recipe.run_folder
        if self._crew.rank:
            self._hand_over(model_only=True)
            return Path(self._crew.lead(str))
        with ModelWriter(folder, self._tensors, add_files=self._add_files()) as writer:
            self._hand_out(writer.states, writer.write)
            return Path(self._crew.lead(lambda: str(writer.commit())))

    def check_state(self, state: RunState) -> tuple[str, ...]:
        """Refuse a checkpoint of other data, seed or batch; say what else differs.

        Raises:
            MismatchError: the run would not continue where it stopped.
        """
        own = self.describe_state(state.step)
        for name, theirs in state.data_position.items():
            mine = own.data_position.get(name)
            if name != "step" and mine != theirs:
                raise MismatchError(
                    f"the checkpoint's {name} is {theirs}, this run's is {mine}",
                    where=f"checkpoint of step {state.step}",
                    fix="use the data, the seed and the batch that the run began with, or begin a"
                    " new run from the checkpoint's weights:\nname it as model_name_or_path",
                )
        if state.optimizer.get("name") != own.optimizer["name"]:
            raise MismatchError(
                f"the checkpoint is of {state.optimizer.get('name')}, this run uses"
                f" {own.optimizer['name']}",
                where="recipe: optim",
                fix="resume with the same optimizer",
            )
        changed = list_changes(state.numerics, own.numerics)
        if not changed:
            return ()
        return ("numerics differ from the checkpoint's, so bits may too: " + "; ".join(changed),)

    def describe_state(self, step: int) -> RunState:
        """The run's state after `step`, besides its tensors."""
        prepared, numerics = self._prepared, self._plan.numerics
        data = prepared.data
        return RunState(
            model=self._session.model.fingerprint,
            step=step,
            workers=numerics.num_workers,
            data_position={
                "step": step,
                "seed": prepared.recipe.seed,
                "global_batch_size": prepared.cut.global_rows,
                "row_length": data.row_length,
                "num_rows": data.train.order.num_rows,
                "data": data.digest,
            },
            random={"seed": prepared.recipe.seed, "key": "seed, step, micro-batch, random node"},
            numerics=describe_numerics(numerics),
            optimizer=_describe_optimizer(prepared),
            trainer={"num_steps": data.num_steps, "model": prepared.recipe.model_name_or_path},
        )

    def _hand_out(self, states: frozenset[tuple[str, str]], take: Callable[[Piece], None]) -> None:
        gather_states(self._session, self._crew, states - self._frozen.states, take)
        self._frozen.hand_out(take)

    def _hand_over(self, *, model_only: bool) -> None:
        """Give what this rank holds to the first one, which saves it."""
        optimizer = () if model_only else self._tensors.optimizer
        states = TensorPlan(model=self._tensors.model, optimizer=optimizer).states
        gather_states(self._session, self._crew, states - self._frozen.states, lambda _: None)

    def _add_files(self) -> AddFiles:
        source, tokenizer = self._prepared.source, self._prepared.data.tokenizer
        has_own_tokenizer = self._prepared.recipe.tokenizer_name_or_path is not None

        def add(target: Path) -> None:
            if source.weights is not None:
                copy_model_files(source.folder)(target)
            else:
                shutil.copyfile(source.config, target / CONFIG_NAME)
            if tokenizer is not None and (has_own_tokenizer or source.weights is None):
                tokenizer.inner.save_pretrained(str(target))

        return add


def _describe_optimizer(prepared: PreparedRun) -> JsonObject:
    recipe = prepared.recipe
    described: dict[str, JsonValue] = {"name": recipe.optim, "weight_decay": recipe.weight_decay}
    if recipe.optim == "sgd":
        return {**described, "momentum": recipe.sgd_momentum}
    return {
        **described,
        "betas": [recipe.adam_beta1, recipe.adam_beta2],
        "eps": recipe.adam_epsilon,
    }
