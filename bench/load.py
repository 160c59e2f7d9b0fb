"""Loading a 2 GiB checkpoint within a budget of 1 GiB, and evaluation that keeps nothing.

A random Llama of 2 GiB in float32 is written by the bench, planned with a budget of 1 GiB, loaded,
evaluated and trained for a step. The process's own peak (VmHWM less what it held after its imports)
must stay within the budget all the way. 64 evaluation batches must peak no higher than 4.
"""

from __future__ import annotations

import sys
from typing import Final

from bench.children import expect_done, run_session, work_folder, write_recipe
from bench.material import make_config, write_checkpoint, write_tokens
from bench.report import Bench, at_least, at_most, run_bench, shown
from packhorse.units import GIB, MIB, format_bytes

LENGTH: Final = 64
FEW: Final = 4
MANY: Final = 64


def measure(bench: Bench) -> None:
    """Write the checkpoint, plan, load, evaluate, train."""
    width, num_layers = (512, 8) if bench.quick else (1536, 18)
    wanted_bytes, budget_bytes = (100 * MIB, 600 * MIB) if bench.quick else (2 * GIB, GIB)
    with work_folder("load") as folder:
        bench.say("writing the checkpoint")
        weights_bytes = write_checkpoint(
            folder / "model", make_config(width=width, num_layers=num_layers)
        )
        train, evaluation = folder / "train.jsonl", folder / "eval.jsonl"
        write_tokens(train, num_rows=1, length=LENGTH, seed=0)
        write_tokens(evaluation, num_rows=MANY, length=LENGTH, seed=1)
        recipe = write_recipe(
            folder / "recipe.yaml",
            {
                "model_name_or_path": str(folder / "model"),
                "train_data": [str(train)],
                "eval_data": [str(evaluation)],
                "data_format": "tokens",
                "data_cache": str(folder / "cache"),
                "max_length": LENGTH,
                "global_batch_size": 1,
                "max_steps": 1,
                "bf16": False,
                "output_dir": str(folder / "run"),
                "budget": {
                    "device": budget_bytes,
                    "disk": [{"path": str(folder / "scratch"), "size": "12GiB"}],
                },
            },
        )
        bench.say("planning, loading, evaluating, a step")
        outcome = expect_done(run_session(recipe, (FEW, MANY), folder=folder), "the session")
    peaks = outcome.answer["peaks"]
    bench.add(
        "sizes",
        [
            at_least("checkpoint", weights_bytes, wanted_bytes, show=format_bytes),
            shown("budget", budget_bytes, show=format_bytes),
            shown("predicted peak", outcome.answer["predicted_bytes"], show=format_bytes),
            shown("held right after imports", outcome.imports_bytes, show=format_bytes),
        ],
    )
    bench.add(
        "peak of the process less its imports",
        [at_most(name, peak, budget_bytes, show=format_bytes) for name, peak in peaks.items()],
    )
    bench.add(
        "evaluation",
        [
            at_most(
                f"peak of {MANY} batches against {FEW}",
                peaks[f"evaluating {MANY}"],
                peaks[f"evaluating {FEW}"],
                show=format_bytes,
            ),
            shown(
                "difference in bytes",
                peaks[f"evaluating {MANY}"] - peaks[f"evaluating {FEW}"],
            ),
        ],
    )


if __name__ == "__main__":
    sys.exit(run_bench("load", "Loading and evaluating a model larger than the budget.", measure))
