"""Does a plan speak of this model? Checked before anything is lowered.

In: a plan and a model. Out: nothing, or an error that names the first difference.
"""

from __future__ import annotations

from packhorse.errors import MismatchError, RefusedError
from packhorse.model.spec import Model
from packhorse.plan.spec import ChunkPlan, Plan
from packhorse.program.buffers import TierName

_REMAKE = "make a plan for this model and this batch"


def check_plan(plan: Plan, model: Model) -> None:
    """Refuse a plan that was made for another model, shape or set of tiers.

    Raises:
        MismatchError: fingerprint, shape or blocks differ from the model's.
        RefusedError: the plan asks for what its budget or this compiler does not have.
    """
    _check_model(plan, model)
    _check_blocks(plan, model)
    _check_numerics(plan)
    for index, chunk in enumerate(plan.chunks):
        _check_tiers(plan, index, chunk)


def _check_model(plan: Plan, model: Model) -> None:
    if plan.model != model.fingerprint:
        raise MismatchError(
            f"the plan was made for model {plan.model_name} ({plan.model}), "
            f"not for {model.name} ({model.fingerprint})",
            where="plan.model",
            fix=_REMAKE,
        )
    planned = (plan.numerics.microbatch_rows.value, plan.length)
    if planned != (model.rows, model.length):
        raise MismatchError(
            f"the plan is for micro-batches of {planned[0]} x {planned[1]} tokens, "
            f"the model was traced for {model.rows} x {model.length}",
            where="plan.numerics.microbatch_rows and plan.length",
            fix="trace the model at the plan's shape, or " + _REMAKE,
        )


def _check_blocks(plan: Plan, model: Model) -> None:
    if len(plan.blocks) != len(model.blocks):
        raise MismatchError(
            f"the plan has {len(plan.blocks)} blocks, the model {len(model.blocks)}",
            where="plan.blocks",
            fix=_REMAKE,
        )
    for index, (planned, block) in enumerate(zip(plan.blocks, model.blocks, strict=True)):
        if planned.name != block.name:
            raise MismatchError(
                f"block {index} is {planned.name} in the plan and {block.name} in the model",
                where=f"plan.blocks[{index}]",
                fix=_REMAKE,
            )


def _check_numerics(plan: Plan) -> None:
    if plan.numerics.num_microbatches < 1:
        raise RefusedError(
            f"the plan has {plan.numerics.num_microbatches} micro-batches; a step needs at least 1",
            where="plan.numerics.num_microbatches",
            fix=_REMAKE,
        )
    if plan.numerics.tied_sum != "per_microbatch":
        raise RefusedError(
            f"tied_sum {plan.numerics.tied_sum} is not possible when micro-batches run one after "
            "another; only per_microbatch is",
            where="plan.numerics.tied_sum",
            fix="set numerics.tied_sum: per_microbatch",
        )


def _check_tiers(plan: Plan, index: int, chunk: ChunkPlan) -> None:
    wanted: dict[str, TierName] = {"parameters": chunk.parameters.value}
    if chunk.trainable:
        wanted |= {"gradients": chunk.gradients.value, "optimizer": chunk.optimizer.value}
    for states, tier in wanted.items():
        if tier not in plan.budget_bytes:
            raise RefusedError(
                f"chunk {index} keeps its {states} in tier {tier}, "
                f"but the plan's budget has only {', '.join(sorted(plan.budget_bytes))}",
                where=f"plan.chunks[{index}].{states}",
                fix=f"grant tier {tier} a budget, or choose a tier that has one",
            )
