"""The benches' report: a missed bar is told, and ends with exit code 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import Bench, at_least, at_most, exactly, holds, run_bench, shown
from packhorse.units import format_bytes


def run(tmp_path: Path, figures, *arguments: str) -> int:
    def measure(bench: Bench) -> None:
        bench.say("measuring")
        bench.add("a table", figures)

    return run_bench("toy", "About it.", measure, arguments=arguments, results=tmp_path)


def test_met_bars_end_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        at_most("peak", 3 << 20, 4 << 20, show=format_bytes),
        at_least("share", 0.5, 0.5),
        exactly("cases", 3, 3),
        holds("curve", True, measured="same bits", bar="same bits"),
        shown("note", "[x] is no markup"),
    ]
    assert run(tmp_path, figures) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    for words in ("3.00 MiB", "<= 4.00 MiB", "[x] is no markup", "4 of 4 bars met", "commit "):
        assert words in text
    content = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert content["met"] is True
    assert content["setup"]["command"] == "python -m bench.toy"
    assert [f["met"] for f in content["tables"][0]["figures"]] == [True] * 4 + [None]


@pytest.mark.parametrize(
    "figure",
    [
        at_most("f", 5, 4),
        at_least("f", 0.1, 0.2),
        exactly("f", 2, 3),
        holds("f", False, measured="a", bar="b"),
    ],
)
def test_a_missed_bar_ends_with_1(
    figure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [exactly("fine", 1, 1), figure], "--quick") == 1
    text = capsys.readouterr().out
    assert "missed: a table: f" in text
    assert "MISSED" in text
    content = json.loads((tmp_path / "toy-quick.json").read_text(encoding="utf-8"))
    assert content["met"] is False
    assert content["quick"] is True
