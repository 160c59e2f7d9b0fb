"""The search against the truth: exhaustive search, budgets, pins, and what it promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from packhorse.verifier.verify import verify_program

from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError, RecipeError
from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.plan.pins import read_pins
from packhorse.plan.spec import OptimizerPlan
from packhorse.profile.analytic import estimate_profile
from packhorse.program.buffers import PAGE_BYTES
from packhorse.search.evaluation import Evaluator
from packhorse.search.prediction import predict_plan
from packhorse.search.search import find_plan, smallest_plan
from packhorse.search.settings import list_settings
from packhorse.search.space import Arithmetic, Candidate, Problem
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_program
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


def need(plan):
    return sum(plan.prediction.peak_bytes["device"].values())


def away(plan):
    tiers = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for chunk in plan.chunks:
        for state in tiers:
            tiers[state] += getattr(chunk, state).value == "disk"
    return tiers


SMALL_CHUNKS = {"chunk_bytes": 8192}


def test_all_stays_when_it_fits():
    plan = search(make_candidates((1, 2), length=64))
    assert away(plan) == {"parameters": 0, "gradients": 0, "optimizer": 0}
    assert {block.activations.value for block in plan.blocks} == {"keep"}
    assert plan.heap.value == "keep"
    assert plan.heap_slack == 0.1
    assert (plan.numerics.microbatch_rows.value, plan.numerics.num_microbatches) == (2, 1)
    assert plan.prediction.disk_read_bytes == plan.prediction.disk_written_bytes == 0


@pytest.mark.parametrize(
    ("pins", "optimizer", "num_layers"),
    [
        ({"parameters": "device", "gradients": "device"}, ADAMW, 2),
        ({"optimizer": "disk", "gradients": "device"}, ADAMW, 1),
        ({"optimizer": "disk", "parameters": {"embed*": "disk", "head*": "disk"}}, ADAMW, 1),
        (
            {"heap": "map", "parameters": {"head*": "device"}},
            replace(SGD, states=("momentum_buffer",)),
            1,
        ),
    ],
)
def test_as_fast_as_exhaustive_search(pins, optimizer, num_layers):
    candidates = make_candidates(length=64, num_layers=num_layers)
    pins = {**pins, **SMALL_CHUNKS}
    problem = Problem(
        machine=make_machine(),
        optimizer=optimizer,
        arithmetic=ARITHMETIC,
        pins=read_pins(pins),
        global_batch_rows=1,
    )
    evaluator = Evaluator(problem)
    states = []
    for setting in list_settings(problem, candidates):
        assert 4 <= len(setting.moves) <= 9
        for taken in product([False, True], repeat=len(setting.moves)):
            found = evaluator.evaluate(setting, taken)
            states.append((evaluator.needs_of_all(found)["device"], found.step_ns))
    smallest, largest = min(states)[0], max(states)[0]
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9):
        budget = smallest + int((largest - smallest) * share)
        best_ns = min(step_ns for bytes_, step_ns in states if bytes_ <= budget)
        plan = search(candidates, make_machine(budget), total=1, optimizer=optimizer, pins=pins)
        assert need(plan) <= budget
        assert best_ns <= plan.prediction.step_ns <= best_ns * 1.02
    least = search(candidates, total=1, optimizer=optimizer, pins=pins, how=smallest_plan)
    assert need(least) == smallest


@pytest.mark.parametrize("options", [{}, {"tied_head": True, "shared_layers": (1, 3)}])
def test_a_bigger_budget_is_never_slower(options):
    candidates = make_candidates((1, 2), num_layers=4, length=64, **options)
    least = search(candidates, how=smallest_plan, pins=SMALL_CHUNKS).budget_bytes["device"]
    most = need(search(candidates, pins=SMALL_CHUNKS))
    times = []
    for step in range(13):
        budget = least + (most - least) * step // 12
        plan = search(candidates, make_machine(budget), pins=SMALL_CHUNKS)
        assert need(plan) <= budget
        times.append(plan.prediction.step_ns)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.parametrize("base_bytes", [0, 12345])
@pytest.mark.parametrize("pins", [{}, {"heap": "keep"}, {"recompute": "none"}])
def test_the_smallest_budget_works_and_one_page_less_does_not(pins, base_bytes):
    candidates = make_candidates((1, 2), base_bytes=base_bytes, num_layers=3, length=64)
    least = search(candidates, pins=pins, how=smallest_plan).budget_bytes["device"]
    plan = search(candidates, make_machine(least), pins=pins)
    assert need(plan) <= least
    for kind in ("train_step", "evaluate", "load", "save"):
        verify_program(lower_plan(plan, candidates[0].model, kind), candidates[0].model)
    with pytest.raises(DoesNotFitError) as caught:
        search(candidates, make_machine(least - PAGE_BYTES), pins=pins)
    message = str(caught.value)
    assert f"device={least // 1024}KiB" in message
    assert "tier device: needs" in message
    assert "at least: " in message
    assert ("unpin some of" in message) == bool(pins)


def test_the_refusal_names_the_block():
    candidates = make_candidates(length=512, vocabulary=2048)
    with pytest.raises(DoesNotFitError) as caught:
        search(candidates, make_machine(PAGE_BYTES))
    assert "of block head holds" in str(caught.value)
    assert "logits" in str(caught.value)


def test_the_disk_budget_is_kept():
    candidates = make_candidates(length=64, num_layers=4)
    free = search(candidates, how=smallest_plan, pins=SMALL_CHUNKS)
    scratch = free.budget_bytes["disk"]
    tight = search(
        candidates, make_machine(HUGE, scratch // 2), how=smallest_plan, pins=SMALL_CHUNKS
    )
    assert tight.budget_bytes["disk"] <= scratch // 2
    with pytest.raises(DoesNotFitError):
        search(
            candidates, make_machine(free.budget_bytes["device"], scratch // 2), pins=SMALL_CHUNKS
        )


def test_causes_add_up_and_the_step_is_the_simulators():
    candidates = make_candidates(length=64, num_layers=3, base_bytes=1000)
    model, profile = candidates[0].model, candidates[0].profile
    least = search(candidates, how=smallest_plan, total=7).budget_bytes["device"]
    machine = make_machine(least)
    plan = search(candidates, machine, total=7)
    prediction = plan.prediction
    assert plan.numerics.num_microbatches == 7
    program = lower_plan(plan, model, "train_step")
    proof = verify_program(program, model)
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    # The search looks at three micro-batches; the whole step must come out the same.
    timeline = simulate_program(program, costs=costs)
    assert prediction.step_ns == timeline.makespan_ns == sum(prediction.time_ns.values())
    pools = {pool.id: pool for pool in program.pools}
    device = sum(b for pool, b in proof.peak_bytes.items() if pools[pool].tier == "device")
    disk = sum(b for pool, b in proof.peak_bytes.items() if pools[pool].tier == "disk")
    causes = prediction.peak_bytes["device"]
    assert sum(causes.values()) - causes["base"] - causes.get("heap", 0) == device
    assert causes["base"] == 1000
    assert prediction.scratch_bytes == disk
    read = sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if getattr(task, "source", None) == "disk"
    )
    assert prediction.disk_read_bytes == read > 0
    assert prediction.bottleneck.startswith("compute: ")


def test_the_same_input_gives_the_same_plan():
    candidates = make_candidates((1, 2), length=64, num_layers=3)
    machine = make_machine(search(candidates, how=smallest_plan).budget_bytes["device"] + 30_000)
    assert search(candidates, machine) == search(candidates, machine)


def test_every_choice_says_why():
    candidates = make_candidates(length=64, num_layers=3, frozen=["embed", "layers.1"])
    machine = make_machine(search(candidates, how=smallest_plan).budget_bytes["device"] + 10_000)
    plan = search(candidates, machine, pins={"optimizer": {"head*": "disk"}})
    choices = [plan.heap, plan.chunk_bytes, plan.numerics.microbatch_rows]
    choices += [plan.numerics.loss_chunk_tokens]
    choices += [block.activations for block in plan.blocks]
    for chunk in plan.chunks:
        choices += [chunk.parameters, chunk.gradients, chunk.optimizer]
    assert all(choice.because for choice in choices)
    words = " ".join(choice.because for choice in choices)
    assert "frees" in words
    assert "costs" in words
    assert "pinned" in words
    assert "frozen" in words


def test_pins_are_kept():
    pins = {
        "recompute": ["layers.1"],
        "optimizer": "disk",
        "parameters": {"embed*": "disk", "*": "device"},
        "heap": "map",
        "microbatch_rows": 1,
        **SMALL_CHUNKS,
    }
    plan = search(make_candidates((1, 2), length=64), pins=pins)
    assert [b.activations.value for b in plan.blocks] == ["keep", "recompute", "keep", "keep"]
    assert away(plan)["optimizer"] == len(plan.chunks)
    disk = [c for c in plan.chunks if c.parameters.value == "disk"]
    assert [c.pieces[0].parameter for c in disk] == ["embed.weight"]
    assert plan.heap.value == "map"
    assert plan.numerics.num_microbatches == 2
    assert plan.chunk_bytes.value == 8192
    assert plan.pins == (
        "recompute",
        "parameters",
        "optimizer",
        "heap",
        "chunk_bytes",
        "microbatch_rows",
    )


@pytest.mark.parametrize(
    ("pins", "total", "words"),
    [
        ({"microbatch_rows": 3}, 4, ["pinned to 3", "pin one of 2, 4"]),
        ({"loss_chunk_tokens": 64}, 4, ["pinned to 64", "whole"]),
        ({"optimizer": "host"}, 4, ["tier host", "device, disk"]),
        ({"tied_sum": "per_step"}, 4, ["per_step", "per_microbatch"]),
        ({"recompute": ["layer.1"]}, 4, ["'layer.1'", "'layers.1'"]),
        ({}, 5, ["global batch of 5 rows", "2, 4"]),
    ],
)
def test_what_cannot_be_met_is_named(pins, total, words):
    with pytest.raises(RecipeError) as caught:
        search(make_candidates((2, 4)), total=total, pins=pins)
    for word in words:
        assert word in str(caught.value)


def test_a_plan_by_hand_is_predicted_too():
    candidates = make_candidates(length=64)
    plan = search(candidates)
    chunk = plan.chunks[0]
    edited = replace(
        plan,
        chunks=(
            replace(chunk, optimizer=replace(chunk.optimizer, value="disk")),
            *plan.chunks[1:],
        ),
    )
    prediction = predict_plan(edited, candidates[0].model, candidates[0].profile, make_machine())
    assert prediction.step_ns > plan.prediction.step_ns
    assert prediction.scratch_bytes == prediction.disk_read_bytes > 0
    everything = search(candidates, pins={"parameters": "disk", "optimizer": "disk"})
    assert everything.prediction.bottleneck.startswith("disk: ")
