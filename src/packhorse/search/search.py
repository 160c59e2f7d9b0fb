"""Which plan is best: the fastest that fits.

In: candidates, a machine with budgets, the optimizer, pins. Out: a `Plan` with a reason for every
choice and a prediction from its own program, or an error with the smallest budget that works.

    for every setting (micro-batch x heap mode x chunk length): time of its fastest start
    for every setting, long chunks first, quickest start first, while it is quicker than the best:
        sketch it; choose moves by the knapsack; lower, replay and time that state
        while it does not fit after all: choose again with a smaller budget
    for the quickest few: choose again exactly, also with room left for lanes to run ahead
    improve the best by single exchanges of moves, each lowered, replayed and timed
    choose how far copies run ahead
    where something lies away from the device: all of this again, for settings like the best one,
    with micro-batches in layers, with values between blocks away, and with both; and, where any
    move is taken, with blocks that may move what they save
    check all programs of the plan (step, evaluation, load, save) by the verifier

The knapsack and the sketch are only guides: what is promised comes from the lowered program. No
limit is in seconds, so the same input gives the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from packhorse.machine.spec import Machine
from packhorse.plan.pins import Pins
from packhorse.plan.spec import OptimizerPlan, PipelinePlan, Plan
from packhorse.search.evaluation import USUAL_DEPTH, Evaluation, Evaluator, lies_away
from packhorse.search.knapsack import FINE_GAP, ROUGH_GAP, choose_moves
from packhorse.search.settings import list_settings, list_variants
from packhorse.search.sketch import Sketch, Sketches
from packhorse.search.smallest import find_smallest, refuse
from packhorse.search.space import Arithmetic, Candidate, Problem, Setting
from packhorse.search.writing import write_plan

MAX_TIGHTENINGS: Final = 6
MAX_EXCHANGES: Final = 8
EXCHANGED_TASKS: Final = 20_000
NEAR: Final = 1.25
# What is found roughly has the usual depth and the usual room: so far off it may be.
CLOSE: Final = 0.03
CLOSE_LOOKS: Final = 2
# Room that is left free, in transfers of the usual largest size.
ROUGH_TRANSFERS: Final = 2
FREE_TRANSFERS: Final = (0, 1, 4)
DEPTHS: Final = (0, 1, 2, 4, 8, 16)
EXCHANGE_DEPTHS: Final = (1, 2, USUAL_DEPTH)
FEW_MOVES: Final = 12
# A sketch knows of no work that goes on into the next phase: by so much it may be too slow.
BLIND: Final = 1.1


def find_plan(
    candidates: Sequence[Candidate],
    machine: Machine,
    *,
    optimizer: OptimizerPlan,
    arithmetic: Arithmetic,
    global_batch_rows: int,
    pins: Pins = Pins(),  # noqa: B008 a frozen value
    resumable: bool = True,
    pipeline: PipelinePlan | None = None,
) -> Plan:
    """Find the fastest plan that fits the machine's budgets.

    Args:
        candidates: the model at each micro-batch size and loss-chunk setting that may be taken.
        machine: its tiers' `budget_bytes` are the limits.
        optimizer: name, states, master copy and clipping.
        arithmetic: the numerics that are already decided.
        global_batch_rows: rows of one optimizer step.
        pins: choices that are fixed.
        resumable: whether whoever runs the plan can go on from steps that it keeps.
        pipeline: how ranks share the model, where the candidates are one rank's parts of it.

    Raises:
        RecipeError: a pin or the batch cannot be met.
        DoesNotFitError: no plan fits; has need and have per tier and the smallest budget.
    """
    problem = Problem(
        machine=machine,
        optimizer=optimizer,
        arithmetic=arithmetic,
        pins=pins,
        global_batch_rows=global_batch_rows,
        resumable=resumable,
        pipeline=pipeline,
    )
    evaluator = Evaluator(problem)
    sketches = Sketches(evaluator)
    settings = list_settings(problem, candidates)
    best = _find_best(evaluator, sketches, settings)
    if best is None or any(best.taken) or lies_away(best):
        # What is brought for every micro-batch may be brought once for all of them, and values
        # may make room for states.
        variants = list_variants(problem, _like(best, settings))
        if best is not None and not lies_away(best):
            # What is made again may be moved instead; nothing else moves.
            own = best.setting.order
            variants = tuple(v for v in variants if v.offload != "device" and v.order == own)
        other = _find_best(evaluator, sketches, variants)
        best = min((e for e in (best, other) if e is not None), key=_step_ns, default=None)
        settings = (*settings, *(v for v in variants if v.order == settings[0].order))
    if best is None:
        best = find_smallest(evaluator, sketches, settings)
        if not _fits_all(evaluator, best):
            raise refuse(evaluator, best)
    else:
        best = _finish(evaluator, sketches, best)
    return write_plan(evaluator, sketches, best, budget_bytes=evaluator.budget_bytes)


def _like(best: Evaluation | None, settings: Sequence[Setting]) -> tuple[Setting, ...]:
    # Those with the heap and, for the same candidate, the chunks of the best.
    if best is None:
        return tuple(settings)
    mine = best.setting
    return tuple(
        s
        for s in settings
        if s.heap == mine.heap
        and (s.candidate is not mine.candidate or s.chunk_bytes == mine.chunk_bytes)
    )


def _step_ns(evaluation: Evaluation) -> int:
    return evaluation.step_ns


def _find_best(
    evaluator: Evaluator, sketches: Sketches, settings: Sequence[Setting]
) -> Evaluation | None:
    longest = {id(s.candidate): 0 for s in settings}
    for setting in settings:
        longest[id(setting.candidate)] = max(longest[id(setting.candidate)], setting.chunk_bytes)
    long = [s for s in settings if s.chunk_bytes == longest[id(s.candidate)]]
    found = _look_roughly(evaluator, sketches, long, None)
    quickest_ns = min((rough.step_ns for rough, _ in found), default=None)
    # Shorter chunks use a budget up better, by a little: not worth a look where long ones fit and
    # are slow.
    slow = {
        (id(rough.setting.candidate), rough.setting.heap)
        for rough, _ in found
        if quickest_ns is not None and rough.step_ns > quickest_ns * NEAR
    }
    short = [
        s
        for s in settings
        if s.chunk_bytes < longest[id(s.candidate)] and (id(s.candidate), s.heap) not in slow
    ]
    found += _look_roughly(evaluator, sketches, short, quickest_ns)
    # A closer look at the quickest: what is nearly as quick may turn out to be better.
    best: Evaluation | None = None
    quickest = sorted(found, key=lambda pair: pair[0].step_ns)
    for looked, (rough, start) in enumerate(quickest):
        if best is not None and (
            looked >= CLOSE_LOOKS or rough.step_ns > best.step_ns * (1 + CLOSE)
        ):
            break
        close = _look_closely(evaluator, sketches, rough, start)
        if close is not None and (best is None or close.step_ns < best.step_ns):
            best = close
    return best


def _finish(evaluator: Evaluator, sketches: Sketches, best: Evaluation) -> Evaluation:
    if any(best.taken):
        best = _exchange(evaluator, sketches.of(best.setting), best)
    return evaluator.evaluate(best.setting, best.taken, DEPTHS)


def _look_roughly(
    evaluator: Evaluator,
    sketches: Sketches,
    settings: Sequence[Setting],
    quickest_ns: int | None,
) -> list[tuple[Evaluation, Evaluation]]:
    # Pairs of what was found for a setting and its start. A start is the fastest of its setting,
    # so whoever starts slower than the quickest that fits is out.
    starts = [evaluator.evaluate(s, [False] * len(s.moves)) for s in settings]
    found: list[tuple[Evaluation, Evaluation]] = []
    for start in sorted(starts, key=lambda evaluation: evaluation.step_ns):
        if quickest_ns is not None and start.step_ns >= quickest_ns:
            break
        rough: Evaluation | None = start
        if not start.fits(evaluator.budget_bytes):
            rough = _choose_roughly(evaluator, sketches.of(start.setting))
        if rough is not None:
            found.append((rough, start))
            quickest_ns = min(quickest_ns or rough.step_ns, rough.step_ns)
    return found


def _choose_roughly(evaluator: Evaluator, sketch: Sketch) -> Evaluation | None:
    # Without any room beside what must be there, lanes cannot run ahead, so some is left at first.
    room = ROUGH_TRANSFERS * _largest_transfer(sketch)
    found = _choose(evaluator, sketch, ROUGH_GAP, free_bytes=room) if room else None
    return found or _choose(evaluator, sketch, ROUGH_GAP)


def _look_closely(
    evaluator: Evaluator, sketches: Sketches, rough: Evaluation, start: Evaluation
) -> Evaluation | None:
    if rough is start and _fits_all(evaluator, start):
        return start
    sketch = sketches.of(rough.setting)
    largest = _largest_transfer(sketch)
    options = [
        rough,
        *(
            _choose(evaluator, sketch, FINE_GAP, check=_fits_all, free_bytes=count * largest)
            for count in FREE_TRANSFERS
            if largest or not count
        ),
    ]
    fitting = [e for e in options if e is not None and _fits_all(evaluator, e)]
    return min(fitting, key=lambda e: e.step_ns, default=None)


def _largest_transfer(sketch: Sketch) -> int:
    # A parameter that is longer than a chunk should be is alone of its size: it says little.
    moved = [c for c, move in enumerate(sketch.setting.moves) if move.kind != "recompute"]
    largest = int(sketch.saved_bytes[:, :, moved].max()) if moved else 0
    return min(largest, sketch.setting.chunk_bytes)


def _fits_step(evaluator: Evaluator, evaluation: Evaluation) -> bool:
    return evaluation.fits(evaluator.budget_bytes)


def _fits_all(evaluator: Evaluator, evaluation: Evaluation) -> bool:
    return _fits_step(evaluator, evaluation) and all(
        need <= evaluator.budget_bytes.get(tier, 0)
        for tier, need in evaluator.needs_of_all(evaluation).items()
    )


def _choose(
    evaluator: Evaluator,
    sketch: Sketch,
    rel_gap: float,
    check: Callable[[Evaluator, Evaluation], bool] = _fits_step,
    free_bytes: int = 0,
) -> Evaluation | None:
    budgets = evaluator.budget_bytes
    target = budgets["device"] - free_bytes
    for _ in range(MAX_TIGHTENINGS):
        taken = choose_moves(sketch, device_bytes=target, away_bytes=budgets, rel_gap=rel_gap)
        if taken is None:
            return None
        found = evaluator.evaluate(sketch.setting, taken)
        if check(evaluator, found):
            return found
        need = found.device_bytes
        if found.fits(budgets):
            need = evaluator.needs_of_all(found)["device"]
        target -= max(need - budgets["device"], 1)
    return None


def _exchange(evaluator: Evaluator, sketch: Sketch, best: Evaluation) -> Evaluation:
    # The sketch ignores how moves act on each other (a block that recomputes needs its parameters
    # once more), so its neighbours are tried for real while that is cheap.
    tried = 0
    start_tasks = evaluator.num_tasks
    improved = True
    while improved:
        improved = False
        for taken in _neighbours(evaluator, sketch, best):
            if tried >= MAX_EXCHANGES and evaluator.num_tasks - start_tasks > EXCHANGED_TASKS:
                return best
            tried += 1
            found = evaluator.evaluate(sketch.setting, taken, EXCHANGE_DEPTHS)
            if found.step_ns < best.step_ns and _fits_all(evaluator, found):
                best, improved = found, True
                break
    return best


def _neighbours(evaluator: Evaluator, sketch: Sketch, best: Evaluation) -> list[tuple[bool, ...]]:
    # One move more, one less, or one for another, if the sketch thinks that it fits and is quicker
    # than the best really is; quickest first. Moves that look alike are tried once.
    groups: dict[tuple[object, ...], list[int]] = {}
    for column, move in enumerate(sketch.setting.moves):
        saved = sketch.saved_bytes[:, :, column]
        looks = (best.taken[column], move.kind, move.tier, sketch.cost_ns[column], saved.max())
        groups.setdefault(looks, []).append(column)
    columns = [column for group in groups.values() for column in {group[0], group[-1]}]
    if len(sketch.setting.moves) <= FEW_MOVES:
        columns = list(range(len(sketch.setting.moves)))
    taken = [column for column in columns if best.taken[column]]
    free = [column for column in columns if not best.taken[column]]
    changes = [(c,) for c in columns] + [(off, on) for off in taken for on in free]
    budget = evaluator.budget_bytes["device"]
    found: list[tuple[int, tuple[bool, ...]]] = []
    for change in changes:
        flags = list(best.taken)
        for column in change:
            flags[column] = not flags[column]
        if (
            sketch.least_ns(flags) < best.step_ns * BLIND
            and sketch.need_bytes(flags) <= budget
            and _is_whole(sketch, flags)
        ):
            found.append((sketch.time_ns(flags), tuple(flags)))
    return [flags for _, flags in sorted(found)]


def _is_whole(sketch: Sketch, taken: Sequence[bool]) -> bool:
    # A state of a chunk lies in one tier; a block recomputes or offloads.
    places: set[tuple[str, int]] = set()
    for move, is_taken in zip(sketch.setting.moves, taken, strict=True):
        if is_taken:
            if move.subject in places:
                return False
            places.add(move.subject)
    return True
