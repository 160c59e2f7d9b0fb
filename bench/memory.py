"""Peak memory against the budget, and against the prediction.

SmolLM2-135M is trained in full with AdamW in float32, in a process of its own for every budget: 75,
50 and 30 percent of its training state (parameter, gradient and two moments: 16 bytes a parameter).
The process is the `packhorse train` command: it plans, traces, measures, loads, evaluates, trains,
checkpoints and writes the model. Its peak is its own VmHWM less what it held right after its
imports. That must not exceed the budget, and must be what the plan predicted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Final

from bench.children import (
    MODEL,
    STATE_BYTES_PER_PARAMETER,
    Outcome,
    expect_done,
    run_command,
    work_folder,
    write_recipe,
)
from bench.material import write_tokens
from bench.report import Bench, Figure, at_least, at_most, run_bench, shown
from packhorse.units import format_bytes, format_percent

SHARES: Final = (0.75, 0.50, 0.30)
ROWS: Final = 2
LENGTH: Final = 128
NUM_STEPS: Final = 3
NUM_EVALUATION_ROWS: Final = 4
NUM_PARAMETERS: Final = 134_515_008
MIN_PARAMETERS: Final = 100_000_000
MAX_ERROR: Final = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one budget gave."""

    budget_bytes: int
    outcome: Outcome
    predicted: dict[str, int]

    @property
    def measured_bytes(self) -> int:
        """The process's own peak."""
        return self.outcome.own_bytes

    @property
    def predicted_bytes(self) -> int:
        """What the plan promised of the device tier, base included."""
        return sum(self.predicted.values())

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def measure(bench: Bench) -> None:
    """Run every budget and add its table."""
    state_bytes = NUM_PARAMETERS * STATE_BYTES_PER_PARAMETER
    bench.add(
        "model",
        [
            at_least("parameters", NUM_PARAMETERS, MIN_PARAMETERS),
            shown("training state", state_bytes, show=format_bytes),
            shown("step", f"{ROWS} rows of {LENGTH} tokens"),
        ],
    )
    for share in SHARES[1:2] if bench.quick else SHARES:
        budget_bytes = int(share * state_bytes)
        title = f"budget of {format_percent(share)}: {format_bytes(budget_bytes)}"
        bench.say(title)
        bench.add(title, _list_figures(_read_budget(budget_bytes)))


def _read_budget(budget_bytes: int) -> Reading:
    with work_folder("memory") as folder:
        train, evaluation = folder / "train.jsonl", folder / "eval.jsonl"
        write_tokens(train, num_rows=ROWS * NUM_STEPS, length=LENGTH, seed=0)
        write_tokens(evaluation, num_rows=NUM_EVALUATION_ROWS, length=LENGTH, seed=1)
        recipe = write_recipe(
            folder / "recipe.yaml",
            {
                "model_name_or_path": str(MODEL),
                "train_data": [str(train)],
                "eval_data": [str(evaluation)],
                "data_format": "tokens",
                "data_cache": str(folder / "cache"),
                "max_length": LENGTH,
                "global_batch_size": ROWS,
                "max_steps": NUM_STEPS,
                "lr_scheduler_type": "constant",
                "bf16": False,
                "output_dir": str(folder / "run"),
                "save_steps": 2,
                "eval_steps": 2,
                "budget": {
                    "device": budget_bytes,
                    "disk": [{"path": str(folder / "scratch"), "size": "8GiB"}],
                },
            },
        )
        outcome = run_command(["train", str(recipe)], folder=folder)
        expect_done(outcome, f"training in {format_bytes(budget_bytes)}")
        plan = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))
    return Reading(
        budget_bytes=budget_bytes,
        outcome=outcome,
        predicted=plan["prediction"]["peak_bytes"]["device"],
    )


def _list_figures(reading: Reading) -> list[Figure]:
    causes = sorted(reading.predicted.items(), key=lambda pair: -pair[1])
    return [
        at_most(
            "peak of the process", reading.measured_bytes, reading.budget_bytes, show=format_bytes
        ),
        shown("predicted peak", reading.predicted_bytes, show=format_bytes),
        at_most("prediction off by", reading.error, MAX_ERROR, show=format_percent),
        shown("held right after imports", reading.outcome.imports_bytes, show=format_bytes),
        *(shown(f"predicted: {cause}", size, show=format_bytes) for cause, size in causes),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("memory", "Peak memory against the budget.", measure))
