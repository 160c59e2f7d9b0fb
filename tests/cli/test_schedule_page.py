"""The page of `packhorse schedule`: its commands run, its output and its messages are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from bench.paper import SHAPE as DECODER
from bench.paper_model import make_decoder
from packhorse.model.files import format_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "schedule.md"


def list_blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_everything_on_the_page_is_so(shell, tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    (own,) = list_blocks("python")
    (tmp_path / "my_schedule.py").write_text(own, encoding="utf-8")
    (tmp_path / "model.json").write_text(format_model(make_decoder(DECODER)), encoding="utf-8")
    assert len(own.splitlines()) <= 20
    said = []
    for line in "".join(list_blocks("sh")).splitlines():
        done = shell(*shlex.split(line)[1:])
        assert done.code == 0, (line, done.err)
        said.append(done.out)
    picture, table, paper, error = list_blocks("text")
    assert said[0].startswith(picture.removesuffix(" ...\n"))
    assert said[2] == table
    (whole,) = (each for each in said if each.startswith("decoder-70b"))
    # Behind it is only how long each part took.
    shown, seconds = whole[: len(paper)], whole[len(paper) :]
    assert shown == paper
    assert len(seconds.split("\n")) == 4
    golden("../../docs/how-to/zb-v.svg", (tmp_path / "zb-v.svg").read_text(encoding="utf-8"))
    lines = own.splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if "*(Forward(stage=back" in line)
    lines[at : at + 2] = reversed(lines[at : at + 2])
    (tmp_path / "my_schedule.py").write_text("".join(lines), encoding="utf-8")
    sizes = ("--ranks", 4, "--microbatches", 32)
    done = shell("check", "my_schedule.py:vee", *sizes)
    assert (done.code, done.err) == (3, error)
