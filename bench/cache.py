"""Belady against LRU and no cache: bytes that a step's chunks move, in three orders of access.

Nothing runs: the step of a decoder is lowered and the order in which its tasks touch the states of
chunks is put through the cache simulation that the search of chunk lengths uses. Beside it stands
what the compiled step itself copies when every state lies on disk, in as little device memory as
it gets by with, and what is left of that when chunks stay in the valleys of that memory.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
import transformers

from bench.material import VOCABULARY, make_config
from bench.planned import Subject, Ways, make_plan, trace_subject
from bench.report import Bench, Figure, at_most, run_bench, shown
from packhorse.compiler.lower import lower_plan
from packhorse.compiler.peak import peak_of
from packhorse.optim.optimizers import AdamW
from packhorse.plan.spec import CacheMode
from packhorse.program.program import Program
from packhorse.program.tasks import Copy
from packhorse.search.cache import (
    Accesses,
    Policy,
    list_states,
    simulate_cache,
    trace_accesses,
    widest_bytes,
)
from packhorse.units import MIB, format_bytes, format_percent

SHARES: Final = (0.25, 0.40, 0.60)
ROWS: Final = 1
LENGTH: Final = 64
NUM_MICROBATCHES: Final = 4
ORDERS: Final = {
    "depth-first, keep": Ways(order="depth_first", activations=("keep",)),
    "depth-first, recompute": Ways(order="depth_first", activations=("recompute",)),
    "layered": Ways(order="layered", tied_sum="per_step", activations=("recompute",)),
}
_WORDS: Final[dict[Policy, str]] = {"belady": "Belady", "lru": "LRU", "none": "no cache"}


def measure(bench: Bench) -> None:
    """Simulate each order at each share of the states."""
    subject = _trace(bench)
    for title, ways in ORDERS.items():
        chunk_bytes = (2 if bench.quick else 8) * MIB
        program = _lower(subject, ways, chunk_bytes, "none")
        keeping = _lower(subject, ways, chunk_bytes, "valleys")
        accesses = trace_accesses(program.tasks, program.layout)
        states_bytes = sum(state.size_bytes for state in list_states(program.layout).values())
        bench.add(
            f"{title}: the order",
            [
                shown("micro-batches", NUM_MICROBATCHES),
                shown("chunks", len(program.layout.chunks)),
                shown("states of chunks", states_bytes, show=format_bytes),
                shown("tasks that touch one", len(accesses)),
                shown("least cache: the widest task", widest_bytes(accesses), show=format_bytes),
                shown("copied, all on disk", _copied_bytes(program), show=format_bytes),
                at_most(
                    "copied by what is copied without, cache: valleys",
                    _copied_bytes(keeping) / _copied_bytes(program),
                    1.0,
                ),
                at_most(
                    "peak of the device by the peak without, cache: valleys",
                    peak_of(keeping)[keeping.workspace_pool]
                    / peak_of(program)[program.workspace_pool],
                    1.0,
                ),
            ],
        )
        for share in SHARES:
            capacity_bytes = max(int(share * states_bytes), widest_bytes(accesses))
            name = f"{title}: a cache of {format_percent(capacity_bytes / states_bytes)}"
            bench.add(name, _compare_policies(accesses, capacity_bytes))


def _compare_policies(accesses: Accesses, capacity_bytes: int) -> list[Figure]:
    found = {
        policy: simulate_cache(accesses, capacity_bytes=capacity_bytes, policy=policy)
        for policy in _WORDS
    }
    moved = {policy: traffic.moved_bytes for policy, traffic in found.items()}
    figures: list[Figure] = []
    for policy, traffic in found.items():
        words = (
            f"{format_bytes(traffic.moved_bytes)}: {format_bytes(traffic.loaded_bytes)} in"
            f" {traffic.num_loads} loads, {format_bytes(traffic.stored_bytes)} in"
            f" {traffic.num_stores} stores"
        )
        figures.append(shown(_WORDS[policy], words))
    return [
        *figures,
        at_most("Belady over LRU", moved["belady"] / moved["lru"], 1.0),
        at_most("LRU over no cache", moved["lru"] / moved["none"], 1.0),
    ]


def _trace(bench: Bench) -> Subject:
    width, num_layers = (256, 4) if bench.quick else (768, 12)
    bench.say("tracing the model")
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(
        make_config(width=width, num_layers=num_layers), dtype=torch.float32
    )
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    return trace_subject(module, {"input_ids": tokens, "labels": tokens}, AdamW())


def _copied_bytes(program: Program) -> int:
    return sum(
        program.buffers[task.buffer].size_bytes for task in program.tasks if isinstance(task, Copy)
    )


def _lower(subject: Subject, ways: Ways, chunk_bytes: int, cache: CacheMode) -> Program:
    away = Ways(
        parameters=("disk",),
        gradients=("disk",),
        optimizer=("disk",),
        activations=ways.activations,
        heap="map",
        chunk_bytes=chunk_bytes,
        cache=cache,
        order=ways.order,
        tied_sum=ways.tied_sum,
    )
    model = subject.traced.model
    plan = make_plan(model, subject.optimizer, away, num_microbatches=NUM_MICROBATCHES, clips=True)
    return lower_plan(plan, model, "train_step")


if __name__ == "__main__":
    sys.exit(run_bench("cache", __doc__.splitlines()[0], measure))
