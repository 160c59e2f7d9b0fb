"""Simulated idle time and peaks against the closed formulas of the papers.

Where a formula is exact it must be met to the nanosecond; elsewhere it is a bound. p is the number
of ranks, m of microbatches, v of stages on a rank; F, I, W are times of a rank's share, B = I + W.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packhorse.schedule.costs import UNIT_NS, even_costs
from packhorse.schedule.families import make_named
from packhorse.schedule.timing import Timing, time_schedule
from tests.schedule.schedule_cases import NAMES

RANKS = st.integers(1, 9)
MICROBATCHES = st.integers(1, 40)
# Divisible by the number of stages on a rank.
TIMES = st.integers(1, 20).map(lambda each: 12 * each)
SHARE_BYTES = 12


def time_even(name: str, p: int, m: int, *, stages: int | None = None, **costs: int) -> Timing:
    even = even_costs(p, saved_bytes=SHARE_BYTES, **costs)
    return time_schedule(make_named(name, p, m, even, num_stages=stages), even)


def idle_of(timing: Timing) -> list[int]:
    """What each rank idles of the step, in ns."""
    return [timing.makespan_ns - rank.busy_ns for rank in timing.ranks]


def peaks_of(timing: Timing) -> list[Fraction]:
    """What each rank saves at most, in microbatches of its share."""
    return [Fraction(peak, SHARE_BYTES) for peak in timing.peak_bytes]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@settings(max_examples=40)
@given(p=RANKS, m=MICROBATCHES, f=TIMES, i=TIMES, w=TIMES)
def test_one_stage_a_rank_idles_for_p_less_1_passes(
    name: str, p: int, m: int, f: int, i: int, w: int
) -> None:
    timing = time_even(name, p, m, forward_ns=f, input_grad_ns=i, weight_grad_ns=w)
    assert idle_of(timing) == [(p - 1) * (f + i + w)] * p
    assert timing.bubble == Fraction(p - 1, m + p - 1)


@settings(max_examples=40)
@given(p=RANKS, m=MICROBATCHES)
def test_peaks_of_one_stage_a_rank(p: int, m: int) -> None:
    assert peaks_of(time_even("gpipe", p, m)) == [m] * p
    assert peaks_of(time_even("1f1b", p, m)) == [min(m, p - rank) for rank in range(p)]
    assert peaks_of(time_even("eager-1f1b", p, m)) == [
        min(m, 2 * (p - 1 - rank) + 1) for rank in range(p)
    ]


@settings(max_examples=40)
@given(p=RANKS, v=st.integers(1, 4), groups=st.integers(1, 5), f=TIMES, i=TIMES, w=TIMES)
def test_interleaved(p: int, v: int, groups: int, f: int, i: int, w: int) -> None:
    timing = time_even(
        "interleaved", p, groups * p, stages=v * p, forward_ns=f, input_grad_ns=i, weight_grad_ns=w
    )
    assert idle_of(timing) == [Fraction((p - 1) * (f + i + w), v)] * p
    assert timing.bubble == Fraction(p - 1, v * groups * p + p - 1)
    assume(groups >= 2)
    assert peaks_of(timing) == [
        Fraction((v - 1) * p + 2 * (p - 1 - rank) + 1, v) for rank in range(p)
    ]


@pytest.mark.parametrize("name", ["looped-bfs", "layered"])
@settings(max_examples=40)
@given(p=RANKS, v=st.integers(1, 4), more=st.integers(0, 20), f=TIMES, i=TIMES, w=TIMES)
def test_breadth_first(name: str, p: int, v: int, more: int, f: int, i: int, w: int) -> None:
    timing = time_even(
        name, p, p + more, stages=v * p, forward_ns=f, input_grad_ns=i, weight_grad_ns=w
    )
    assert idle_of(timing) == [Fraction((p - 1) * (f + i + w), v)] * p
    assert peaks_of(timing) == [p + more] * p


@settings(max_examples=40)
@given(p=RANKS, more=st.integers(0, 20))
def test_zb_h1(p: int, more: int) -> None:
    m = p + more
    timing = time_even("zb-h1", p, m)
    assert idle_of(timing) == [(p - 1) * UNIT_NS] * p
    assert timing.bubble == Fraction(p - 1, 3 * m + p - 1)
    assert peaks_of(timing) == [p] * p


@settings(max_examples=40)
@given(p=RANKS, more=st.integers(0, 20))
def test_zb_h2(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    timing = time_even("zb-h2", p, m)
    assert timing.idle_in_span == 0
    assert timing.bubble == Fraction(p - 1, 3 * m + p - 1)
    assert peaks_of(timing) == [2 * p - 1] * p


@settings(max_examples=40)
@given(p=RANKS, more=st.integers(0, 20))
def test_zb_v(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    timing = time_even("zb-v", p, m)
    assert timing.idle_in_span == 0
    assert idle_of(timing) == [(p - 1) * UNIT_NS // 2] * p
    assert timing.bubble == Fraction(p - 1, 6 * m + p - 1)
    assert peaks_of(timing) == [p] * p


@settings(max_examples=40)
@given(p=RANKS, more=st.integers(0, 20))
def test_dualpipe_v(p: int, more: int) -> None:
    m = 2 * p + more
    timing = time_even("dualpipe-v", p, m)
    assert timing.bubble == Fraction(p - 1, 6 * m + p - 1)
    assert peaks_of(timing) == [Fraction(2 * p + 1, 2)] * p


@settings(max_examples=40)
@given(p=RANKS, more=st.integers(0, 30))
def test_v_half_and_v_min_are_bounded(p: int, more: int) -> None:
    m = 2 * p + more
    one_forward = time_even("1f1b", p, m).bubble
    for name, share, most in (
        ("v-half", Fraction(p, 2 * m), (p + 2) // 2),
        ("v-min", Fraction(2 * p, 3 * m), (p + 4) // 3),
    ):
        timing = time_even(name, p, m)
        assert timing.idle_in_span <= share
        assert timing.bubble <= one_forward
        # With one or two ranks no schedule on a V does with less than the first rank's two stages.
        assert max(peaks_of(timing)) <= max(most, min(p, 2))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(p=RANKS, m=MICROBATCHES)
def test_few_or_odd_microbatches_never_save_more(name: str, p: int, m: int) -> None:
    many = time_even(name, p, p * (m // p + 3))
    few = time_even(name, p, m)
    assert max(few.peak_bytes) <= max(many.peak_bytes)
    # And no schedule idles longer than the one that does nothing at the same time.
    assert few.makespan_ns <= 3 * UNIT_NS * m * p


@pytest.mark.parametrize(
    ("name", "bubble", "first_and_last"),
    [
        ("gpipe", "30.4", (16, 16)),
        ("1f1b", "30.4", (8, 1)),
        ("eager-1f1b", "30.4", (15, 1)),
        ("interleaved", "17.9", (11.5, 4.5)),
        ("looped-bfs", "17.9", (16, 16)),
        ("zb-h1", "12.7", (8, 8)),
        ("zb-v", "6.8", (8, 8)),
        ("dualpipe-v", "6.8", (8.5, 8.5)),
    ],
)
def test_eight_ranks_and_sixteen_microbatches(
    name: str, bubble: str, first_and_last: tuple[float, float]
) -> None:
    """The figures that torch's own lists of tasks give, simulated."""
    timing = time_even(name, 8, 16)
    assert f"{float(timing.bubble) * 100:.1f}" == bubble
    peaks = peaks_of(timing)
    assert (peaks[0], peaks[-1]) == first_and_last
    with_sends = time_even(name, 8, 16, send_ns=UNIT_NS // 10)
    assert with_sends.bubble > timing.bubble
