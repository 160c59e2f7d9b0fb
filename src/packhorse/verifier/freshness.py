"""Rule `fresh`: nobody reads an old version, and the newest one is never lost.

A write makes the copies in other tiers stale. Freeing a stale copy is right; freeing the only
newest copy of a state with a home, or of a buffer that a later task still reads, is not.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.program.tasks import Free
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.replay import Replay

RULE: Final = "fresh"


def check_fresh(replay: Replay) -> None:
    """Check the task at `replay.index` before it happens."""
    if isinstance(replay.task, Free):
        _check_free(replay, replay.reads[0])
    elif not replay.stale.isdisjoint(replay.reads):
        raise _stale(replay, next(place for place in replay.reads if place in replay.stale))


def _check_free(replay: Replay, place: int) -> None:
    if place in replay.stale or (place in replay.shared and replay.has_other_newest(place)):
        return
    home = replay.buffer_at(place).home
    next_read = _find_next_read(replay, place)
    if home is None and next_read is None:
        return
    name, tier = replay.buffer_at(place).id, replay.tier_at(place)
    if next_read is not None:
        needs = f"{name_task(replay.program, next_read)} still reads it"
    else:
        needs = f"it is a state that the step must leave in its home, {home}"
    raise make_error(
        replay.program,
        RULE,
        replay.index,
        f"frees the only newest copy of {name} ({tier}), and {needs}: it would be lost",
        fix=f"copy {name} to another tier before task {replay.index}, or free it later",
    )


def _find_next_read(replay: Replay, place: int) -> int | None:
    # The next task that reads the buffer in any tier before it is created anew.
    touches, siblings = replay.touches, replay.siblings(place)
    last = max([touches.last_read.get(each, 0) for each in siblings])
    for index in range(replay.index + 1, last + 1):
        if not isinstance(replay.program.tasks[index], Free):
            if any(each in touches.reads[index] for each in siblings):
                return index
            if any(each in touches.writes[index] for each in siblings):
                return None
    return None


def _stale(replay: Replay, place: int) -> RuleError:
    siblings = replay.siblings(place)
    wrote = replay.find_last(lambda index: any(replay.makes(index, each) for each in siblings))
    by = f"; {name_task(replay.program, wrote)} wrote the newest" if wrote is not None else ""
    name, tier = replay.buffer_at(place).id, replay.tier_at(place)
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"reads a stale copy of {name} in the {tier} tier: {replay.tiers_with(place)}{by}",
        fix=f"copy {name} to {tier} after it was written",
    )
