"""Pictures of several ranks, for pages and terminals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from picture_texts import assert_texts_are_apart

from packhorse.report.colours import colour_of, fade
from packhorse.report.rank_rows import picture_ranks
from packhorse.report.rank_tasks import PASSES, list_rank_tasks, shade_of
from packhorse.report.ranks import draw_ranks
from packhorse.report.svg import WIDTH
from packhorse.timeline.names import ALL_REDUCE, words_for
from packhorse.timeline.spec import Span, Timeline
from tests.report.samples import render

SVG = "{http://www.w3.org/2000/svg}"


def make_rank(rank, *tasks, slowness=1):
    """A rank that does `kind stage microbatch start end` after `kind stage ...`."""
    spans = []
    for index, (kind, stage, microbatch, start, end) in enumerate(tasks):
        spans.append(
            Span(
                index=index,
                name=f"{words_for(kind)} {stage}@{microbatch}",
                kind=kind,
                lane="compute",
                start_ns=start * 1_000_000 * slowness,
                end_ns=end * 1_000_000 * slowness,
            )
        )
    return Timeline(source="simulated", rank=rank, spans=tuple(spans), memory={})


def two_ranks(slowness=1):
    """One microbatch on a V of four stages, with halves on one rank, and one more forward."""
    return (
        make_rank(
            0,
            ("forward", 0, 0, 0, 1),
            ("forward", 0, 1, 1, 2),
            ("forward", 3, 0, 3, 4),
            ("backward", 3, 0, 4, 6),
            ("input_grad", 0, 0, 10, 11),
            ("weight_grad", 0, 0, 11, 12),
            slowness=slowness,
        ),
        make_rank(
            1,
            ("forward", 1, 0, 1, 2),
            ("forward", 2, 0, 2, 3),
            ("backward", 2, 0, 6, 8),
            ("backward", 1, 0, 8, 10),
            slowness=slowness,
        ),
    )


def many_ranks(num_ranks, num_tasks, *, gap=0):
    return tuple(
        make_rank(
            rank,
            *(
                (list(PASSES)[at % 5], rank, at, rank + at * (1 + gap), rank + at * (1 + gap) + 1)
                for at in range(num_tasks)
            ),
        )
        for rank in range(num_ranks)
    )


def draw(timelines):
    notes = [f"rank {timeline.rank} idles 10 %" for timeline in timelines]
    return draw_ranks(timelines, title="a < b", facts="12 ms", notes=notes, notes_head="idle")


def test_golden_pictures(golden):
    golden("report/ranks.svg", draw(two_ranks()))
    golden("report/ranks.txt", render(picture_ranks(two_ranks()), width=80, encoding="ascii"))


@pytest.mark.parametrize(
    "timelines",
    [
        (),
        (make_rank(0),),
        two_ranks(),
        two_ranks(slowness=100_000),
        many_ranks(8, 20),
        many_ranks(30, 20),
        many_ranks(64, 300),
        many_ranks(100, 40),
    ],
)
def test_texts_stay_inside_and_apart(timelines):
    assert_texts_are_apart(draw(timelines), WIDTH)


def test_a_picture_of_many_tasks_stays_small():
    few, many = (draw(many_ranks(16, count)) for count in (1000, 6000))
    assert len(many) < 2 * len(few) < 1_000_000


def test_boxes_say_what_they_are():
    svg = draw(two_ranks())
    assert "a &lt; b" in svg
    assert "prefers-color-scheme: dark" in svg
    assert "<title>input grad, stage 0, microbatch 0</title>" in svg
    assert svg.count('class="row"') == 2
    assert "paler: later stages of a rank" in svg


def list_areas(svg):
    """The surface of each colour of rows that are drawn as areas."""
    surfaces = {}
    for path, colour in re.findall(r'<path d="([^"]+)" fill="([^"]+)"/>', svg):
        boxes = re.findall(r"h([\d.]+)v([\d.]+)h", path)
        surfaces[colour] = sum(float(width) * float(height) for width, height in boxes)
    return surfaces


@pytest.mark.parametrize(("gap", "share"), [(0, 1), (1, 1 / 2), (3, 1 / 4)])
def test_areas_are_as_large_as_ranks_are_busy(gap, share):
    svg = draw(many_ranks(1, 4000, gap=gap))
    (ground,) = re.findall(r'class="row" [^>]*width="([\d.]+)" height="([\d.]+)"', svg)
    whole = float(ground[0]) * float(ground[1])
    areas = list_areas(svg)
    assert areas.keys() == {colour_of(kind) for kind in PASSES}
    assert sum(areas.values()) == pytest.approx(share * whole, rel=0.02)
    # Each edge between two kinds is rounded to half a pixel.
    half_a_pixel = float(ground[0]) / 2
    for area in areas.values():
        assert area == pytest.approx(share * whole / 5, abs=half_a_pixel)


def add_reduction(timeline, start, end):
    span = Span(
        index=len(timeline.spans),
        name="all-reduce, stage 0",
        kind=ALL_REDUCE,
        lane=ALL_REDUCE,
        start_ns=start * 1_000_000,
        end_ns=end * 1_000_000,
    )
    return replace(timeline, spans=(*timeline.spans, span))


def test_sums_over_replicas_are_drawn_beside_and_behind_what_is_computed():
    first, second = two_ranks()
    timelines = (add_reduction(first, 12, 15), add_reduction(second, 9, 11))
    svg = draw(timelines)
    strips = re.findall(r"<title>all-reduce, stage 0</title><rect[^>]* width=\"([\d.]+)\"", svg)
    assert float(strips[0]) / float(strips[1]) == pytest.approx(3 / 2, rel=0.01)
    assert "A all-reduce" in svg
    assert_texts_are_apart(svg, WIDTH)
    lines = render(picture_ranks(timelines), width=80, encoding="ascii").splitlines()
    # What is computed hides it; a step is as long as the last of them.
    assert lines[0].endswith("A-----------")
    assert "A" not in lines[0][: lines[0].index("W")]
    assert lines[1].rstrip(".").endswith("A---")
    assert "A all-reduce" in "\n".join(lines[3:])


def test_short_tasks_share_a_row_of_a_terminal_in_proportion():
    (line, *_) = render(picture_ranks(many_ranks(1, 4000, gap=1)), width=127).splitlines()
    row = line.removeprefix("rank 0  ")
    assert len(row) == 119
    assert row.count(".") / 119 == pytest.approx(1 / 2, abs=0.03)
    for letter in "FRBIW":
        assert row.count(letter) / 119 == pytest.approx(1 / 10, abs=0.03)


def test_many_ranks_share_rows_of_a_terminal():
    lines = render(picture_ranks(many_ranks(70, 900)), width=80).splitlines()
    heads = [line.split("  ")[0] for line in lines[:24]]
    assert heads[:2] == ["ranks 0-2", "ranks 3-5"]
    assert heads[23] == "rank 69"
    assert max(map(len, lines)) <= 80


def test_turns_and_letters():
    first, second = list_rank_tasks(two_ranks())
    assert "".join(task.letter for task in first) == "FFfbIW"
    assert "".join(task.letter for task in second) == "FfbB"
    assert shade_of("forward", 0) == colour_of("forward")
    assert len({shade_of("forward", turn) for turn in range(4)}) == 4
    assert len({shade_of(kind, 0) for kind in PASSES}) == len(PASSES)
    assert (fade("#102030", 0), fade("#102030", 1)) == ("#102030", "#ffffff")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "timelines", [(), (make_rank(0),), two_ranks(), many_ranks(3, 70), many_ranks(12, 900)]
)
def test_terminal_pictures_fit(timelines, width):
    lines = render(picture_ranks(timelines), width=width).splitlines()
    assert max(map(len, lines), default=0) <= width
    for timeline, line in zip(timelines, lines, strict=False):
        assert line.startswith(f"rank {timeline.rank}")
        assert not timeline.spans or set("FRBIW") & set(line)
