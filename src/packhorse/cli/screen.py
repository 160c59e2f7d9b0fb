"""Where a command says what it has to say: tables for people, or one JSON document for programs.

In: rich renderables, documents, notes, progress. Out: results on stdout, everything else on stderr.
With `--json` stdout holds exactly one document. Where stderr is no terminal, progress is plain
lines; colours follow the terminal and NO_COLOR.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from packhorse.errors import InputError
from packhorse.units import format_percent

# Between two plain lines about the same work.
QUIET_S: Final = 10.0
_BAR_WIDTH: Final = 16

Tell = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and how much there is where known."""


class Screen:
    """The two streams of one command; a muted one says nothing, for ranks beside the first."""

    def __init__(self, *, as_json: bool = False, muted: bool = False) -> None:
        self.as_json = as_json
        self.muted = muted
        self.out = _make_console(stderr=False, quiet=muted)
        self.err = _make_console(stderr=True, quiet=muted)

    def show(self, *parts: RenderableType) -> None:
        """Print results for people; nothing with `--json`. Files get no spaces at line ends."""
        if self.as_json or self.muted:
            return
        for part in parts:
            if self.out.is_terminal:
                self.out.print(part)
                continue
            with self.out.capture() as captured:
                self.out.print(part)
            lines = captured.get().splitlines()
            sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))

    def show_text(self, text: str) -> None:
        """Print a text as it is, however wide; nothing with `--json`."""
        if not self.as_json and not self.muted:
            sys.stdout.write(text)

    def answer(self, document: Mapping[str, object]) -> None:
        """Print the result for programs; nothing without `--json`."""
        if self.as_json and not self.muted:
            sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")

    def note(self, text: str) -> None:
        """Say what a person should know, on stderr."""
        self._remark(f"note: {text}", "dim")

    def warn(self, text: str) -> None:
        """Say what is probably not meant, on stderr."""
        self._remark(f"warning: {text}", "yellow")

    def _remark(self, text: str, style: str) -> None:
        # Terminals break at words; files and programs get one line.
        self.err.print(text, style=style, soft_wrap=not self.err.is_terminal)

    def wrote(self, *paths: object) -> None:
        """Say which files were written, on stderr."""
        self.err.print(
            f"wrote {', '.join(str(path) for path in paths)}", style="dim", soft_wrap=True
        )

    @contextmanager
    def progress(self, title: str) -> Generator[Tell]:
        """Show what is being done and how far it is, until the block ends."""
        if self.err.is_terminal:
            with _make_progress(self.err) as progress:
                yield _bar_of(progress, title)
        else:
            yield _lines_of(self.err, title)

    def ask(self, question: str, *, yes: bool) -> bool:
        """Ask a person for a yes; `yes` answers without asking.

        Raises:
            InputError: nobody is there to be asked.
        """
        if yes:
            return True
        if not sys.stdin.isatty() or self.as_json:
            raise InputError(
                "this needs a yes, and nobody is there to be asked",
                where="standard input is no terminal" if not self.as_json else "--json",
                fix="add --yes",
            )
        self.err.print(f"{question} [y/N] ", end="")
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bar_of(progress: Progress, title: str) -> Tell:
    task = progress.add_task(title, total=None, detail="")

    def show(what: str, done: int, total: int | None) -> None:
        progress.update(task, completed=done, total=total, detail=what)

    return show


def _lines_of(console: Console, title: str) -> Tell:
    last = ""
    said_at_s = time.monotonic()

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal last, said_at_s
        now_s = time.monotonic()
        if what == last and now_s - said_at_s < QUIET_S:
            return
        share = f", {format_percent(done / total)}" if what == last and total else ""
        last, said_at_s = what, now_s
        console.print(f"{title}: {what}{share}", soft_wrap=True)

    return tell


def _make_console(*, stderr: bool, quiet: bool) -> Console:
    # What is printed are texts of files and people: never markup, never guessed colours.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, quiet=quiet)


def _make_progress(console: Console) -> Progress:
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        SpinnerColumn(style="none"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False, table_column=text),
        console=console,
        transient=True,
        expand=True,
    )
