"""How large the saves of a run are.

In: a model, its layout and the dtypes of its source. Out: bytes of a checkpoint and of the model at
the end. The same figures are promised before a run and asked for when it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.checkpoint.save import SMALL_FILES_BYTES
from packhorse.checkpoint.tensor_plan import TensorPlan, plan_tensors
from packhorse.compiler.layout import lay_out_chunks
from packhorse.model.parts import whole_of
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.trainer.preparation import PreparedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSizes:
    """Bytes of files, configs and tokenizers included at their most."""

    checkpoint_bytes: int
    model_bytes: int


def size_tensors(tensors: TensorPlan, *, model_only: bool) -> SaveSizes:
    """Add up the files of what a run saves; `model_only` checkpoints hold no optimizer states."""
    alone_bytes = TensorPlan(model=tensors.model, optimizer=()).file_bytes() + SMALL_FILES_BYTES
    whole_bytes = tensors.file_bytes() + SMALL_FILES_BYTES
    return SaveSizes(
        checkpoint_bytes=alone_bytes if model_only else whole_bytes, model_bytes=alone_bytes
    )


def size_saves(prepared: PreparedRun, plan: Plan, model: Model) -> SaveSizes:
    """Size the saves of a run that has a plan and has not begun.

    Raises:
        ModelError, FileFormatError: the weights that the run begins with cannot be read.
    """
    weights = prepared.open_weights()
    try:
        dtypes: Mapping[str, str] = weights.dtypes
    finally:
        weights.close()
    tensors = plan_tensors(whole_of(model), lay_out_chunks(plan, model), saved_dtypes=dtypes)
    return size_tensors(tensors, model_only=prepared.recipe.save_only_model)
