"""The same pipeline under packhorse and under torch.distributed.pipelining, in one run.

Two decoders are trained on two processes of one thread each, with few and many micro-batches. Both
sides compute with the same module and tell loss and global norm; every schedule does a step in
turn, so that what else the machine does hits all alike. Schedules that both have are cut in the
same places, and packhorse is to be no slower in any; nor is what it plans by itself, schedule and
cuts, to be slower than the best of torch's, one of which has the cuts that packhorse finds for it.
Beside it: what rank 0 and 1 were idle for, and how long a step took, against the simulator fed with
the durations that this run measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.children import work_folder
from bench.pipeline_worker import (
    CUT_BY_PLAN,
    NUM_RANKS,
    PLANNED,
    Shape,
    choose_cut,
    find_links,
    lower,
    trace,
)
from bench.report import Bench, Figure, at_most, run_bench, shown
from packhorse.machine.catalogue import load_known_machine
from packhorse.profile.files import parse_profile
from packhorse.program.program import Program
from packhorse.program.tasks import Task
from packhorse.simulator.joint import simulate_ranks
from packhorse.timeline.spec import Timeline
from packhorse.units import format_ns, format_percent

MODELS: Final = {"20M": (384, 8), "60M": (640, 10)}
COUNTS: Final = (8, 32)
# Packhorse's schedules, and torch's of the same kind.
BOTH: Final = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zb-v": "zbv"}
OURS: Final = (*BOTH, PLANNED)
THEIRS: Final = (*BOTH.values(), "zb1p")
NUM_STEPS: Final = 10
NUM_QUICK_STEPS: Final = 4
LIMIT: Final = 1.0
MAX_IDLE_POINTS: Final = 0.03
MAX_STEP_OFF: Final = 0.1


class MeasuredCosts:
    """Every task takes as long as it was measured to."""

    machine = load_known_machine("laptop-16gb")

    def __init__(self, program: Program, durations_ns: Sequence[int]) -> None:
        self._duration_ns = {
            id(task): duration for task, duration in zip(program.tasks, durations_ns, strict=True)
        }

    def duration_ns(self, task: Task) -> int:
        """Give the duration of one of the program's own tasks."""
        return self._duration_ns[id(task)]


def measure(bench: Bench) -> None:
    """Run every model and count."""
    options = bench.options
    for name in options.models or list(MODELS)[: 1 if bench.quick else None]:
        width, num_layers = MODELS[name]
        for count in options.microbatches or COUNTS[: 1 if bench.quick else None]:
            shape = Shape(
                width=width,
                num_layers=num_layers,
                vocabulary=4096,
                rows=1,
                length=128,
                num_microbatches=count,
            )
            bench.say(f"{name}, {count} micro-batches")
            told = run_ranks(
                shape, options.steps or (NUM_QUICK_STEPS if bench.quick else NUM_STEPS)
            )
            bench.add(f"{name}, {count} micro-batches of 1 x 128 tokens", list_steps(told))
            predicted = simulate_told(shape, told)
            bench.add(f"{name}, {count} micro-batches: idle time", list_idle(told, predicted))
            words = f"{name}, {count} micro-batches: predicted step"
            bench.add(words, list_predicted(told, predicted))


def run_ranks(shape: Shape, num_steps: int) -> list[dict[str, Any]]:
    """Run all ways on two processes; gives what each rank told."""
    with work_folder("pipeline") as folder:
        specification = folder / "specification.json"
        wanted = {
            "shape": {name: getattr(shape, name) for name in Shape.__slots__},
            "ours": OURS,
            "theirs": THEIRS,
            "num_steps": num_steps,
        }
        specification.write_text(json.dumps(wanted), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={NUM_RANKS}", "-m", "bench.pipeline_worker"),
            *(str(specification), str(folder)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return [read_told(folder / f"{rank}.json") for rank in range(NUM_RANKS)]


def read_told(path: Path) -> dict[str, Any]:
    """Read what a rank told."""
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def list_steps(told: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Each schedule's step, and packhorse's over torch's in pairs of turns."""
    taken = told[0]["taken"]
    figures: list[Figure] = []
    wall_ns = {name: median(step["wall_ns"] for step in steps) for name, steps in taken.items()}
    best = min((f"torch {name}" for name in (*THEIRS, CUT_BY_PLAN)), key=lambda name: wall_ns[name])
    pairs = {PLANNED: best} | {name: f"torch {other}" for name, other in BOTH.items()}
    for name, theirs in pairs.items():
        turns = zip(taken[f"packhorse {name}"], taken[theirs], strict=True)
        ratio = median(a["wall_ns"] / b["wall_ns"] for a, b in turns)
        about = f" ({told[0]['planned']}, against torch's best)" if name == PLANNED else ""
        words = f"{name}{about}: step over that of {theirs}"
        figures.append(at_most(words, ratio, LIMIT, show=_show_ratio))
    figures += [shown(f"{name}: median wall", ns, show=format_ns) for name, ns in wall_ns.items()]
    return figures


def simulate_told(
    shape: Shape, told: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[Timeline]]:
    """Simulate each schedule's ranks with the durations of tasks that they told."""
    subject = trace(shape)
    profile = parse_profile(told[0]["profile"], where="rank 0")
    links = find_links(told[0]["rates"])
    predicted: dict[str, Sequence[Timeline]] = {}
    for name in OURS:
        cut = choose_cut(subject, shape, name, profile, links)
        programs = lower(subject, shape, cut).programs["train_step"]
        costs = [
            MeasuredCosts(program, told[rank]["told"][name]["duration_ns"])
            for rank, program in enumerate(programs)
        ]
        predicted[name] = simulate_ranks(programs, costs)
    return predicted


def list_idle(
    told: Sequence[Mapping[str, Any]], predicted: Mapping[str, Sequence[Timeline]]
) -> list[Figure]:
    """The share of a step in which a rank's compute lane was idle, measured and simulated."""
    figures: list[Figure] = []
    for name, timelines in predicted.items():
        for rank, timeline in enumerate(timelines):
            own = told[rank]["told"][name]
            pairs = zip(own["busy_ns"], own["step_ns"], strict=True)
            measured = median(1 - busy / step for busy, step in pairs)
            simulated = 1 - timeline.busy_ns("compute") / timeline.makespan_ns
            off = abs(measured - simulated)
            words = f"{name}, rank {rank}: measured {measured:.1%}, simulated {simulated:.1%}, off"
            figures.append(at_most(words, off, MAX_IDLE_POINTS, show=_show_points))
    return figures


def list_predicted(
    told: Sequence[Mapping[str, Any]], predicted: Mapping[str, Sequence[Timeline]]
) -> list[Figure]:
    """Each schedule's simulated step against the measured one, barrier to barrier."""
    figures: list[Figure] = []
    for name, timelines in predicted.items():
        step_ns = max(timeline.makespan_ns for timeline in timelines)
        wall_ns = median(step["wall_ns"] for step in told[0]["taken"][f"packhorse {name}"])
        words = f"{name}: {format_ns(step_ns)} for {format_ns(wall_ns)}, off"
        off = abs(step_ns / wall_ns - 1)
        figures.append(at_most(words, off, MAX_STEP_OFF, show=format_percent))
    return figures


def _show_ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def _show_points(share: float) -> str:
    return f"{100 * share:.1f} points"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="only these models")
    parser.add_argument("--microbatches", nargs="+", type=int, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, help="steps of each way that are counted")


if __name__ == "__main__":
    sys.exit(run_bench("pipeline", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
