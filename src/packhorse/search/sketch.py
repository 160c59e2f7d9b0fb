"""A linear model of all states of a setting: every sum of moves at once, in microseconds.

In: the fastest start and the state with all moves taken, both lowered. Out: a `Sketch`: for each
task that computes, the bytes in each device pool, and what each move saves of them; and what each
move costs.

Both programs run the same computing tasks, so they are compared task by task:

    at every computing task, for every buffer
        in the start, not in the other      its move saves the buffer's bytes there
        in the other, not in the start      (a value kept for a Recompute) its move adds them
    copies and frees of a buffer            are the cost of its move, as is what they take from
                                            computing on the same cores
    a Recompute                             costs its time, and its workspace while it runs
    what a block saves, where all offload   its absences are saved, its copies are the cost

Lanes work beside each other, but not over the whole step: what is moved for updates after the
global norm cannot hide behind a forward. So times are kept by *load*: a lane (compute, reads of the
disk, ...) in a phase of the step (see `loads`). A phase takes at least as long as its busiest lane,
and nearly that where memory is left to run ahead.

It is exact where moves do not act on each other; the search confirms its choice by lowering it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from packhorse.machine.spec import TierName
from packhorse.program.buffers import BufferId, PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Forward,
    Free,
    GradNorm,
    InputGrad,
    Recompute,
    Task,
    WeightGrad,
    workspace_of,
    writes_of,
)
from packhorse.search.evaluation import Evaluator, costs_of, need_of, short_plan
from packhorse.search.loads import (
    BACKWARD,
    FORWARD,
    NUM_LOADS,
    NUM_PHASES,
    UPDATE,
    Floats,
    limits_on,
    load_of,
)
from packhorse.search.space import Problem, Setting, find_away_tiers
from packhorse.search.timing import weights_of
from packhorse.timeline.names import LANES

EXPOSED_SHARE: Final = 0.1
"""Of the work beyond the busiest lane's, what the sketch takes to be seen in the step all the same:
of two states that look alike, the one that moves less is better."""
_KINDS: Final = {"param": "parameters", "grad": "gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """Needs and times of all states of a setting, nearly.

    `used_bytes` has a row per device pool and a column per computing task; `saved_bytes` has the
    moves as its third axis. A pool with slack weighs more than its bytes (`weights`).
    `away_bytes` gives for each other tier what each move puts there. `cost_ns` is the work that
    each move makes, whatever is busy with it; `step_ns` is that of the start. `load_ns` has the
    moves in columns and a row for every limit on the phases of a step, with the start in
    `load_start_ns` and the phase in `phases`: no phase is shorter than any of its rows.
    """

    setting: Setting
    base_bytes: int
    weights: tuple[float, ...]
    used_bytes: Floats
    saved_bytes: Floats
    away_start_bytes: Mapping[TierName, int]
    away_bytes: Mapping[TierName, Floats]
    step_ns: int
    cost_ns: Floats
    phases: npt.NDArray[np.int64]
    load_start_ns: Floats
    load_ns: Floats

    def need_bytes(self, taken: Sequence[bool]) -> int:
        """The device budget that a state needs."""
        flags = np.asarray(taken, dtype=np.float64)
        peaks = (self.used_bytes - self.saved_bytes @ flags).max(axis=1)
        return self.base_bytes + ceil(float(peaks @ np.asarray(self.weights)))

    def work_ns(self, taken: Sequence[bool]) -> int:
        """How long a step of a state would take one task after another."""
        return self.step_ns + round(float(self.cost_ns @ np.asarray(taken, dtype=np.float64)))

    def least_ns(self, taken: Sequence[bool]) -> int:
        """How long a step of a state takes if all lanes run beside each other all the time."""
        loads = self.load_start_ns + self.load_ns @ np.asarray(taken, dtype=np.float64)
        return round(sum(float(loads[self.phases == phase].max()) for phase in range(NUM_PHASES)))

    def time_ns(self, taken: Sequence[bool]) -> int:
        """How long a step of a state takes, nearly: a small part of the work is never hidden."""
        least_ns, work_ns = self.least_ns(taken), self.work_ns(taken)
        return round(least_ns + EXPOSED_SHARE * (work_ns - least_ns))


class Sketches:
    """Sketches of the settings of one problem, each made once, when it is asked for."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[int, Sketch] = {}

    def of(self, setting: Setting) -> Sketch:
        """The sketch of a setting."""
        # A sketch holds its setting, so an id cannot be given to another one.
        if id(setting) not in self._known:
            self._known[id(setting)] = make_sketch(self._evaluator, setting)
        return self._known[id(setting)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    # A program seen at its computing tasks: where each device buffer is present, workspace, and
    # who pays how many ns.
    program: Program
    present: Mapping[BufferId, npt.NDArray[np.bool_]]
    workspace: Floats
    task_ns: Mapping[tuple[str, int], int]
    copy_ns: Mapping[BufferId, Floats]
    busy_ns: Floats
    step_ns: int
    forward_at: Mapping[int, tuple[int, ...]]
    recompute_at: Mapping[int, tuple[int, ...]]
    backward_at: Mapping[int, tuple[int, ...]]


def make_sketch(evaluator: Evaluator, setting: Setting) -> Sketch:
    """Lower the two ends of a setting and compare them."""
    problem = evaluator.problem
    slots = frozenset(m.index for m in setting.moves if m.kind == "recompute")
    start_taken = [False] * len(setting.moves)
    start = _trace(problem, setting, evaluator.start_program(setting), slots)
    ends: dict[TierName, _Trace] = {
        tier: _trace(problem, setting, _lower_end(evaluator, setting, tier), slots)
        for tier in find_away_tiers(problem.machine) or ("device",)
    }
    offloads = [move.kind == "offload" for move in setting.moves]
    if any(offloads):
        lowered = _lower_state(evaluator, setting, offloads)
        offloaded = _trace(problem, setting, lowered, slots)
    else:
        offloaded = start
    pools = [pool.id for pool in start.program.pools if pool.tier == "device"]
    num_tasks = len(start.workspace)
    used = np.zeros((len(pools), num_tasks))
    for buffer, present in start.present.items():
        used[_pool_index(start.program, buffer, pools)] += present * _size(start, buffer)
    heap = pools.index(start.program.workspace_pool)
    used[heap] += start.workspace
    saved = np.zeros((len(pools), num_tasks, len(setting.moves)))
    work = np.zeros((NUM_LOADS, len(setting.moves)))
    away: dict[TierName, Floats] = {
        tier: np.zeros(len(setting.moves)) for tier in ends if tier != "device"
    }
    by_move = _buffers_by_move(start)
    for column, move in enumerate(setting.moves):
        if move.kind == "recompute":
            end = next(iter(ends.values()))
            saved[:, :, column] = _recompute_saving(start, end, move.index, setting, pools)
            work[load_of("compute", BACKWARD), column] = _recompute_ns(start, end, move.index)
            continue
        if move.kind == "offload":
            kept = [name for name in start.present if name.startswith(f"saved/{move.index}@")]
            for buffer in kept:
                gone = start.present[buffer] & ~offloaded.present[buffer]
                saved[heap, :, column] += gone * _size(start, buffer)
                work[:, column] += offloaded.copy_ns[buffer] - start.copy_ns.get(buffer, 0)
            # One after another they take each other's place; in other orders many wait at once.
            waiting = kept[:1] if setting.order == "depth_first" else kept
            away[move.tier][column] += sum(_size(start, buffer) for buffer in waiting)
            continue
        end = ends[move.tier]
        for buffer in by_move.get((move.kind, move.index), ()):
            size = _size(start, buffer)
            gone = start.present[buffer] & ~end.present.get(buffer, np.zeros(num_tasks, bool))
            saved[_pool_index(start.program, buffer, pools), :, column] += gone * size
            work[:, column] += end.copy_ns.get(buffer, 0) - start.copy_ns.get(buffer, 0)
            away[move.tier][column] += size
    limits = limits_on(problem.machine)
    plan = short_plan(problem, setting, start_taken)
    needs = need_of(plan, start.program)
    away_start: dict[TierName, int] = {tier: needs.get(tier, 0) for tier in away}
    return Sketch(
        setting=setting,
        base_bytes=plan.base_bytes,
        weights=tuple(
            1 + plan.heap_slack if len(pools) > 1 and index == heap else 1.0
            for index in range(len(pools))
        ),
        used_bytes=used,
        saved_bytes=saved,
        away_start_bytes=away_start,
        away_bytes=away,
        step_ns=start.step_ns,
        cost_ns=work.sum(axis=0),
        phases=np.arange(len(limits)) % NUM_PHASES,
        load_start_ns=limits @ start.busy_ns,
        load_ns=limits @ work,
    )


def _lower_end(evaluator: Evaluator, setting: Setting, tier: TierName) -> Program:
    taken = [
        (move.tier == tier and move.kind != "offload") or move.kind == "recompute"
        for move in setting.moves
    ]
    return _lower_state(evaluator, setting, taken)


def _lower_state(evaluator: Evaluator, setting: Setting, taken: Sequence[bool]) -> Program:
    plan = short_plan(evaluator.problem, setting, taken)
    return evaluator.lowerer_of(setting.model).lower(plan, "train_step")


def _trace(problem: Problem, setting: Setting, program: Program, slots: frozenset[int]) -> _Trace:
    # Every block in `slots` gets a column for its Recompute before each of its Backwards, or of the
    # first halves of them, also where it has none, so that programs with and without it have the
    # same columns.
    costs = costs_of(problem, setting, program)
    weights = weights_of(program.tasks, setting.num_microbatches)
    first: dict[BufferId, int] = {
        buffer.id: 0 for buffer in program.buffers.values() if buffer.home == "device"
    }
    spans: dict[BufferId, list[tuple[int, int]]] = {}
    workspace: list[float] = []
    task_ns: dict[tuple[str, int], int] = {}
    copy_ns: dict[BufferId, Floats] = {}
    busy = np.zeros(NUM_LOADS)
    # Under a schedule forwards and backwards take turns, so that lanes work beside both.
    takes_turns = setting.order == "scheduled"
    phase = BACKWARD if takes_turns else FORWARD
    at: dict[str, dict[int, list[int]]] = {"forward": {}, "recompute": {}, "backward": {}}
    step_ns = 0
    recomputed = False
    begun: set[tuple[int, int]] = set()
    lanes = assign_lanes(program.tasks)
    for task, lane, weight in zip(program.tasks, lanes, weights, strict=True):
        if isinstance(task, Backward | InputGrad | WeightGrad) and task.block in slots:
            which = task.block, task.microbatch
            if which not in begun and not recomputed:
                workspace.append(0.0)
            begun.add(which)
        duration, core = costs.alone_ns(task) * weight, costs.core_ns(task) * weight
        step_ns += duration + core
        if phase != UPDATE and not takes_turns:
            phase = _phase_of(task, phase)
        computing = load_of("compute", phase)
        busy[computing] += core
        load = computing
        if lane in LANES:
            # What messages are on their way for is the ranks' together.
            load = load_of(lane, phase)
            busy[load] += duration
        match task:
            case Copy() | Free():
                if task.buffer not in copy_ns:
                    copy_ns[task.buffer] = np.zeros(NUM_LOADS)
                copy_ns[task.buffer][load] += duration
                copy_ns[task.buffer][computing] += core
            case Forward() | Recompute() | Backward():
                name = type(task).__name__.lower()
                at[name].setdefault(task.block, []).append(len(workspace))
                key = (name, task.block)
                task_ns[key] = task_ns.get(key, 0) + duration + core
            case GradNorm():
                phase = UPDATE
            case _:
                pass
        column = len(workspace)
        for buffer, tier in writes_of(task):
            if tier == "device":
                first.setdefault(buffer, column)
        if isinstance(task, Free) and task.tier == "device":
            began = first.pop(task.buffer)
            spans.setdefault(task.buffer, []).append((began, column))
        if not isinstance(task, Copy | Free | Emit):
            workspace.append(float(workspace_of(task)))
            recomputed = isinstance(task, Recompute)
    for buffer, began in first.items():
        spans.setdefault(buffer, []).append((began, len(workspace)))
    present: dict[BufferId, npt.NDArray[np.bool_]] = {}
    for buffer, runs in spans.items():
        flags = np.zeros(len(workspace), dtype=np.bool_)
        for began, ended in runs:
            flags[began:ended] = True
        present[buffer] = flags
    return _Trace(
        program=program,
        present=present,
        workspace=np.asarray(workspace),
        task_ns=task_ns,
        copy_ns=copy_ns,
        busy_ns=busy,
        step_ns=step_ns,
        forward_at=_frozen(at["forward"]),
        recompute_at=_frozen(at["recompute"]),
        backward_at=_frozen(at["backward"]),
    )


def _phase_of(task: Task, phase: int) -> int:
    match task:
        case Forward():
            return FORWARD
        case Recompute() | Backward() | InputGrad() | WeightGrad():
            return BACKWARD
        case _:
            return phase


def _recompute_saving(
    start: _Trace, end: _Trace, block: int, setting: Setting, pools: Sequence[PoolId]
) -> Floats:
    saving = np.zeros((len(pools), len(start.workspace)))
    heap = pools.index(start.program.workspace_pool)
    prefix = f"saved/{block}@"
    for buffer, present in start.present.items():
        if buffer.startswith(prefix):
            gone = present & ~end.present[buffer]
            saving[heap] += gone * _size(start, buffer)
    for column in (*end.forward_at.get(block, ()), *end.recompute_at.get(block, ())):
        saving[heap, column] += start.workspace[column] - end.workspace[column]
    # The block's inputs have to stay until its last Recompute.
    for microbatch, until in enumerate(end.recompute_at.get(block, ())):
        for value in setting.model.blocks[block].inputs:
            buffer = BufferId(f"value/{value}@{microbatch}")
            if buffer in start.present and buffer in end.present:
                longer = end.present[buffer] & ~start.present[buffer]
                longer[until + 1 :] = False
                saving[heap] -= longer * _size(start, buffer)
    return saving


def _recompute_ns(start: _Trace, end: _Trace, block: int) -> int:
    forward = ("forward", block)
    return (
        end.task_ns.get(("recompute", block), 0)
        + end.task_ns.get(forward, 0)
        - start.task_ns.get(forward, 0)
    )


def _buffers_by_move(trace: _Trace) -> dict[tuple[str, int], list[BufferId]]:
    found: dict[tuple[str, int], list[BufferId]] = {}
    for buffer in trace.present:
        state, _, rest = buffer.partition("/")
        if not rest.isdigit() or state == "norm":
            continue
        found.setdefault((_KINDS.get(state, "optimizer"), int(rest)), []).append(buffer)
    return found


def _pool_index(program: Program, buffer: BufferId, pools: Sequence[PoolId]) -> int:
    return pools.index(program.buffers[buffer].pools["device"])


def _size(trace: _Trace, buffer: BufferId) -> int:
    return trace.program.buffers[buffer].size_bytes


def _frozen(lists: Mapping[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {key: tuple(items) for key, items in lists.items()}
