"""Time to the first step: the quickstart as it is, from the command to the end of step 1.

`packhorse train recipes/quickstart.yaml` runs in a process with an empty cache, so that the machine
is probed and the text is tokenised as after an installation; it is ended when step 1 is in the
log. What the command says on its way tells where the time goes; the longest silence tells how long
a person waits without a sign. Then it starts a second time, with the cache of the first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Final

from bench.report import ROOT, Bench, Figure, at_most, run_bench, shown
from packhorse.units import format_ns

RECIPE: Final = ROOT / "recipes" / "quickstart.yaml"
LIMIT_NS: Final = 60 * 10**9
# Where nothing is a terminal, a line takes the place of each change of the bar.
SILENCE_LIMIT_NS: Final = 20 * 10**9
_GIVE_UP_S: Final = 900.0
_POLL_S: Final = 0.01
# Lines that take a bar's place: `planning: exporting the model`, later with a share behind.
_PROGRESS: Final = re.compile(
    r"((?:starting|measuring this machine|planning|preparing): [^,]+)(, .*)?"
)
_STEPS_BEGIN: Final = "steps 1 to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A line of the command, and when it came after the start."""

    at_ns: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the command up to the end of step 1."""

    lines: tuple[Said, ...]
    first_step_ns: int

    @property
    def stages(self) -> tuple[tuple[str, int], ...]:
        """What the command did, in its own words, and how long each took in ns."""
        begun = [(0, "starting the command")]
        for line in self.lines:
            stage = _find_stage(line.text)
            if stage is not None and stage != begun[-1][1]:
                begun.append((line.at_ns, stage))
        ends_ns = [at_ns for at_ns, _ in begun[1:]] + [self.first_step_ns]
        return tuple(
            (name, end_ns - at_ns) for (at_ns, name), end_ns in zip(begun, ends_ns, strict=True)
        )

    @property
    def longest_silence_ns(self) -> int:
        """The longest time between two lines until step 1 begins, which is announced."""
        times = [0]
        for line in self.lines:
            times.append(line.at_ns)
            if line.text.startswith(_STEPS_BEGIN):
                break
        return max(after - before for before, after in pairwise(times))


def measure(bench: Bench) -> None:
    """Start the quickstart with an empty cache, and once more with a full one."""
    with tempfile.TemporaryDirectory(prefix="packhorse-first-") as scratch:
        folder = Path(scratch)
        first = start_quickstart(bench, folder, "first")
        bench.add("The first start after an installation", list_figures(first))
        if not bench.quick:
            second = start_quickstart(bench, folder, "second")
            bench.add("A second start: machine and text are known", list_figures(second))


def list_figures(start: Start) -> list[Figure]:
    """The bar, and what the time went into."""
    return [
        at_most("command to the end of step 1", start.first_step_ns, LIMIT_NS, show=format_ns),
        at_most(
            "longest time without a sign before step 1",
            start.longest_silence_ns,
            SILENCE_LIMIT_NS,
            show=format_ns,
        ),
        *(shown(f"  {name}", spent_ns, show=format_ns) for name, spent_ns in start.stages),
    ]


def start_quickstart(bench: Bench, folder: Path, name: str) -> Start:
    """Run the command until step 1 is in the log, then end it."""
    run = folder / name
    command = [sys.executable, "-m", "packhorse", "train", str(RECIPE)]
    for setting in (f"output_dir={run}", f"data_cache={folder / 'data'}"):
        command += ["--set", setting]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    began_ns = time.monotonic_ns()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[Said] = []
    reader = threading.Thread(target=_read, args=(process.stdout, began_ns, lines), daemon=True)
    reader.start()
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        if time.monotonic_ns() - began_ns > _GIVE_UP_S * 1e9:
            break
        time.sleep(_POLL_S)
    first_step_ns = time.monotonic_ns() - began_ns
    ended_alone = process.poll() is not None
    if not ended_alone:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join()
    if ended_alone or not metrics.is_file():
        raise SystemExit("\n".join(["step 1 did not come:", *(line.text for line in lines[-15:])]))
    for line in lines:
        bench.say(f"{format_ns(line.at_ns)}  {line.text}")
    shown_before = tuple(line for line in lines if line.at_ns <= first_step_ns)
    return Start(lines=shown_before, first_step_ns=first_step_ns)


def _find_stage(text: str) -> str | None:
    """Name what a line says to begin; None for a line that says something else."""
    progress = _PROGRESS.fullmatch(text)
    if progress is not None:
        return progress.group(1)
    if text.startswith(_STEPS_BEGIN):
        return "step 1"
    return "loading the weights" if text == "loading" else None


def _read(stream: IO[str], began_ns: int, lines: list[Said]) -> None:
    # Line by line: each is noted when it comes.
    lines.extend(
        Said(at_ns=time.monotonic_ns() - began_ns, text=text.rstrip())
        for text in stream
        if text.strip()
    )


if __name__ == "__main__":
    sys.exit(run_bench("first_step", __doc__.splitlines()[0], measure))
