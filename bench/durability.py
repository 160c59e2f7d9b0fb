"""Every step a checkpoint: what keeping each finished step costs where the state lies on disk.

A decoder of GPT-2's shape with random weights is trained with all of its state on disk, in turns
with `durable: 1`, where every finished step can be resumed from, and with `durable: off`.
Parameters are written in every step anyway; what comes on top is the flush, which overlaps the next
step, and a record. What a killed run loses is `bench.crash`'s to show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.children import (
    expect_done,
    probe_machine,
    read_metrics,
    run_command,
    work_folder,
    write_recipe,
)
from bench.material import make_config, write_checkpoint, write_tokens
from bench.report import Bench, at_most, run_bench, shown
from packhorse.units import GIB, format_bytes, format_ns, format_percent

SHAPE: Final = (768, 12)
QUICK_SHAPE: Final = (256, 4)
LIMIT: Final = 1.03
MORE_BYTES: Final = 0.25
ROWS: Final = 1
LENGTH: Final = 128
NUM_STEPS: Final = 8
NUM_WARM_STEPS: Final = 2
NUM_TURNS: Final = 3
_DISK_BUDGET: Final = "16GiB"
_SPARE_BYTES: Final = GIB
_RESIDENT_BYTES: Final = 8


def measure(bench: Bench) -> None:
    """Train in turns with steps kept and not kept."""
    width, num_layers = QUICK_SHAPE if bench.quick else SHAPE
    num_turns = 1 if bench.quick else bench.options.turns
    with work_folder("durability") as folder:
        config = make_config(width=width, num_layers=num_layers)
        num_parameters = write_checkpoint(folder / "model", config) // 4
        write_tokens(folder / "train.jsonl", num_rows=NUM_STEPS, length=LENGTH, seed=0)
        budget_bytes = num_parameters * _RESIDENT_BYTES + _SPARE_BYTES
        bench.say("measuring this machine")
        probe_machine(folder, device_bytes=budget_bytes, disk=_DISK_BUDGET)
        steps: dict[str, list[dict[str, Any]]] = {"off": [], "kept": []}
        for turn in range(num_turns):
            for name, durable in (("off", "off"), ("kept", 1)):
                bench.say(f"turn {turn + 1} of {num_turns}: durable {durable}")
                steps[name] += _train(folder, f"{name}-{turn}", durable, budget_bytes)
    wall = {name: [_duration_ns(step) for step in found] for name, found in steps.items()}
    written = {
        name: median(step["disk_written_gib"] for step in found) * GIB
        for name, found in steps.items()
    }
    bench.add(
        f"{num_parameters:,} parameters, all state on disk, {ROWS} x {LENGTH} tokens a step",
        [
            at_most(
                "step with steps kept over one without, medians",
                median(wall["kept"]) / median(wall["off"]),
                LIMIT,
            ),
            shown("step, steps kept", median(wall["kept"]), show=format_ns),
            shown("fastest and slowest, kept", _show_range(wall["kept"])),
            shown("step, not kept", median(wall["off"]), show=format_ns),
            shown("fastest and slowest, not kept", _show_range(wall["off"])),
            at_most(
                "more bytes written in a step",
                written["kept"] / written["off"] - 1,
                MORE_BYTES,
                show=format_percent,
            ),
            shown("written in a step, kept", written["kept"], show=format_bytes),
        ],
    )


def _train(folder: Path, name: str, durable: int | str, budget_bytes: int) -> list[dict[str, Any]]:
    recipe = write_recipe(
        folder / f"{name}.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": LENGTH,
            "global_batch_size": ROWS,
            "max_steps": NUM_STEPS,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "output_dir": str(folder / name),
            "save_steps": None,
            "save_only_model": True,
            "budget": {
                "device": budget_bytes,
                "disk": [{"path": str(folder / "scratch"), "size": _DISK_BUDGET}],
            },
            "plan": {
                "parameters": "disk",
                "gradients": "disk",
                "optimizer": "disk",
                "durable": durable,
            },
        },
    )
    machine = str(folder / "machine.json")
    expect_done(
        run_command(["train", str(recipe), "--machine", machine], folder=folder), f"train {name}"
    )
    return read_metrics(folder / name)[NUM_WARM_STEPS:-1]


def _duration_ns(step: dict[str, Any]) -> float:
    return ROWS * LENGTH * 1e9 / step["tokens_per_second"]


def _show_range(found: list[float]) -> str:
    return f"{format_ns(min(found))} to {format_ns(max(found))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="runs of each kind")


if __name__ == "__main__":
    sys.exit(run_bench("durability", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
