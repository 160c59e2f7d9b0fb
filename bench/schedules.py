"""The searched schedule against the best named one, on ten random cost profiles with caps.

A profile is a model of uneven depth (forward, input and weight gradient, and what is saved, drawn
for each of two lengths a rank), a number of ranks and microbatches, a time for transfers, and a cap
on what each rank saves: the peaks of a named schedule drawn at random, times up to 1.3, so that at
least one named schedule keeps the caps. Every schedule is timed with the same costs by the list
simulator; the searched one must keep every rule and cap, must never be longer than the shortest
named one that keeps the caps, and must be shorter on most profiles. No profile is looked at before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from bench.report import Bench, Figure, at_least, at_most, exactly, run_bench, shown
from packhorse.schedule.board import make_board
from packhorse.schedule.costs import Cost, Costs
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.moves import bound_makespan
from packhorse.schedule.placements import place_looped, place_vee
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.searched import make_searched
from packhorse.schedule.timing import Timing, find_excess, time_schedule
from packhorse.units import format_ns, format_percent

SEED: Final = 20_241
NUM_PROFILES: Final = 10
NUM_BETTER: Final = 6  # most of ten
RANKS: Final = (2, 4, 6, 8)
QUICK_RANKS: Final = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes and costs of one case; the caps are in the costs."""

    num_ranks: int
    num_microbatches: int
    costs: Costs

    def time_named(self, name: str) -> Timing:
        """Time a named schedule of the profile's sizes."""
        made = make_named(name, self.num_ranks, self.num_microbatches, self.costs)
        return time_schedule(made, self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The shortest named schedule that keeps the caps, and the searched one."""

    profile: Profile
    best_name: str
    best_ns: int
    searched_ns: int
    bound_ns: int
    bubble: float
    search_ns: int

    @property
    def ratio(self) -> float:
        """Searched by best named; below 1 is better."""
        return self.searched_ns / self.best_ns


def draw_profile(random: Random, ranks: tuple[int, ...]) -> Profile:
    """Draw sizes, costs along the depth, and caps."""
    num_ranks = random.choice(ranks)
    num_microbatches = random.choice((num_ranks, 2 * num_ranks, 3 * num_ranks, 4 * num_ranks))
    forward_ns = random.randint(500_000, 2_000_000)
    input_share, weight_share = random.uniform(0.8, 1.6), random.uniform(0.4, 1.2)
    parts: list[Cost] = []
    for _ in range(2 * num_ranks):
        here_ns = round(forward_ns * random.uniform(0.8, 1.2))
        cost = Cost(
            forward_ns=here_ns,
            input_grad_ns=round(here_ns * input_share),
            weight_grad_ns=round(here_ns * weight_share),
            saved_bytes=random.randint(90, 110) << 20,
        )
        parts.append(cost)
    costs = Costs(parts=tuple(parts), send_ns=round(forward_ns * random.uniform(0, 0.4)))
    free = Profile(num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
    peaks = free.time_named(random.choice(tuple(FAMILIES))).peak_bytes
    caps = tuple(round(peak * random.uniform(1, 1.3)) for peak in peaks)
    return replace(free, costs=replace(costs, cap_bytes=caps))


def try_profile(profile: Profile) -> Outcome:
    """Time every named schedule and the searched one; the searched one is proved right."""
    costs = profile.costs
    timings = {name: profile.time_named(name) for name in FAMILIES}
    steps_ns = {
        name: timing.makespan_ns
        for name, timing in timings.items()
        if not find_excess(timing.peak_bytes, costs.cap_bytes)
    }
    best_name = min(steps_ns, key=lambda name: steps_ns[name])
    begin_ns = time.monotonic_ns()
    searched = make_searched(profile.num_ranks, profile.num_microbatches, costs)
    search_ns = time.monotonic_ns() - begin_ns
    check_schedule(searched)
    timing = time_schedule(searched, costs)
    if find_excess(timing.peak_bytes, costs.cap_bytes):
        raise AssertionError("the searched schedule breaks a cap")
    return Outcome(
        profile=profile,
        best_name=best_name,
        best_ns=steps_ns[best_name],
        searched_ns=timing.makespan_ns,
        bound_ns=find_bound(profile),
        bubble=float(timing.bubble),
        search_ns=search_ns,
    )


def find_bound(profile: Profile) -> int:
    """Give a time that no schedule can beat on a V, or a loop of up to four stages a rank."""
    p = profile.num_ranks
    placements = (*(place_looped(p, rounds * p) for rounds in (1, 2, 3, 4)), place_vee(p))
    return min(
        bound_makespan(
            make_board(
                [placement[stage][0] for stage in range(len(placement))],
                p,
                profile.num_microbatches,
                profile.costs,
            )
        )
        for placement in placements
    )


def measure(bench: Bench) -> None:
    """Draw the profiles and hold the searched schedule against the named ones."""
    random = Random(SEED)
    outcomes: list[Outcome] = []
    for at in range(NUM_PROFILES):
        profile = draw_profile(random, QUICK_RANKS if bench.quick else RANKS)
        bench.say(
            f"profile {at}: {profile.num_ranks} ranks, {profile.num_microbatches} microbatches"
        )
        outcomes.append(try_profile(profile))
        bench.add(f"profile {at}", _show(outcomes[-1]))
    ratios = sorted(outcome.ratio for outcome in outcomes)
    bench.add(
        "all profiles",
        [
            exactly("longer than the best named", sum(ratio > 1 for ratio in ratios), 0),
            at_least("shorter than the best named", sum(r < 1 for r in ratios), NUM_BETTER),
            shown("step by that of the best named, least", ratios[0]),
            shown("median", (ratios[len(ratios) // 2 - 1] + ratios[len(ratios) // 2]) / 2),
            shown("most", ratios[-1]),
        ],
    )


def _show(outcome: Outcome) -> list[Figure]:
    profile = outcome.profile
    sizes = f"{profile.num_ranks} ranks, {profile.num_microbatches} microbatches"
    return [
        shown("sizes", sizes),
        shown(f"best named: {outcome.best_name}", outcome.best_ns, show=format_ns),
        at_most("searched", outcome.searched_ns, outcome.best_ns, show=format_ns),
        shown("searched by best named", outcome.ratio),
        shown("bound for up to four stages a rank", outcome.bound_ns, show=format_ns),
        shown("idle with the flush", outcome.bubble, show=format_percent),
        shown("time to search", outcome.search_ns, show=format_ns),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("schedules", "The searched schedule against the named ones.", measure))
