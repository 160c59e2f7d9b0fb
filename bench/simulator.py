"""A million tasks simulated: all ranks on one clock, and a program of one rank.

The programs are those of `bench.deep`: a training step of a deep decoder, lowered from real plans
and timed by the cost model on a machine of the catalogue with links between the ranks. Every step
is simulated behind another one, so that each task is walked through twice. How near predicted steps
of real ranks are to measured ones is shown by `bench.pipeline`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from bench.deep import Deep, lower_alone, lower_many, lower_ranks, trace_deep
from bench.report import Bench, Figure, at_least, at_most, run_bench, shown
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import Machine, PeerLink
from packhorse.model.spec import Model
from packhorse.profile.analytic import estimate_profile
from packhorse.program.program import Program
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run
from packhorse.simulator.joint import simulate_ranks
from packhorse.units import format_ns

NUM_TASKS: Final = 1_000_000
NUM_QUICK_TASKS: Final = 100_000
LIMIT_NS: Final = 20_000_000_000
MACHINE: Final = "laptop-16gb"
LINK_BYTES_PER_S: Final = 1.25e9
LINK_LATENCY_NS: Final = 20_000


def make_machine(rank: int, num_ranks: int) -> Machine:
    """A machine of the catalogue with a link to every other rank."""
    peers = tuple(
        PeerLink(peer=peer, bytes_per_s=LINK_BYTES_PER_S, latency_ns=LINK_LATENCY_NS)
        for peer in range(num_ranks)
        if peer != rank
    )
    return replace(load_known_machine(MACHINE), peers=peers)


def make_costs(program: Program, model: Model, machine: Machine) -> TaskCosts:
    """The cost model of one rank's program."""
    profile = estimate_profile(model, machine)
    return TaskCosts(machine=machine, profile=profile, model=model, program=program, heap="keep")


def measure(bench: Bench) -> None:
    """Simulate all ranks together, then one rank alone."""
    torch.set_num_threads(1)
    wanted = NUM_QUICK_TASKS if bench.quick else NUM_TASKS
    model = trace_deep()
    for lower, title in ((lower_ranks, "all ranks on one clock"), (lower_alone, "one rank")):
        deep = lower_many(partial(lower, model), wanted)
        num_ranks = len(deep.programs)
        bench.say(f"{deep.num_tasks} tasks on {num_ranks} ranks")
        costs = [
            make_costs(program, part, make_machine(rank, num_ranks))
            for rank, (program, part) in enumerate(zip(deep.programs, deep.parts, strict=True))
        ]
        words = f"{title}, {deep.num_microbatches} micro-batches"
        bench.add(words, time_simulation(deep, costs, wanted))


def time_simulation(deep: Deep, costs: Sequence[TaskCosts], wanted: int) -> list[Figure]:
    """Simulate programs and tell how long that took."""
    begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    if len(deep.programs) == 1:
        timelines = (simulate_run(deep.programs[0], costs=costs[0]),)
    else:
        timelines = simulate_ranks(deep.programs, costs)
    wall_ns, cpu_ns = time.perf_counter_ns() - begin_ns, time.process_time_ns() - begin_cpu_ns
    num_spans = sum(len(timeline.spans) for timeline in timelines)
    limit_ns = round(LIMIT_NS * wanted / NUM_TASKS)
    return [
        at_least("tasks simulated", num_spans, wanted),
        at_most("time to simulate", wall_ns, limit_ns, show=format_ns),
        shown("its CPU time a task", cpu_ns / num_spans, show=format_ns),
        shown("predicted step", max(each.step_ns for each in timelines), show=format_ns),
    ]


if __name__ == "__main__":
    sys.exit(run_bench("simulator", "A million tasks simulated.", measure))
