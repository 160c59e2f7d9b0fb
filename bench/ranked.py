"""Run a model on several ranks of one process under a schedule, and record its curve.

In: a traced subject, a schedule with the blocks of its stages, how each rank plans. Out: a `Curve`,
as from `bench.planned`. Ranks are threads over a loopback transport; every arrow is the product's
own: cut, order, lower, verify jointly, run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from bench.planned import KINDS, Subject, Ways, load_weights, make_plan, read_states, record_curve
from bench.reference import Curve, Feed
from packhorse.compiler.lower import lower_plan
from packhorse.errors import PeerLostError
from packhorse.graph.parts import cut_traced
from packhorse.graph.trace import Traced
from packhorse.model.spec import BlockId, Model
from packhorse.plan.spec import SCHEDULED, Choice, PipelinePlan
from packhorse.program.program import Program, ProgramKind, Proof
from packhorse.runtime.engine import Engine
from packhorse.runtime.step_result import StepResult
from packhorse.runtime.transport.loopback import LoopbackGroup
from packhorse.runtime.transport.spec import Transport
from packhorse.schedule.spec import Schedule
from packhorse.verifier.joint import verify_ranks

T = TypeVar("T")
Stages = Sequence[Sequence[BlockId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A model on ranks: each one's part, programs and proofs."""

    parts: tuple[Traced, ...]
    programs: Mapping[ProgramKind, tuple[Program, ...]]
    proofs: Mapping[ProgramKind, tuple[Proof, ...]]


def plan_pipeline(schedule: Schedule, stages: Stages) -> PipelinePlan:
    """Write down how ranks share a model, without a search."""
    bounds = (0, *accumulate(map(len, stages)))
    return PipelinePlan(
        name=Choice(value="by hand", because=""),
        schedule=schedule,
        bounds=Choice(value=bounds, because=""),
    )


def spread_blocks(model: Model, num_stages: int) -> Stages:
    """Cut the blocks into stages of nearly as many blocks each, later ones the longer."""
    bounds = [len(model.blocks) * at // num_stages for at in range(num_stages + 1)]
    ids = [block.id for block in model.blocks]
    return [ids[first:last] for first, last in pairwise(bounds)]


def lower_ranks(
    subject: Subject,
    schedule: Schedule,
    stages: Stages,
    ways: Sequence[Ways],
    *,
    num_microbatches: int,
    clips: bool,
) -> Ranked:
    """Cut, order, lower and verify; `ways` are those of the ranks, repeated."""
    pipeline = plan_pipeline(schedule, stages)
    parts = cut_traced(subject.traced, pipeline.owners)
    plans = [
        make_plan(
            part.model,
            subject.optimizer,
            ways[rank % len(ways)],
            num_microbatches=num_microbatches,
            clips=clips,
        )
        for rank, part in enumerate(parts)
    ]
    programs = {
        kind: tuple(
            lower_plan(replace(plan, order=SCHEDULED, pipeline=pipeline), part.model, kind)
            for plan, part in zip(plans, parts, strict=True)
        )
        for kind in KINDS
    }
    models = [part.model for part in parts]
    return Ranked(
        parts=parts,
        programs=programs,
        proofs={kind: verify_ranks(found, models) for kind, found in programs.items()},
    )


def train_on_ranks(
    subject: Subject,
    schedule: Schedule,
    stages: Stages,
    ways: Sequence[Ways],
    steps: Sequence[Sequence[Feed]],
    *,
    max_grad_norm: float | None,
    scratch: Path,
    seed: int = 1,
    evaluate: bool = False,
) -> Curve:
    """Train on ranks that are threads, and tell what the first one heard.

    Every rank has to hear the same, and copies of a parameter have to be the same bits.
    """
    ranked = lower_ranks(
        subject,
        schedule,
        stages,
        ways,
        num_microbatches=len(steps[0]),
        clips=max_grad_norm is not None,
    )
    group = LoopbackGroup(len(ranked.parts))

    def train(rank: int) -> tuple[list[StepResult], dict[str, dict[str, Tensor]]]:
        end = group.end_of(rank)
        with open_rank(
            subject, ranked, rank, end, scratch, max_grad_norm=max_grad_norm, seed=seed
        ) as engine:
            results: list[StepResult] = []
            for step, feeds in enumerate(steps, 1):
                results.append(
                    engine.train_step(feeds, step=step, learning_rate=subject.optimizer.lr)
                )
                if evaluate:
                    results.append(engine.evaluate(feeds))
            held = ranked.parts[rank].model.parameters
            shapes = {name: subject.weights[name] for name in subject.weights if name in held}
            return results, read_states(engine, shapes)

    told = run_ranks(len(ranked.parts), train)
    first = told[0][0]
    for results, _ in told[1:]:
        heard = [(r.loss, r.losses, r.grad_norm) for r in results]
        assert heard == [(r.loss, r.losses, r.grad_norm) for r in first], "ranks heard other things"
    states = _join([states for _, states in told], subject.weights)
    if not evaluate:
        return record_curve(first, states)
    return Curve(
        losses=tuple(result.losses for result in first),
        totals=tuple(result.loss for result in first),
        norms=tuple(result.grad_norm for result in first if result.grad_norm is not None),
        states=states,
    )


def open_rank(
    subject: Subject,
    ranked: Ranked,
    rank: int,
    transport: Transport,
    scratch: Path,
    *,
    max_grad_norm: float | None = None,
    seed: int = 1,
) -> Engine:
    """Start one rank, in audit mode, with the subject's weights."""
    folder = scratch / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(
        traced=ranked.parts[rank],
        programs={kind: found[rank] for kind, found in ranked.programs.items()},
        proofs={kind: found[rank] for kind, found in ranked.proofs.items()},
        optimizer=subject.optimizer,
        max_grad_norm=max_grad_norm,
        seed=seed,
        scratch=folder,
        num_threads=1,
        heap="keep",
        audit=True,
        transport=transport,
    )
    load_weights(engine, subject.weights)
    return engine


def run_ranks(num_ranks: int, work: Callable[[int], T]) -> list[T]:
    """Run work on a thread for each rank; raises the first rank's error that is not another's."""
    with ThreadPoolExecutor(num_ranks, thread_name_prefix="rank") as pool:
        futures = [pool.submit(work, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
    return [future.result() for future in futures]


def _join(
    states: Sequence[Mapping[str, Mapping[str, Tensor]]], weights: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    joined: dict[str, dict[str, Tensor]] = {}
    for found in states:
        for state, tensors in found.items():
            for name, tensor in tensors.items():
                known = joined.setdefault(state, {}).setdefault(name, tensor)
                assert known.equal(tensor), f"the copies of {state} of {name} are not the same"
    return {
        state: {name: tensors[name] for name in weights if name in tensors}
        for state, tensors in joined.items()
    }
