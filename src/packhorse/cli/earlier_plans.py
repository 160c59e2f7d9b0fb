"""The plan by which a run's steps so far were made, and what of it has to stay for equal bits.

In: a recipe and its run folder. Out: the earlier plan, of one rank or of several, and the recipe
with its numerics pinned. What the recipe itself pins stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packhorse.errors import DoesNotFitError
from packhorse.plan.files import PLAN_NAME
from packhorse.plan.ranks import RankPlans

if TYPE_CHECKING:
    from pydantic import JsonValue

    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.plan.spec import Plan
    from packhorse.trainer.recipe import Recipe


def read_earlier(recipe: Recipe) -> Plan | RankPlans | None:
    """Read the plan in the run folder.

    Raises:
        FileFormatError: it is damaged.
    """
    from packhorse.cli.rank_reading import read_any_plan

    path = recipe.run_folder / PLAN_NAME
    return read_any_plan(path) if path.is_file() else None


def pin_numerics(recipe: Recipe, earlier: Plan | RankPlans) -> tuple[Recipe, int | None]:
    """Pin the numerics of an earlier plan, so that the curve goes on in the same bits.

    Returns:
        The recipe, and the compute threads that are pinned now.
    """
    from packhorse.plan.pins import WHOLE

    numerics = earlier.ranks[0].numerics if isinstance(earlier, RankPlans) else earlier.numerics
    pins: dict[str, JsonValue] = {
        "microbatch_rows": numerics.microbatch_rows.value,
        "loss_chunk_tokens": numerics.loss_chunk_tokens.value or WHOLE,
        "num_threads": numerics.num_threads,
        "tied_sum": numerics.tied_sum,
    }
    if recipe.bf16 == "auto":
        pins["compute_dtype"] = numerics.compute_dtype
    own = set(recipe.pins.names)
    pins = {name: value for name, value in pins.items() if name not in own}
    pinned = recipe.model_copy(update={"plan": pins | recipe.plan})
    return pinned, pinned.pins.num_threads


def plan_alike(
    recipe: Recipe,
    earlier: Plan | RankPlans,
    screen: Screen,
    plan: Callable[[Recipe, int | None], Planned],
) -> Planned:
    """Plan with the numerics of an earlier plan, so that its curve goes on in the same bits.

    Args:
        plan: plans a recipe for so many compute threads; None leaves them to the machine.

    Raises:
        DoesNotFitError: no plan fits, whatever its numerics.
    """
    pinned, threads = pin_numerics(recipe, earlier)
    try:
        return plan(pinned, threads)
    except DoesNotFitError:
        screen.warn(
            f"micro-batches of {pinned.pins.microbatch_rows} rows no longer fit: others"
            " are taken, and the curve goes on with other roundings"
        )
        return plan(recipe, threads)
