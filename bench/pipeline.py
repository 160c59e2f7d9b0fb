"""The same pipeline under packhorse and under torch.distributed.pipelining, in one run.

Two decoders are trained on two processes of one thread each, with few and many micro-batches. Both
sides compute with the same module, cut in the same places, and tell loss and global norm; every
schedule does a step in turn, so that what else the machine does hits all alike. The bar is for the
schedules that both have: no slower. Beside it: torch's schedules in halves; what rank 0 and 1 were
idle for, and how long a step took, against the simulator fed with the durations that this run
measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.children import work_folder
from bench.pipeline_worker import Decoder, Shape, lower, make_batch
from bench.planned import trace_subject
from bench.report import Bench, Figure, at_most, run_bench, shown
from packhorse.machine.catalogue import load_known_machine
from packhorse.optim.optimizers import AdamW
from packhorse.program.program import Program
from packhorse.program.tasks import Task
from packhorse.simulator.joint import simulate_ranks
from packhorse.timeline.spec import Timeline
from packhorse.units import format_ns, format_percent

NUM_RANKS: Final = 2
MODELS: Final = {"20M": (384, 8), "60M": (640, 10)}
COUNTS: Final = (8, 32)
BOTH: Final = ("gpipe", "1f1b", "interleaved")
ONLY_THEIRS: Final = ("zb1p", "zbv")
NUM_STEPS: Final = 10
NUM_QUICK_STEPS: Final = 2
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
    models = dict(list(MODELS.items())[:1]) if bench.quick else MODELS
    for name, (width, num_layers) in models.items():
        for count in COUNTS[:1] if bench.quick else COUNTS:
            shape = Shape(
                width=width,
                num_layers=num_layers,
                vocabulary=4096,
                rows=1,
                length=128,
                num_microbatches=count,
            )
            bench.say(f"{name}, {count} micro-batches")
            told = run_ranks(shape, NUM_QUICK_STEPS if bench.quick else NUM_STEPS)
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
            "ours": BOTH,
            "theirs": (*BOTH, *ONLY_THEIRS),
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
    for name in BOTH:
        ours, theirs = (taken[f"{side} {name}"] for side in ("packhorse", "torch"))
        ratios = [a["wall_ns"] / b["wall_ns"] for a, b in zip(ours, theirs, strict=True)]
        figures.append(
            at_most(f"{name}: step over torch's", median(ratios), LIMIT, show=_show_ratio)
        )
    for name, steps in taken.items():
        wall_ns = median(step["wall_ns"] for step in steps)
        figures.append(shown(f"{name}: median wall", wall_ns, show=format_ns))
    return figures


def simulate_told(
    shape: Shape, told: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[Timeline]]:
    """Simulate each schedule's ranks with the durations of tasks that they told."""
    torch.manual_seed(0)
    tokens, labels = make_batch(shape, 0)
    feed = {"input_ids": tokens[: shape.rows], "labels": labels[: shape.rows]}
    subject = trace_subject(Decoder(shape), feed, AdamW(lr=1e-4))
    predicted: dict[str, Sequence[Timeline]] = {}
    for name in BOTH:
        programs = lower(subject, shape, name, NUM_RANKS).programs["train_step"]
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


if __name__ == "__main__":
    sys.exit(run_bench("pipeline", __doc__.splitlines()[0], measure))
