"""A 70B decoder on 1,024 ranks that are not there: one command, on one core of this machine.

The model is made without torch (`bench.paper_model`). `packhorse schedule --model` then cuts it
into 64 stages, lowers 512 micro-batches to a program for each rank of one replica, verifies and
simulates all of them together, and draws the step; then the same for 80 stages on 40 ranks, with
backwards in halves. Bars: the command succeeds and tells the peak of every rank; its time; the
whole process at its largest; the size of the picture. Beside them: where the time goes, and what
the step looks like.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.children import expect_done, run_command, work_folder
from bench.paper_model import DecoderShape, make_decoder
from bench.report import Bench, Figure, at_most, exactly, run_bench, shown
from packhorse.model.files import format_model
from packhorse.units import GIB, MIB, format_bytes, format_count, format_ns, format_percent

SHAPE: Final = DecoderShape(
    name="decoder-70b",
    num_layers=80,
    width=8192,
    inner_width=28672,
    kv_width=1024,
    vocabulary=128_256,
    rows=1,
    length=4096,
)
NUM_REPLICAS: Final = 16
NUM_MICROBATCHES: Final = 512
NUM_QUICK_MICROBATCHES: Final = 128
WALL_NS: Final = 180 * 10**9
PEAK_BYTES: Final = 8 * GIB
PICTURE_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule on the ranks of one replica."""

    schedule: str
    machine: str
    num_ranks: int


CASES: Final = (
    Case(schedule="1f1b", machine="a100-80gb", num_ranks=64),
    Case(schedule="v-half", machine="h200", num_ranks=40),
)


def measure(bench: Bench) -> None:
    """Run the command for each case."""
    count = NUM_QUICK_MICROBATCHES if bench.quick else NUM_MICROBATCHES
    with work_folder("paper") as folder:
        model = folder / "model.json"
        model.write_text(format_model(make_decoder(SHAPE)), encoding="utf-8")
        for case in CASES[:1] if bench.quick else CASES:
            ranks = f"{NUM_REPLICAS} x {case.num_ranks} ranks of {case.machine}"
            title = f"{case.schedule}, {ranks}, {count} micro-batches each"
            bench.say(title)
            bench.add(title, run_whole_way(folder, model, case, count))


def run_whole_way(folder: Path, model: Path, case: Case, num_microbatches: int) -> list[Figure]:
    """Run one command in a child, and hold what it took against the bars."""
    picture = folder / f"{case.schedule}.svg"
    begin_ns = time.monotonic_ns()
    done = run_command(
        [
            *("schedule", case.schedule, "--model", str(model), "--machine", case.machine),
            *("--ranks", str(case.num_ranks), "--replicas", str(NUM_REPLICAS)),
            *("--microbatches", str(num_microbatches), "--svg", str(picture)),
        ],
        folder=folder,
    )
    wall_ns = time.monotonic_ns() - begin_ns
    told: Any = expect_done(done, "schedule").answer
    assert done.peak_bytes is not None
    return [
        exactly("ranks of all replicas", told["ranks_of_all"], case.num_ranks * NUM_REPLICAS),
        exactly("ranks with a peak", len(told["peak_bytes"]), case.num_ranks),
        at_most("wall, imports counted", wall_ns, WALL_NS, show=format_ns),
        at_most("the process at its largest", done.peak_bytes, PEAK_BYTES, show=format_bytes),
        at_most("picture", picture.stat().st_size, PICTURE_BYTES, show=format_bytes),
        shown("tasks", told["tasks"], show=format_count),
        *(shown(part, taken_s * 1e9, show=format_ns) for part, taken_s in told["taken_s"].items()),
        shown("step", told["step_ns"], show=format_ns),
        shown("idle", told["bubble"], show=format_percent),
        shown(
            f"peak of rank {told['fullest_rank']}, the fullest",
            max(told["peak_bytes"]),
            show=format_bytes,
        ),
        shown("ranks that recompute", sum(told["recomputes"])),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("paper", __doc__.splitlines()[0], measure))
