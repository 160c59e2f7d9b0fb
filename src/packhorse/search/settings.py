"""All settings that a search looks at, and what is wrong with a request before it starts.

In: candidates, the problem. Out: `Setting`s: every candidate that cuts the global batch, each with
every heap mode and a few chunk lengths, unless they are pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

from packhorse.errors import RecipeError
from packhorse.machine.spec import TierName
from packhorse.model.parts import whole_of
from packhorse.model.spec import Model
from packhorse.plan.pins import Pins, Placed
from packhorse.plan.spec import HeapMode, Order
from packhorse.search.lengths import Lengths
from packhorse.search.space import (
    STATES,
    Candidate,
    Problem,
    Setting,
    find_away_tiers,
    find_offload_tier,
    make_setting,
)

# All of a layered step is lowered, because its memory grows with each micro-batch: more runs of
# blocks than this take too long to try again and again. A pin of the order has no such limit.
MOST_LAYERED_RUNS: Final = 1024


class _Cut(Protocol):
    # A model at one micro-batch size and loss setting.
    @property
    def model(self) -> Model: ...

    @property
    def loss_chunk_tokens(self) -> int | None: ...


Cut = TypeVar("Cut", bound=_Cut)


def list_settings(problem: Problem, candidates: Sequence[Candidate]) -> tuple[Setting, ...]:
    """List the settings in a fixed order.

    Raises:
        RecipeError: a pin or the batch cannot be met; says what could.
    """
    if not candidates:
        raise ValueError("there is no candidate to search")
    _check_pins(problem, candidates)
    usable = filter_candidates(problem.pins, problem.global_batch_rows, candidates)
    if problem.pins.order == "layered":
        usable = _filter_layered(problem, usable)
    # A GPU's allocator keeps what is freed, and is held to a pool of its own.
    heaps: tuple[HeapMode, ...] = ("keep",) if problem.machine.device != "cpu" else ("keep", "map")
    if problem.pins.heap is not None:
        heaps = (problem.pins.heap,)
    lengths = Lengths(problem)
    return tuple(
        make_setting(
            problem,
            candidate,
            heap=heap,
            chunk_bytes=chunk_bytes,
            boundaries=problem.pins.boundaries or "device",
        )
        for candidate, chosen in [(each, lengths.choose(each)) for each in usable]
        for heap in heaps
        for chunk_bytes in chosen
    )


def list_variants(problem: Problem, settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The same settings with what moves between tiers arranged otherwise, where nothing is pinned.

    With all micro-batches going through a block before the next block, where that is another
    order, changes no number, and is not too long to look at; with values that wait elsewhere
    between the blocks that use them; with both. In either order, with blocks that may move what
    they save.
    """
    offload = find_offload_tier(problem)
    moving = tuple(
        make_setting(
            problem,
            setting.candidate,
            heap=setting.heap,
            chunk_bytes=setting.chunk_bytes,
            order=order,
            boundaries=setting.boundaries,
            offload=offload,
        )
        for setting in settings
        for order in _list_orders(problem, setting)
        if offload != "device" and any(move.kind == "recompute" for move in setting.moves)
    )
    waiting = tuple(
        make_setting(
            problem,
            setting.candidate,
            heap=setting.heap,
            chunk_bytes=setting.chunk_bytes,
            order=order,
            boundaries=boundaries,
        )
        for setting in settings
        for order in _list_orders(problem, setting)
        for boundaries in _list_boundaries(problem, setting)
        if (order, boundaries) != (setting.order, setting.boundaries)
    )
    return (*waiting, *moving)


def _list_orders(problem: Problem, setting: Setting) -> tuple[Order, ...]:
    pins = problem.pins
    layered = (
        pins.order is None
        and problem.pipeline is None
        and (problem.optimizer.clips or not pins.gradients)
        and 1 < setting.num_microbatches <= MOST_LAYERED_RUNS // len(setting.model.blocks)
        and _may_go_in_layers(problem, setting.candidate)
    )
    return (setting.order, "layered") if layered else (setting.order,)


def _list_boundaries(problem: Problem, setting: Setting) -> tuple[TierName, ...]:
    free = problem.pins.boundaries is None
    return (setting.boundaries, *(find_away_tiers(problem.machine)[:1] if free else ()))


def _may_go_in_layers(problem: Problem, candidate: Candidate) -> bool:
    # Sums of tied gradients that are eager's need one micro-batch after another.
    return (
        candidate.model.rows == problem.global_batch_rows
        or problem.arithmetic.tied_sum == "per_step"
        or not candidate.model.summed_parameters
    )


def filter_candidates(pins: Pins, batch: int, candidates: Sequence[Cut]) -> list[Cut]:
    """Take those candidates that cut a batch of so many rows, as they are pinned.

    Raises:
        RecipeError: none is left; says what could be taken.
    """
    rows = sorted({candidate.model.rows for candidate in candidates})
    cuts = [candidate for candidate in candidates if batch % candidate.model.rows == 0]
    if not cuts:
        raise RecipeError(
            f"a global batch of {batch} rows cannot be cut into micro-batches of "
            f"{_join(rows)} rows",
            where="recipe: global_batch_size",
            fix=f"take a multiple of {rows[0]}, such as {batch // rows[0] * rows[0] or rows[0]}, "
            f"or micro-batches of {_join(n for n in range(1, batch + 1) if batch % n == 0)} rows",
        )
    if pins.microbatch_rows is not None:
        fit = [c for c in cuts if c.model.rows == pins.microbatch_rows]
        if not fit:
            known = sorted({candidate.model.rows for candidate in cuts})
            raise RecipeError(
                f"microbatch_rows is pinned to {pins.microbatch_rows}, which does not cut the "
                f"global batch of {batch} rows",
                where="recipe: plan.microbatch_rows",
                fix=f"pin one of {_join(known)}, or leave it out",
            )
        cuts = fit
    if pins.loss_chunk_tokens is not None:
        wanted = None if pins.loss_chunk_tokens == "whole" else pins.loss_chunk_tokens
        fit = [candidate for candidate in cuts if candidate.loss_chunk_tokens == wanted]
        if not fit:
            known = {c.loss_chunk_tokens or "whole" for c in cuts}
            raise RecipeError(
                f"loss_chunk_tokens is pinned to {pins.loss_chunk_tokens}, which this model does "
                "not offer",
                where="recipe: plan.loss_chunk_tokens",
                fix=f"pin one of {_join(sorted(map(str, known)))}, or leave it out",
            )
        cuts = fit
    return cuts


def _filter_layered(problem: Problem, cuts: Sequence[Candidate]) -> list[Candidate]:
    fit = [candidate for candidate in cuts if _may_go_in_layers(problem, candidate)]
    if not fit:
        tied = cuts[0].model.summed_parameters[0]
        raise RecipeError(
            f"order is pinned to layered, but {tied} is used by several blocks and its "
            "gradient is summed micro-batch by micro-batch",
            where="recipe: plan.order",
            fix="pin tied_sum: per_step too (other numbers in the last bits), or no order",
        )
    return fit


def _check_pins(problem: Problem, candidates: Sequence[Candidate]) -> None:
    pins, arithmetic = problem.pins, problem.arithmetic
    pins.check(whole_of(candidates[0].model))
    find_offload_tier(problem)
    there = ("device", *find_away_tiers(problem.machine))
    if pins.boundaries not in (None, *there):
        raise RecipeError(
            f"boundaries are pinned to the tier {pins.boundaries}, which {problem.machine.name} "
            "does not have",
            where="recipe: plan.boundaries",
            fix=f"pin to {_join(there)}, or grant a budget for {pins.boundaries}",
        )
    if pins.heap == "map" and problem.machine.device != "cpu":
        raise RecipeError(
            "the heap is pinned to map, but the allocator of a GPU keeps what is freed",
            where="recipe: plan.heap",
            fix="leave it out",
        )
    if pins.stride is not None and "host" not in there:
        raise RecipeError(
            f"the stride of updates is pinned to {pins.stride}, but {problem.machine.name} has no "
            "host tier to update in",
            where="recipe: plan.stride",
            fix="leave it out, or grant a budget for host",
        )
    placed: tuple[Placed, ...] = (*STATES, "update")
    for state in placed:
        for pattern, tier in pins.tiers(state):
            if tier not in there:
                what = "updates" if state == "update" else state
                raise RecipeError(
                    f"{what} of {pattern} are pinned to the tier {tier}, which "
                    f"{problem.machine.name} does not have",
                    where=f"recipe: plan.{state}",
                    fix=f"pin to {_join(there)}, or grant a budget for {tier}",
                )
    is_whole = all(c.model.rows == problem.global_batch_rows for c in candidates)
    if pins.gradients and (is_whole or pins.order == "layered") and not problem.optimizer.clips:
        raise RecipeError(
            "gradients are pinned to a tier, but none is kept: without clipping and with one "
            "micro-batch, or all of them in layers, each is used up where it arises",
            where="recipe: plan.gradients",
            fix="leave it out",
        )
    traced = {
        "compute_dtype": (pins.compute_dtype, arithmetic.compute_dtype),
        "attention": (pins.attention, arithmetic.attention),
        "tied_sum": (pins.tied_sum, arithmetic.tied_sum),
        "num_threads": (pins.num_threads, arithmetic.num_threads),
        "num_workers": (pins.num_workers, arithmetic.num_workers),
    }
    for name, (pinned, actual) in traced.items():
        if pinned is not None and pinned != actual:
            raise RecipeError(
                f"{name} is pinned to {pinned}, but this run computes with {actual}",
                where=f"recipe: plan.{name}",
                fix=f"pin {name} to {actual}, or leave it out",
            )


def _join(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)
