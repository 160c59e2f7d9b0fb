"""Ranks that run different programs against one process: losses, norms and weights, bit by bit.

Models of the zoo are trained for some steps on 2 and 4 processes over gloo, under every named
schedule that has no more stages than the model has blocks, with ties, skips over stages, dropout,
uneven label tokens, recomputed blocks, states on disk, and fewer micro-batches than stages; and on
one process with the same micro-batches and the same numerics. All ranks have to hear the same, and
every copy of a parameter has to be the same bits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

import torch

from bench.children import work_folder
from bench.planned import train_by_plan
from bench.rank_worker import DROPOUT, NUM_STEPS, Case, make_subject, ways_of, write_cases
from bench.reference import Curve, find_differences
from bench.report import Bench, at_least, run_bench
from bench.zoo import LAYERS, ZOO, OptimizerName, clip_of, make_steps
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import FAMILIES, make_named

MODELS: Final = ("llama", DROPOUT, "weave", "mixtral")
NUM_BLOCKS: Final = LAYERS + 2
COUNTS: Final = (1, 4)
ACTIVATIONS: Final = (("keep",), ("recompute",))
RANKS: Final = (2, 4)


def measure(bench: Bench) -> None:
    """Train every case on one process and on many."""
    for num_ranks in RANKS[:1] if bench.quick else RANKS:
        cases = list_cases(num_ranks, quick=bench.quick)
        with work_folder("ranks") as folder:
            bench.say(f"{len(cases)} cases on {num_ranks} ranks")
            run_worker(write_cases(folder / "cases.json", cases), folder, num_ranks)
            bench.say("the same on one process")
            subjects: dict[tuple[str, str], Any] = {}  # Any: subjects are only handed on
            same = 0
            for case in cases:
                key = (case.model, case.optimizer)
                if key not in subjects:
                    subjects[key] = make_subject(case)
                one = train_alone(case, subjects[key], folder)
                many = read_curve(case, folder, num_ranks, list(subjects[key].weights))
                differences = find_differences(one, many)
                same += not differences
                if differences:
                    bench.say(f"{case.name}: {differences[0]}")
        bench.add(
            f"{num_ranks} ranks, {NUM_STEPS} steps, bits of one process",
            [at_least("cases with the same bits", same, len(cases))],
        )


def list_cases(num_ranks: int, *, quick: bool = False) -> list[Case]:
    """The product of models, schedules, micro-batches and what blocks do."""
    schedules = [
        name
        for name in FAMILIES
        if make_named(name, num_ranks, 1, even_costs(num_ranks)).num_stages <= NUM_BLOCKS
    ]
    rows = product(MODELS, schedules, COUNTS, ACTIVATIONS, (False, True))
    cases = [
        Case(
            name=f"{model}-{schedule}-{count}-{activations[0]}-{'disk' if disk else 'memory'}",
            model=model,
            schedule=schedule,
            num_microbatches=count,
            optimizer="momentum" if disk else "adamw",
            activations=activations,
            disk=disk,
        )
        for model, schedule, count, activations, disk in rows
    ]
    return cases[::17] if quick else cases


def run_worker(cases: Path, folder: Path, num_ranks: int) -> None:
    """Start all ranks by torchrun and wait for them."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={num_ranks}", "-m", "bench.rank_worker", str(cases), str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")


def train_alone(case: Case, subject: Any, folder: Path) -> Curve:  # Any: only handed on
    """Train a case in this process."""
    entry = ZOO[case.model.partition("-")[0]]
    return train_by_plan(
        subject,
        ways_of(case),
        make_steps(entry, num_steps=NUM_STEPS, num_microbatches=case.num_microbatches),
        max_grad_norm=clip_of(cast("OptimizerName", case.optimizer)),
        scratch=folder,
    )


def read_curve(case: Case, folder: Path, num_ranks: int, names: Sequence[str]) -> Curve:
    """Put what the ranks wrote together; they have to agree."""
    found = [torch.load(folder / f"{case.name}-{rank}.pt") for rank in range(num_ranks)]
    first = found[0]
    states: dict[str, dict[str, torch.Tensor]] = {}
    for other in found:
        heard = [other[key] for key in ("losses", "totals", "norms")]
        assert heard == [first[key] for key in ("losses", "totals", "norms")], case.name
        for state, tensors in other["states"].items():
            for name, tensor in tensors.items():
                known = states.setdefault(state, {}).setdefault(name, tensor)
                assert known.equal(tensor), f"{case.name}: copies of {state} of {name}"
    return Curve(
        losses=tuple(tuple(each) for each in first["losses"]),
        totals=tuple(first["totals"]),
        norms=tuple(first["norms"]),
        states={
            state: {name: tensors[name] for name in names if name in tensors}
            for state, tensors in states.items()
        },
    )


if __name__ == "__main__":
    sys.exit(run_bench("ranks", __doc__.splitlines()[0], measure))
