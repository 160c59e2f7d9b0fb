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
    # Homes first: a copy that was left behind is often the one that should be at home.
    for place_index, place in enumerate(replay.places):
        if place.tier != place.home:
            continue
        version, lies = replay.held[place_index], replay.tiers_with(place_index)
        if version is None:
            what = f"which is not in its home, {place.home}, at the end: {lies}"
        elif version != replay.newest[place.buffer_index]:
            what = f"whose copy in its home, {place.home}, is stale at the end: {lies}"
        else:
            continue
        fix = f"copy it to {place.home} after its last change"
        raise _unsteady(replay, place_index, what, fix)
    for place_index, place in enumerate(replay.places):
        if place.tier != place.home and replay.held[place_index] is not None:
            rest = f"its home is {place.home}" if place.home else "it lives only inside a step"
            what = f"which is left in the {place.tier} tier at the end: {rest}, so it leaks"
            fix = f"free it in {place.tier} after its last use"
            raise _unsteady(replay, place_index, what, fix)


def _unsteady(replay: Replay, place_index: int, what: str, fix: str) -> RuleError:
    siblings = replay.places[place_index].siblings
    buffer = replay.places[place_index].buffer
    for index in range(len(replay.accesses) - 1, -1, -1):
        access = replay.accesses[index]
        touched = (*access.reads, *access.creates, access.copies_into, access.frees)
        if any(sibling in touched for sibling in siblings):
            words = f"is the last to touch {buffer}, {what}"
            return make_error(replay.program, RULE, index, words, fix)
    return make_error(replay.program, RULE, None, f"no task touches {buffer}, {what}", fix)
