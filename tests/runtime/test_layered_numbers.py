"""The order of micro-batches changes no number: depth first and layered have the same bits.

Tied parameters are summed once a step here; then the plain loop has a copy for each user of a tied
parameter and adds the copies' gradients at the end, the last user's first.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from subjects import find_subject
from torch import nn

from bench.planned import (
    PLACES,
    Subject,
    Ways,
    make_plan,
    open_engine,
    trace_subject,
    train_by_plan,
)
from bench.reference import Copies, Curve, find_differences, train_plainly
from bench.zoo import ZOO, Weave, batch_of, build_gpt2, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.graph.liveness import peak_bytes
from packhorse.optim.optimizers import AdamW
from packhorse.program.tasks import Copy
from packhorse.verifier.rules import verify_program

ON_DISK = PLACES["all on disk"]
WAYS = {
    "resident": PLACES["resident"],
    "all on disk": ON_DISK,
    "recompute": replace(ON_DISK, activations=("recompute",), heap="map"),
    "offload": Ways(
        parameters=("disk", "device"),
        activations=("offload", "offload", "recompute", "keep"),
        heap="map",
        prefetch=2,
    ),
}
AWAY = replace(WAYS["recompute"], boundaries="disk")
WORDS = AdamW(lr=3e-3)


def untie(module: nn.Module) -> Copies:
    """Give every user of a tied parameter but the first a copy of its own."""
    if isinstance(module, Weave):
        module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
        weights, biases = [], []
        for block in (module.blocks[4], module.blocks[3], module.blocks[1]):
            block.shared = deepcopy(module.shared)
            weights.append(block.shared.weight)
            biases.append(block.shared.bias)
        return {
            "embed.weight": [module.head.weight],
            "shared.weight": weights,
            "shared.bias": biases,
        }
    embed = module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    if head.weight is not embed:
        return {}
    head.weight = nn.Parameter(embed.detach().clone())
    return {"model.embed_tokens.weight": [head.weight]}


def build(name: str) -> nn.Module:
    """A model of the zoo, or the one with skips without its ties."""
    module = build_model(ZOO["weave" if name == "skips" else name])
    if name == "skips":
        untie(module)
    return module


@cache
def subject_of(name: str) -> Subject:
    if name != "skips":
        return replace(find_subject(name), optimizer=WORDS)
    steps = make_steps(ZOO["weave"], num_steps=1, num_microbatches=1)
    return trace_subject(build(name), batch_of(steps), WORDS)


def steps_of(name: str, count: int, num_steps: int = 3):
    entry = ZOO["weave" if name == "skips" else name]
    return make_steps(entry, num_steps=num_steps, num_microbatches=count)


@cache
def plain_curve(name: str, count: int, clip: float | None) -> Curve:
    module = build(name)
    # With one micro-batch both sums are eager's.
    copies = {} if name == "skips" else untie(module)
    return train_plainly(module, WORDS, steps_of(name, count), max_grad_norm=clip, copies=copies)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3", "llama", "weave", "skips"])
def test_both_orders_have_the_bits_of_the_plain_loop(
    name: str, count: int, way: str, clip: float | None, tmp_path: Path
) -> None:
    for order in ("depth_first", "layered"):
        curve = train_by_plan(
            subject_of(name),
            replace(WAYS[way], order=order, tied_sum="per_step"),
            steps_of(name, count),
            max_grad_norm=clip,
            scratch=tmp_path,
        )
        assert find_differences(plain_curve(name, count, clip), curve) == (), order


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("order", ["depth_first", "layered"])
@pytest.mark.parametrize("activations", [("recompute",), ("keep",), ("keep", "recompute")])
@pytest.mark.parametrize("name", ["llama", "weave"])
def test_values_that_wait_elsewhere_come_back_as_they_were(
    name: str, activations, order, tier, tmp_path: Path
) -> None:
    curve = train_by_plan(
        subject_of(name),
        replace(AWAY, activations=activations, order=order, boundaries=tier, tied_sum="per_step"),
        steps_of(name, 2),
        max_grad_norm=1.0,
        scratch=tmp_path,
    )
    assert find_differences(plain_curve(name, 2, 1.0), curve) == ()


def test_values_on_the_disk_leave_the_device() -> None:
    model = subject_of("qwen3").traced.model
    peaks, moved = {}, {}
    for tier in ("device", "disk"):
        ways = replace(WAYS["recompute"], order="layered", boundaries=tier)
        plan = make_plan(model, WORDS, ways, num_microbatches=8, clips=False)
        program = lower_plan(plan, model, "train_step")
        peaks[tier] = verify_program(program, model).peak_bytes
        moved[tier] = sum(
            program.buffers[task.buffer].size_bytes
            for task in program.tasks
            if isinstance(task, Copy) and task.buffer.startswith("value/")
        )
    (boundary,) = {
        v.size_bytes for v in model.values.values() if v.needs_grad and v.id != model.loss
    }
    assert moved["device"] == 0
    # Out and back once for each micro-batch; what the last block reads is used up at once.
    num_waiting = len([b for b in model.blocks if b.has_backward]) - 2
    assert moved["disk"] == 2 * 8 * num_waiting * boundary
    saved = peaks["device"]["device"] - peaks["disk"]["device"]
    assert saved >= 8 * (num_waiting - 2) * boundary


def test_the_copies_of_the_plain_loop_are_those_of_the_traced_users() -> None:
    for name in ("llama", "weave"):
        model = subject_of(name).traced.model
        copies = untie(build_model(ZOO[name]))
        assert set(copies) == set(model.summed_parameters)
        for parameter, found in copies.items():
            assert len(model.parameters[parameter].blocks) == 1 + len(found)
    assert subject_of("skips").traced.model.summed_parameters == ()


def test_sums_of_ties_per_step_are_other_numbers_with_several_micro_batches() -> None:
    """Else the comparison above would say little."""
    for name in ("llama", "weave"):
        tied = train_plainly(build(name), WORDS, steps_of(name, 4), max_grad_norm=1.0)
        assert find_differences(plain_curve(name, 4, 1.0), tied)


@pytest.mark.parametrize("name", ["llama", "weave"])
def test_sums_in_half_precision_are_kept_in_float32_and_are_equal_between_plans(
    name: str, tmp_path: Path
) -> None:
    steps = steps_of(name, 3)
    subject = trace_subject(build(name), batch_of(steps), WORDS, compute_dtype=torch.bfloat16)
    first, *others = (
        train_by_plan(subject, ways, steps, max_grad_norm=1.0, scratch=tmp_path)
        for ways in (
            Ways(tied_sum="per_step"),
            replace(WAYS["all on disk"], order="layered", tied_sum="per_step"),
            replace(AWAY, order="layered", tied_sum="per_step"),
        )
    )
    for other in others:
        assert find_differences(first, other) == ()


def test_layers_draw_the_noise_of_their_micro_batches(tmp_path: Path) -> None:
    steps = steps_of("gpt2", 3)

    def build_noisy() -> nn.Module:
        torch.manual_seed(0)
        return build_gpt2(dropout=0.2)

    subject = trace_subject(build_noisy(), batch_of(steps), WORDS)
    curves = [
        train_by_plan(subject, ways, steps, max_grad_norm=1.0, scratch=tmp_path)
        for ways in (
            Ways(tied_sum="per_step"),
            replace(WAYS["recompute"], order="layered", tied_sum="per_step"),
            Ways(activations=("offload",), order="layered", tied_sum="per_step"),
            Ways(activations=("offload", "keep"), offload="host", tied_sum="per_step"),
        )
    ]
    for other in curves[1:]:
        assert find_differences(curves[0], other) == ()


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("name", ["qwen3", "llama", "weave"])
def test_layers_move_no_more_for_several_micro_batches_than_for_one(
    name: str, clip: float | None, tmp_path: Path
) -> None:
    moved: dict[tuple[str, int], int] = {}
    for order in ("depth_first", "layered"):
        for count in (1, 4):
            with open_engine(
                subject_of(name),
                replace(WAYS["recompute"], order=order, tied_sum="per_step"),
                num_microbatches=count,
                max_grad_norm=clip,
                scratch=tmp_path,
            ) as engine:
                (feeds,) = steps_of(name, count, 1)
                step = engine.train_step(feeds, step=1, learning_rate=WORDS.lr)
                moved[order, count] = step.disk_read_bytes + step.disk_written_bytes
    assert moved["layered", 1] == moved["depth_first", 1]
    assert moved["layered", 4] <= 1.02 * moved["layered", 1]
    assert moved["depth_first", 4] > 1.5 * moved["layered", 4]


def test_an_evaluation_in_layers_has_the_same_losses_and_reads_parameters_once(
    tmp_path: Path,
) -> None:
    (feeds,) = steps_of("weave", 4, 1)
    seen = []
    for order in ("depth_first", "layered"):
        ways = replace(ON_DISK, order=order, tied_sum="per_step")
        with open_engine(
            subject_of("weave"), ways, num_microbatches=4, max_grad_norm=1.0, scratch=tmp_path
        ) as engine:
            seen.append(engine.evaluate(feeds))
    assert seen[0].losses == seen[1].losses
    assert 3 * seen[1].disk_read_bytes < seen[0].disk_read_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "weave"])
def test_bodies_that_sum_apart_stay_within_their_workspace(name: str) -> None:
    """What a program reserves: the body's workspace, and the gradient that a last user adds."""
    traced = find_subject(name).traced
    model, seen = traced.model, 0
    for block in model.blocks:
        backward = traced.code[block.body].backward
        if backward is None or backward.apart_later is backward.later:
            continue
        seen += 1
        body = model.body_of(block.id)
        made = sum(model.values[v].size_bytes for v in block.inputs if model.values[v].needs_grad)
        handed = sum(
            4 * model.parameters[p].num_elements
            for p in block.parameters
            if len(model.parameters[p].blocks) > 1 and model.parameters[p].blocks[-1] == block.id
        )
        for graph, more in ((backward.apart_first, 0), (backward.apart_later, handed)):
            held = peak_bytes(graph.graph.graph)
            assert held <= body.backward_workspace_bytes + made + more, block.name
    assert seen >= 2
