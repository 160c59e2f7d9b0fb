"""Rule `fresh`: nobody reads an old version, and the newest one is never lost.

A write makes the copies in other tiers stale. Freeing a stale copy is right; freeing the only
newest copy of a state with a home, or of a buffer that a later task still reads, is not.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.replay import Replay

RULE: Final = "fresh"


def check_fresh(replay: Replay) -> None:
    """Check the task at `replay.index` before it happens."""
    access, held = replay.access, replay.held
    for place_index in access.reads:
        place = replay.places[place_index]
        if held[place_index] != replay.newest[place.buffer_index]:
            raise _stale(replay, place_index)
    if access.frees is not None:
        place = replay.places[access.frees]
        if (
            (place.home is not None or access.next_read is not None)
            and held[access.frees] == replay.newest[place.buffer_index]
            and replay.num_newest_copies(access.frees) == 1
        ):
            raise _lost(replay, access.frees)


def _stale(replay: Replay, place_index: int) -> RuleError:
    place = replay.places[place_index]
    wrote = replay.find_last(
        lambda access: any(i in access.changes or i in access.creates for i in place.siblings)
    )
    by = f"; {name_task(replay.program, wrote)} wrote the newest" if wrote is not None else ""
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"reads a stale copy of {place.buffer} in the {place.tier} tier:"
        f" {replay.tiers_with(place_index)}{by}",
        fix=f"copy {place.buffer} to {place.tier} after it was written",
    )


def _lost(replay: Replay, place_index: int) -> RuleError:
    place, next_read = replay.places[place_index], replay.access.next_read
    if next_read is not None:
        needs = f"{name_task(replay.program, next_read)} still reads it"
    else:
        needs = f"it is a state that the step must leave in its home, {place.home}"
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"frees the only newest copy of {place.buffer} ({place.tier}), and {needs}:"
        " it would be lost",
        fix=f"copy {place.buffer} to another tier before task {replay.index}, or free it later",
    )
