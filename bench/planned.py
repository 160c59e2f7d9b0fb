"""Run a model under a hand-made plan, in audit mode, and record the same curve as the plain loop.

In: a module, an optimizer, the micro-batches of each step, and where the states lie. Out: a
`Curve`. Every arrow is the product's own: export, trace, plan, lower, verify, run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from bench.reference import Curve, Feed, group_names
from packhorse.compiler.chunks import pack_chunks
from packhorse.compiler.lower import Lowerer
from packhorse.compiler.runs import Runs
from packhorse.graph.export import Exported, export_module
from packhorse.graph.trace import Traced, trace_blocks
from packhorse.model.spec import Model
from packhorse.optim.optimizers import AdamW, Optimizer
from packhorse.plan.spec import (
    ActivationChoice,
    BlockPlan,
    CacheMode,
    Choice,
    ChunkPlan,
    HeapMode,
    Numerics,
    OptimizerPlan,
    Order,
    Plan,
    TiedSum,
)
from packhorse.program.buffers import TierName
from packhorse.program.program import Program, ProgramKind
from packhorse.runtime.emulation import Pace
from packhorse.runtime.engine import Engine, ParameterPiece
from packhorse.runtime.step_result import StepResult
from packhorse.units import KIB
from packhorse.verifier.rules import verify_program

KINDS: Final[tuple[ProgramKind, ...]] = ("train_step", "evaluate", "load", "save")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What a plan chooses; a sequence is repeated over the chunks or blocks."""

    parameters: Sequence[TierName] = ("device",)
    gradients: Sequence[TierName] = ("device",)
    optimizer: Sequence[TierName] = ("device",)
    update: Sequence[TierName] = ("device",)
    stride: int = 0
    prefetch: int = 0
    activations: Sequence[ActivationChoice] = ("keep",)
    heap: HeapMode = "keep"
    chunk_bytes: int = 16 * KIB
    order: Order = "depth_first"
    cache: CacheMode = "none"
    boundaries: TierName = "device"
    offload: TierName = "disk"
    tied_sum: TiedSum = "per_microbatch"


RESIDENT: Final = Ways()
PLACES: Final[Mapping[str, Ways]] = {
    "resident": RESIDENT,
    "parameters on disk": Ways(parameters=("disk",)),
    "optimizer on disk": Ways(optimizer=("disk",)),
    "all on disk": Ways(parameters=("disk",), gradients=("disk",), optimizer=("disk",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A traced model with the weights it starts from."""

    exported: Exported
    traced: Traced
    optimizer: Optimizer
    weights: Mapping[str, Tensor]
    compute_dtype: torch.dtype


def trace_subject(
    module: nn.Module,
    batch: Feed,
    optimizer: Optimizer,
    *,
    exported: Exported | None = None,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Subject:
    """Trace a module for micro-batches of the shape of `batch`.

    `exported` is the module's own export in the same dtype, where one exists already.
    """
    if exported is None:
        exported = export_module(module, batch, compute_dtype=compute_dtype)
    return Subject(
        exported=exported,
        traced=trace_blocks(
            exported,
            rows=next(iter(batch.values())).shape[0],
            chunk_tokens=chunk_tokens,
            groups=group_names(module, optimizer),
            compute_dtype=compute_dtype,
        ),
        optimizer=optimizer,
        weights={name: p.detach().clone() for name, p in module.named_parameters()},
        compute_dtype=compute_dtype,
    )


def make_plan(
    model: Model,
    optimizer: Optimizer,
    ways: Ways,
    *,
    num_microbatches: int,
    clips: bool,
    compute_dtype: str = "float32",
) -> Plan:
    """Write down a plan without a search."""
    chunks = pack_chunks(model, ways.chunk_bytes)
    tiers = zip(
        cycle(ways.parameters), cycle(ways.gradients), cycle(ways.optimizer), cycle(ways.update)
    )
    return Plan(
        model=model.fingerprint,
        model_name=model.name,
        machine="any",
        length=model.length,
        budget_bytes=dict.fromkeys(("device", "host", "disk"), 1 << 34),
        base_bytes=0,
        numerics=Numerics(
            microbatch_rows=_choose(model.rows),
            num_microbatches=num_microbatches,
            num_workers=1,
            compute_dtype=compute_dtype,
            loss_chunk_tokens=_choose(None),
            tied_sum=ways.tied_sum,
            attention="causal",
            num_threads=1,
            device="cpu",
        ),
        optimizer=OptimizerPlan(
            name="adamw" if isinstance(optimizer, AdamW) else "sgd",
            states=optimizer.state_names,
            master=compute_dtype != "float32",
            clips=clips,
        ),
        heap=_choose(ways.heap),
        heap_slack=0.0,
        chunk_bytes=_choose(ways.chunk_bytes),
        chunks=tuple(
            ChunkPlan(
                pieces=chunk.pieces,
                group=chunk.group,
                trainable=chunk.trainable,
                parameters=_choose(parameters),
                gradients=_choose(gradients),
                optimizer=_choose(states),
                update=_choose(update),
            )
            for chunk, (parameters, gradients, states, update) in zip(chunks, tiers, strict=False)
        ),
        blocks=tuple(
            BlockPlan(name=block.name, activations=_choose(choice))
            for block, choice in zip(model.blocks, cycle(ways.activations), strict=False)
        ),
        pins=(),
        prediction=None,
        order=_choose(ways.order),
        cache=_choose(ways.cache),
        boundaries=_choose(ways.boundaries),
        offload=_choose(ways.offload),
        stride=_choose(ways.stride),
        prefetch=_choose(ways.prefetch),
    )


def open_engine(
    subject: Subject,
    ways: Ways,
    *,
    num_microbatches: int,
    max_grad_norm: float | None,
    scratch: Path,
    seed: int = 1,
    pace: Pace | None = None,
    audit: bool = True,
    runs: Runs = (),
) -> Engine:
    """Write a plan down, start it, and load the subject's weights."""
    plan = make_plan(
        subject.traced.model,
        subject.optimizer,
        ways,
        num_microbatches=num_microbatches,
        clips=max_grad_norm is not None,
        compute_dtype=str(subject.compute_dtype).removeprefix("torch."),
    )
    return start_plan(
        subject,
        plan,
        max_grad_norm=max_grad_norm,
        scratch=scratch,
        seed=seed,
        pace=pace,
        audit=audit,
        runs=runs,
    )


def start_plan(
    subject: Subject,
    plan: Plan,
    *,
    max_grad_norm: float | None,
    scratch: Path,
    seed: int = 1,
    pace: Pace | None = None,
    audit: bool = True,
    runs: Runs = (),
) -> Engine:
    """Lower, verify and start a plan, and load the subject's weights.

    `runs` are those of a training step, in place of the plan's own order.
    """
    lowerer = Lowerer(subject.traced.model, runs)
    programs: dict[ProgramKind, Program] = {kind: lowerer.lower(plan, kind) for kind in KINDS}
    engine = Engine(
        traced=subject.traced,
        programs=programs,
        proofs={kind: verify_program(p, subject.traced.model) for kind, p in programs.items()},
        optimizer=subject.optimizer,
        max_grad_norm=max_grad_norm,
        seed=seed,
        scratch=scratch,
        num_threads=1,
        heap=plan.heap.value,
        pace=pace,
        audit=audit,
    )
    load_weights(engine, subject.weights)
    return engine


def load_weights(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Fill parameters (and their master copies); optimizer states start at zero."""

    def fill(state: str, piece: ParameterPiece) -> None:
        if state in ("param", "master"):
            piece.tensor.copy_(weights[piece.parameter].flatten()[piece.start : piece.stop])

    engine.load(fill)


def read_states(engine: Engine, shapes: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Copy every state of every parameter out of an engine; `shapes` has the parameters' shapes."""
    states: dict[str, dict[str, Tensor]] = {}

    def drain(state: str, piece: ParameterPiece) -> None:
        whole = states.setdefault(state, {}).setdefault(
            piece.parameter,
            torch.empty(shapes[piece.parameter].shape, dtype=piece.tensor.dtype),
        )
        whole.view(-1)[piece.start : piece.stop] = piece.tensor

    engine.save(drain)
    return {
        state: {name: tensors[name] for name in shapes if name in tensors}
        for state, tensors in states.items()
    }


def train_by_plan(
    subject: Subject,
    ways: Ways,
    steps: Sequence[Sequence[Feed]],
    *,
    max_grad_norm: float | None,
    scratch: Path,
    seed: int = 1,
    runs: Runs = (),
) -> Curve:
    """Train under a plan and tell what happened; `runs` as in `start_plan`."""
    with open_engine(
        subject,
        ways,
        num_microbatches=len(steps[0]),
        max_grad_norm=max_grad_norm,
        scratch=scratch,
        seed=seed,
        runs=runs,
    ) as engine:
        results = [
            engine.train_step(feeds, step=step, learning_rate=subject.optimizer.lr)
            for step, feeds in enumerate(steps, 1)
        ]
        return record_curve(results, read_states(engine, subject.weights))


def record_curve(
    results: Sequence[StepResult], states: Mapping[str, Mapping[str, Tensor]]
) -> Curve:
    """Put what the steps gave back in the words of the plain loop."""
    norms = [result.grad_norm for result in results]
    assert None not in norms, "a training step reports the norm"
    return Curve(
        losses=tuple(result.losses for result in results),
        totals=tuple(result.loss for result in results),
        norms=tuple(norm for norm in norms if norm is not None),
        states=states,
    )


def _choose(value: T) -> Choice[T]:
    return Choice(value=value, because="it is asked for")
