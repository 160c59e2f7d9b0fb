import re
from itertools import pairwise

import pytest
from picture_texts import assert_texts_are_apart

from packhorse.program.buffers import PoolId
from packhorse.report.axes import byte_ticks, time_ticks
from packhorse.report.colours import colour_of, ink_on
from packhorse.report.pictures import WIDTH, draw_timeline
from packhorse.report.strips import cut_strips
from packhorse.report.terminal import picture_timeline
from packhorse.timeline.names import KINDS
from packhorse.timeline.spec import MemoryPoint, Span, Timeline
from tests.report.samples import CAPACITIES, make_step, render

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = Timeline(source="measured", rank=1, spans=(), memory={})


def long_step(num_tasks):
    spans = tuple(
        Span(
            index=n,
            name=f"{KINDS[n % 13]} {n}@0",
            kind=KINDS[n % 13],
            lane="compute",
            start_ns=n * 1000,
            end_ns=n * 1000 + 900,
        )
        for n in range(num_tasks)
    )
    points = tuple(
        MemoryPoint(at_ns=n * 500, used_bytes=n % 7 * 1000) for n in range(2 * num_tasks)
    )
    return Timeline(source="simulated", rank=0, spans=spans, memory={PoolId("device"): points})


def test_golden_pictures(golden):
    golden("report/timeline.svg", draw_timeline(make_step(), capacity_bytes=CAPACITIES))
    picture = picture_timeline(make_step(), capacity_bytes=CAPACITIES)
    golden("report/timeline.txt", render(picture, encoding="ascii"))


@pytest.mark.parametrize(
    "timeline",
    [
        EMPTY,
        make_step(),
        make_step(slowness=1000),
        long_step(500),
        long_step(13),
        make_step(num_blocks=40),
    ],
)
def test_texts_stay_inside_and_apart(timeline):
    assert_texts_are_apart(draw_timeline(timeline, capacity_bytes=CAPACITIES), WIDTH)


def test_a_picture_of_many_tasks_stays_small():
    few, many = (draw_timeline(long_step(count)) for count in (3000, 30_000))
    assert len(many) < 2 * len(few) < 1_000_000


def test_names_are_escaped_and_both_themes_are_there():
    svg = draw_timeline(make_step(), title="a < b & c")
    assert "a &lt; b &amp; c" in svg
    assert "prefers-color-scheme: dark" in svg
    assert re.search(r"copy param/0 disk -&gt; device", svg)


def test_a_curve_keeps_its_peak_and_a_roomy_capacity_has_no_line():
    tight = draw_timeline(make_step(), capacity_bytes=CAPACITIES)
    assert tight.count('class="limit"') == 1
    assert "of 64.0 MiB" in tight
    assert "of 1.00 TiB" in tight
    assert draw_timeline(make_step()).count('class="limit"') == 0


def test_strips_keep_time_and_join_only_short_spans():
    spans = long_step(100).spans
    assert [strip.name for strip in cut_strips(spans, pixel_ns=10)] == [s.name for s in spans]
    joined = cut_strips(spans, pixel_ns=5000)
    assert len(joined) < 30
    assert joined[0].start_ns == 0
    assert joined[-1].end_ns == spans[-1].end_ns
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(joined))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("timeline", [EMPTY, make_step(), long_step(300)])
def test_terminal_pictures_fit(timeline, width):
    lines = render(picture_timeline(timeline, capacity_bytes=CAPACITIES), width=width)
    assert max(len(line) for line in lines.splitlines()) <= width
    assert "\u2588" in lines or not timeline.spans


@pytest.mark.parametrize(
    ("largest", "labels"),
    [
        (0, ["0 ns"]),
        (9, ["0 ns", "1 ns", "2 ns", "3 ns", "4 ns", "5 ns", "6 ns", "7 ns", "8 ns", "9 ns"]),
        (1_360_000_000, ["0 ms", "200 ms", "400 ms", "600 ms", "800 ms", "1000 ms", "1200 ms"]),
        (5_000_000_000, ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s"]),
        (3 * 3600 * 10**9, ["0 h", "0.5 h", "1 h", "1.5 h", "2 h", "2.5 h", "3 h"]),
    ],
)
def test_time_ticks_are_round(largest, labels):
    ticks = time_ticks(largest)
    assert [label for _, label in ticks] == labels
    assert all(0 <= value <= largest for value, _ in ticks)


def test_byte_ticks_are_round():
    assert [label for _, label in byte_ticks(64 << 20)] == ["0 MiB", "32 MiB", "64 MiB"]
    assert [label for _, label in byte_ticks(5)] == ["0 B", "2 B", "4 B"]
    assert [label for _, label in byte_ticks(0)] == ["0 B"]
    assert [label for _, label in byte_ticks(3 << 30)] == ["0 GiB", "1 GiB", "2 GiB", "3 GiB"]


def test_colours_are_distinct_and_their_ink_is_readable():
    kinds = [kind for kind in KINDS if kind not in ("feed", "free", "emit", "import", "export")]
    assert len({colour_of(kind) for kind in kinds}) == len(kinds)
    assert ink_on("#000000") == "#ffffff"
    assert ink_on("#ffffff") == "#14171c"
