"""A planned session in a process that tells how large it became, part by part.

    python -m bench.loaded_session MEMORY.json recipe.yaml 4,64

Plans the recipe, loads its weights, runs so many evaluation batches each time, then one training
step. The answer has the largest resident size of each part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # noqa: F401  imported before the first look
import transformers  # noqa: F401  imported before the first look

import packhorse.trainer.training  # noqa: F401  imported before the first look
from bench.memory_gauge import read_status_bytes, reset_peak, write_memory
from packhorse.cli.machines import MachineChoice, choose_machine
from packhorse.cli.planning import Planned, load_libraries, plan_recipe
from packhorse.cli.screen import Screen
from packhorse.runtime.memory.heap import trim_heap
from packhorse.trainer.recipe_files import load_recipe
from packhorse.trainer.run_data import model_inputs
from packhorse.trainer.session import Session


def main() -> int:
    """Plan, load, evaluate, train a step; print the peaks and write the memory file."""
    report, path, counts = sys.argv[1:4]
    imports_bytes = read_status_bytes("VmRSS")
    peaks: dict[str, int] = {}
    highest = 0

    def take_peak(name: str) -> None:
        nonlocal highest
        peaks[name] = read_status_bytes("VmHWM") - imports_bytes
        highest = max(highest, peaks[name])
        reset_peak()

    screen = Screen(as_json=True)
    recipe = load_recipe(Path(path), ()).recipe
    baseline_bytes = load_libraries(screen)
    machine = choose_machine(MachineChoice(), screen, granted=recipe.granted, here=True)
    planned = plan_recipe(recipe, machine, screen, baseline_bytes=baseline_bytes)
    take_peak("planning")
    disk = machine.tier("disk")
    assert disk is not None
    with Session(
        planned.traced,
        planned.plan,
        optimizer=planned.prepared.optimizer,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        scratch=Path(str(disk.path)),
    ) as session:
        weights = planned.prepared.open_weights()
        session.begin(weights)
        weights.close()
        trim_heap()
        take_peak("loading")
        losses = {}
        for count in map(int, counts.split(",")):
            losses[count] = evaluate(session, planned, count)
            take_peak(f"evaluating {count}")
        batch = planned.prepared.data.train.batch(0)
        result = session.train_step(
            model_inputs(batch), denominator=batch.num_items, step=1, learning_rate=1e-5
        )
        session.settle()
        take_peak("training")
    prediction = planned.plan.prediction
    assert prediction is not None
    answer = {
        "peaks": peaks,
        "loss": result.loss,
        "eval_losses": losses,
        "predicted_bytes": sum(prediction.peak_bytes["device"].values()),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    write_memory(Path(report), imports_bytes=imports_bytes, peak_bytes=highest + imports_bytes)
    return 0


def evaluate(session: Session, planned: Planned, count: int) -> float:
    """Give the mean loss of the first batches of the evaluation data."""
    batches = planned.prepared.data.evaluation
    assert batches is not None
    total, num_items = 0.0, 0
    for index in range(count):
        batch = batches.batch(index)
        total += session.evaluate(model_inputs(batch), denominator=1).loss
        num_items += batch.num_items
    return total / num_items


if __name__ == "__main__":
    sys.exit(main())
