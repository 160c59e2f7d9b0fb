"""A toy machine, toy candidates and one call to search, shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import replace

from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.plan.pins import read_pins
from packhorse.plan.spec import OptimizerPlan
from packhorse.profile.analytic import estimate_profile
from packhorse.search.evaluation import Evaluator
from packhorse.search.search import find_plan
from packhorse.search.settings import list_settings
from packhorse.search.sketch import Sketches
from packhorse.search.smallest import find_smallest, round_up_page
from packhorse.search.space import Arithmetic, Candidate, Problem
from packhorse.search.writing import write_plan
from tests.support.models import make_model

ARITHMETIC = Arithmetic(
    compute_dtype="float32",
    tied_sum="per_microbatch",
    attention="causal",
    num_threads=1,
    device="cpu",
    num_workers=1,
)
ADAMW = OptimizerPlan(name="adamw", states=("exp_avg", "exp_avg_sq"), master=False, clips=True)
SGD = OptimizerPlan(name="sgd", states=(), master=False, clips=False)
HUGE = 1 << 40


def make_machine(device_bytes=HUGE, disk_bytes=HUGE):
    return Machine(
        name="toy",
        source="hand",
        fingerprint="toy",
        measured_at="never",
        device="cpu",
        num_cores=2,
        num_threads=1,
        bf16_native=False,
        tiers=(
            Tier(name="device", total_bytes=HUGE, budget_bytes=device_bytes),
            Tier(name="disk", total_bytes=HUGE, budget_bytes=disk_bytes, path="scratch"),
        ),
        links=(
            Link(source="device", target="disk", bytes_per_s=5e8, latency_ns=50_000),
            Link(source="disk", target="device", bytes_per_s=1e9, latency_ns=20_000),
        ),
        matmul=(MatmulPoint(dtype="float32", size=512, flops_per_s=5e10),),
        memory_bytes_per_s=1e10,
        updates=(UpdateRate(tier="device", parameters_per_s=3e8),),
        heap=Heap(map_cost=0.2, keep_slack=0.1),
    )


def make_candidates(rows=(1,), *, base_bytes=0, **options):
    found = []
    for count in rows:
        model = make_model(rows=count, **{"hidden": 32, "vocabulary": 64, **options})
        profile = replace(estimate_profile(model, make_machine()), base_bytes=base_bytes)
        found.append(Candidate(model=model, profile=profile, loss_chunk_tokens=None))
    return found


def search(candidates, machine=None, *, total=2, optimizer=ADAMW, pins=None, how=find_plan):
    return how(
        candidates,
        machine or make_machine(),
        optimizer=optimizer,
        arithmetic=ARITHMETIC,
        global_batch_rows=total,
        pins=read_pins(pins or {}),
    )


def smallest_plan(candidates, machine, **options):
    """The plan behind the smallest budget that a refusal names; its budgets are its needs."""
    problem = Problem(machine=machine, **options)
    evaluator = Evaluator(problem)
    sketches = Sketches(evaluator)
    smallest = find_smallest(evaluator, sketches, list_settings(problem, candidates))
    needs = evaluator.needs_of_all(smallest).items()
    budget_bytes = {tier: round_up_page(need_bytes) for tier, need_bytes in needs}
    return write_plan(evaluator, sketches, smallest, budget_bytes=budget_bytes)


def need(plan):
    """The smallest device budget for a plan: what lanes hold ahead is what it has beyond that."""
    causes = plan.prediction.peak_bytes["device"]
    assert sum(causes.values()) <= plan.budget_bytes["device"]
    return sum(size for cause, size in causes.items() if cause != "ahead")


def away(plan):
    tiers = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for chunk in plan.chunks:
        for state in tiers:
            tiers[state] += getattr(chunk, state).value == "disk"
    return tiers


SMALL_CHUNKS = {"chunk_bytes": 8192}
