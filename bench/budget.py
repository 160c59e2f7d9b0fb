"""The curve over the budget: step time and peak, predicted against measured, as memory shrinks.

A decoder of the shape of GPT-2 medium with random weights is trained with budgets of 100, 75, 50,
30 and 20 percent of its training state (parameter, gradient and two moments: 16 bytes a parameter),
each in a process of its own, on a machine that was measured once at the start. A fifth of a much
smaller model would not hold the head's backward (parameter, gradient, logits) beside what the
process itself holds. For each budget the plan's promises are held against what the process did;
over all of them a smaller budget must not promise a shorter step, nor be measurably quicker. The
curves are drawn into the folder of the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.children import (
    STATE_BYTES_PER_PARAMETER,
    probe_machine,
    run_command,
    work_folder,
    write_recipe,
)
from bench.curves import draw_curves
from bench.material import make_config, write_checkpoint, write_tokens
from bench.report import RESULTS, Bench, Figure, at_most, holds, run_bench, shown
from packhorse.units import format_bytes, format_ns, format_percent

SHARES: Final = (1.00, 0.75, 0.50, 0.30, 0.20)
QUICK_SHARES: Final = (1.00, 0.40)
SHAPES: Final = {"19M": (256, 4), "125M": (768, 12), "350M": (1024, 24)}
MODEL: Final = "350M"
QUICK_MODEL: Final = "125M"
MAX_STEP_ERROR: Final = 0.10
MAX_PEAK_ERROR: Final = 0.05
# Every run times its blocks anew, so that two promises differ by what those times do.
MAX_NOISE: Final = 0.03
LENGTH: Final = 128
ROWS: Final = 2
NUM_STEPS: Final = 6
NUM_QUICK_STEPS: Final = 3
_DISK_BUDGET: Final = "32GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the runs lie, and what they have in common."""

    folder: Path
    state_bytes: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one budget gave."""

    budget_bytes: int
    predicted_ns: int
    measured_ns: int
    predicted_bytes: int
    measured_bytes: int
    bottleneck: str

    @property
    def step_error(self) -> float:
        """How far the promised step is off, as a share of the measured one."""
        return abs(self.predicted_ns - self.measured_ns) / self.measured_ns

    @property
    def peak_error(self) -> float:
        """How far the promised peak is off, as a share of the measured one."""
        return abs(self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def measure(bench: Bench) -> None:
    """Run every budget, then look at the curve."""
    model = bench.options.model or (QUICK_MODEL if bench.quick else MODEL)
    width, num_layers = SHAPES[model]
    readings: list[Reading] = []
    with work_folder("budget") as folder:
        weights_bytes = write_checkpoint(
            folder / "model", make_config(width=width, num_layers=num_layers)
        )
        place = Place(
            folder=folder,
            state_bytes=weights_bytes // 4 * STATE_BYTES_PER_PARAMETER,
            num_steps=NUM_QUICK_STEPS if bench.quick else NUM_STEPS,
        )
        num_rows = place.num_steps * ROWS
        write_tokens(folder / "train.jsonl", num_rows=num_rows, length=LENGTH, seed=0)
        bench.add(
            "model",
            [
                shown("parameters", weights_bytes // 4),
                shown("training state", place.state_bytes, show=format_bytes),
                shown("step", f"{ROWS} rows of {LENGTH} tokens"),
            ],
        )
        bench.say("measuring this machine")
        probe_machine(
            folder,
            device_bytes=2 * place.state_bytes,
            disk=_DISK_BUDGET,
            # Rates of a small file are a burst; states and their second slots are of this size.
            file_bytes=2 * place.state_bytes,
        )
        for share in bench.options.shares or (QUICK_SHARES if bench.quick else SHARES):
            title = f"budget of {format_percent(share)}"
            bench.say(title)
            found = _read_budget(place, int(share * place.state_bytes))
            if isinstance(found, str):
                bench.add(title, [holds("trains", met=False, measured=found, bar="finishes")])
                continue
            readings.append(found)
            bench.add(f"{title}: {format_bytes(found.budget_bytes)}", _list_figures(found))
    if len(readings) > 1:
        bench.add("the curve", _judge_curve(readings))
        picture = RESULTS / f"budget{'-quick' if bench.quick else ''}.svg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(_draw(readings, model), encoding="utf-8")
        bench.say(f"drawn: {picture.name}")


def _read_budget(place: Place, budget_bytes: int) -> Reading | str:
    folder = place.folder
    run = folder / f"run-{budget_bytes}"
    recipe = write_recipe(
        folder / f"recipe-{budget_bytes}.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": LENGTH,
            "global_batch_size": ROWS,
            "max_steps": place.num_steps,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "output_dir": str(run),
            "save_steps": None,
            "budget": {
                "device": budget_bytes,
                "disk": [{"path": str(folder / "scratch"), "size": _DISK_BUDGET}],
            },
        },
    )
    machine = str(folder / "machine.json")
    outcome = run_command(["train", str(recipe), "--machine", machine], folder=folder)
    if outcome.exit_code:
        lines = [line for line in outcome.error.splitlines() if line.strip()]
        return f"ended with {outcome.exit_code}: {lines[0] if lines else 'without a word'}"
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    return Reading(
        budget_bytes=budget_bytes,
        predicted_ns=outcome.answer["predicted_step_ns"],
        measured_ns=outcome.answer["step_ns"],
        predicted_bytes=sum(plan["prediction"]["peak_bytes"]["device"].values()),
        measured_bytes=outcome.own_bytes,
        bottleneck=plan["prediction"]["bottleneck"],
    )


def _list_figures(reading: Reading) -> list[Figure]:
    return [
        at_most("step: prediction off by", reading.step_error, MAX_STEP_ERROR, show=format_percent),
        shown("step, predicted", reading.predicted_ns, show=format_ns),
        shown("step, measured median", reading.measured_ns, show=format_ns),
        at_most("peak: prediction off by", reading.peak_error, MAX_PEAK_ERROR, show=format_percent),
        shown("peak, predicted", reading.predicted_bytes, show=format_bytes),
        at_most("peak, measured", reading.measured_bytes, reading.budget_bytes, show=format_bytes),
        shown("bottleneck", reading.bottleneck),
    ]


def _judge_curve(readings: Sequence[Reading]) -> list[Figure]:
    falling = sorted(readings, key=lambda reading: -reading.budget_bytes)
    promised = [small.predicted_ns / large.predicted_ns for large, small in pairwise(falling)]
    measured = [small.measured_ns / large.measured_ns for large, small in pairwise(falling)]
    return [
        holds(
            "promised steps, each by the one with more memory",
            min(promised) >= 1 - MAX_NOISE,
            measured=", ".join(f"{ratio:.3f}" for ratio in promised),
            bar=f"none below {1 - MAX_NOISE:.2f}",
        ),
        holds(
            "measured steps, each by the one with more memory",
            min(measured) >= 1 - MAX_STEP_ERROR,
            measured=", ".join(f"{ratio:.3f}" for ratio in measured),
            bar=f"none below {1 - MAX_STEP_ERROR:.2f}",
        ),
    ]


def _draw(readings: Sequence[Reading], model: str) -> str:
    return draw_curves(
        {
            "predicted": [(r.budget_bytes, r.predicted_ns) for r in readings],
            "measured": [(r.budget_bytes, r.measured_ns) for r in readings],
        },
        title=f"A step of the {model} decoder over its budget",
        size_name="budget of the device",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument(
        "--model", choices=list(SHAPES), help=f"what is trained: {MODEL}, quickly {QUICK_MODEL}"
    )
    parser.add_argument("--shares", nargs="+", type=float, help="budgets, of the training state")


if __name__ == "__main__":
    sys.exit(run_bench("budget", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
