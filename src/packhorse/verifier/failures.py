"""The words of a broken rule: what, and the task with its neighbours.

In: a program, the index of the task that breaks a rule, what is wrong. Out: a `RuleError` whose
place is at most seven tasks, each on one line, never the whole program.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from packhorse.errors import RuleError
from packhorse.program.program import Program
from packhorse.program.text import format_task

NUM_NEIGHBOURS: Final = 3
LINE_WIDTH: Final = 160


def make_error(
    program: Program, rule: str, index: int | None, what: str, fix: str | None = None
) -> RuleError:
    """Make the error of a rule; `index` is None where no task is to blame."""
    if index is None:
        return RuleError(what, rule=rule, where=f"the {program.kind} program", fix=fix)
    return RuleError(
        f"task {index} {what}", rule=rule, where=format_excerpt(program, index), fix=fix
    )


def format_excerpt(program: Program, index: int) -> str:
    """Render a task and its neighbours, the task itself marked with `>`."""
    first = max(index - NUM_NEIGHBOURS, 0)
    last = min(index + NUM_NEIGHBOURS, len(program.tasks) - 1)
    width = len(str(last))
    return "\n".join(
        _cut(f"{'>' if i == index else ' '} {i:>{width}}  {format_task(program.tasks[i])}")
        for i in range(first, last + 1)
    )


def name_task(program: Program, index: int) -> str:
    """Name a task in a sentence: `task 12 (B block=3 mb=0)`."""
    words = format_task(program.tasks[index]).split()
    short = [word for word in words if not word.startswith(("reads=", "writes=", "work="))]
    return f"task {index} ({' '.join(short)})"


def suggest(word: str, known: tuple[str, ...]) -> str:
    """Say which known name is nearest to an unknown one; empty when none is near."""
    nearest = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; the nearest declared buffer is {nearest[0]}" if nearest else ""


def _cut(line: str) -> str:
    return line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 3] + "..."
