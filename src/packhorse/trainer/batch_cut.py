"""Batch arithmetic: the rows of a step, and what a recipe pins of how they are cut.

In: a recipe and the number of data-parallel ranks. Out: a `BatchCut`:

    global_batch_size = per_device_train_batch_size x gradient_accumulation_steps x ranks

An error shows each factor, where it came from, and the nearest values that work.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.errors import RecipeError
from packhorse.trainer.recipe import DEFAULT_GLOBAL_BATCH_SIZE, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """Rows of a step; `microbatch_rows` is None where the plan chooses it."""

    global_rows: int
    microbatch_rows: int | None


def cut_batch(recipe: Recipe, *, num_ranks: int = 1) -> BatchCut:
    """Work out the global batch and the pinned micro-batch of a recipe.

    Raises:
        RecipeError: the factors do not multiply up.
    """
    rows, key = _pinned_rows(recipe)
    accumulation = recipe.gradient_accumulation_steps
    global_rows = recipe.global_batch_size
    if global_rows is None:
        if rows is None and accumulation is None:
            return BatchCut(global_rows=DEFAULT_GLOBAL_BATCH_SIZE, microbatch_rows=None)
        if rows is None:
            raise RecipeError(
                f"gradient_accumulation_steps is {accumulation}, but nothing says of how many rows",
                where="recipe: gradient_accumulation_steps",
                fix="give per_device_train_batch_size or global_batch_size too",
            )
        product = rows * (accumulation or 1) * num_ranks
        return BatchCut(global_rows=product, microbatch_rows=rows)
    divisor = (rows or 1) * (accumulation or 1) * num_ranks
    exact = rows is not None and accumulation is not None
    if (exact and divisor != global_rows) or global_rows % divisor:
        raise _does_not_multiply(recipe, rows, key, num_ranks, exact=exact)
    if rows is None and accumulation is not None:
        rows = global_rows // divisor
    return BatchCut(global_rows=global_rows, microbatch_rows=rows)


def _pinned_rows(recipe: Recipe) -> tuple[int | None, str]:
    key = "per_device_train_batch_size"
    rows, pinned = recipe.per_device_train_batch_size, recipe.pins.microbatch_rows
    if pinned is None:
        return rows, key
    if rows is not None and rows != pinned:
        raise RecipeError(
            f"the rows of a micro-batch are given twice: {rows} and {pinned}",
            where=f"recipe: {key} and plan.microbatch_rows",
            fix="keep one of them",
        )
    return pinned, "plan.microbatch_rows"


def _does_not_multiply(
    recipe: Recipe, rows: int | None, key: str, num_ranks: int, *, exact: bool
) -> RecipeError:
    accumulation, wanted = recipe.gradient_accumulation_steps, recipe.global_batch_size
    assert wanted is not None
    factors = [f"{key} {rows}"] if rows is not None else []
    factors += [f"gradient_accumulation_steps {accumulation}"] if accumulation is not None else []
    factors += [f"ranks {num_ranks}"]
    product = (rows or 1) * (accumulation or 1) * num_ranks
    relation = f"is not {product}" if exact else f"is no multiple of {product}"
    if exact:
        fix = f"set global_batch_size: {product}, or leave one of the three out"
    else:
        low = wanted // product * product
        near = [str(value) for value in (low, low + product) if value]
        fix = f"nearest values of global_batch_size: {' or '.join(near)}"
        free = [d for d in range(1, wanted // num_ranks + 1) if wanted % (d * num_ranks) == 0]
        if rows is not None and accumulation is None and free:
            nearest = sorted(sorted(free, key=lambda d: abs(d - rows))[:2])
            fix += f"; or of {key}: {' or '.join(str(d) for d in nearest)}"
    return RecipeError(
        f"global_batch_size {wanted} {relation} = {' x '.join(factors)}",
        where="recipe: global_batch_size",
        fix=fix,
    )
