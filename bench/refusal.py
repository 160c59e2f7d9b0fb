"""A budget that is too small is refused before anything is loaded, and the advice is right.

`packhorse train` of SmolLM2-135M with a budget below what its largest block needs: the exit code is
3, need and have are named, the weights were not read, no run folder and no scratch space were made.
The refusal names the smallest budget that would work; with exactly that budget the same command
then trains a step, and its peak stays within it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.children import (
    MODEL,
    ChildError,
    Outcome,
    read_metrics,
    run_command,
    work_folder,
    write_recipe,
)
from bench.material import make_config, write_checkpoint, write_tokens
from bench.report import Bench, Figure, at_most, exactly, holds, run_bench, shown
from packhorse.units import MIB, format_bytes, parse_bytes

TOO_SMALL_BYTES: Final = 64 * MIB
REFUSED: Final = 3
LENGTH: Final = 64
_NEED: Final = re.compile(r"device needs (\S+ ?\w+) and has (\S+ ?\w+)")
_ADVICE: Final = re.compile(r"--budget device=(\w+)")


def measure(bench: Bench) -> None:
    """Get refused, then follow the advice."""
    with work_folder("refusal") as folder:
        model = MODEL
        if bench.quick:
            model = folder / "model"
            write_checkpoint(model, make_config(width=256, num_layers=4))
        recipe = _write_recipe(folder, model)
        bench.say(f"budget of {format_bytes(TOO_SMALL_BYTES)}")
        refused = _train(folder, recipe, TOO_SMALL_BYTES)
        said = refused.answer.get("error", {})
        text = "\n".join(str(said.get(part, "")) for part in ("what", "where", "fix"))
        weights_bytes = (model / "model.safetensors").stat().st_size
        bench.add(
            f"budget of {format_bytes(TOO_SMALL_BYTES)}",
            [
                exactly("exit code", refused.exit_code, REFUSED),
                _show_need(text),
                *_show_untouched(folder, refused, weights_bytes, quick=bench.quick),
            ],
        )
        advice = _ADVICE.search(text)
        if advice is None:
            raise ChildError(f"the refusal names no budget:\n{text}\n{refused.error[-2000:]}")
        smallest_bytes = parse_bytes(advice.group(1))
        bench.say(f"budget of {format_bytes(smallest_bytes)}")
        followed = _train(folder, recipe, smallest_bytes)
        bench.add(
            f"the budget that the refusal named: {format_bytes(smallest_bytes)}",
            _show_followed(folder, followed, smallest_bytes),
        )
        if followed.exit_code:
            bench.say(followed.error[-2000:])


def _train(folder: Path, recipe: Path, budget_bytes: int) -> Outcome:
    budget = f"device={budget_bytes}"
    return run_command(["train", str(recipe), "--budget", budget], folder=folder)


def _show_need(text: str) -> Figure:
    found = _NEED.search(text)
    words = "not named" if found is None else f"{found.group(1)}, {found.group(2)}"
    return holds("need and have of the device", found is not None, measured=words, bar="named")


def _show_untouched(
    folder: Path, refused: Outcome, weights_bytes: int, *, quick: bool
) -> Sequence[Figure]:
    made = [name for name in ("run", "scratch") if (folder / name).exists()]
    held = [
        holds(
            "run folder and scratch space",
            not made,
            measured=", ".join(made) or "not made",
            bar="not made",
        )
    ]
    if quick:
        # The weights of the small model are less than what tracing holds.
        held.append(shown("peak of the process", refused.own_bytes, show=format_bytes))
    else:
        held.append(
            at_most(
                "peak of the process, against its weights",
                refused.own_bytes,
                weights_bytes - 1,
                show=format_bytes,
            )
        )
    return held


def _show_followed(folder: Path, followed: Outcome, budget_bytes: int) -> Sequence[Figure]:
    figures: list[Figure] = [exactly("exit code", followed.exit_code, 0)]
    if not followed.exit_code:
        figures += [
            exactly("steps", len(read_metrics(folder / "run")), 1),
            at_most("peak of the process", followed.own_bytes, budget_bytes, show=format_bytes),
        ]
    return figures


def _write_recipe(folder: Path, model: Path) -> Path:
    write_tokens(folder / "train.jsonl", num_rows=1, length=LENGTH, seed=0)
    return write_recipe(
        folder / "recipe.yaml",
        {
            "model_name_or_path": str(model),
            "train_data": [str(folder / "train.jsonl")],
            "data_format": "tokens",
            "data_cache": str(folder / "cache"),
            "max_length": LENGTH,
            "global_batch_size": 1,
            "max_steps": 1,
            "bf16": False,
            "output_dir": str(folder / "run"),
            "save_steps": None,
            "budget": {"disk": [{"path": str(folder / "scratch"), "size": "8GiB"}]},
        },
    )


if __name__ == "__main__":
    sys.exit(run_bench("refusal", "What does not fit is refused, with advice that works.", measure))
