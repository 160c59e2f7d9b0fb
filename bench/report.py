"""What every bench shares: its command line, its tables with the bar beside each figure, its file.

In: a function that measures and hands over tables of figures. Out: the tables on the screen, one
JSON file `bench/results/NAME.json` (`NAME-quick.json` for a quick run), and the exit code: 1 when a
bar is missed. Commit, machine and versions head both, so that a table can be pasted as it is.

    def measure(bench: Bench) -> None:
        bench.say("plain loop")
        bench.add("memory", [at_most("peak", peak_bytes, limit_bytes, show=format_bytes)])

    if __name__ == "__main__":
        sys.exit(run_bench("memory", "Peak memory against the budget.", measure))
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table as ScreenTable
from rich.text import Text

from packhorse.units import format_bytes, format_ns

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
FORMAT_VERSION: Final = 1
_PACKAGES: Final = ("packhorse", "torch", "transformers", "numpy")
_WIDTH: Final = 100

Number = int | float
Show = Callable[[Number], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure.

    `value` goes into the file, `measured` and `bar` are the words on the screen. `met` is None for
    a figure that has no bar.
    """

    name: str
    value: Number | str | None
    measured: str
    bar: str
    met: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures under one title."""

    title: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was measured, where and with what."""

    command: str
    commit: str
    date: str
    machine: str
    system: str
    versions: Mapping[str, str]


def at_most(name: str, value: Number, limit: Number, *, show: Show | None = None) -> Figure:
    """Give a figure that must not be above `limit`; `show` renders both for the screen."""
    return _compare(name, value, limit, "<=", met=value <= limit, show=show)


def at_least(name: str, value: Number, limit: Number, *, show: Show | None = None) -> Figure:
    """Give a figure that must not be below `limit`."""
    return _compare(name, value, limit, ">=", met=value >= limit, show=show)


def exactly(name: str, value: Number, wanted: Number, *, show: Show | None = None) -> Figure:
    """Give a figure that must be `wanted`."""
    return _compare(name, value, wanted, "=", met=value == wanted, show=show)


def holds(name: str, met: bool, *, measured: str, bar: str) -> Figure:
    """Give a figure whose bar is a statement, for example that two curves have the same bits."""
    return Figure(name=name, value=measured, measured=measured, bar=bar, met=met)


def shown(name: str, value: Number | str | None, *, show: Show | None = None) -> Figure:
    """Give a figure that has no bar."""
    text = _render(value, show) if isinstance(value, int | float) else str(value)
    return Figure(name=name, value=value, measured=text, bar="", met=None)


class Bench:
    """What a bench measures into.

    `quick` asks for a minute's version; `options` holds the bench's own arguments.
    """

    def __init__(self, name: str, options: argparse.Namespace, console: Console) -> None:
        self.name = name
        self.options = options
        self.tables: list[Table] = []
        self._console = console
        self._begin_ns = time.monotonic_ns()

    @property
    def quick(self) -> bool:
        """Whether a minute's version is wanted."""
        return bool(self.options.quick)

    def say(self, text: str) -> None:
        """Print a line of progress to standard error."""
        elapsed = format_ns(time.monotonic_ns() - self._begin_ns)
        print(f"bench.{self.name} [{elapsed}] {text}", file=sys.stderr, flush=True)

    def add(self, title: str, figures: Sequence[Figure]) -> None:
        """Print a table and keep it for the file."""
        table = Table(title=title, figures=tuple(figures))
        self.tables.append(table)
        _print_table(self._console, table)

    @property
    def missed(self) -> tuple[str, ...]:
        """The figures whose bar is missed, with their table."""
        return tuple(
            f"{table.title}: {figure.name}"
            for table in self.tables
            for figure in table.figures
            if figure.met is False
        )


def run_bench(
    name: str,
    about: str,
    measure: Callable[[Bench], None],
    *,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    arguments: Sequence[str] | None = None,
    results: Path = RESULTS,
) -> int:
    """Run a bench from its command line; print and write what it found.

    Args:
        name: as in `python -m bench.NAME`.
        about: one line, for `--help` and the head of the report.
        measure: fills the bench with tables.
        add_arguments: adds options beyond `--quick`.
        arguments: of the command line; by default the process's own.
        results: folder of the JSON file.

    Returns:
        The exit code: 0, or 1 when a bar is missed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--quick", action="store_true", help="about a minute's version")
    if add_arguments is not None:
        add_arguments(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    setup = describe_setup(shlex.join(["python", "-m", f"bench.{name}", *given]))
    _print_setup(console, about, setup)
    bench = Bench(name, options, console)
    begin_ns = time.monotonic_ns()
    measure(bench)
    elapsed_ns = time.monotonic_ns() - begin_ns
    path = results / f"{name}{'-quick' if bench.quick else ''}.json"
    write_report(path, bench, setup, elapsed_ns)
    missed = bench.missed
    num_bars = sum(figure.met is not None for table in bench.tables for figure in table.figures)
    verdict = f"{num_bars - len(missed)} of {num_bars} bars met in {format_ns(elapsed_ns)}"
    console.print(Text(f"{verdict}; {_short(path)}", style="bold red" if missed else "bold green"))
    for place in missed:
        console.print(Text(f"missed: {place}", style="red"))
    return 1 if missed else 0


def describe_setup(command: str) -> Setup:
    """Say what code, machine and versions a bench ran with."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return Setup(
        command=command,
        commit=_find_commit(),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=_describe_machine(),
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
    )


def write_report(path: Path, bench: Bench, setup: Setup, elapsed_ns: int) -> None:
    """Write the file of a bench."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": "packhorse-bench",
        "version": FORMAT_VERSION,
        "bench": bench.name,
        "quick": bench.quick,
        "met": not bench.missed,
        "elapsed_ns": elapsed_ns,
        "setup": asdict(setup),
        "tables": [asdict(table) for table in bench.tables],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _compare(
    name: str, value: Number, limit: Number, sign: str, *, met: bool, show: Show | None
) -> Figure:
    return Figure(
        name=name,
        value=value,
        measured=_render(value, show),
        bar=f"{sign} {_render(limit, show)}",
        met=met,
    )


def _render(value: Number, show: Show | None) -> str:
    if show is not None:
        return show(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _print_setup(console: Console, about: str, setup: Setup) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    lines = (about, setup.command, f"commit {setup.commit}, {setup.date}", setup.machine)
    for line in (*lines, f"{setup.system}; {versions}"):
        console.print(Text(line))
    console.print()


def _print_table(console: Console, table: Table) -> None:
    # Into a file or a pipe goes a table of plain ASCII that Markdown reads too.
    look = box.ROUNDED if console.is_terminal else box.MARKDOWN
    console.print(Text(table.title, style="bold"))
    screen = ScreenTable(box=look)
    screen.add_column("figure", overflow="fold")
    screen.add_column("measured", justify="right", overflow="fold")
    screen.add_column("bar", justify="right", overflow="fold")
    screen.add_column("")
    for figure in table.figures:
        verdict = {None: "", True: "met", False: "MISSED"}[figure.met]
        style = "red" if figure.met is False else ""
        cells = (figure.name, figure.measured, figure.bar, verdict)
        screen.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(screen)
    console.print()


def _find_commit() -> str:
    """The commit of the checkout, with a plus sign when tracked files differ from it."""
    try:
        commit = _ask_git("rev-parse", "--short=12", "HEAD")
        changed = _ask_git("status", "--porcelain", "--untracked-files=no", "src", "bench")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _ask_git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _describe_machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{model}, {cores} cores, {format_bytes(memory)}"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
