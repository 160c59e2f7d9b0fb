"""A million tasks verified, and random changes of right programs that must not pass.

A step of a deep decoder on eight ranks, lowered from real plans, is verified jointly, every rule
with the model. Then programs of models of the zoo on several ranks, in pools that are exactly as
large as their proofs say, get one random change each: a task or a message is dropped, done twice,
swapped or moved. The verifier must reject it, or it is harmless by an argument of its own.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

import torch

from bench.deep import lower_many, trace_deep
from bench.deep import lower_ranks as deep_ranks
from bench.mutants import CHANGES, draw_mutant, is_harmless
from bench.planned import Ways
from bench.rank_worker import Case, make_subject
from bench.ranked import lower_ranks, spread_blocks
from bench.report import Bench, at_least, at_most, exactly, run_bench, shown
from packhorse.errors import RuleError
from packhorse.model.spec import Model
from packhorse.program.program import Program
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.units import format_ns
from packhorse.verifier.joint import verify_ranks

NUM_TASKS: Final = 1_000_000
NUM_QUICK_TASKS: Final = 100_000
LIMIT_NS: Final = 20_000_000_000
NUM_MUTANTS: Final = 200
SEED: Final = 20_242
NUM_MICROBATCHES: Final = 4
ON_DISK: Final = Ways(
    tied_sum="per_step",
    parameters=("disk",),
    gradients=("disk",),
    optimizer=("disk",),
    activations=("keep", "recompute"),
)
KEPT: Final = Ways(tied_sum="per_step", optimizer=("disk",), activations=("offload", "keep"))
GROUNDS: Final = (("gpt2", "1f1b", 3), ("weave", "interleaved", 2), ("llama", "zb-h1", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Right programs of several ranks in the smallest pools that hold them."""

    name: str
    models: Sequence[Model]
    programs: Sequence[Program]


def make_ground(model: str, schedule_name: str, num_ranks: int) -> Ground:
    """Lower and prove a training step of a model of the zoo."""
    name = f"{model}, {schedule_name} on {num_ranks}"
    case = Case(
        name=name,
        model=model,
        schedule=schedule_name,
        num_microbatches=NUM_MICROBATCHES,
        optimizer="adamw",
        activations=("keep",),
        disk=False,
    )
    subject = make_subject(case)
    schedule = make_named(schedule_name, num_ranks, NUM_MICROBATCHES, even_costs(num_ranks))
    ranked = lower_ranks(
        subject,
        schedule,
        spread_blocks(subject.traced.model, schedule.num_stages),
        (ON_DISK, KEPT),
        num_microbatches=NUM_MICROBATCHES,
        clips=True,
    )
    programs: list[Program] = []
    for program, proof in zip(
        ranked.programs["train_step"], ranked.proofs["train_step"], strict=True
    ):
        peak_bytes = proof.peak_bytes
        pools = tuple(replace(pool, capacity_bytes=peak_bytes[pool.id]) for pool in program.pools)
        programs.append(replace(program, pools=pools))
    models = [part.model for part in ranked.parts]
    verify_ranks(programs, models)
    return Ground(name=name, models=models, programs=programs)


def measure(bench: Bench) -> None:
    """Verify many tasks, then many mutants."""
    torch.set_num_threads(1)
    measure_speed(bench)
    grounds: list[Ground] = []
    for entry in GROUNDS:
        grounds.append(make_ground(*entry))
        sizes = [len(program.tasks) for program in grounds[-1].programs]
        bench.say(f"{grounds[-1].name}: {sizes} tasks")
    measure_mutants(bench, grounds)


def measure_speed(bench: Bench) -> None:
    """Verify the ranks of a deep decoder."""
    wanted = NUM_QUICK_TASKS if bench.quick else NUM_TASKS
    deep = lower_many(partial(deep_ranks, trace_deep()), wanted)
    bench.say(f"{deep.num_tasks} tasks on {len(deep.programs)} ranks")
    begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    proofs = verify_ranks(deep.programs, deep.parts)
    wall_ns, cpu_ns = time.perf_counter_ns() - begin_ns, time.process_time_ns() - begin_cpu_ns
    num_proved = sum(len(proof.entries) for proof in proofs)
    limit_ns = round(LIMIT_NS * wanted / NUM_TASKS)
    bench.add(
        f"{len(deep.programs)} ranks, {deep.num_microbatches} micro-batches, joint, with the model",
        [
            at_least("tasks proved", num_proved, wanted),
            at_most("time to verify", wall_ns, limit_ns, show=format_ns),
            shown("its CPU time a task", cpu_ns / num_proved, show=format_ns),
            shown("CPU time of lowering a task", deep.lower_ns / num_proved, show=format_ns),
        ],
    )


def measure_mutants(bench: Bench, grounds: Sequence[Ground]) -> None:
    """Change programs at random; the kinds of changes take turns, and so do the programs."""
    random = Random(SEED)
    kinds = list(CHANGES)
    rejected: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    num_harmless = num_wrong = 0
    while drawn.total() < NUM_MUTANTS:
        change = kinds[drawn.total() % len(kinds)]
        ground = random.choice(grounds)
        mutant = draw_mutant(random, ground.programs, change)
        if mutant is None:
            continue
        drawn[change] += 1
        try:
            verify_ranks(mutant.programs, ground.models)
        except RuleError as error:
            rejected[error.rule] += 1
            continue
        harmless = is_harmless(ground.programs, mutant)
        num_harmless += harmless
        num_wrong += not harmless
        if not harmless:
            bench.say(f"accepted: {ground.name}, rank {mutant.rank}, {mutant.index} {change}")
    bench.add(
        f"{drawn.total()} programs with a random change",
        [
            exactly("accepted wrongly", num_wrong, 0),
            shown("accepted, harmless by their dependencies and pools", num_harmless),
            *(shown(f"rejected by {rule}", count) for rule, count in rejected.most_common()),
            *(shown(f"tried: {change}", count) for change, count in drawn.items()),
        ],
    )


if __name__ == "__main__":
    sys.exit(run_bench("verifier", "A million tasks verified; changed programs rejected.", measure))
