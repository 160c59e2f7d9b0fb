"""How low it goes: the state that needs the smallest device budget, and the refusal that names it.

In: the settings of a search. Out: an `Evaluation`, or the `DoesNotFitError` for a budget below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError
from packhorse.machine.spec import TierName
from packhorse.program.buffers import PAGE_BYTES
from packhorse.program.tasks import (
    Backward,
    Forward,
    InputGrad,
    Recompute,
    Update,
    WeightGrad,
)
from packhorse.search.evaluation import Evaluation, Evaluator, short_plan
from packhorse.search.knapsack import choose_moves
from packhorse.search.peaks import explain_peaks, fullest_task
from packhorse.search.sketch import Sketches
from packhorse.search.space import UNLIMITED_BYTES, Setting, find_away_tiers
from packhorse.timeline.names import kind_of, name_of, words_for
from packhorse.units import MIB, format_bytes, format_exact_bytes

CLOSE_LOOKS: Final = 6
# The next process measures its base anew and finds it some MiB larger or smaller: what is advised
# leaves a thirty-second of it and this much more.
BASE_NOISE_SHARE: Final = 32
BASE_NOISE_BYTES: Final = 4 * MIB


def find_smallest(
    evaluator: Evaluator, sketches: Sketches, settings: Sequence[Setting]
) -> Evaluation:
    """Find the state with the smallest device need within the other tiers' budgets.

    If no state is within those, they are taken as unlimited. Among equals the fastest is taken.
    """
    budgets = evaluator.budget_bytes
    unlimited = dict.fromkeys(budgets, UNLIMITED_BYTES)
    for away_bytes in (budgets, unlimited):
        guesses: list[tuple[int, int, tuple[bool, ...]]] = []
        for index, setting in enumerate(settings):
            sketch = sketches.of(setting)
            taken = choose_moves(
                sketch, device_bytes=0, away_bytes=away_bytes, goal="memory", rel_gap=0.0
            )
            if taken is not None:
                guesses.append((sketch.need_bytes(taken), index, taken))
        looked = [
            evaluator.evaluate(settings[index], taken)
            for _, index, taken in sorted(guesses)[:CLOSE_LOOKS]
        ]
        if looked:
            least = min(looked, key=lambda e: (evaluator.needs_of_all(e)["device"], e.step_ns))
            return _hurry(evaluator, sketches, least, away_bytes)
    raise ValueError("there is no setting to search")


def _hurry(
    evaluator: Evaluator,
    sketches: Sketches,
    least: Evaluation,
    away_bytes: Mapping[TierName, int],
) -> Evaluation:
    # The fastest that needs no more: taking every move that frees memory is not always needed.
    need = evaluator.needs_of_all(least)["device"]
    taken = choose_moves(sketches.of(least.setting), device_bytes=need, away_bytes=away_bytes)
    if taken is None:
        return least
    found = evaluator.evaluate(least.setting, taken)
    smaller = evaluator.needs_of_all(found)["device"] <= need
    return found if smaller and found.step_ns < least.step_ns else least


def round_up_page(size_bytes: int) -> int:
    """The next whole page."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def advise_bytes(need_bytes: int, base_bytes: int) -> int:
    """The budget to type for a need: whole MiB, with room for a base that is found larger."""
    noise_bytes = base_bytes // BASE_NOISE_SHARE + BASE_NOISE_BYTES if base_bytes else 0
    return -(-(need_bytes + noise_bytes) // MIB) * MIB


def refuse(evaluator: Evaluator, smallest: Evaluation) -> DoesNotFitError:
    """Say what is needed, what is there, which block is the cause, and what would work."""
    needs = evaluator.needs_of_all(smallest)
    have = evaluator.budget_bytes
    short: list[TierName] = [
        tier for tier, need in needs.items() if round_up_page(need) > have.get(tier, 0)
    ]
    base_bytes = smallest.setting.candidate.profile.base_bytes
    least: dict[TierName, int] = {
        tier: advise_bytes(needs[tier], base_bytes if tier == "device" else 0) for tier in short
    }
    lines = [
        f"tier {tier}: needs {format_bytes(needs[tier])}, has {format_bytes(have.get(tier, 0))}"
        for tier in needs
    ]
    lines.append(_name_cause(evaluator, smallest))
    grant = ",".join(f"{tier}={format_exact_bytes(least[tier])}" for tier in short)
    setting = smallest.setting
    hints = [f"grant at least --budget {grant}: about the smallest budget that works"]
    if setting.model.rows > 1:
        hints.append("or offer smaller micro-batches (per_device_train_batch_size: 1)")
    hints.append("or take a shorter max_length")
    if not find_away_tiers(evaluator.problem.machine):
        hints.append("or grant a second tier, so that states can leave the device")
    names = " and ".join(short)
    pinned = evaluator.problem.pins.names
    if pinned:
        hints.append(f"or unpin some of: {', '.join(pinned)}")
    return DoesNotFitError(
        f"no plan for {setting.model.name} fits the budget of {names or 'the machine'}: "
        + "; ".join(
            f"{tier} needs {format_bytes(needs[tier])} and has {format_bytes(have.get(tier, 0))}"
            for tier in short
        ),
        where="\n".join(lines),
        fix="\n".join(hints),
        least_bytes={str(tier): size for tier, size in least.items()},
    )


def _name_cause(evaluator: Evaluator, smallest: Evaluation) -> str:
    setting = smallest.setting
    plan = short_plan(evaluator.problem, setting, smallest.taken)
    program = lower_plan(plan, setting.model, "train_step")
    task = fullest_task(program)
    match task:
        case Forward() | Backward() | Recompute() | InputGrad() | WeightGrad():
            block = setting.model.blocks[task.block].name
            moment = f"the {words_for(kind_of(task))} of block {block}"
        case Update():
            moment = f"the update of chunk {task.chunk}"
        case None:
            moment = "the state between steps"
        case _:
            moment = f"the task {name_of(task)}"
    causes = explain_peaks(plan, setting.model, program)["device"]
    parts = sorted(causes.items(), key=lambda item: -item[1])
    held = ", ".join(f"{words_for(cause)} {format_bytes(size)}" for cause, size in parts)
    return f"at least: {moment} holds {held}"
