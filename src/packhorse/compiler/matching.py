"""Can a plan be lowered for a model? Checked before anything is.

In: a plan and a model. Out: nothing, or an error that names what is in the way.
"""

from __future__ import annotations

from packhorse.errors import MismatchError, RefusedError
from packhorse.model.parts import find_shared
from packhorse.model.spec import Model
from packhorse.plan.identity import check_plan
from packhorse.plan.spec import ChunkPlan, PipelinePlan, Plan
from packhorse.program.buffers import TierName

_REMAKE = "make a plan for this model and this batch"


def check_lowering(plan: Plan, model: Model) -> None:
    """Refuse a plan that was made for another model, or asks for what cannot be done.

    Raises:
        MismatchError: it is of another model or shape; names the first difference.
        RefusedError: it asks for what its budget or this compiler does not have.
    """
    # A search lowers thousands of plans of one model, so the long comparison is for strangers. How
    # chunks hold the parameters is checked, place by place, when they are laid out.
    if _identity_of_plan(plan) != _identity_of_model(model):
        check_plan(plan, model)
    _check_numerics(plan)
    _check_order(plan, model)
    if plan.boundaries.value not in plan.budget_bytes:
        raise RefusedError(
            f"values between blocks wait in tier {plan.boundaries.value}, "
            f"but the plan's budget has only {', '.join(sorted(plan.budget_bytes))}",
            where="plan.boundaries",
            fix="grant that tier a budget, or set boundaries: device",
        )
    _check_offload(plan)
    for index, chunk in enumerate(plan.chunks):
        _check_tiers(plan, index, chunk)


def _identity_of_plan(plan: Plan) -> tuple[object, ...]:
    names = tuple(block.name for block in plan.blocks)
    return plan.model, plan.numerics.microbatch_rows.value, plan.length, names


def _identity_of_model(model: Model) -> tuple[object, ...]:
    names = tuple(block.name for block in model.blocks)
    return model.fingerprint, model.rows, model.length, names


def _check_numerics(plan: Plan) -> None:
    if plan.numerics.num_workers != 1:
        raise RefusedError(
            f"the plan has {plan.numerics.num_workers} workers; one process is one worker",
            where="plan.numerics.num_workers",
            fix="set numerics.num_workers: 1",
        )
    if plan.numerics.num_microbatches < 1:
        raise RefusedError(
            f"the plan has {plan.numerics.num_microbatches} micro-batches; a step needs at least 1",
            where="plan.numerics.num_microbatches",
            fix=_REMAKE,
        )


def _check_order(plan: Plan, model: Model) -> None:
    if plan.pipeline is not None:
        _check_part(plan.pipeline, model)
        if plan.durable.value != "off":
            raise RefusedError(
                f"the state is to be kept every {plan.durable.value} steps, and ranks that share a"
                " model do not keep steps each for itself",
                where="plan.durable",
                fix="set durable: off, and save checkpoints: save_steps of the recipe",
            )
    elif plan.order.value == "scheduled":
        raise RefusedError(
            "the plan's order is that of a schedule, and it has none",
            where="plan.order",
            fix="set order: depth_first, or make the plan again for several ranks",
        )
    if model.part is not None:
        _check_shared(plan, model)
        return
    if plan.order.value == "depth_first" or plan.numerics.tied_sum == "per_step":
        return
    tied = model.summed_parameters
    if tied and plan.numerics.num_microbatches > 1:
        raise RefusedError(
            f"all micro-batches go through a block before the next one, but {tied[0]} is used by "
            "several blocks and its gradient is summed micro-batch by micro-batch",
            where="plan.order and plan.numerics.tied_sum",
            fix="set order: depth_first, or numerics.tied_sum: per_step (other numbers in the last "
            "bits)",
        )


def _check_part(pipeline: PipelinePlan, model: Model) -> None:
    owners = None if model.part is None else model.part.owners
    if owners == pipeline.owners:
        return
    planned = ", ".join(map(str, pipeline.bounds.value))
    raise MismatchError(
        f"the plan cuts the model into stages at blocks {planned}, and this"
        + (" is the whole model" if owners is None else " part is of another cut"),
        where=f"model {model.name}",
        fix="cut the model as the plan says",
    )


def _check_shared(plan: Plan, model: Model) -> None:
    assert model.part is not None
    shared = list(find_shared(model.part.whole, model.part.owners))
    if shared and plan.numerics.num_microbatches > 1 and plan.numerics.tied_sum != "per_step":
        raise RefusedError(
            f"{shared[0]} is used by blocks on several ranks, but its gradient is summed"
            " micro-batch by micro-batch",
            where="plan.numerics.tied_sum",
            fix="set numerics.tied_sum: per_step (other numbers in the last bits), or put its"
            " blocks on one rank",
        )


def _check_offload(plan: Plan) -> None:
    if not plan.offloads:
        return
    tier = plan.offload.value
    first = next(b.name for b in plan.blocks if b.activations.value == "offload")
    others = [name for name in ("host", "disk") if name in plan.budget_bytes]
    there = f"set offload: {' or '.join(others)}" if others else "grant tier host or disk a budget"
    if tier == "device":
        raise RefusedError(
            f"block {first} offloads what it saves, but the tier for that is device",
            where="plan.offload",
            fix=f"{there}, or activations: keep",
        )
    if tier not in plan.budget_bytes:
        raise RefusedError(
            f"block {first} offloads what it saves to tier {tier}, "
            f"but the plan's budget has only {', '.join(sorted(plan.budget_bytes))}",
            where="plan.offload",
            fix=f"{there}, or activations: keep",
        )


def _check_tiers(plan: Plan, index: int, chunk: ChunkPlan) -> None:
    wanted: dict[str, TierName] = {"parameters": chunk.parameters.value}
    if chunk.trainable:
        wanted |= {"gradients": chunk.gradients.value, "optimizer": chunk.optimizer.value}
    if plan.update_tiers[index] not in plan.budget_bytes:
        raise RefusedError(
            f"chunk {index} is updated in tier {plan.update_tiers[index]}, "
            f"but the plan's budget has only {', '.join(sorted(plan.budget_bytes))}",
            where=f"plan.chunks[{index}].update",
            fix="grant tier host a budget, or set update: device",
        )
    for states, tier in wanted.items():
        if tier not in plan.budget_bytes:
            raise RefusedError(
                f"chunk {index} keeps its {states} in tier {tier}, "
                f"but the plan's budget has only {', '.join(sorted(plan.budget_bytes))}",
                where=f"plan.chunks[{index}].{states}",
                fix=f"grant tier {tier} a budget, or choose a tier that has one",
            )
