"""Child processes that tell how large they became.

In: the arguments of a `packhorse` command, or of the plain loop. Out: an `Outcome`: the exit code,
what the command answered, and the child's own memory figures: resident bytes right after its
imports and the largest ever (VmHWM). A child may run in a memory cgroup of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import yaml

from bench.cgroups import MemoryGroup
from bench.report import ROOT

MODEL: Final = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
WORK: Final = ROOT / ".cache" / "bench"
STATE_BYTES_PER_PARAMETER: Final = 16
_THREADS: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child ended.

    `imports_bytes` is resident right after the imports, `peak_bytes` the largest ever; both are
    None for a child that was killed. `group_peak_bytes` is the cgroup's own account, page cache
    included, where there was one.
    """

    exit_code: int
    answer: Mapping[str, Any]
    error: str
    imports_bytes: int | None
    peak_bytes: int | None
    group_peak_bytes: int | None

    @property
    def killed(self) -> bool:
        """Whether the kernel ended it, as it does when a cgroup is full."""
        return self.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def own_bytes(self) -> int:
        """What the process held at its largest beyond its imports."""
        if self.peak_bytes is None or self.imports_bytes is None:
            raise ChildError(f"the child ended with {self.exit_code}: {self.error[-2000:]}")
        return self.peak_bytes - self.imports_bytes


class ChildError(RuntimeError):
    """A child ended in a way that the bench cannot go on with."""


@contextmanager
def work_folder(name: str) -> Generator[Path]:
    """A folder on the project's own disk, removed at the end; a RAM disk would count as memory.

    Inside, SIGTERM unwinds as Ctrl-C does, so that children, folder and cgroup go with the bench.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=WORK) as folder:
        yield Path(folder)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


def write_recipe(path: Path, content: Mapping[str, object]) -> Path:
    """Write a recipe file."""
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    return path


def run_command(
    arguments: Sequence[str], *, folder: Path, group: MemoryGroup | None = None
) -> Outcome:
    """Run a `packhorse` command with `--json` in a child that measures itself."""
    return _run("bench.measured_command", [*arguments, "--json"], folder, group)


def probe_machine(
    folder: Path, *, device_bytes: int, disk: str, file_bytes: int | None = None
) -> Path:
    """Measure this machine afresh, with these budgets; give its file, in `folder`.

    Args:
        disk: budget of the scratch space in `folder`.
        file_bytes: how large a file the disk is measured with; None leaves it to the command.
    """
    machine = folder / "machine.json"
    budget = f"device={device_bytes},disk={folder / 'scratch'}:{disk}"
    arguments = ["probe", "--fresh", "--budget", budget, "--out", str(machine)]
    if file_bytes is not None:
        arguments += ["--file-size", str(file_bytes)]
    expect_done(run_command(arguments, folder=folder), "probe")
    return machine


def run_plain(
    specification: Mapping[str, object], *, folder: Path, group: MemoryGroup | None = None
) -> Outcome:
    """Run the plain loop in a child that measures itself; see `bench.plain_loop`."""
    return run_module("bench.plain_loop", specification, folder=folder, group=group)


def run_module(
    module: str,
    specification: Mapping[str, object],
    *,
    folder: Path,
    group: MemoryGroup | None = None,
) -> Outcome:
    """Run a module of the benches, which takes a JSON document and measures itself, in a child."""
    return _run(module, [json.dumps(specification)], folder, group)


def run_session(recipe: Path, eval_batches: Sequence[int], *, folder: Path) -> Outcome:
    """Plan a recipe, load, evaluate and train a step in a child; see `bench.loaded_session`."""
    counts = ",".join(map(str, eval_batches))
    return _run("bench.loaded_session", [str(recipe), counts], folder, None)


def _run(module: str, arguments: Sequence[str], folder: Path, group: MemoryGroup | None) -> Outcome:
    report = folder / "memory.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(report), *arguments]
    if group is not None:
        command = group.wrap(command)
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": _THREADS, "PYTHONPATH": str(ROOT / "src")},
    )
    memory = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    answer = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return Outcome(
        exit_code=done.returncode,
        answer=answer,
        error=done.stderr,
        imports_bytes=memory.get("imports_bytes"),
        peak_bytes=memory.get("peak_bytes"),
        group_peak_bytes=None if group is None else group.peak_bytes,
    )


def expect_done(outcome: Outcome, what: str) -> Outcome:
    """Give the outcome of a child that has to succeed.

    Raises:
        ChildError: it did not.
    """
    if outcome.exit_code:
        raise ChildError(f"{what} ended with {outcome.exit_code}:\n{outcome.error[-3000:]}")
    return outcome


def read_metrics(run_folder: Path) -> list[Mapping[str, Any]]:
    """Read the training lines of a run's metrics."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]
