"""From a plan to a program: a chain of small passes, each a function of tasks to tasks.

In: a plan, the model it was made for and what the program is for. Out: a `Program` that ends in
the state in which it began (a load fills it, a save leaves it).

    chunks -> layout -> runs -> compute order -> norms and updates -> residency -> frees
    -> cache -> pools -> prefetch

Whoever lowers many plans of one model has a `Lowerer`: up to the residency pass, most of what they
are made of is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from packhorse.compiler.buffers import (
    HEAP,
    find_rests,
    heap_pool,
    name_gradients,
    name_states,
    name_transients,
    size_pools,
)
from packhorse.compiler.durability import slot_bytes, states_written_behind
from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.matching import check_lowering
from packhorse.compiler.passes.cache import keep_in_valleys
from packhorse.compiler.passes.exchange import find_concerned
from packhorse.compiler.passes.frees import add_frees
from packhorse.compiler.passes.order import order_evaluation, order_train_step
from packhorse.compiler.passes.prefetch import hoist_copies
from packhorse.compiler.passes.residency import add_residency
from packhorse.compiler.passes.states import order_load, order_save
from packhorse.compiler.passes.updates import (
    add_updates,
    find_norm_exchange,
    place_updates,
    takes_norm_to_host,
)
from packhorse.compiler.replay import replay_pools
from packhorse.compiler.runs import Runs, run_alone, run_forward, run_pipelined
from packhorse.errors import InputError, RefusedError
from packhorse.model.parts import rank_of, whole_of
from packhorse.model.spec import Model
from packhorse.plan.spec import PipelinePlan, Plan
from packhorse.program.buffers import Buffer, BufferId, Layout
from packhorse.program.bulk import collector_waits
from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Task, accesses_of

HOISTED: Final[tuple[ProgramKind, ...]] = ("train_step", "evaluate", "save")
"""What brings states into the device for work; other kinds only carry them through."""


# What depends on the order of compute tasks is kept for so many orders.
_KEPT_ORDERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordered:
    # Compute tasks in their order, with norms and updates, and what they touch beside states with
    # a home: `transients` of it for any plan that has as large a heap, the same boundaries and
    # blocks that offload.
    tasks: tuple[Task, ...]
    touched: frozenset[BufferId]
    transients: Mapping[BufferId, Buffer]
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    # A program before its pools are sized.
    tasks: tuple[Task, ...]
    buffers: Mapping[BufferId, Buffer]
    num_microbatches: int


def lower_plan(
    plan: Plan,
    model: Model,
    kind: ProgramKind,
    *,
    runs: Runs = (),
    eval_microbatches: int | None = None,
) -> Program:
    """Lower one plan to a program; see `Lowerer` and its `lower`."""
    return Lowerer(model, runs).lower(plan, kind, eval_microbatches=eval_microbatches)


class Lowerer:
    """Lowers plans of one model; what they have in common is worked out once.

    Args:
        model: traced at the plans' micro-batch shape; or the part of it that one rank computes.
        runs: of a training step, of all ranks where there are several; without them the order is
            the one that a plan says.
    """

    def __init__(self, model: Model, runs: Runs = ()) -> None:
        self._model = model
        self._runs = runs
        self._layouts: dict[object, Layout] = {}
        self._orders: OrderedDict[object, _Ordered] = OrderedDict()
        self._transients: dict[object, Mapping[BufferId, Buffer]] = {}
        self._heap_bytes: dict[object, int] = {}
        # Held with what they were made from, so that no other one can come to the same id.
        self._pipelined: dict[int, tuple[PipelinePlan, Runs]] = {}

    @collector_waits()
    def lower(
        self, plan: Plan, kind: ProgramKind, *, eval_microbatches: int | None = None
    ) -> Program:
        """Lower a plan to a program.

        Args:
            plan: every decision; it must speak of the model.
            kind: what the program is for.
            eval_microbatches: micro-batches of an evaluation; None takes as many as a training
                step.

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
        check_lowering(plan, self._model)
        layout = self._lay_out(plan)
        draft = self._draft(plan, layout, kind, eval_microbatches)
        heap_bytes = self._size_heap(plan, layout, kind, draft)
        pools = size_pools(plan, heap_bytes, slot_bytes(plan, layout))
        return Program(
            kind=kind,
            model=self._model.fingerprint,
            rank=rank_of(self._model),
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

    def order_step(self, plan: Plan) -> tuple[tuple[Task, ...], Layout]:
        """Order the compute tasks of a training step, norms and updates included; nothing moves.

        Raises:
            MismatchError, RefusedError: as `lower`.
        """
        check_lowering(plan, self._model)
        layout = self._lay_out(plan)
        return self._order_step(plan, layout).tasks, layout

    def _lay_out(self, plan: Plan) -> Layout:
        key = (
            tuple((chunk.pieces, chunk.group, chunk.trainable) for chunk in plan.chunks),
            plan.optimizer,
            plan.numerics.compute_dtype,
        )
        if key not in self._layouts:
            self._layouts[key] = lay_out_chunks(plan, self._model)
        return self._layouts[key]

    def _draft(
        self, plan: Plan, layout: Layout, kind: ProgramKind, eval_microbatches: int | None
    ) -> _Draft:
        match kind:
            case "train_step":
                return _place(plan, self._model, layout, self._order_step(plan, layout))
            case "evaluate":
                count = eval_microbatches or plan.numerics.num_microbatches
                return _place(
                    plan, self._model, layout, self._order_evaluation(plan, layout, count)
                )
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

    def _step_key(self, plan: Plan, layout: Layout) -> object:
        # All that tells the compute tasks of a step, and the buffers inside it, apart.
        return (
            id(layout),
            tuple(block.activations.value for block in plan.blocks),
            plan.numerics.num_microbatches,
            plan.numerics.tied_sum,
            plan.order.value,
            id(plan.pipeline),
            plan.boundaries.value,
            plan.offload.value,
            plan.heap.value,
            # Whether parameters are at home matters only where they are updated in the host.
            tuple((p.tier, p.tier == "host" and p.parameters_home) for p in place_updates(plan)),
        )

    def _order_step(self, plan: Plan, layout: Layout) -> _Ordered:
        _check_trains(whole_of(self._model))
        key = self._step_key(plan, layout)
        found = self._find_order(key)
        if found is not None:
            return found
        count = plan.numerics.num_microbatches
        tasks = order_train_step(
            self._model,
            layout,
            self._runs or self._run(plan),
            recomputed=[
                block.id
                for block, planned in zip(self._model.blocks, plan.blocks, strict=True)
                if planned.activations.value == "recompute"
            ],
            num_microbatches=count,
            tied_sum=plan.numerics.tied_sum,
        )
        tasks = add_updates(
            tasks, layout, plan.optimizer, place_updates(plan), find_norm_exchange(self._model)
        )
        return self._keep_order(key, plan, layout, tasks, count)

    def _run(self, plan: Plan) -> Runs:
        if plan.pipeline is None:
            return run_alone(self._model, plan.numerics.num_microbatches, plan.order.value)
        key = id(plan.pipeline)
        if key not in self._pipelined:
            # A rank's program follows from the runs that concern it: of many ranks' runs, a few.
            concerned, rank = find_concerned(self._model), rank_of(self._model)
            runs = run_pipelined(whole_of(self._model), plan.pipeline)
            own = tuple(run for run in runs if rank in concerned[run.block])
            self._pipelined[key] = plan.pipeline, own
        return self._pipelined[key][1]

    def _evaluation_key(self, plan: Plan, layout: Layout, count: int) -> object:
        together = _num_together(plan)
        return (id(layout), count, together, plan.boundaries.value, plan.heap.value)

    def _order_evaluation(self, plan: Plan, layout: Layout, count: int) -> _Ordered:
        key = self._evaluation_key(plan, layout, count)
        found = self._find_order(key)
        if found is not None:
            return found
        whole = whole_of(self._model)
        runs = run_forward(whole, count, num_together=_num_together(plan))
        tasks = order_evaluation(self._model, layout, runs, num_microbatches=count)
        return self._keep_order(key, plan, layout, tasks, count)

    def _find_order(self, key: object) -> _Ordered | None:
        if key in self._orders:
            self._orders.move_to_end(key)
        return self._orders.get(key)

    def _keep_order(
        self, key: object, plan: Plan, layout: Layout, tasks: tuple[Task, ...], count: int
    ) -> _Ordered:
        touched: set[BufferId] = set()
        for task in tasks:
            _, read, _, written = accesses_of(task)
            touched.update(read, written)
        transients = self._name_transients(plan, layout, count)
        self._orders[key] = _Ordered(
            tasks=tasks,
            touched=frozenset(touched),
            transients={name: each for name, each in transients.items() if name in touched},
            num_microbatches=count,
        )
        if len(self._orders) > _KEPT_ORDERS:
            self._orders.popitem(last=False)
        return self._orders[key]

    def _name_transients(self, plan: Plan, layout: Layout, count: int) -> Mapping[BufferId, Buffer]:
        places = place_updates(plan)
        key = (
            id(layout),
            count,
            plan.boundaries.value,
            plan.offload.value,
            tuple(block.activations.value == "offload" for block in plan.blocks),
            plan.heap.value,
            takes_norm_to_host(plan.optimizer, places, layout),
        )
        if key not in self._transients:
            self._transients[key] = name_transients(
                plan, self._model, layout, num_microbatches=count
            )
        return self._transients[key]

    def _size_heap(self, plan: Plan, layout: Layout, kind: ProgramKind, draft: _Draft) -> int:
        # A kept heap never shrinks, so all programs of a plan share one size: the largest of
        # theirs. Micro-batches of an evaluation that do not go together are alike, and nothing
        # stays between them: those of one round tell it. Where states of chunks lie tells nothing:
        # they have a pool of their own.
        if plan.heap.value == "map":
            return 0
        together = _num_together(plan)
        key = self._evaluation_key(plan, layout, together)
        if key not in self._heap_bytes:
            self._heap_bytes[key] = _peak_of_heap(self._draft(plan, layout, "evaluate", together))
        heap_bytes = self._heap_bytes[key]
        if not whole_of(self._model).num_trainable:
            return heap_bytes
        key = self._step_key(plan, layout)
        if key not in self._heap_bytes:
            step = draft if kind == "train_step" else self._draft(plan, layout, "train_step", None)
            self._heap_bytes[key] = _peak_of_heap(step)
        return max(heap_bytes, self._heap_bytes[key])


def _peak_of_heap(draft: _Draft) -> int:
    return replay_pools(draft.tasks, draft.buffers, workspace_pool=HEAP).peak_bytes[HEAP]


def _place(plan: Plan, model: Model, layout: Layout, ordered: _Ordered) -> _Draft:
    gradients = {
        name: buffer
        for name, buffer in name_gradients(plan, layout).items()
        if name in ordered.touched
    }
    buffers = {**name_states(plan, layout), **gradients, **ordered.transients}
    rests = find_rests(plan, model, layout, num_microbatches=ordered.num_microbatches)
    tasks = add_frees(add_residency(ordered.tasks, buffers, rests), buffers)
    if plan.cache.value == "valleys":
        tasks = keep_in_valleys(tasks, buffers, workspace_pool=heap_pool(plan))
    return _Draft(tasks=tasks, buffers=buffers, num_microbatches=ordered.num_microbatches)


def _num_together(plan: Plan) -> int:
    # How many micro-batches of an evaluation go through a block before the next block.
    return plan.numerics.num_microbatches if plan.order.value == "layered" else 1


def _check_trains(model: Model) -> None:
    # Of a model, whatever one rank of it trains.
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
