"""Programs of very many tasks: a deep decoder on ranks, over as many micro-batches as asked.

In: a number of tasks. Out: the ranks' parts of the model and their programs, lowered from a plan
for each: one keeps, one recomputes, one has every state on disk, one offloads what blocks save. The
model is traced as any other; only its width is small, because nothing here computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import torch

from bench.pipeline_worker import Decoder, Shape, make_batch
from bench.planned import Ways, make_plan, trace_subject
from bench.ranked import plan_pipeline, spread_blocks
from packhorse.compiler.lower import lower_plan
from packhorse.compiler.runs import Runs, run_pipelined
from packhorse.model.parts import cut_model
from packhorse.model.spec import Model
from packhorse.optim.optimizers import AdamW
from packhorse.program.program import Program
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named

NUM_LAYERS: Final = 62
NUM_RANKS: Final = 8
SCHEDULE: Final = "1f1b"
WAYS: Final = (
    Ways(tied_sum="per_step"),
    Ways(tied_sum="per_step", activations=("recompute",)),
    Ways(
        tied_sum="per_step",
        parameters=("disk",),
        gradients=("disk",),
        optimizer=("disk",),
        activations=("keep", "recompute"),
    ),
    Ways(tied_sum="per_step", optimizer=("disk",), activations=("offload", "keep")),
)
_FEW: Final = 2 * NUM_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Deep:
    """The parts and training steps of all ranks, and the CPU time that lowering them took."""

    parts: Sequence[Model]
    programs: Sequence[Program]
    num_microbatches: int
    lower_ns: int

    @property
    def num_tasks(self) -> int:
        """Tasks of all ranks."""
        return sum(len(program.tasks) for program in self.programs)


def trace_deep(num_layers: int = NUM_LAYERS) -> Model:
    """Trace a decoder of many small layers."""
    shape = Shape(
        width=64, num_layers=num_layers, vocabulary=256, rows=1, length=16, num_microbatches=1
    )
    torch.manual_seed(0)
    tokens, labels = make_batch(shape, 0)
    feed = {"input_ids": tokens, "labels": labels}
    return trace_subject(Decoder(shape), feed, AdamW(lr=1e-4)).traced.model


def lower_many(lower: Callable[[int], Deep], num_tasks: int) -> Deep:
    """Lower a step with so many micro-batches that there are at least `num_tasks`."""
    few, more = (lower(count).num_tasks for count in (_FEW, 2 * _FEW))
    each = (more - few) / _FEW
    return lower(_FEW + max(ceil((num_tasks - few) / each), 0))


def lower_ranks(model: Model, num_microbatches: int) -> Deep:
    """Lower a step of all ranks."""
    schedule = make_named(SCHEDULE, NUM_RANKS, num_microbatches, even_costs(NUM_RANKS))
    pipeline = plan_pipeline(schedule, spread_blocks(model, schedule.num_stages))
    parts = cut_model(model, pipeline.owners)
    begin_ns = time.process_time_ns()
    runs = run_pipelined(model, pipeline)
    return _lower(parts, runs, num_microbatches, begin_ns)


def lower_alone(model: Model, num_microbatches: int) -> Deep:
    """Lower a step of the whole model on one rank."""
    return _lower([model], (), num_microbatches, time.process_time_ns())


def _lower(parts: Sequence[Model], runs: Runs, num_microbatches: int, begin_ns: int) -> Deep:
    programs: list[Program] = []
    for rank, part in enumerate(parts):
        ways = WAYS[(rank + 2) % len(WAYS)]
        optimizer = AdamW(lr=1e-4)
        plan = make_plan(part, optimizer, ways, num_microbatches=num_microbatches, clips=True)
        programs.append(lower_plan(plan, part, "train_step", runs=runs))
    return Deep(
        parts=parts,
        programs=programs,
        num_microbatches=num_microbatches,
        lower_ns=time.process_time_ns() - begin_ns,
    )
