"""Opens a checkpoint to resume from, under any plan.

In: a checkpoint folder, and the model and states that the new plan has. Out: any range of any
state of any parameter, by name, in the caller's memory. How the run that saved it had cut its
parameters leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from packhorse.checkpoint.folders import verify_checkpoint
from packhorse.checkpoint.manifest import RunState
from packhorse.checkpoint.tensor_files import TensorFiles, find_model_files
from packhorse.checkpoint.tensor_plan import GRAD, MASTER, PARAM, state_key
from packhorse.errors import FileFormatError, MismatchError
from packhorse.model.spec import Model
from packhorse.program.buffers import Layout


class SavedRun:
    """An open checkpoint. May be shared between threads; leaving the `with` block closes it.

    Args:
        checksums: read every file once and compare it; leave out right after `newest_complete`.

    Raises:
        FileFormatError: a needed part is missing or damaged, or only the model was saved.
    """

    def __init__(self, path: Path, *, checksums: bool = True) -> None:
        manifest = verify_checkpoint(path, checksums=checksums)
        self._path = path
        self._run = manifest.run
        states = [path / e.name for e in manifest.files if _holds_states(e.name)]
        self._model = TensorFiles(find_model_files(path), ties={})
        self._states = TensorFiles(states, ties={})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._model.close()
        self._states.close()

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self._path

    @property
    def run(self) -> RunState:
        """The run's state besides its tensors."""
        return self._run

    def check_model(self, model: Model, layout: Layout) -> None:
        """Refuse a checkpoint of another model, or one without a state that the plan needs.

        Raises:
            MismatchError: names the first difference.
            FileFormatError: a state of a trained parameter was not saved.
        """
        self._check_shapes({p.name: p.shape for p in model.parameters.values()})
        if model.fingerprint != self._run.model:
            raise MismatchError(
                f"the checkpoint is of a model with fingerprint {self._run.model}, this model has"
                f" {model.fingerprint}; parameters and shapes are the same",
                where=str(self._path),
                fix="use the model code and config that the run began with",
            )
        for parameter in model.parameters.values():
            for state in layout.dtypes if parameter.trainable else ():
                if state != GRAD:
                    self._key(parameter.name, state)

    def read_into(
        self, parameter: str, state: str, start: int, stop: int, destination: Tensor
    ) -> None:
        """Read elements `start` to `stop` of a parameter's state; see `TensorFiles.read_into`.

        `param` and `master` come from the exact values where the model's file is rounded.

        Raises:
            FileFormatError: the state was not saved, or a file became shorter.
            ValueError: the range lies outside of the parameter.
        """
        source, key = self._key(parameter, state)
        source.read_into(key, start, stop, destination)

    def _key(self, parameter: str, state: str) -> tuple[TensorFiles, str]:
        if state in (PARAM, MASTER):
            exact = state_key(parameter, MASTER)
            return (self._states, exact) if exact in self._states else (self._model, parameter)
        key = state_key(parameter, state)
        if key not in self._states:
            has_any = any(name.startswith(f"{parameter}/") for name in self._states.names)
            reason = "the optimizer kept other states" if has_any else "it was frozen"
            raise FileFormatError(
                f"the checkpoint has no {state} of {parameter!r}; when it was saved, {reason}",
                where=str(self._path),
                fix="resume with the same optimizer and freeze patterns, or begin a new run from"
                f" these weights: model_name_or_path: {self._path}",
            )
        return self._states, key

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if name not in self._model:
                raise self._mismatch(f"it has no parameter {name!r}")
            found = self._model.place(name).shape
            if found != shape:
                raise self._mismatch(
                    f"{name!r} has shape {list(found)} there, {list(shape)} in this model"
                )
        for name in self._model.names:
            if name not in shapes:
                raise self._mismatch(f"this model has no parameter {name!r}")

    def _mismatch(self, difference: str) -> MismatchError:
        return MismatchError(
            f"the checkpoint belongs to another model: {difference}",
            where=str(self._path),
            fix="resume with the model that the run began with",
        )


def _holds_states(name: str) -> bool:
    return name.startswith("optimizer-") and name.endswith(".safetensors")
