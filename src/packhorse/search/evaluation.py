"""What a state of the search really needs and takes: the plan is lowered, replayed and costed.

In: a setting, the moves taken and how far copies run ahead. Out: an `Evaluation`: bytes per tier
and ns per step. The bytes are those of the tasks one after another, which is what has to fit. The
time is that of the lanes beside each other within the budgets: what memory is left over lets them
run ahead. What does not fit is timed as if there were room.

Steps with many micro-batches are looked at with three: from the second one on they are all alike,
so the middle one stands for the rest, in time and in memory. Where several go through a block
before the next block each of them takes room of its own: such a step is looked at whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from packhorse.compiler.lower import Lowerer
from packhorse.compiler.peak import peak_of
from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import Order, Plan
from packhorse.program.program import Program, ProgramKind
from packhorse.search.space import UNLIMITED_BYTES, Problem, Setting, build_plan
from packhorse.search.timing import time_limited
from packhorse.simulator.costs import TaskCosts

MODEL_MICROBATCHES: Final = 3
OTHER_KINDS: Final[tuple[ProgramKind, ...]] = ("evaluate", "load", "save")
USUAL_DEPTH: Final = 4
"""How far copies run ahead while moves are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The exact outcome of one state; `need_bytes` is the smallest budget of each tier.

    `unhurried_ns` is the time of the step with each copy at its use, None where that was not tried.
    """

    setting: Setting
    taken: tuple[bool, ...]
    prefetch: int
    need_bytes: Mapping[TierName, int]
    step_ns: int
    unhurried_ns: int | None
    num_tasks: int

    def fits(self, budget_bytes: Mapping[TierName, int]) -> bool:
        """Whether every tier's need is within its budget."""
        return all(need <= budget_bytes.get(tier, 0) for tier, need in self.need_bytes.items())

    @property
    def device_bytes(self) -> int:
        """The smallest budget of the device tier."""
        return self.need_bytes["device"]


_Key = tuple[int, tuple[bool, ...], tuple[int, ...]]


class Evaluator:
    """Evaluates states of one problem, remembers them, and counts the tasks it has lowered."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.budget_bytes: Mapping[TierName, int] = {
            tier.name: tier.budget_bytes for tier in problem.machine.tiers
        }
        self.num_tasks = 0
        self._known: dict[_Key, Evaluation] = {}
        self._needs: dict[_Key, Mapping[TierName, int]] = {}
        self._starts: dict[int, Program] = {}
        self._lowerers: dict[int, tuple[Model, Lowerer]] = {}
        # The program of the last state: it is often looked at again, at other depths.
        self._last: tuple[_Key, Plan, Program] | None = None
        # Keeps the settings alive whose ids are keys.
        self._settings: list[Setting] = []

    def evaluate(
        self, setting: Setting, taken: Sequence[bool], depths: Sequence[int] | None = None
    ) -> Evaluation:
        """Lower, replay and time the training step of a state.

        Args:
            setting: the setting of the state.
            taken: one flag per move.
            depths: how far copies may run ahead: the fastest is taken, the least of equals; None
                takes what is pinned, or else the usual.
        """
        pinned = self.problem.pins.prefetch
        if pinned is not None:
            depths = (pinned,)
        elif depths is None:
            depths = (USUAL_DEPTH,)
        key = (id(setting), tuple(taken), tuple(depths))
        if key not in self._known:
            self._known[key] = self._evaluate(setting, tuple(taken), depths)
        return self._known[key]

    def _evaluate(
        self, setting: Setting, taken: tuple[bool, ...], depths: Sequence[int]
    ) -> Evaluation:
        plan, program = self._lower(setting, taken)
        need_bytes = need_of(plan, program)
        fits = all(need <= self.budget_bytes.get(tier, 0) for tier, need in need_bytes.items())
        times_ns = time_limited(
            program,
            plan,
            self.budget_bytes if fits else dict.fromkeys(need_bytes, UNLIMITED_BYTES),
            costs=costs_of(self.problem, setting, program),
            machine=self.problem.machine,
            num_microbatches=setting.num_microbatches,
            depths=depths,
        )
        step_ns, depth = min(zip(times_ns, depths, strict=True))
        return Evaluation(
            setting=setting,
            taken=taken,
            prefetch=depth,
            need_bytes=need_bytes,
            step_ns=step_ns,
            unhurried_ns=times_ns[depths.index(0)] if 0 in depths else None,
            num_tasks=len(program.tasks),
        )

    def _lower(self, setting: Setting, taken: tuple[bool, ...]) -> tuple[Plan, Program]:
        key = (id(setting), taken, ())
        if self._last is None or self._last[0] != key:
            plan = short_plan(self.problem, setting, taken)
            program = self.lowerer_of(setting.model).lower(plan, "train_step")
            self.num_tasks += len(program.tasks)
            self._settings.append(setting)
            if not any(taken):
                self._starts[id(setting)] = program
            self._last = (key, plan, program)
        return self._last[1:]

    def lowerer_of(self, model: Model) -> Lowerer:
        """What lowers all plans of a model."""
        # The model is held, so that no other one can come to the same id.
        return self._lowerers.setdefault(id(model), (model, Lowerer(model)))[1]

    def start_program(self, setting: Setting) -> Program:
        """The training step of the state in which no move is taken."""
        self.evaluate(setting, [False] * len(setting.moves))
        return self._starts[id(setting)]

    def needs_of_all(self, evaluation: Evaluation) -> Mapping[TierName, int]:
        """The needs over all programs of the state: step, evaluation, load and save."""
        setting = evaluation.setting
        key = (id(setting), evaluation.taken, ())
        if key not in self._needs:
            plan = short_plan(self.problem, setting, evaluation.taken)
            needs = dict(evaluation.need_bytes)
            for kind in OTHER_KINDS:
                program = self.lowerer_of(setting.model).lower(plan, kind)
                self.num_tasks += len(program.tasks)
                for tier, need in need_of(plan, program).items():
                    needs[tier] = max(needs.get(tier, 0), need)
            self._needs[key] = needs
        return self._needs[key]


def lies_away(evaluation: Evaluation) -> bool:
    """Whether any state of a chunk, any value, or what a block saves lies outside the device."""
    setting = evaluation.setting
    moved = any(
        taken and move.kind != "recompute"
        for taken, move in zip(evaluation.taken, setting.moves, strict=True)
    )
    start = [tier for tiers in setting.tiers.values() for tier in tiers]
    moved = moved or "offload" in setting.activations
    return moved or any(tier != "device" for tier in (*start, setting.boundaries))


def short_plan(problem: Problem, setting: Setting, taken: Sequence[bool]) -> Plan:
    """The plan of a state without limits and with no more micro-batches than tell its step."""
    count = count_modelled(setting.order, setting.num_microbatches)
    return build_plan(problem, setting, taken, num_microbatches=count)


def count_modelled(order: Order, num_microbatches: int) -> int:
    """How many micro-batches tell the memory and time of a step; see the module."""
    if order != "depth_first":
        return num_microbatches
    return min(num_microbatches, MODEL_MICROBATCHES)


def costs_of(problem: Problem, setting: Setting, program: Program) -> TaskCosts:
    """The cost model of a program of a setting."""
    return costs_on(problem.machine, setting, program)


def costs_on(machine: Machine, setting: Setting, program: Program) -> TaskCosts:
    """The cost model of a program of a setting on a machine."""
    return TaskCosts(
        machine=machine,
        profile=setting.candidate.profile,
        model=setting.model,
        program=program,
        heap=setting.heap,
    )


def need_of(plan: Plan, program: Program) -> dict[TierName, int]:
    """The smallest budget of each tier under which a program runs.

    A kept heap is granted its live peak and, on top, the share by which it outgrows it.
    """
    peaks = peak_of(program)
    needs: dict[TierName, int] = {}
    for pool in program.pools:
        used = peaks[pool.id]
        if pool.tier != "device":
            if used:
                needs[pool.tier] = needs.get(pool.tier, 0) + used
        elif plan.heap.value == "keep" and pool.id == program.workspace_pool:
            held = ceil(pool.capacity_bytes * (1 + plan.heap_slack))
            needs["device"] = needs.get("device", plan.base_bytes) + held
        else:
            needs["device"] = needs.get("device", plan.base_bytes) + used
    return needs
