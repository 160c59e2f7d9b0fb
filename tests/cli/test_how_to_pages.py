"""Every command has a page; the commands on all pages exist, and the cheap ones run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from packhorse.cli.main import app, spell_resume

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
GROUP = typer.main.get_command(app)
GUIDES = ("ranks",)
"""Pages that take a reader through several commands."""
CHEAP = ("doctor", "explain", "lower", "check", "simulate", "schema")


def list_lines(page: str) -> list[list[str]]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`(packhorse [a-z]+ [^`]+)`", text)
    lines = [line for block in blocks for line in block.splitlines()] + spans
    # Of what torchrun starts, what it starts: `torchrun --nproc-per-node 2 -m packhorse train ...`.
    words = [shlex.split(line) for line in lines if line.startswith(("packhorse ", "torchrun "))]
    return [each[each.index("packhorse") + 1 :] for each in words]


def test_every_command_has_a_page_and_every_page_a_command():
    assert {path.stem for path in PAGES.glob("*.md")} == {*GROUP.commands, *GUIDES}


@pytest.mark.parametrize("page", sorted(GROUP.commands))
def test_commands_on_a_page_parse(page):
    lines = list_lines(page)
    assert any(name == page for name, *_ in lines)
    for name, *arguments in lines:
        context = GROUP.commands[name].make_context(name, spell_resume(arguments))
        assert context.params, name


@pytest.mark.parametrize("page", GUIDES)
def test_commands_of_a_guide_parse(page):
    lines = list_lines(page)
    assert len({name for name, *_ in lines}) > 2
    for name, *arguments in lines:
        context = GROUP.commands[name].make_context(name, spell_resume(arguments))
        assert context.params, name


@pytest.mark.parametrize("page", CHEAP)
def test_cheap_commands_on_a_page_run(shell, plan_folder, monkeypatch, page):
    monkeypatch.chdir(plan_folder)
    for name, *arguments in list_lines(page):
        if name == page:
            done = shell(name, *arguments)
            assert done.code == 0, done.err
