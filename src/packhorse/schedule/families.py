"""Every named schedule: how it is made, and what may be said of its stages.

In: a name. Out: a `NamedFamily`, or a schedule of it. Names are those that recipes and commands
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from packhorse.errors import InputError
from packhorse.schedule.breadth_first import make_layered, make_looped_bfs
from packhorse.schedule.costs import Costs
from packhorse.schedule.dualpipe import make_dualpipe_v
from packhorse.schedule.gpipe import make_gpipe
from packhorse.schedule.interleaved import make_interleaved
from packhorse.schedule.one_forward import make_1f1b, make_eager_1f1b
from packhorse.schedule.spec import Family, Schedule
from packhorse.schedule.vee import make_v_half, make_v_min, make_zb_v
from packhorse.schedule.zero_bubble import make_zb_h1, make_zb_h2


class StagedFamily(Protocol):
    """A family that works with any number of stages from one a rank upwards."""

    def __call__(
        self, num_ranks: int, num_microbatches: int, costs: Costs, *, num_stages: int | None = None
    ) -> Schedule:
        """Make the schedule; a family has a number of its own for None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStages:
    """A family with a fixed number of stages on each rank."""

    make: Family
    about: str
    stages_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyStages:
    """A family that takes a number of stages."""

    make: StagedFamily
    about: str


NamedFamily = FixedStages | AnyStages

FAMILIES: Final[Mapping[str, NamedFamily]] = {
    "gpipe": FixedStages(make=make_gpipe, stages_per_rank=1, about="all forwards first"),
    "1f1b": FixedStages(make=make_1f1b, stages_per_rank=1, about="one of each in turn"),
    "eager-1f1b": FixedStages(
        make=make_eager_1f1b,
        stages_per_rank=1,
        about="1f1b, hides transfers",
    ),
    "interleaved": AnyStages(make=make_interleaved, about="1f1b in a loop"),
    "looped-bfs": AnyStages(make=make_looped_bfs, about="stage by stage, looped"),
    "layered": AnyStages(make=make_layered, about="layer by layer, looped"),
    "zb-h1": FixedStages(make=make_zb_h1, stages_per_rank=1, about="1f1b, weights deferred"),
    "zb-h2": FixedStages(make=make_zb_h2, stages_per_rank=1, about="no idle inside a rank"),
    "zb-v": FixedStages(make=make_zb_v, stages_per_rank=2, about="no idle inside, on a V"),
    "v-half": FixedStages(make=make_v_half, stages_per_rank=2, about="half of 1f1b's memory"),
    "v-min": FixedStages(make=make_v_min, stages_per_rank=2, about="third of 1f1b's memory"),
    "dualpipe-v": FixedStages(make=make_dualpipe_v, stages_per_rank=2, about="in pairs, on a V"),
}


def make_named(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    *,
    num_stages: int | None = None,
) -> Schedule:
    """Make the schedule of a named family.

    Raises:
        InputError: the family does not go with that number of stages.
    """
    family = FAMILIES[name]
    match family:
        case FixedStages():
            wanted = family.stages_per_rank * num_ranks
            if num_stages not in (None, wanted):
                free = ", ".join(
                    key for key, each in FAMILIES.items() if isinstance(each, AnyStages)
                )
                raise InputError(
                    f"{name} on {num_ranks} ranks has {wanted} stages, not {num_stages}",
                    where="the number of stages",
                    fix=f"leave it out, or take one of {free}",
                )
            return family.make(num_ranks, num_microbatches, costs)
        case AnyStages():
            if num_stages is not None and num_stages < num_ranks:
                raise InputError(
                    f"{num_stages} stages leave {num_ranks - num_stages} of {num_ranks} ranks"
                    " without work",
                    where="the number of stages",
                    fix="give at least one stage a rank, or fewer ranks",
                )
            return family.make(num_ranks, num_microbatches, costs, num_stages=num_stages)
