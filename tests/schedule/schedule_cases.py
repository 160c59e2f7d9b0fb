"""Schedules and short ways to write them, for the tests of schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from packhorse.schedule.costs import Cost, Costs, even_costs
from packhorse.schedule.csv_text import parse_csv
from packhorse.schedule.families import FAMILIES, make_named
from packhorse.schedule.spec import Schedule

NAMES = tuple(FAMILIES)
STAGED = ("interleaved", "looped-bfs", "layered")


def make_even(name: str, num_ranks: int, num_microbatches: int, **more: int) -> Schedule:
    """A named schedule of a model that costs the same everywhere."""
    return make_named(name, num_ranks, num_microbatches, even_costs(num_ranks), **more)


def write_schedule(*rows: str) -> Schedule:
    """A schedule of rows such as `0F0 0B0`, each stage placed where its tasks are."""
    return parse_csv("\n".join(",".join(row.split()) for row in rows))


@st.composite
def named_schedules(draw: st.DrawFn) -> tuple[str, Schedule]:
    """Any named schedule of up to 7 ranks, 20 microbatches and 4 stages a rank, where it may."""
    name = draw(st.sampled_from(NAMES))
    num_ranks = draw(st.integers(1, 7))
    more = {}
    if name in STAGED and draw(st.booleans()):
        more["num_stages"] = draw(st.integers(num_ranks, 4 * num_ranks))
    return name, make_even(name, num_ranks, draw(st.integers(1, 20)), **more)


@st.composite
def uneven_costs(draw: st.DrawFn, *, most_parts: int = 12) -> Costs:
    """Costs that differ along the depth."""
    times, sizes = st.integers(1, 1000), st.integers(1, 100)
    part = st.builds(
        Cost, forward_ns=times, input_grad_ns=times, weight_grad_ns=times, saved_bytes=sizes
    )
    parts = draw(st.lists(part, min_size=1, max_size=most_parts))
    return Costs(parts=tuple(parts), send_ns=draw(st.integers(0, 500)))
