"""A decoder of a billion parameters, trained in 4 GiB.

Its float32 training state (parameter, gradient and two moments) is about 16 GB, so nearly all of it
lives on the disk. A Llama with random weights is planned, loaded and trained for a few steps of one
row, the same in every step. The plan's promises stand beside what the process did, and what a
million tokens would take.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import Final

from bench.children import (
    STATE_BYTES_PER_PARAMETER,
    expect_done,
    probe_machine,
    read_metrics,
    run_command,
    work_folder,
    write_recipe,
)
from bench.material import make_config, write_checkpoint, write_tokens
from bench.report import Bench, at_least, at_most, holds, run_bench, shown
from packhorse.units import GIB, MIB, format_bytes, format_ns, format_percent

SHAPE: Final = (2048, 20)
QUICK_SHAPE: Final = (256, 4)
NUM_PARAMETERS: Final = 1_000_000_000
NUM_QUICK_PARAMETERS: Final = 10_000_000
BUDGET_BYTES: Final = 4 * GIB
QUICK_BUDGET_BYTES: Final = 400 * MIB
MAX_PEAK_ERROR: Final = 0.05
MAX_STEP_ERROR: Final = 0.10
LENGTH: Final = 512
LEARNING_RATE: Final = 1e-4
NUM_STEPS: Final = 4
NUM_WARM_STEPS: Final = 1
_DISK_BUDGET: Final = "40GiB"
_NS_PER_HOUR: Final = 3600e9


def measure(bench: Bench) -> None:
    """Write the model, probe, train, hold the promises against what happened."""
    width, num_layers = QUICK_SHAPE if bench.quick else SHAPE
    wanted = NUM_QUICK_PARAMETERS if bench.quick else NUM_PARAMETERS
    budget_bytes = QUICK_BUDGET_BYTES if bench.quick else BUDGET_BYTES
    num_steps = bench.options.steps
    with work_folder("billion") as folder:
        bench.say("writing the checkpoint")
        config = make_config(width=width, num_layers=num_layers)
        num_parameters = write_checkpoint(folder / "model", config) // 4
        write_tokens(folder / "train.jsonl", num_rows=1, length=LENGTH, seed=0)
        scratch = folder / "scratch"
        bench.say("measuring this machine")
        machine = probe_machine(
            folder,
            device_bytes=budget_bytes,
            disk=_DISK_BUDGET,
            # A small file's rates are a burst: what a step moves is of the size of the state.
            file_bytes=num_parameters * STATE_BYTES_PER_PARAMETER,
        )
        recipe = write_recipe(
            folder / "recipe.yaml",
            {
                "model_name_or_path": str(folder / "model"),
                "train_data": [str(folder / "train.jsonl")],
                "data_format": "tokens",
                "data_cache": str(folder / "cache"),
                "max_length": LENGTH,
                "global_batch_size": 1,
                "max_steps": num_steps,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "bf16": False,
                "output_dir": str(folder / "run"),
                "save_steps": None,
                "budget": {
                    "device": budget_bytes,
                    "disk": [{"path": str(scratch), "size": _DISK_BUDGET}],
                },
            },
        )
        bench.say(f"planning, loading, {num_steps} steps")
        outcome = expect_done(
            run_command(["train", str(recipe), "--machine", str(machine)], folder=folder), "train"
        )
        lines = read_metrics(folder / "run")
        plan = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))
    prediction = plan["prediction"]
    later = lines[NUM_WARM_STEPS:]
    step_ns = median(LENGTH * 1e9 / line["tokens_per_second"] for line in later)
    predicted_ns = outcome.answer["predicted_step_ns"]
    predicted_bytes = sum(prediction["peak_bytes"]["device"].values())
    losses = [line["loss"] for line in lines]
    bench.add(
        "model",
        [
            at_least("parameters", num_parameters, wanted),
            shown("training state", num_parameters * STATE_BYTES_PER_PARAMETER, show=format_bytes),
            shown("step", f"1 row of {LENGTH} tokens"),
        ],
    )
    bench.add(
        "it trains",
        [
            holds(
                "steps",
                len(lines) == num_steps and losses[-1] < losses[0],
                measured=f"{len(lines)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}",
                bar=f"{num_steps} steps, falling loss",
            ),
            at_most("own peak", outcome.own_bytes, budget_bytes, show=format_bytes),
            at_most(
                "peak: prediction off by",
                abs(predicted_bytes - outcome.own_bytes) / outcome.own_bytes,
                MAX_PEAK_ERROR,
                show=format_percent,
            ),
            shown("peak, predicted", predicted_bytes, show=format_bytes),
            at_most(
                "step: prediction off by",
                abs(predicted_ns - step_ns) / step_ns,
                MAX_STEP_ERROR,
                show=format_percent,
            ),
            shown("step, predicted", predicted_ns, show=format_ns),
            shown("step, median", step_ns, show=format_ns),
            shown("bottleneck", prediction["bottleneck"]),
            shown("read in a step", later[-1]["disk_read_gib"] * GIB, show=format_bytes),
            shown("written in a step", later[-1]["disk_written_gib"] * GIB, show=format_bytes),
            shown("hours for a million tokens", step_ns / LENGTH * 1e6 / _NS_PER_HOUR),
        ],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps to train")


if __name__ == "__main__":
    sys.exit(run_bench("billion", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
