"""Rule `steady`: a program ends in the state in which it began, so that a step is repeatable.

Every buffer with a home lies there in its newest version and nowhere else, and every other buffer
is gone. That is the state from which a step begins, and what a task may do depends on nothing but
that state: so the second step is the first one again, task by task, with the same ledgers, and so
is every further one. A `load` program begins empty, a `restore` program with the states of the
disk; both end with every state at home.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.verifier.failures import make_error
from packhorse.verifier.replay import Replay

RULE: Final = "steady"


def check_steady(replay: Replay) -> None:
    """Check the state after the last task of a step."""
    if replay.there == replay.homes and not replay.stale:
        return
    # Homes first: a copy that was left behind is often the one that should be at home.
    for place in _in_order(replay, replay.homes):
        home, lies = replay.tier_at(place), replay.tiers_with(place)
        if place not in replay.there:
            what = f"which is not in its home, {home}, at the end: {lies}"
        elif place in replay.stale:
            what = f"whose copy in its home, {home}, is stale at the end: {lies}"
        else:
            continue
        raise _unsteady(replay, place, what, f"copy it to {home} after its last change")
    for place in _in_order(replay, replay.there - replay.homes):
        home, tier = replay.buffer_at(place).home, replay.tier_at(place)
        rest = f"its home is {home}" if home else "it lives only inside a step"
        what = f"which is left in the {tier} tier at the end: {rest}, so it leaks"
        raise _unsteady(replay, place, what, f"free it in {tier} after its last use")


def _in_order(replay: Replay, places: set[int]) -> list[int]:
    # By buffers, in the order in which they are declared.
    return sorted(places, key=lambda place: (place % len(replay.buffers), place))


def _unsteady(replay: Replay, place: int, what: str, fix: str) -> RuleError:
    siblings = set(replay.siblings(place))
    buffer = replay.buffer_at(place).id
    for index in range(len(replay.program.tasks) - 1, -1, -1):
        touched = {*replay.touches.reads[index], *replay.touches.writes[index]}
        if not siblings.isdisjoint(touched):
            words = f"is the last to touch {buffer}, {what}"
            return make_error(replay.program, RULE, index, words, fix)
    return make_error(replay.program, RULE, None, f"no task touches {buffer}, {what}", fix)
