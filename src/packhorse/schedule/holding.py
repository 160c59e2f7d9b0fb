"""How many microbatches of each of its stages a rank holds at its fullest moments.

In: a schedule. Out: for each rank the moments that no other moment of its order exceeds in every
count. What a microbatch of a stage weighs is for the reader to say: whatever the weights, the most
that a rank holds is that of one of these moments. The order alone decides, not the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, Task, WeightGrad


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a rank holds at one moment, by its stages from first to last.

    `saved` counts microbatches between the start of their Forward and the end of their Backward or
    WeightGrad; `opened` those between the start of their InputGrad and the end of their WeightGrad.
    """

    saved: tuple[int, ...]
    opened: tuple[int, ...]


def list_moments(schedule: Schedule) -> tuple[tuple[Moment, ...], ...]:
    """List the fullest moments of each rank."""
    return tuple(
        _list_fullest(order, stages_of(schedule, rank))
        for rank, order in enumerate(schedule.orders)
    )


def stages_of(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages of a rank, first to last."""
    return tuple(stage for stage, ranks in sorted(schedule.placement.items()) if rank in ranks)


def _list_fullest(order: Sequence[Task], stages: Sequence[int]) -> tuple[Moment, ...]:
    places = {stage: place for place, stage in enumerate(stages)}
    saved, opened = [0] * len(stages), [0] * len(stages)
    seen: set[tuple[int, ...]] = set()
    grows = False
    for task in order:
        place = places[task.stage]
        match task:
            case Forward():
                saved[place] += 1
                grows = True
            case InputGrad():
                opened[place] += 1
                grows = True
            case Backward() | WeightGrad():
                if grows:
                    seen.add((*saved, *opened))
                grows = False
                saved[place] -= 1
                if isinstance(task, WeightGrad):
                    opened[place] -= 1
    seen.add((*saved, *opened))
    return tuple(
        Moment(saved=counts[: len(stages)], opened=counts[len(stages) :])
        for counts in _drop_lesser(seen)
    )


def _drop_lesser(seen: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for counts in sorted(seen, key=lambda each: (-sum(each), each)):
        if not any(all(a >= b for a, b in zip(other, counts, strict=True)) for other in kept):
            kept.append(counts)
    return kept
