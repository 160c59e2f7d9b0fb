"""Backwards in halves, in any order that sums allow: the bits of whole ones, and of the plain loop.

Every run is audited: a body sees only what its task declares, and each stash is measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from halved_orders import ORDERS, two_later
from subjects import choose_pairwise, find_subject
from torch import Tensor, nn
from torch.nn import functional

from bench.planned import (
    PLACES,
    RESIDENT,
    Subject,
    Ways,
    make_plan,
    open_engine,
    trace_subject,
    train_by_plan,
)
from bench.reference import Curve, find_differences, train_plainly
from bench.zoo import (
    ZOO,
    batch_of,
    build_gpt2,
    build_model,
    clip_of,
    make_optimizer_words,
    make_steps,
)
from packhorse.compiler.lower import Lowerer
from packhorse.errors import MismatchError
from packhorse.graph.halving import halve_backwards
from packhorse.optim.optimizers import SGD
from packhorse.program.tasks import Forward, InputGrad, Recompute, WeightGrad
from packhorse.verifier.rules import verify_program

COUNT = 3
DEEP = tuple(name for name in ORDERS if name != "in layers")
CASES = choose_pairwise(
    (
        ("llama", "gpt2", "weave", "mixtral"),
        ("all", "frozen"),
        ("keep", "recompute", "offload"),
        ("resident", "all on disk"),
        DEEP,
        ("adamw", "sgd"),
    )
)


@cache
def halved(name: str, training="all", optimizer="adamw") -> Subject:
    subject = find_subject(name, training, optimizer)
    return replace(subject, traced=halve_backwards(subject.traced))


def steps_of(name: str, num_steps: int = 3):
    return make_steps(ZOO[name], num_steps=num_steps, num_microbatches=COUNT)


@cache
def plain_curve(name: str, training, optimizer) -> Curve:
    return train_plainly(
        build_model(ZOO[name], training),
        make_optimizer_words(optimizer, ZOO[name], training),
        steps_of(name),
        max_grad_norm=clip_of(optimizer),
    )


@pytest.mark.parametrize(("name", "training", "activations", "place", "order", "optimizer"), CASES)
def test_halves_have_the_bits_of_the_plain_loop(
    name, training, activations, place, order, optimizer, tmp_path: Path
) -> None:
    subject = halved(name, training, optimizer)
    curve = train_by_plan(
        subject,
        replace(PLACES[place], activations=(activations,)),
        steps_of(name),
        max_grad_norm=clip_of(optimizer),
        scratch=tmp_path,
        runs=ORDERS[order](subject.traced.model, COUNT),
    )
    assert find_differences(plain_curve(name, training, optimizer), curve) == ()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["llama", "weave"])
def test_ties_that_are_summed_once_a_step_have_the_bits_of_whole_backwards(
    name: str, order: str, tmp_path: Path
) -> None:
    subject = halved(name)
    whole, halves = (
        train_by_plan(
            subject,
            Ways(tied_sum="per_step", activations=("keep", "recompute"), gradients=("disk",)),
            steps_of(name),
            max_grad_norm=1.0,
            scratch=tmp_path,
            runs=runs,
        )
        for runs in ((), ORDERS[order](subject.traced.model, COUNT))
    )
    assert find_differences(whole, halves) == ()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_layers_of_halves_have_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    subject = halved(name)
    tied = "per_step" if subject.traced.model.summed_parameters else "per_microbatch"
    whole, halves = (
        train_by_plan(
            subject,
            Ways(order="layered", tied_sum=tied, parameters=("disk",)),
            steps_of(name),
            max_grad_norm=1.0,
            scratch=tmp_path,
            runs=runs,
        )
        for runs in ((), ORDERS["in layers"](subject.traced.model, COUNT))
    )
    assert find_differences(whole, halves) == ()


def test_recomputed_halves_draw_the_noise_of_their_micro_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = build_gpt2(dropout=0.2)
    steps = steps_of("gpt2")
    subject = trace_subject(
        module, batch_of(steps), make_optimizer_words("adamw", ZOO["gpt2"], "all")
    )
    subject = replace(subject, traced=halve_backwards(subject.traced))
    runs = two_later(subject.traced.model, COUNT)
    kept, again = (
        train_by_plan(
            subject,
            Ways(activations=(activations,)),
            steps,
            max_grad_norm=1.0,
            scratch=tmp_path,
            runs=chosen,
        )
        for activations, chosen in (("keep", ()), ("recompute", runs))
    )
    assert find_differences(kept, again) == ()


def test_a_recomputed_block_runs_forward_twice_and_each_half_once(tmp_path: Path) -> None:
    model = halved("llama").traced.model
    with open_engine(
        halved("llama"),
        Ways(activations=("recompute",)),
        num_microbatches=COUNT,
        max_grad_norm=1.0,
        scratch=tmp_path,
        runs=two_later(model, COUNT),
    ) as engine:
        (feeds,) = steps_of("llama", 1)
        timeline = engine.train_step(feeds, step=1, learning_rate=1e-3).timeline
    layer = next(b.id for b in model.blocks if b.name == "model.layers.1")
    kinds = [span.name.split()[0] for span in timeline.spans if span.name.endswith(f" {layer}@0")]
    assert kinds == ["forward", "recompute", "input_grad", "weight_grad"]


def test_less_waits_for_late_weight_halves_than_was_saved() -> None:
    subject = halved("gpt2")
    model = subject.traced.model
    plan_ways = replace(RESIDENT, heap="map")
    peaks = {}
    for order in ("at the end", "in turn"):
        with_halves = lower(subject, plan_ways, order)
        proof = verify_program(with_halves, model)
        peaks[order] = proof.peak_bytes["device"]
    waiting = sum(
        body.halves.stash_bytes
        for body in (model.body_of(b.id) for b in model.blocks)
        if body.halves is not None
    )
    saved = sum(model.body_of(block.id).saved_bytes for block in model.blocks)
    assert waiting < 0.7 * saved
    assert peaks["at the end"] - peaks["in turn"] < COUNT * saved


def lower(subject: Subject, ways: Ways, order: str):
    plan = make_plan(
        subject.traced.model, subject.optimizer, ways, num_microbatches=COUNT, clips=True
    )
    runs = ORDERS[order](subject.traced.model, COUNT)
    return Lowerer(subject.traced.model, runs).lower(plan, "train_step")


def test_a_trace_without_halves_does_not_run_them(tmp_path: Path) -> None:
    subject = halved("llama")
    whole = replace(subject, traced=replace(subject.traced, halves={}))
    (feeds,) = steps_of("llama", 1)
    with (
        open_engine(
            whole,
            RESIDENT,
            num_microbatches=COUNT,
            max_grad_norm=1.0,
            scratch=tmp_path,
            runs=two_later(subject.traced.model, COUNT),
        ) as engine,
        pytest.raises(MismatchError, match="runs in two halves, but it was traced whole"),
    ):
        engine.train_step(feeds, step=1, learning_rate=1e-3)


def test_tasks_of_halves_are_those_of_the_order() -> None:
    subject = halved("llama")
    program = lower(subject, RESIDENT, "two micro-batches later")
    blocks = [b for b in subject.traced.model.blocks if b.has_backward]
    found = {
        kind: sum(isinstance(task, kind) for task in program.tasks)
        for kind in (Forward, Recompute, InputGrad, WeightGrad)
    }
    # Nothing flows to the inputs of the first block.
    assert found == {
        Forward: COUNT * len(subject.traced.model.blocks),
        Recompute: 0,
        InputGrad: COUNT * (len(blocks) - 1),
        WeightGrad: COUNT * len(blocks),
    }


class Shifted(nn.Module):
    """A gradient that is a parameter's and an input's at once, and operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(ShiftedLayer() for _ in range(3))
        self.head = nn.Linear(16, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV = self.head(x_BTD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


class ShiftedLayer(nn.Module):
    """Shifts each place of the one row that there is by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 9, 16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.linear(functional.silu(x_BTD + self.shift))
        y_BTD[:, 0].mul_(0.5)
        y_BTD[..., 3:5] += x_BTD[..., :2]
        return functional.silu(y_BTD)


@pytest.mark.parametrize("order", DEEP)
def test_a_stash_shares_no_bytes_and_in_place_writes_have_their_turn(
    order: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Shifted()

    tokens = torch.randint(0, 30, (2, COUNT, 1, 9))
    steps = [
        [
            {"input_ids": t, "labels": t.roll(1), "denominator": torch.tensor(float(COUNT))}
            for t in step
        ]
        for step in tokens
    ]
    words = SGD(lr=0.1, momentum=0.9)
    batch = {key: steps[0][0][key] for key in ("input_ids", "labels")}
    subject = trace_subject(build(), batch, words)
    subject = replace(subject, traced=halve_backwards(subject.traced))
    plain = train_plainly(build(), words, steps, max_grad_norm=None)
    curve = train_by_plan(
        subject,
        Ways(activations=("keep", "recompute")),
        steps,
        max_grad_norm=None,
        scratch=tmp_path,
        runs=ORDERS[order](subject.traced.model, COUNT),
    )
    assert find_differences(plain, curve) == ()
    layer = next(b for b in subject.traced.model.blocks if "layers.1.shift" in b.parameters)
    first = subject.traced.halves[layer.body].input
    assert first is not None
    clones = [n for n in first.bare.graph.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert clones, "what is stashed of the shared gradient has bytes of its own"
