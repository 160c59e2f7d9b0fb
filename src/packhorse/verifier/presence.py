"""Rule `present`: what is read or freed is there; what is created is not there yet.

A Copy must change something: its target tier does not already hold the version that it would
bring. A buffer without a home may be created only while no tier holds it; one with a home may be
written anew in one tier while an older copy waits at home.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.replay import Replay

RULE: Final = "present"


def check_present(replay: Replay) -> None:
    """Check the task at `replay.index` before it happens."""
    access, held = replay.access, replay.held
    if access.frees is not None:
        if held[access.frees] is None:
            raise _absent(replay, access.frees, "frees")
        return
    for place_index in access.reads:
        if held[place_index] is None:
            raise _absent(replay, place_index, "reads")
    for place_index in access.creates:
        place = replay.places[place_index]
        if held[place_index] is not None or (
            place.home is None and any(held[i] is not None for i in place.siblings)
        ):
            raise _created_twice(replay, place_index)
    target = access.copies_into
    if target is not None and held[target] == held[access.reads[0]]:
        place, source = replay.places[target], replay.places[access.reads[0]]
        raise make_error(
            replay.program,
            RULE,
            replay.index,
            f"copies {place.buffer} from {source.tier} to {place.tier}, which already holds the"
            " same version: the copy is redundant",
            fix="take the Copy out, or free the target before it",
        )


def _absent(replay: Replay, place_index: int, verb: str) -> RuleError:
    place = replay.places[place_index]
    freed = replay.find_last(lambda access: access.frees == place_index)
    made = replay.find_last(
        lambda access: access.copies_into == place_index or place_index in access.creates
    )
    if freed is not None and (made is None or made < freed):
        history = f"; {name_task(replay.program, freed)} freed it there"
    else:
        later = replay.find_next(
            lambda access: access.copies_into == place_index or place_index in access.creates
        )
        history = "; no task brings it there"
        if later is not None:
            history = f"; {name_task(replay.program, later)} brings it there only later"
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"{verb} {place.buffer} in the {place.tier} tier, where it is not present:"
        f" {replay.tiers_with(place_index)}{history}",
        fix=f"create {place.buffer} or copy it to {place.tier} before task {replay.index}",
    )


def _created_twice(replay: Replay, place_index: int) -> RuleError:
    place = replay.places[place_index]
    made = replay.find_last(
        lambda access: any(access.copies_into == i or i in access.creates for i in place.siblings)
    )
    first = f"; {name_task(replay.program, made)} made it" if made is not None else ""
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"creates {place.buffer} in the {place.tier} tier, but {replay.tiers_with(place_index)}:"
        f" created twice{first}",
        fix="free it first, or list it among the reads too to change it in place",
    )
