"""Bytes to and from the disk in one step, with every state there, against the least possible.

One micro-batch. The least is: each optimizer state is read and written once; parameters are
written once and read once per phase; a gradient is written and read once where clipping has to see
all of them before the first update, and not at all without clipping.

    with clipping     phases forward, backward, update
    without           the update belongs to the backward: two phases

The bytes are those that the runtime's disk tier counted in the last step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from bench.children import expect_done, read_metrics, run_command, work_folder, write_recipe
from bench.material import describe_shapes, make_config, write_checkpoint, write_tokens
from bench.report import Bench, at_most, run_bench, shown
from packhorse.units import GIB, format_bytes

MAX_RATIO: Final = 1.05
LENGTH: Final = 64
NUM_STEPS: Final = 2
_NUM_MOMENTS: Final = 2
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least bytes of a step."""

    read_bytes: int
    written_bytes: int


def find_bound(parameter_bytes: int, *, clips: bool) -> Bound:
    """Give the least traffic of a step with all states on disk; see the module."""
    num_phases = 3 if clips else 2
    gradients = parameter_bytes if clips else 0
    moments = _NUM_MOMENTS * parameter_bytes
    return Bound(
        read_bytes=num_phases * parameter_bytes + gradients + moments,
        written_bytes=parameter_bytes + gradients + moments,
    )


def measure(bench: Bench) -> None:
    """Count the bytes of a step with and without clipping."""
    width, num_layers = (256, 4) if bench.quick else (768, 12)
    config = make_config(width=width, num_layers=num_layers)
    parameter_bytes = _FLOAT_BYTES * sum(map(prod, describe_shapes(config).values()))
    bench.add(
        "model",
        [
            shown("parameters", parameter_bytes // _FLOAT_BYTES),
            shown("parameters, bytes", parameter_bytes, show=format_bytes),
        ],
    )
    with work_folder("traffic") as folder:
        write_checkpoint(folder / "model", config)
        write_tokens(folder / "train.jsonl", num_rows=NUM_STEPS, length=LENGTH, seed=0)
        for clips in (True, False):
            title = "with clipping" if clips else "without clipping"
            bench.say(title)
            _measure_step(bench, folder, title, find_bound(parameter_bytes, clips=clips), clips)


def _measure_step(bench: Bench, folder: Path, title: str, bound: Bound, clips: bool) -> None:
    name = "clipped" if clips else "unclipped"
    # Without clipping a gradient is used up where it arises: there is none to keep anywhere.
    states = ("parameters", "gradients", "optimizer") if clips else ("parameters", "optimizer")
    recipe = write_recipe(
        folder / f"{name}.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": LENGTH,
            "global_batch_size": 1,
            "max_steps": NUM_STEPS,
            "max_grad_norm": 1.0 if clips else None,
            "bf16": False,
            "output_dir": str(folder / name),
            "save_steps": None,
            "budget": {
                "device": 2 * GIB,
                "disk": [{"path": str(folder / "scratch"), "size": "8GiB"}],
            },
            "plan": dict.fromkeys(states, "disk"),
        },
    )
    expect_done(run_command(["train", str(recipe)], folder=folder), title)
    step = read_metrics(folder / name)[-1]
    read_bytes = round(step["disk_read_gib"] * GIB)
    written_bytes = round(step["disk_written_gib"] * GIB)
    least = bound.read_bytes + bound.written_bytes
    bench.add(
        f"one step, all states on disk, {title}",
        [
            shown("least to read", bound.read_bytes, show=format_bytes),
            shown("read", read_bytes, show=format_bytes),
            shown("least to write", bound.written_bytes, show=format_bytes),
            shown("written", written_bytes, show=format_bytes),
            at_most("traffic over the least", (read_bytes + written_bytes) / least, MAX_RATIO),
        ],
    )


if __name__ == "__main__":
    sys.exit(run_bench("traffic", "Disk traffic of a step with all states on disk.", measure))
