"""Programs of all the ranks that share a model.

In: the ranks' plans, and the model that they share. Out: each rank's part of the model, and its
program. All of them follow from the same total order, so they meet each other's messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from packhorse.compiler.durability import list_kinds
from packhorse.compiler.lower import Lowerer
from packhorse.errors import MismatchError
from packhorse.model.parts import cut_model
from packhorse.model.spec import Model
from packhorse.plan.spec import PipelinePlan, Plan
from packhorse.program.program import Program, ProgramKind


def cut_stages(pipeline: PipelinePlan, model: Model) -> tuple[Model, ...]:
    """Give each rank its part of a model, as its pipeline says.

    Raises:
        MismatchError: the model has another number of blocks.
    """
    if pipeline.bounds.value[-1] != len(model.blocks):
        raise MismatchError(
            f"the plan cuts a model of {pipeline.bounds.value[-1]} blocks,"
            f" {model.name} has {len(model.blocks)}",
            where=f"model {model.name}",
            fix="make the plan again for this model",
        )
    return cut_model(model, pipeline.owners)


def lower_ranks(
    plans: Sequence[Plan], parts: Sequence[Model], kinds: Sequence[ProgramKind] = ()
) -> dict[ProgramKind, tuple[Program, ...]]:
    """Lower the plans of all ranks, for each kind of program that they need or for those asked for.

    Args:
        plans: by rank.
        parts: of the ranks, from `cut_stages`.

    Raises:
        MismatchError, RefusedError, DoesNotFitError: as `Lowerer.lower`.
    """
    lowerers = [Lowerer(part) for part in parts]
    return {
        kind: tuple(
            lowerer.lower(plan, kind) for plan, lowerer in zip(plans, lowerers, strict=True)
        )
        for kind in kinds or list_kinds(plans[0])
    }
