"""What more micro-batches cost where every state lies on the disk and they go in layers.

A GPT-2, whose head is its embedding, trains with 1, 4 and 16 micro-batches of one row, gradients of
the tied parameter summed once a step. All micro-batches go through a block before the next block,
so that more of them move no more bytes: what crosses from block to block stays in memory. A step
takes as long as the longer of

    compute     the same step with every state in memory
    transfers   the bytes that the disk tier counted, at the rates that the run's machine has

Gradients are not clipped: then a block's is used up where it arises, and updates hide behind the
backward of the blocks before it. With clipping, which has to see every gradient first, the same is
shown without a bar for the step. Bytes are those of the last step; times are medians over the steps
after the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Final

from bench.children import expect_done, read_metrics, run_command, work_folder, write_recipe
from bench.material import describe_shapes, make_tied_config, write_checkpoint, write_tokens
from bench.report import Bench, at_most, run_bench, shown
from packhorse.machine.files import read_machine
from packhorse.machine.spec import Machine
from packhorse.units import GIB, format_bytes, format_ns

MAX_BYTES_RATIO: Final = 1.05
MAX_STEP_RATIO: Final = 1.15
COUNTS: Final = (1, 4, 16)
QUICK_COUNTS: Final = (1, 4)
LENGTH: Final = 512
CLIP: Final = 1.0
NUM_STEPS: Final = 3
NUM_QUICK_STEPS: Final = 3
ON_DISK: Final = {
    "parameters": "disk",
    "optimizer": "disk",
    "order": "layered",
    "recompute": "none",
    # What stays in memory where there is room would be another measurement.
    "boundaries": "device",
    "cache": "none",
}
IN_MEMORY: Final = {"parameters": "device", "optimizer": "device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    # What a run of some steps showed.
    read_bytes: int
    written_bytes: int
    step_ns: float
    machine: Machine

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def transfer_ns(self) -> float:
        links = {(link.source, link.target): link for link in self.machine.links}
        read, write = links["disk", "device"], links["device", "disk"]
        seconds = self.read_bytes / read.bytes_per_s + self.written_bytes / write.bytes_per_s
        return seconds * 1e9


def measure(bench: Bench) -> None:
    """Train with each number of micro-batches, on the disk and in memory."""
    width, num_layers = (256, 4) if bench.quick else (768, 12)
    num_steps = bench.options.steps or (NUM_QUICK_STEPS if bench.quick else NUM_STEPS)
    config = make_tied_config(width=width, num_layers=num_layers)
    num_parameters = sum(map(prod, describe_shapes(config).values()))
    bench.add("model", [shown("parameters", num_parameters)])
    usual = QUICK_COUNTS if bench.quick else COUNTS
    counts: Sequence[int] = bench.options.microbatches or usual
    with work_folder("accumulation") as folder:
        write_checkpoint(folder / "model", config)
        rows = num_steps * max(counts)
        write_tokens(folder / "train.jsonl", num_rows=rows, length=LENGTH, seed=0)
        one: _Run | None = None
        for count in counts:
            bench.say(f"{count} micro-batches, in memory and on the disk")
            memory = _train(folder, count, num_steps, "memory", IN_MEMORY)
            disk = _train(folder, count, num_steps, "disk", ON_DISK)
            one = one or disk
            clipped = None
            if count == counts[0]:
                pins = {**ON_DISK, "gradients": "disk"}
                clipped = _train(folder, count, num_steps, "clipped", pins, clip=CLIP)
            _report(bench, count, one, memory, disk, clipped)


def _report(
    bench: Bench, count: int, one: _Run, memory: _Run, disk: _Run, clipped: _Run | None
) -> None:
    bound_ns = max(memory.step_ns, disk.transfer_ns)
    what = "one micro-batch" if count == 1 else f"{count} micro-batches"
    bench.add(
        f"one step of {what}, all states on disk",
        [
            shown("read", disk.read_bytes, show=format_bytes),
            shown("written", disk.written_bytes, show=format_bytes),
            at_most(
                "bytes over those of the fewest",
                disk.moved_bytes / one.moved_bytes,
                MAX_BYTES_RATIO,
            ),
            shown("compute: the step in memory", memory.step_ns, show=format_ns),
            shown("transfers: bytes by rates", disk.transfer_ns, show=format_ns),
            shown("step", disk.step_ns, show=format_ns),
            at_most("step over the longer of both", disk.step_ns / bound_ns, MAX_STEP_RATIO),
            *(
                []
                if clipped is None
                else [
                    shown("read and written, clipped", clipped.moved_bytes, show=format_bytes),
                    shown("step, clipped", clipped.step_ns, show=format_ns),
                ]
            ),
        ],
    )


def _train(
    folder: Path,
    count: int,
    num_steps: int,
    name: str,
    pins: Mapping[str, object],
    *,
    clip: float | None = None,
) -> _Run:
    run = folder / f"{name}-{count}"
    recipe = write_recipe(
        folder / f"{name}-{count}.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": LENGTH,
            "global_batch_size": count,
            "max_steps": num_steps,
            "max_grad_norm": clip,
            "bf16": False,
            "output_dir": str(run),
            "save_steps": None,
            "budget": {
                # Layers hold what all micro-batches saved.
                "device": 12 * GIB,
                "disk": [{"path": str(folder / "scratch"), "size": "8GiB"}],
            },
            "plan": {**pins, "microbatch_rows": 1, "tied_sum": "per_step"},
        },
    )
    expect_done(run_command(["train", str(recipe)], folder=folder), f"{name}, {count}")
    steps = read_metrics(run)
    later = steps[1:] or steps
    tokens = count * LENGTH
    return _Run(
        read_bytes=round(steps[-1]["disk_read_gib"] * GIB),
        written_bytes=round(steps[-1]["disk_written_gib"] * GIB),
        step_ns=median(tokens * 1e9 / step["tokens_per_second"] for step in later),
        machine=read_machine(run / "machine.json"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--microbatches", type=int, nargs="+", help="numbers of micro-batches")


if __name__ == "__main__":
    sys.exit(
        run_bench("accumulation", __doc__.splitlines()[0], measure, add_arguments=add_arguments)
    )
