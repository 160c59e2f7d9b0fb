"""CPU time of the runtime itself: what a compute action costs outside of its body.

Blocks whose bodies do next to nothing (linear layers of width 8) are trained on one rank, where one
thread does all, and on two processes under 1F1B, where lanes are threads and every stage's values
are sent. A step's CPU time over all threads of the process, less that of the same bodies called
directly with the same arguments, is divided by its forwards and backwards of blocks: what is left
is frees, messages, dependencies, the ledger, the timeline, feeds, losses, norms and updates. Beside
it torch.distributed.pipelining's 1F1B with a stage of one such layer on each rank, in the same
processes, in turns. What gloo's own threads take of it is told apart: they poll while a thread that
sends is kept from its core. CPU time, since wall time tells more of what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import torch

from bench.actions_worker import Bodies, Ours, Shape, time_steps
from bench.children import work_folder
from bench.pipeline import read_told
from bench.report import Bench, Figure, Number, at_most, run_bench, shown

NUM_RANKS: Final = 2
NUM_MICROBATCHES: Final = 32
LAYERS_ALONE: Final = 16
RANKED: Final = {"one or two blocks a stage": 2, "nine blocks a stage": 16}
NUM_STEPS: Final = 20
NUM_QUICK_STEPS: Final = 5
LIMIT_NS: Final = 100_000


def measure(bench: Bench) -> None:
    """Measure one rank, then two."""
    torch.set_num_threads(1)
    num_steps = NUM_QUICK_STEPS if bench.quick else NUM_STEPS
    words = f"{NUM_MICROBATCHES} micro-batches"
    bench.say("one rank")
    shape = Shape(num_layers=LAYERS_ALONE, num_microbatches=NUM_MICROBATCHES)
    with work_folder("actions") as folder:
        alone = Ours(shape, folder, None, Bodies())
        taken = time_steps({"alone": alone.step}, num_steps, ranked=False)["alone"]
        told = {
            "cpu_ns": [step["cpu_ns"] for step in taken],
            "gloo_ns": [step["gloo_ns"] for step in taken],
            "num_actions": alone.num_actions,
            "bodies_ns": alone.time_bodies(),
        }
        alone.engine.close()
    bench.add(f"one rank, {words}", list_costs("packhorse", told, judged=True))
    bench.say("two ranks")
    ranks = run_ranks(num_steps)
    for name in (*RANKED, "torch"):
        ours = name != "torch"
        title = f"two ranks, 1F1B, {words}: {name}"
        bench.add(
            title,
            [
                figure
                for rank, told in enumerate(ranks)
                for figure in list_costs(f"rank {rank}", told[name], judged=ours)
            ],
        )


def run_ranks(num_steps: int) -> list[dict[str, Any]]:
    """Run all ways on two processes; gives what each rank told."""
    with work_folder("actions") as folder:
        specification = folder / "specification.json"
        shapes = {
            name: {"num_layers": num_layers, "num_microbatches": NUM_MICROBATCHES}
            for name, num_layers in RANKED.items()
        }
        wanted = {"shapes": shapes, "num_steps": num_steps}
        specification.write_text(json.dumps(wanted), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={NUM_RANKS}", "-m", "bench.actions_worker"),
            *(str(specification), str(folder)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return [read_told(folder / f"{rank}.json") for rank in range(NUM_RANKS)]


def list_costs(name: str, told: Mapping[str, Any], *, judged: bool) -> list[Figure]:
    """What an action costs in all, in its body, and outside of it."""
    num_actions: int = told["num_actions"]
    whole = _per_action(told["cpu_ns"], num_actions)
    body = _per_action(told["bodies_ns"], num_actions)
    gloo = _per_action(told["gloo_ns"], num_actions)
    words = f"{name}: CPU per action outside the body"
    outside = whole - body
    return [
        at_most(words, outside, LIMIT_NS, show=_show_ms)
        if judged
        else shown(words, outside, show=_show_ms),
        shown(f"{name}: of it gloo's own threads", gloo, show=_show_ms),
        shown(f"{name}: with the body", whole, show=_show_ms),
        shown(f"{name}: the body alone", body, show=_show_ms),
        shown(f"{name}: compute actions a step", num_actions),
    ]


def _per_action(taken_ns: Sequence[int], num_actions: int) -> float:
    return median(taken_ns) / num_actions


def _show_ms(value_ns: Number) -> str:
    return f"{value_ns / 1e6:.3f} ms"


if __name__ == "__main__":
    sys.exit(run_bench("actions", __doc__.splitlines()[0], measure))
