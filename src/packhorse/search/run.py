"""What a whole run takes: hours, tokens, checkpoints, disk and wear.

In: a plan, its model, profile and machine, and the counts of a run. Out: a `RunEstimate`. The time
of an evaluation comes from its own program, as that of a step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from packhorse.machine.spec import Machine
from packhorse.model.spec import ITEM_BYTES, Model
from packhorse.plan.spec import OptimizerPlan, Plan, Prediction
from packhorse.profile.spec import Profile
from packhorse.search.prediction import predict_evaluation_ns, predict_plan

STATE_ITEM_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """What a recipe asks for.

    `save_steps` is None when nothing is saved before the end; `checkpoints_kept` counts those on
    the disk at once between saves, None when all are kept. `stored_dtype` is the dtype of the
    weights in a checkpoint. `eval_rows` is None when there is no evaluation; with rows, evaluation
    runs before the first step, every `eval_steps` if given, and at the end.
    """

    num_steps: int
    tokens_per_step: int
    save_steps: int | None
    checkpoints_kept: int | None
    save_only_model: bool
    stored_dtype: str
    eval_steps: int | None = None
    eval_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """A run in numbers.

    `disk_bytes` is the most that lies on disks at once: scratch, the checkpoints kept and the one
    being written. `written_bytes` gives for `scratch` and `output` what the whole run writes there.
    `tokens_per_s` counts training alone.
    """

    num_steps: int
    step_ns: int
    run_ns: int
    tokens_per_s: float
    eval_ns: int
    num_checkpoints: int
    checkpoint_bytes: int
    checkpoint_ns: int
    scratch_bytes: int
    disk_bytes: int
    written_per_step_bytes: int
    written_bytes: Mapping[str, int]


def estimate_run(
    plan: Plan, model: Model, profile: Profile, machine: Machine, counts: RunCounts
) -> RunEstimate:
    """Estimate a run of `counts.num_steps` steps.

    A checkpoint is read from where the states lie and written at the disk's rate; a machine without
    a disk tier is taken to write at its memory's rate.

    Raises:
        MismatchError: the plan or profile belongs to another model.
    """
    prediction = plan.prediction or predict_plan(plan, model, profile, machine)
    checkpoint_bytes = size_checkpoint(
        model,
        plan.optimizer,
        save_only_model=counts.save_only_model,
        stored_dtype=counts.stored_dtype,
    )
    num_checkpoints = 0
    if counts.save_steps is not None:
        num_checkpoints = counts.num_steps // counts.save_steps
    checkpoint_ns = _checkpoint_ns(prediction, machine, checkpoint_bytes)
    eval_ns = _eval_ns(plan, model, profile, machine, counts)
    kept = num_checkpoints
    if counts.checkpoints_kept is not None:
        kept = min(kept, counts.checkpoints_kept)
    # A new checkpoint is whole before an old one goes, and the model itself is written at the end.
    model_bytes = _weight_bytes(model, counts.stored_dtype)
    lying = kept + (1 if num_checkpoints > kept else 0)
    scratch_bytes = prediction.scratch_bytes
    return RunEstimate(
        num_steps=counts.num_steps,
        step_ns=prediction.step_ns,
        run_ns=counts.num_steps * prediction.step_ns + num_checkpoints * checkpoint_ns + eval_ns,
        tokens_per_s=counts.tokens_per_step * 1e9 / max(prediction.step_ns, 1),
        eval_ns=eval_ns,
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_ns=checkpoint_ns,
        scratch_bytes=scratch_bytes,
        disk_bytes=scratch_bytes + lying * checkpoint_bytes + model_bytes,
        written_per_step_bytes=prediction.disk_written_bytes,
        written_bytes={
            "scratch": scratch_bytes + counts.num_steps * prediction.disk_written_bytes,
            "output": num_checkpoints * checkpoint_bytes + model_bytes,
        },
    )


def size_checkpoint(
    model: Model, optimizer: OptimizerPlan, *, save_only_model: bool, stored_dtype: str
) -> int:
    """Bytes of a checkpoint: weights, and the trained ones' states and master copy in float32."""
    states = len(optimizer.states) + optimizer.master
    state_bytes = 0 if save_only_model else model.num_trainable * states * STATE_ITEM_BYTES
    return _weight_bytes(model, stored_dtype) + state_bytes


def _weight_bytes(model: Model, stored_dtype: str) -> int:
    return model.num_parameters * ITEM_BYTES[stored_dtype]


def _checkpoint_ns(prediction: Prediction, machine: Machine, checkpoint_bytes: int) -> int:
    written = machine.link("device", "disk")
    read = machine.link("disk", "device")
    if written is None or read is None:
        return round(checkpoint_bytes * 1e9 / machine.memory_bytes_per_s)
    # What lies in the scratch file is read before it is written to the checkpoint.
    away_bytes = min(prediction.scratch_bytes, checkpoint_bytes)
    seconds = checkpoint_bytes / written.bytes_per_s + away_bytes / read.bytes_per_s
    return round(seconds * 1e9)


def _eval_ns(
    plan: Plan, model: Model, profile: Profile, machine: Machine, counts: RunCounts
) -> int:
    # One round before the first step, one every `eval_steps`, and one at the end.
    if counts.eval_rows is None:
        return 0
    num_microbatches = ceil(counts.eval_rows / plan.numerics.microbatch_rows.value)
    if not num_microbatches:
        return 0
    round_ns = predict_evaluation_ns(plan, model, profile, machine, num_microbatches)
    num_rounds = 2
    if counts.eval_steps is not None:
        num_rounds = 1 + ceil(counts.num_steps / counts.eval_steps)
    return num_rounds * round_ns
