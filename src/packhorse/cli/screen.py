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
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from packhorse.errors import InputError
from packhorse.units import format_bytes, format_percent

# Between two plain lines about the same work.
QUIET_S: Final = 10.0
_BAR_WIDTH: Final = 24

Stages = Callable[[str, int, int], None]
"""Told what is done next, its index, and the number of parts."""

Amount = Callable[[int, int | None], None]
"""Told how many bytes are done, and of how many."""


class Screen:
    """The two streams of one command."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = _make_console(stderr=False)
        self.err = _make_console(stderr=True)

    def show(self, *parts: RenderableType) -> None:
        """Print results for people; nothing with `--json`."""
        if not self.as_json:
            for part in parts:
                self.out.print(part)

    def show_text(self, text: str) -> None:
        """Print a text as it is, however wide; nothing with `--json`."""
        if not self.as_json:
            sys.stdout.write(text)

    def answer(self, document: Mapping[str, object]) -> None:
        """Print the result for programs; nothing without `--json`."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")

    def note(self, text: str) -> None:
        """Say what a person should know, on stderr."""
        self.err.print(f"note: {text}", style="dim", soft_wrap=True)

    def warn(self, text: str) -> None:
        """Say what is probably not meant, on stderr."""
        self.err.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def wrote(self, *paths: object) -> None:
        """Say which files were written, on stderr."""
        self.err.print(
            f"wrote {', '.join(str(path) for path in paths)}", style="dim", soft_wrap=True
        )

    @contextmanager
    def stages(self, title: str) -> Generator[Stages]:
        """Show which part of some work is being done."""
        if not self.err.is_terminal:

            def tell(what: str, index: int, num_parts: int) -> None:
                self.err.print(f"{title}: {what} ({index + 1}/{num_parts})", soft_wrap=True)

            yield tell
            return
        with _make_progress(self.err) as progress:
            task = progress.add_task(title, total=None, detail="")

            def show(what: str, index: int, num_parts: int) -> None:
                progress.update(task, completed=index, total=num_parts, detail=what)

            yield show

    @contextmanager
    def amount(self, title: str) -> Generator[Amount]:
        """Show how many bytes of some work are done."""
        if self.err.is_terminal:
            with _make_progress(self.err) as progress:
                yield _bar_of(progress, progress.add_task(title, total=None, detail=""))
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


def _bar_of(progress: Progress, task: TaskID) -> Amount:
    def show(done: int, total: int | None) -> None:
        detail = format_bytes(done) + (f" of {format_bytes(total)}" if total else "")
        progress.update(task, completed=done, total=total, detail=detail)

    return show


def _lines_of(console: Console, title: str) -> Amount:
    said_at_s = time.monotonic()

    def tell(done: int, total: int | None) -> None:
        nonlocal said_at_s
        now_s = time.monotonic()
        if now_s - said_at_s >= QUIET_S:
            said_at_s = now_s
            share = f" ({format_percent(done / total)})" if total else ""
            console.print(f"{title}: {format_bytes(done)}{share}", soft_wrap=True)

    return tell


def _make_console(*, stderr: bool) -> Console:
    # What is printed are texts of files and people: never markup, never guessed colours.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _make_progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(style="none"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
        console=console,
        transient=True,
    )
