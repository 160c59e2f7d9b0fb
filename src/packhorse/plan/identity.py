"""Whether a plan belongs to a model.

In: a plan (perhaps edited by hand) and a model. Out: nothing, or an error that names the first
difference: a block, a parameter, its pieces, or the shape of the micro-batches.
"""

from __future__ import annotations

from itertools import zip_longest

from packhorse.errors import MismatchError
from packhorse.model.spec import Model
from packhorse.plan.spec import Piece, Plan


def check_plan(plan: Plan, model: Model) -> None:
    """Refuse a plan that is not for this model at its micro-batch shape.

    Raises:
        MismatchError: says what the plan has and what the model has, at the first difference.
    """
    difference = _find_difference(plan, model)
    if difference is None and plan.model != model.fingerprint:
        difference = (
            f"the graphs differ: fingerprint {plan.model} in the plan, "
            f"{model.fingerprint} in the model"
        )
    if difference is not None:
        raise MismatchError(
            f"the plan (of {plan.model_name}) does not belong to this model ({model.name})",
            where=difference,
            fix="make a plan for this model with `packhorse plan RECIPE`",
        )
    shape = _find_shape_difference(plan, model)
    if shape is not None:
        raise MismatchError(
            "the plan is for micro-batches of another shape",
            where=shape,
            fix="plan again after changing max_length or the batch size",
        )


def _find_difference(plan: Plan, model: Model) -> str | None:
    for index, (ours, theirs) in enumerate(zip_longest(plan.blocks, model.blocks)):
        planned = ours.name if ours is not None else None
        traced = theirs.name if theirs is not None else None
        if planned != traced:
            return (
                f"block {index} is {planned or 'missing'} in the plan, "
                f"{traced or 'missing'} in the model"
            )
    pieces: dict[str, list[Piece]] = {}
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            pieces.setdefault(piece.parameter, []).append(piece)
    for name, parameter in model.parameters.items():
        end = 0
        for piece in pieces.pop(name, []):
            if piece.start != end:
                return f"parameter {name}: elements {min(end, piece.start)} on are not planned once"
            end = piece.stop
        if end != parameter.num_elements:
            return (
                f"parameter {name} has {end} elements in the plan, "
                f"{parameter.num_elements} in the model"
            )
    for name in pieces:
        return f"parameter {name} of the plan is not in the model"
    trainable = {str(name): p.trainable for name, p in model.parameters.items()}
    for index, chunk in enumerate(plan.chunks):
        for piece in chunk.pieces:
            if trainable[piece.parameter] != chunk.trainable:
                planned = "trained" if chunk.trainable else "frozen"
                return (
                    f"chunk {index}: {piece.parameter} is {planned} in the plan, not in the model"
                )
    return None


def _find_shape_difference(plan: Plan, model: Model) -> str | None:
    if plan.length != model.length:
        return f"length is {plan.length} in the plan, {model.length} in the model"
    rows = plan.numerics.microbatch_rows.value
    if rows != model.rows:
        return f"microbatch_rows is {rows} in the plan, {model.rows} in the model"
    return None
