"""Prediction: a step of the quickstart, simulated before it ran, beside the measured one.

The machine is probed afresh, then `packhorse train recipes/quickstart.yaml` runs a few steps and
`packhorse compare` lays the two timelines side by side: the step, each lane, each kind of task.
The bar is for the step; it means little on a machine that does something else meanwhile, so the
spread of the measured steps stands beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, cast

from bench.report import ROOT, Bench, Figure, at_most, run_bench, shown
from packhorse.units import format_bytes, format_ns, format_percent

RECIPE: Final = ROOT / "recipes" / "quickstart.yaml"
LIMIT: Final = 0.25
NUM_STEPS: Final = 8
NUM_QUICK_STEPS: Final = 3


def measure(bench: Bench) -> None:
    """Train some steps and compare."""
    num_steps = bench.options.steps or (NUM_QUICK_STEPS if bench.quick else NUM_STEPS)
    with tempfile.TemporaryDirectory(prefix="packhorse-prediction-") as scratch:
        folder = Path(scratch)
        run = folder / "run"
        machine = folder / "machine.json"
        bench.say("measuring this machine")
        _run_packhorse("probe", "--fresh", "--json", "--out", str(machine))
        settings = [f"output_dir={run}", f"max_steps={num_steps}", "eval_data=null"]
        settings += ["save_steps=null", *bench.options.set]
        bench.say(f"training {num_steps} steps")
        summary = _run_packhorse(
            "train",
            str(RECIPE),
            "--json",
            *("--machine", str(machine)),
            *(word for setting in settings for word in ("--set", setting)),
        )
        found = _run_packhorse("compare", str(run), "--json")
        rates = _read_rates(run)
    predicted_ns, compared_ns = _pair(found["step_ns"])
    typical_ns = cast("int", summary["step_ns"])
    # The first step still fills memory and the disk's blocks for the first time.
    later = rates[1:] or rates
    times = [median(later) / rate for rate in later]
    bench.add(
        "Step of the quickstart",
        [
            at_most(
                "error against the step that is compared",
                abs(predicted_ns - compared_ns) / compared_ns,
                LIMIT,
                show=format_percent,
            ),
            at_most(
                "error against the median step",
                abs(predicted_ns - typical_ns) / typical_ns,
                LIMIT,
                show=format_percent,
            ),
            shown("predicted step", predicted_ns, show=format_ns),
            shown("measured step, compared", compared_ns, show=format_ns),
            shown("measured step, median", typical_ns, show=format_ns),
            shown("fastest and slowest by the median", f"{min(times):.2f}, {max(times):.2f}"),
        ],
    )
    bench.add("Busy time by lane: predicted, measured", _list_pairs(found["lanes_ns"], format_ns))
    bench.add(
        "Time by kind of task: predicted, measured", _list_pairs(found["kinds_ns"], format_ns)
    )
    bench.add("Peak by pool: predicted, measured", _list_pairs(found["peak_bytes"], format_bytes))


def _list_pairs(table: object, show: Callable[[float], str]) -> list[Figure]:
    figures: list[Figure] = []
    for name, entry in cast("Mapping[str, object]", table).items():
        predicted, measured = _pair(entry)
        error = (predicted - measured) / measured if measured else 0.0
        text = f"{show(predicted)}, {show(measured)}: {error:+.1%}"
        figures.append(shown(name, text))
    return figures


def _pair(entry: object) -> tuple[int, int]:
    found = cast("Mapping[str, int]", entry)
    return found["predicted"], found["measured"]


def _read_rates(run: Path) -> list[float]:
    """Share of the peak rate of each step; the same operations every time, so 1 / duration."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["mfu"] for line in lines]


def _run_packhorse(*arguments: str) -> Mapping[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "packhorse", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"packhorse {arguments[0]} ended with exit code {done.returncode}")
    return cast("Mapping[str, object]", json.loads(done.stdout))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--steps", type=int, help="steps to train")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe")


if __name__ == "__main__":
    sys.exit(run_bench("prediction", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
