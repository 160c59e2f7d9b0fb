"""Out of core at the speed of the hardware: a step with all optimizer state on disk.

A decoder of GPT-2's shape with random weights is trained in one process with `optimizer: disk`. The
bar is for the wall time of a step: at most 1.15 x the longer of what cannot be avoided,

    compute alone       the same step under a plan with everything in memory
    the disk alone      the bytes that the step moved, at the rates at which this disk, by the same
                        way, reads and writes at once (and alone, for what is left of the longer)

both measured in this run, the disk before and after the steps. Without clipping an update may start
as soon as its gradient is there, and reads and writes hide behind the backward; with clipping,
which must see every gradient first, the same is shown without a bar. So is a step of few tokens for
the smaller model: all bytes then move while little is computed, and what they take of the memory's
bandwidth, and of the cores of a virtual machine's host, shows.

Beside it: plain PyTorch in memory; plain PyTorch with its optimizer state in mapped files, in as
much memory as packhorse was granted where a memory cgroup can be made; DeepSpeed ZeRO-3 with its
optimizer state on disk, where it can be installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from bench.cgroups import NoGroupError, open_group
from bench.children import (
    expect_done,
    probe_machine,
    read_metrics,
    run_command,
    run_module,
    work_folder,
    write_recipe,
)
from bench.material import VOCABULARY, make_config, write_checkpoint, write_tokens
from bench.peers import ask_peer, find_peer
from bench.report import Bench, Figure, at_most, run_bench, shown
from packhorse.machine.probe_disk import DiskRates, measure_disk
from packhorse.units import GIB, MIB, format_bytes, format_ns

LIMIT: Final = 1.15
SHAPES: Final = {"125M": (768, 12), "350M": (1024, 24)}
QUICK_SHAPES: Final = {"19M": (256, 4)}
LENGTH: Final = 512
SHORT_LENGTH: Final = 128
ROWS: Final = 1
NUM_STEPS: Final = 8
NUM_QUICK_STEPS: Final = 4
NUM_WARM_STEPS: Final = 2
LEARNING_RATE: Final = 1e-5
PROBE_BYTES: Final = GIB
QUICK_PROBE_BYTES: Final = 128 * MIB
PEER_LIMIT_S: Final = 1800.0
# Parameter and gradient in float32, and what activations and the process itself need.
_RESIDENT_BYTES: Final = 8
_SPARE_BYTES: Final = GIB
_PLENTY_BYTES: Final = 24
_DISK_BUDGET: Final = "16GiB"
_MOMENTS_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model's runs lie, and what a step of them is."""

    folder: Path
    num_parameters: int
    length: int
    num_steps: int
    num_threads: int

    @property
    def budget_bytes(self) -> int:
        """The device budget of the runs with optimizer state on disk."""
        return self.num_parameters * _RESIDENT_BYTES + _SPARE_BYTES

    @property
    def plenty_bytes(self) -> int:
        """The device budget of the run with everything in memory."""
        return self.num_parameters * _PLENTY_BYTES + _SPARE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run of `packhorse train` showed of its later steps."""

    step_ns: float
    lowest_ns: float
    highest_ns: float
    read_bytes: int
    written_bytes: int
    own_bytes: int
    predicted_ns: int


def measure(bench: Bench) -> None:
    """Measure each model."""
    shapes = QUICK_SHAPES if bench.quick else SHAPES
    for name in bench.options.models or list(shapes):
        width, num_layers = {**SHAPES, **QUICK_SHAPES}[name]
        with work_folder("outofcore") as folder:
            config = make_config(width=width, num_layers=num_layers)
            weights_bytes = write_checkpoint(folder / "model", config)
            place = Place(
                folder=folder,
                num_parameters=weights_bytes // 4,
                length=bench.options.length,
                num_steps=NUM_QUICK_STEPS if bench.quick else NUM_STEPS,
                num_threads=bench.options.threads,
            )
            _write_rows(place)
            _measure_model(bench, name, place)
            if name == next(iter(shapes)) and place.length > SHORT_LENGTH:
                _measure_short(bench, name, replace(place, length=SHORT_LENGTH))


def _write_rows(place: Place) -> None:
    num_rows = place.num_steps * ROWS
    write_tokens(place.folder / "train.jsonl", num_rows=num_rows, length=place.length, seed=0)


def _measure_short(bench: Bench, name: str, place: Place) -> None:
    _write_rows(place)
    runs: dict[str, Run] = {}
    for title, optimizer in (("short in memory", "device"), ("short out of core", "disk")):
        bench.say(f"{name}: {title}")
        runs[title] = _train(place, title.replace(" ", "-"), optimizer, clips=False)
    compute_ns, step_ns = (run.step_ns for run in runs.values())
    bench.add(
        f"{name}: a short step, {ROWS} x {place.length} tokens",
        [
            shown("step in memory", compute_ns, show=format_ns),
            shown("step out of core, median wall", step_ns, show=format_ns),
            shown("fastest and slowest", _show_range(runs["short out of core"])),
            shown("step over the step in memory", step_ns / compute_ns, show=_show_ratio),
        ],
    )


def disk_alone_ns(rates: Sequence[DiskRates], read_bytes: int, written_bytes: int) -> float:
    """How long the disk takes for the bytes of a step, both directions at once."""
    read_s = mean(rate.read_bytes_per_s for rate in rates)
    write_s = mean(rate.write_bytes_per_s for rate in rates)
    mixed_read_s = mean(rate.mixed_read_bytes_per_s or rate.read_bytes_per_s for rate in rates)
    mixed_write_s = mean(rate.mixed_write_bytes_per_s or rate.write_bytes_per_s for rate in rates)
    both_s = min(read_bytes / mixed_read_s, written_bytes / mixed_write_s)
    left_s = (read_bytes - both_s * mixed_read_s) / read_s
    left_s += (written_bytes - both_s * mixed_write_s) / write_s
    return (both_s + left_s) * 1e9


def _measure_model(bench: Bench, name: str, place: Place) -> None:
    probe_bytes = QUICK_PROBE_BYTES if bench.quick else PROBE_BYTES
    scratch = str(place.folder / "scratch")
    bench.say(f"{name}: the disk")
    rates = [measure_disk(scratch, file_bytes=probe_bytes)]
    probe_machine(place.folder, device_bytes=place.plenty_bytes, disk=_DISK_BUDGET)
    runs: dict[str, Run] = {}
    for title, optimizer, clips in (
        ("in memory", "device", False),
        ("out of core", "disk", False),
        ("out of core, clipped", "disk", True),
    ):
        bench.say(f"{name}: {title}")
        runs[title] = _train(place, title.replace(", ", "-").replace(" ", "-"), optimizer, clips)
    rates.append(measure_disk(scratch, file_bytes=probe_bytes))
    compute_ns = runs["in memory"].step_ns
    bench.add(
        f"{name}: a step of {ROWS} x {place.length} tokens, {place.num_threads} threads",
        [
            shown("parameters", place.num_parameters),
            shown("optimizer state", _MOMENTS_BYTES * place.num_parameters, show=format_bytes),
            shown("compute alone: the step in memory", compute_ns, show=format_ns),
            shown("its fastest and slowest", _show_range(runs["in memory"])),
            *(
                shown(f"disk {words}, before and after", _show_rates(rates, field))
                for words, field in (
                    ("reads", "read_bytes_per_s"),
                    ("writes", "write_bytes_per_s"),
                    ("reads while it writes", "mixed_read_bytes_per_s"),
                    ("writes while it reads", "mixed_write_bytes_per_s"),
                )
            ),
        ],
    )
    for title in ("out of core", "out of core, clipped"):
        run = runs[title]
        disk_ns = disk_alone_ns(rates, run.read_bytes, run.written_bytes)
        ratio = run.step_ns / max(compute_ns, disk_ns)
        words = "step over the longer of compute and disk"
        bench.add(
            f"{name}: {title}",
            [
                at_most(words, ratio, LIMIT, show=_show_ratio)
                if title == "out of core"
                else shown(words, ratio, show=_show_ratio),
                shown("step, median wall", run.step_ns, show=format_ns),
                shown("fastest and slowest", _show_range(run)),
                shown("predicted", run.predicted_ns, show=format_ns),
                shown("read in a step", run.read_bytes, show=format_bytes),
                shown("written in a step", run.written_bytes, show=format_bytes),
                shown("the disk alone", disk_ns, show=format_ns),
                shown("step over the step in memory", run.step_ns / compute_ns, show=_show_ratio),
                shown("own peak", run.own_bytes, show=format_bytes),
                shown("budget", place.budget_bytes, show=format_bytes),
            ],
        )
    _compare_others(bench, name, place, runs["out of core"])


def _train(place: Place, name: str, optimizer: str, clips: bool) -> Run:
    folder = place.folder
    recipe = write_recipe(
        folder / f"{name}.yaml",
        {
            "model_name_or_path": str(folder / "model"),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": place.length,
            "global_batch_size": ROWS,
            "max_steps": place.num_steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0 if clips else None,
            "bf16": False,
            "output_dir": str(folder / name),
            "save_steps": None,
            "budget": {
                "device": place.plenty_bytes if optimizer == "device" else place.budget_bytes,
                "disk": [{"path": str(folder / "scratch"), "size": _DISK_BUDGET}],
            },
            "plan": {"optimizer": optimizer, "num_threads": place.num_threads},
        },
    )
    outcome = expect_done(
        run_command(
            ["train", str(recipe), "--machine", str(folder / "machine.json")], folder=folder
        ),
        name,
    )
    lines = read_metrics(folder / name)[NUM_WARM_STEPS:]
    taken = [ROWS * place.length * 1e9 / line["tokens_per_second"] for line in lines]
    return Run(
        step_ns=median(taken),
        lowest_ns=min(taken),
        highest_ns=max(taken),
        read_bytes=round(median(line["disk_read_gib"] for line in lines) * GIB),
        written_bytes=round(median(line["disk_written_gib"] for line in lines) * GIB),
        own_bytes=outcome.own_bytes,
        predicted_ns=outcome.answer["predicted_step_ns"],
    )


def _compare_others(bench: Bench, name: str, place: Place, ours: Run) -> None:
    specification: dict[str, object] = {
        "model": str(place.folder / "model"),
        "state": None,
        "rows": ROWS,
        "length": place.length,
        "num_steps": place.num_steps,
        "num_threads": place.num_threads,
        "learning_rate": LEARNING_RATE,
        "vocabulary": VOCABULARY,
    }
    bench.say(f"{name}: plain PyTorch")
    plain = run_module("bench.plain_steps", specification, folder=place.folder)
    figures = [*_list_steps("in memory", expect_done(plain, "plain steps").answer, ours)]
    mapped = {**specification, "state": str(place.folder / "mapped")}
    held = f"held to {format_bytes(place.budget_bytes)} and its libraries, swap off"
    bench.say(f"{name}: plain PyTorch with mapped state")
    try:
        group = open_group(place.budget_bytes + (plain.imports_bytes or 0))
    except NoGroupError as error:
        group, held = nullcontext(), f"not held: {error}"
    with group as limit:
        other = run_module("bench.plain_steps", mapped, folder=place.folder, group=limit)
    words = "killed" if other.killed else f"ended with {other.exit_code}"
    answer = other.answer if not other.exit_code else words
    figures += [*_list_steps("state in mapped files", answer, ours), shown("mapped files", held)]
    bench.add(f"{name}: plain PyTorch", figures)
    bench.say(f"{name}: DeepSpeed")
    peer = ask_peer(
        find_peer("deepspeed"),
        "bench.peer_outofcore",
        {**specification, "state": str(place.folder / "deepspeed")},
        limit_s=PEER_LIMIT_S,
    )
    bench.add(f"{name}: DeepSpeed ZeRO-3, optimizer state on disk", _list_steps("step", peer, ours))


def _list_steps(name: str, answer: Mapping[str, Any] | str, ours: Run) -> list[Figure]:
    if isinstance(answer, str):
        return [shown(name, answer)]
    steps = answer["steps"][NUM_WARM_STEPS:]
    wall_ns = median(step["wall_ns"] for step in steps)
    return [
        shown(f"{name}: median wall", wall_ns, show=format_ns),
        shown(f"{name}: median CPU", median(step["cpu_ns"] for step in steps), show=format_ns),
        shown(f"{name}: over packhorse out of core", wall_ns / ours.step_ns, show=_show_ratio),
    ]


def _show_rates(rates: Sequence[DiskRates], field: str) -> str:
    found = [getattr(rate, field) for rate in rates]
    return ", ".join("unknown" if rate is None else f"{format_bytes(rate)}/s" for rate in found)


def _show_ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def _show_range(run: Run) -> str:
    return f"{format_ns(run.lowest_ns)} to {format_ns(run.highest_ns)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, *QUICK_SHAPES], help="only these")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")


if __name__ == "__main__":
    sys.exit(run_bench("outofcore", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
