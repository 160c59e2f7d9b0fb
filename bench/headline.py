"""A full fine-tune of SmolLM2-135M in 1 GiB for the whole process, with plain PyTorch's losses.

Batches of 1 x 64 tokens, float32, AdamW, clipping. Every run is a child process in a memory cgroup
of its own: interpreter, libraries, tokens, tracing, planning, weights, training and the page cache
that it fills all count. Plain PyTorch (`from_pretrained`, AdamW with `fused=True`) is killed there
at 1 and at 2 GiB; without a limit it gives the losses to compare with. Packhorse finishes at 1 GiB
with the same losses, bit by bit; then the limit is lowered until it no longer does.

Where no cgroup can be made, the bench says so and holds the process's own peak (VmHWM) against the
limit instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.cgroups import MemoryGroup, NoGroupError, open_group
from bench.children import (
    MODEL,
    Outcome,
    expect_done,
    read_metrics,
    run_command,
    run_plain,
    work_folder,
    write_recipe,
)
from bench.report import ROOT, Bench, Figure, at_most, exactly, holds, run_bench, shown
from packhorse.trainer.model_sources import find_model
from packhorse.trainer.recipe_files import load_recipe
from packhorse.trainer.run_data import prepare_run_data
from packhorse.units import GIB, MIB, format_bytes

CORPUS: Final = ROOT / ".cache" / "corpora" / "kjv-train.jsonl"
LIMIT_BYTES: Final = GIB
PLAIN_LIMITS: Final = (GIB, 2 * GIB)
LOWER_LIMITS: Final = tuple(size * MIB for size in (900, 800, 750, 700, 650, 600, 550, 500))
NUM_STEPS: Final = 20
QUICK_STEPS: Final = 5
NUM_LOWER_STEPS: Final = 3
LENGTH: Final = 64
LEARNING_RATE: Final = 1e-5
MAX_GRAD_NORM: Final = 1.0
NUM_THREADS: Final = 1
# Page tables and other memory of the kernel's, and the page cache that reading needs to go on.
KERNEL_BYTES: Final = 32 * MIB
_VOCABULARY: Final = 49_152


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the runs of this bench lie, and what the libraries alone take of every limit."""

    folder: Path
    imports_bytes: int
    num_steps: int


def measure(bench: Bench) -> None:
    """Run the plain loop, then Packhorse, then Packhorse in less."""
    with work_folder("headline") as folder:
        num_steps = QUICK_STEPS if bench.quick else NUM_STEPS
        imports = expect_done(run_command(["schema"], folder=folder), "the empty command")
        assert imports.imports_bytes is not None
        place = Place(folder=folder, imports_bytes=imports.imports_bytes, num_steps=num_steps)
        problem = _find_problem()
        held_by = "VmHWM" if problem else "memory cgroup, swap off"
        bench.add("limit", [shown("held by", held_by), shown("cgroup", problem or "can be made")])
        losses = _measure_plain(bench, place)
        _measure_ours(bench, place, losses)
        _measure_lowest(bench, place)


def _find_problem() -> str | None:
    try:
        with open_group(GIB):
            return None
    except NoGroupError as error:
        return str(error)


@contextmanager
def _limited(limit_bytes: int) -> Generator[MemoryGroup | None]:
    if _find_problem() is not None:
        yield None
        return
    with open_group(limit_bytes) as group:
        yield group


def _measure_plain(bench: Bench, place: Place) -> list[float]:
    batches = place.folder / "batches.json"
    _write_batches(place, batches)
    specification = {
        "model": str(MODEL),
        "batches": str(batches),
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "num_threads": NUM_THREADS,
    }
    bench.say("plain PyTorch without a limit")
    free = expect_done(run_plain(specification, folder=place.folder), "the plain loop")
    figures = [
        shown(
            f"peak of the process, no limit, {place.num_steps} steps",
            free.peak_bytes,
            show=format_bytes,
        )
    ]
    for limit_bytes in PLAIN_LIMITS:
        bench.say(f"plain PyTorch in {format_bytes(limit_bytes)}")
        name = f"in {format_bytes(limit_bytes)}"
        with _limited(limit_bytes) as group:
            if group is None:
                above = (free.peak_bytes or 0) > limit_bytes
                words = f"peak {format_bytes(free.peak_bytes or 0)}"
                figures.append(holds(name, above, measured=words, bar="above the limit"))
                continue
            outcome = run_plain(specification, folder=place.folder, group=group)
        words = "killed" if outcome.killed else f"ended with {outcome.exit_code}"
        figures.append(holds(name, outcome.killed, measured=words, bar="killed"))
    bench.add("plain PyTorch", figures)
    return [float(loss) for loss in free.answer["losses"]]


def _measure_ours(bench: Bench, place: Place, losses: Sequence[float]) -> None:
    bench.say(f"packhorse in {format_bytes(LIMIT_BYTES)}")
    outcome, ours = _train(place, LIMIT_BYTES, place.num_steps)
    if outcome.exit_code:
        bench.say(outcome.error[-2000:])
    num_equal = sum(one == other for one, other in zip(ours, losses, strict=False))
    figures = [
        _show_exit(f"in {format_bytes(LIMIT_BYTES)}", outcome),
        exactly("steps", len(ours), len(losses)),
        exactly("losses with the bits of the plain loop's", num_equal, len(losses)),
        *_show_peaks(outcome, LIMIT_BYTES),
        shown("budget given to the plan", _budget_bytes(place, LIMIT_BYTES), show=format_bytes),
    ]
    if ours:
        figures.append(shown("loss, first and last step", f"{ours[0]:.6f}, {ours[-1]:.6f}"))
    bench.add("packhorse", figures)


def _measure_lowest(bench: Bench, place: Place) -> None:
    lowest: int | None = None
    words = ""
    limits = LOWER_LIMITS[3:5] if bench.quick else LOWER_LIMITS
    figures: list[Figure] = []
    for limit_bytes in limits:
        bench.say(f"packhorse in {format_bytes(limit_bytes)}")
        outcome, _ = _train(place, limit_bytes, NUM_LOWER_STEPS)
        words = "finishes" if not outcome.exit_code else "refused"
        if outcome.killed:
            words = "killed"
        elif outcome.exit_code not in (0, 3):
            words = f"ended with {outcome.exit_code}"
        peak = "" if outcome.peak_bytes is None else f", VmHWM {format_bytes(outcome.peak_bytes)}"
        figures.append(shown(f"in {format_bytes(limit_bytes)}", words + peak))
        if outcome.exit_code:
            bench.say(outcome.error[-1500:])
            break
        lowest = limit_bytes
    lowest_words = "none of these" if lowest is None else format_bytes(lowest)
    bench.add("how low it goes", [*figures, shown("lowest that finishes", lowest_words)])


def _train(place: Place, limit_bytes: int, num_steps: int) -> tuple[Outcome, list[float]]:
    name = f"{limit_bytes // MIB}"
    recipe = _write_recipe(place, name, limit_bytes, num_steps)
    with _limited(limit_bytes) as group:
        outcome = run_command(["train", str(recipe)], folder=place.folder, group=group)
    run = place.folder / f"run-{name}"
    losses = [line["loss"] for line in read_metrics(run)] if not outcome.exit_code else []
    return outcome, losses


def _budget_bytes(place: Place, limit_bytes: int) -> int:
    return limit_bytes - place.imports_bytes - KERNEL_BYTES


def _write_recipe(place: Place, name: str, limit_bytes: int, num_steps: int) -> Path:
    folder = place.folder
    return write_recipe(
        folder / f"recipe-{name}.yaml",
        {
            "model_name_or_path": str(MODEL),
            "train_data": [str(CORPUS)],
            "data_format": "text",
            # A cache of its own: making the tokens counts too.
            "data_cache": str(folder / f"cache-{name}"),
            "max_length": LENGTH,
            "global_batch_size": 1,
            "max_steps": num_steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": MAX_GRAD_NORM,
            "bf16": False,
            "output_dir": str(folder / f"run-{name}"),
            "save_steps": None,
            "budget": {
                "device": _budget_bytes(place, limit_bytes),
                "disk": [{"path": str(folder / "scratch"), "size": "8GiB"}],
            },
            "plan": {"num_threads": NUM_THREADS},
        },
    )


def _write_batches(place: Place, path: Path) -> None:
    recipe = load_recipe(_write_recipe(place, "batches", GIB, place.num_steps), ()).recipe
    data = prepare_run_data(
        recipe,
        find_model(recipe.model_name_or_path),
        vocab_size=_VOCABULARY,
        global_rows=1,
    )
    batches = [data.train.batch(step) for step in range(place.num_steps)]
    content = [
        {
            "input_ids": batch.inputs["input_ids"].tolist(),
            "labels": batch.inputs["labels"].tolist(),
            "num_items": batch.num_items,
        }
        for batch in batches
    ]
    path.write_text(json.dumps(content), encoding="utf-8")


def _show_exit(name: str, outcome: Outcome) -> Figure:
    words = "killed" if outcome.killed else f"ended with {outcome.exit_code}"
    done = outcome.exit_code == 0
    return holds(name, done, measured="finished" if done else words, bar="finishes")


def _show_peaks(outcome: Outcome, limit_bytes: int) -> list[Figure]:
    figures: list[Figure] = []
    if outcome.peak_bytes is not None:
        figures.append(
            at_most(
                "peak of the process, libraries included",
                outcome.peak_bytes,
                limit_bytes,
                show=format_bytes,
            )
        )
    if outcome.group_peak_bytes is not None:
        figures.append(
            shown(
                "peak of the cgroup, page cache included",
                outcome.group_peak_bytes,
                show=format_bytes,
            )
        )
    return figures


if __name__ == "__main__":
    sys.exit(run_bench("headline", "Full fine-tune of a 135M model in 1 GiB.", measure))
