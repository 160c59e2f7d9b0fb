"""One rank of several processes: trains models of the zoo under schedules and writes what it heard.

In: `python -m bench.rank_worker CASES FOLDER` under torchrun; CASES is a JSON list of `Case`s.
Out: FOLDER/CASE-RANK.pt: losses, totals, norms and the states of this rank's parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from bench.planned import Subject, Ways, read_states, trace_subject
from bench.ranked import lower_ranks, open_rank, spread_blocks
from bench.zoo import (
    ZOO,
    OptimizerName,
    batch_of,
    build_gpt2,
    build_model,
    clip_of,
    make_optimizer_words,
    make_steps,
)
from packhorse.compiler.passes.exchange import find_channels
from packhorse.graph.halving import halve_backwards
from packhorse.plan.spec import ActivationChoice
from packhorse.runtime.transport.processes import ProcessTransport
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named

NUM_STEPS = 5
DROPOUT = "gpt2-dropout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a model of the zoo (or `gpt2-dropout`), how it is cut, ordered and trained."""

    name: str
    model: str
    schedule: str
    num_microbatches: int
    optimizer: str
    activations: tuple[str, ...]
    disk: bool


def write_cases(path: Path, cases: Sequence[Case]) -> Path:
    """Write cases for the worker."""
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    return path


def make_subject(case: Case) -> Subject:
    """Trace a case's model; every process gets the same."""
    entry = ZOO[case.model.partition("-")[0]]
    optimizer = make_optimizer_words(cast("OptimizerName", case.optimizer), entry, "all")
    if case.model == DROPOUT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = build_gpt2(dropout=0.2).train()
    else:
        module = build_model(entry)
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1))
    subject = trace_subject(module, batch, optimizer)
    return replace(subject, traced=halve_backwards(subject.traced))


def ways_of(case: Case) -> Ways:
    """How each rank plans."""
    tier = ("disk",) if case.disk else ("device",)
    return Ways(
        tied_sum="per_step",
        activations=cast("tuple[ActivationChoice, ...]", case.activations),
        parameters=tier,
        gradients=tier,
        optimizer=tier,
    )


def train_case(case: Case, subject: Subject, folder: Path, store: dist.Store) -> None:
    """Train one case on this rank and write what it heard."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    entry = ZOO[case.model.partition("-")[0]]
    steps = make_steps(entry, num_steps=NUM_STEPS, num_microbatches=case.num_microbatches)
    schedule = make_named(case.schedule, num_ranks, case.num_microbatches, even_costs(num_ranks))
    clip = clip_of(cast("OptimizerName", case.optimizer))
    ranked = lower_ranks(
        subject,
        schedule,
        spread_blocks(subject.traced.model, schedule.num_stages),
        [ways_of(case)],
        num_microbatches=case.num_microbatches,
        clips=clip is not None,
    )
    part = ranked.parts[rank]
    transport = ProcessTransport(find_channels(part.model), store)
    with open_rank(subject, ranked, rank, transport, folder, max_grad_norm=clip) as engine:
        results = [
            engine.train_step(feeds, step=step, learning_rate=subject.optimizer.lr)
            for step, feeds in enumerate(steps, 1)
        ]
        shapes = {name: subject.weights[name] for name in part.model.parameters}
        torch.save(
            {
                "losses": [result.losses for result in results],
                "totals": [result.loss for result in results],
                "norms": [result.grad_norm for result in results],
                "states": read_states(engine, shapes),
            },
            folder / f"{case.name}-{rank}.pt",
        )


def main(cases_path: str, folder: str) -> None:
    """Run all cases, one after another."""
    torch.set_num_threads(1)
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    subjects: dict[tuple[str, str], Subject] = {}
    found = json.loads(Path(cases_path).read_text(encoding="utf-8"))
    for values in found:
        case = Case(**{**values, "activations": tuple(values["activations"])})
        key = (case.model, case.optimizer)
        if key not in subjects:
            subjects[key] = make_subject(case)
        train_case(case, subjects[key], Path(folder), store)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
