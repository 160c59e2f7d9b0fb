"""From a plan to a program: a chain of small passes, each a function of tasks to tasks.

In: a plan, the model it was made for and what the program is for. Out: a `Program` that ends in
the state in which it began (a load fills it, a save leaves it).

    chunks -> layout -> compute order -> norms and updates -> residency -> frees
    -> cache -> pools -> prefetch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from packhorse.compiler.buffers import (
    HEAP,
    find_rests,
    heap_pool,
    name_buffers,
    name_states,
    size_pools,
)
from packhorse.compiler.durability import slot_bytes, states_written_behind
from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.matching import check_lowering
from packhorse.compiler.passes.cache import keep_in_valleys
from packhorse.compiler.passes.frees import add_frees
from packhorse.compiler.passes.order import order_evaluation, order_train_step
from packhorse.compiler.passes.prefetch import hoist_copies
from packhorse.compiler.passes.residency import add_residency
from packhorse.compiler.passes.states import order_load, order_save
from packhorse.compiler.passes.updates import add_updates, place_updates
from packhorse.compiler.replay import replay_pools
from packhorse.errors import InputError, RefusedError
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.program.buffers import Buffer, BufferId, Layout
from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Task

HOISTED: Final[tuple[ProgramKind, ...]] = ("train_step", "evaluate", "save")
"""What brings states into the device for work; other kinds only carry them through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    # A program before its pools are sized.
    tasks: tuple[Task, ...]
    buffers: Mapping[BufferId, Buffer]
    num_microbatches: int


def lower_plan(
    plan: Plan, model: Model, kind: ProgramKind, *, eval_microbatches: int | None = None
) -> Program:
    """Lower a plan to a program.

    Args:
        plan: every decision; it must speak of `model`.
        model: traced at the plan's micro-batch shape.
        kind: what the program is for.
        eval_microbatches: micro-batches of an evaluation; None takes as many as a training step.

    Raises:
        MismatchError: the plan was made for another model; names the first difference.
        RefusedError: the plan contradicts itself, or a training step has nothing to train.
        DoesNotFitError: the device budget is used up before any chunk has a place.
        InputError: `eval_microbatches` is not positive, or given for another kind.
    """
    if eval_microbatches is not None and (kind != "evaluate" or eval_microbatches < 1):
        raise InputError(
            f"eval_microbatches is {eval_microbatches} for a program of kind {kind}",
            fix="give a positive number, and only for an evaluation",
        )
    check_lowering(plan, model)
    layout = lay_out_chunks(plan, model)
    draft = _draft(plan, model, layout, kind, eval_microbatches)
    pools = size_pools(
        plan, _heap_bytes(plan, model, layout, kind, draft), slot_bytes(plan, layout)
    )
    return Program(
        kind=kind,
        model=model.fingerprint,
        rank=0,
        num_microbatches=draft.num_microbatches,
        pools=pools,
        workspace_pool=heap_pool(plan),
        buffers=draft.buffers,
        layout=layout,
        tasks=hoist_copies(
            draft.tasks,
            draft.buffers,
            pools,
            workspace_pool=heap_pool(plan),
            depth=plan.prefetch.value if kind in HOISTED else 0,
        ),
    )


def _draft(
    plan: Plan,
    model: Model,
    layout: Layout,
    kind: ProgramKind,
    eval_microbatches: int | None = None,
) -> _Draft:
    match kind:
        case "train_step":
            _check_trains(model)
            tasks = add_updates(
                order_train_step(
                    model,
                    layout,
                    recomputed=[
                        block.id
                        for block, planned in zip(model.blocks, plan.blocks, strict=True)
                        if planned.activations.value == "recompute"
                    ],
                    num_microbatches=plan.numerics.num_microbatches,
                    order=plan.order.value,
                    tied_sum=plan.numerics.tied_sum,
                ),
                layout,
                plan.optimizer,
                place_updates(plan),
            )
            return _place(plan, model, layout, tasks, plan.numerics.num_microbatches)
        case "evaluate":
            count = eval_microbatches or plan.numerics.num_microbatches
            tasks = order_evaluation(
                model, layout, num_microbatches=count, num_together=_num_together(plan)
            )
            return _place(plan, model, layout, tasks, count)
        case "load":
            states = name_states(plan, layout)
            return _Draft(tasks=order_load(states, states), buffers=states, num_microbatches=0)
        case "save":
            states = name_states(plan, layout)
            return _Draft(tasks=order_save(states, states), buffers=states, num_microbatches=0)
        case "persist":
            states = name_states(plan, layout)
            behind = states_written_behind(plan, layout)
            return _Draft(tasks=order_save(behind, states), buffers=states, num_microbatches=0)
        case "restore":
            states = name_states(plan, layout)
            missing = [name for name, buffer in states.items() if buffer.home != "disk"]
            return _Draft(tasks=order_load(missing, states), buffers=states, num_microbatches=0)
        case _:
            assert_never(kind)


def _place(
    plan: Plan, model: Model, layout: Layout, tasks: tuple[Task, ...], num_microbatches: int
) -> _Draft:
    buffers = name_buffers(plan, model, layout, tasks, num_microbatches=num_microbatches)
    rests = find_rests(plan, model, layout, num_microbatches=num_microbatches)
    tasks = add_frees(add_residency(tasks, buffers, rests), buffers)
    if plan.cache.value == "valleys":
        tasks = keep_in_valleys(tasks, buffers, workspace_pool=heap_pool(plan))
    return _Draft(tasks=tasks, buffers=buffers, num_microbatches=num_microbatches)


def _heap_bytes(plan: Plan, model: Model, layout: Layout, kind: ProgramKind, draft: _Draft) -> int:
    # A kept heap never shrinks, so all programs of a plan share one size: the largest of theirs.
    # Micro-batches of an evaluation that do not go together are alike, and nothing stays between
    # them: those of one round tell it.
    if plan.heap.value == "map":
        return 0
    drafts = [_draft(plan, model, layout, "evaluate", _num_together(plan))]
    if kind == "train_step":
        drafts.append(draft)
    elif model.num_trainable:
        drafts.append(_draft(plan, model, layout, "train_step"))
    return max(
        replay_pools(each.tasks, each.buffers, workspace_pool=HEAP).peak_bytes[HEAP]
        for each in drafts
    )


def _num_together(plan: Plan) -> int:
    # How many micro-batches of an evaluation go through a block before the next block.
    return plan.numerics.num_microbatches if plan.order.value == "layered" else 1


def _check_trains(model: Model) -> None:
    if not model.num_trainable:
        raise RefusedError(
            "every parameter is frozen, so there is nothing to train",
            where=f"model {model.name}",
            fix="freeze fewer parameters",
        )
    for name, parameter in model.parameters.items():
        reached = all(model.blocks[user].has_backward for user in parameter.blocks)
        if parameter.trainable and not (parameter.blocks and reached):
            raise RefusedError(
                f"parameter {name} is to be trained, but the loss does not depend on it",
                where=f"model {model.name}",
                fix=f"freeze it: freeze: ['{name}']",
            )
