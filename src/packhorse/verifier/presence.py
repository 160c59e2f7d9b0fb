"""Rule `present`: what is read or freed is there; what is created is not there yet.

A Copy must change something: its target tier does not already hold the version that it would
bring. A buffer without a home may be created only while no tier holds it; one with a home may be
written anew in one tier while an older copy waits at home.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.program.tasks import Copy, Free
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.replay import Replay

RULE: Final = "present"


def check_present(replay: Replay) -> None:
    """Check the task at `replay.index` before it happens."""
    reads, writes = replay.reads, replay.writes
    if not replay.there.issuperset(reads):
        absent = next(place for place in reads if place not in replay.there)
        raise _absent(replay, absent, "frees" if isinstance(replay.task, Free) else "reads")
    if isinstance(replay.task, Copy):
        if not replay.grows:
            _check_copy(replay, reads[0], writes[0])
        return
    if replay.grows is writes and replay.shared.isdisjoint(writes):
        return
    for place in writes:
        if place not in reads and not replay.may_create(place):
            raise _created_twice(replay, place)


def _check_copy(replay: Replay, source: int, target: int) -> None:
    if not replay.is_newest(source) or not replay.is_newest(target):
        return
    tiers = replay.tier_at(source), replay.tier_at(target)
    raise make_error(
        replay.program,
        RULE,
        replay.index,
        f"copies {replay.buffer_at(source).id} from {tiers[0]} to {tiers[1]}, which already holds"
        " the same version: the copy is redundant",
        fix="take the Copy out, or free the target before it",
    )


def _absent(replay: Replay, place: int, verb: str) -> RuleError:
    buffer, tier = replay.buffer_at(place).id, replay.tier_at(place)
    freed = replay.find_last(lambda index: replay.frees(index, place))
    made = replay.find_last(lambda index: replay.brings(index, place))
    if freed is not None and (made is None or made < freed):
        history = f"; {name_task(replay.program, freed)} freed it there"
    else:
        later = replay.find_next(lambda index: replay.brings(index, place))
        history = "; no task brings it there"
        if later is not None:
            history = f"; {name_task(replay.program, later)} brings it there only later"
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"{verb} {buffer} in the {tier} tier, where it is not present:"
        f" {replay.tiers_with(place)}{history}",
        fix=f"create {buffer} or copy it to {tier} before task {replay.index}",
    )


def _created_twice(replay: Replay, place: int) -> RuleError:
    siblings = replay.siblings(place)
    made = replay.find_last(lambda index: any(replay.brings(index, each) for each in siblings))
    first = f"; {name_task(replay.program, made)} made it" if made is not None else ""
    return make_error(
        replay.program,
        RULE,
        replay.index,
        f"creates {replay.buffer_at(place).id} in the {replay.tier_at(place)} tier, but"
        f" {replay.tiers_with(place)}: created twice{first}",
        fix="free it first, or list it among the reads too to change it in place",
    )
