"""Updates in the host, alone and in turns with the device: the bits of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from subjects import find_subject

from bench.planned import (
    RESIDENT,
    Subject,
    Ways,
    make_plan,
    open_engine,
    read_states,
    trace_subject,
    train_by_plan,
)
from bench.reference import Curve, find_differences, same_bits, train_plainly
from bench.zoo import ZOO, batch_of, build_model, clip_of, make_optimizer_words, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.errors import NonFiniteError
from packhorse.optim.optimizers import AdamW
from packhorse.program.tasks import Copy, Update

IN_HOST = Ways(
    parameters=("host",),
    gradients=("host",),
    optimizer=("host",),
    update=("host",),
    chunk_bytes=4096,
)
# Parameters that live in the device, as with mixed precision; gradients of both kinds.
AT_DEVICE = replace(IN_HOST, parameters=("device",), gradients=("device", "host"))
# Whatever can be written down: homes and updates in tiers that have nothing to do with each other.
ANYWHERE = Ways(
    parameters=("disk", "host", "device"),
    gradients=("host", "disk", "device", "device"),
    optimizer=("host", "disk", "device"),
    update=("host", "host", "device"),
    activations=("recompute", "keep"),
    chunk_bytes=4096,
)
STRIDES = (0, 1, 2, 3, 4, 5, 7, 1000)
# Of another length than the other plans', so that some strides divide the number of chunks.
IN_TURNS = replace(IN_HOST, chunk_bytes=8192)


@cache
def plain_curve(name: str, microbatches: int, optimizer) -> Curve:
    entry = ZOO[name]
    return train_plainly(
        build_model(entry),
        make_optimizer_words(optimizer, entry, "all"),
        make_steps(entry, num_steps=3, num_microbatches=microbatches),
        max_grad_norm=clip_of(optimizer),
    )


def count_hosted(subject: Subject, ways: Ways) -> tuple[int, int]:
    """The updates in the host and in the device that a step of a plan has."""
    plan = make_plan(subject.traced.model, subject.optimizer, ways, num_microbatches=1, clips=False)
    tasks = lower_plan(plan, subject.traced.model, "train_step").tasks
    places = [task.where for task in tasks if isinstance(task, Update)]
    return places.count("host"), places.count("device")


@pytest.mark.parametrize(
    "ways",
    [IN_HOST, AT_DEVICE, ANYWHERE, replace(ANYWHERE, cache="valleys", stride=3)],
    ids=["host", "device", "any", "cached"],
)
@pytest.mark.parametrize(
    ("name", "optimizer", "microbatches"),
    [("weave", "adamw", 4), ("llama", "adamw", 1), ("llama", "momentum", 2), ("gpt2", "sgd", 2)],
)
def test_host_updates_have_the_bits_of_the_plain_loop(
    ways: Ways, name: str, optimizer, microbatches: int, tmp_path: Path
) -> None:
    curve = train_by_plan(
        find_subject(name, "all", optimizer),
        ways,
        make_steps(ZOO[name], num_steps=3, num_microbatches=microbatches),
        max_grad_norm=clip_of(optimizer),
        scratch=tmp_path,
    )
    assert find_differences(plain_curve(name, microbatches, optimizer), curve) == ()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_every_stride_has_the_bits_of_the_plain_loop(
    stride: int, optimizer, tmp_path: Path
) -> None:
    """Strides that divide the number of chunks, that do not, and that are longer than it.

    The states are handed out right after each step: nothing of a step may still be on its way.
    """
    entry = ZOO["weave"]
    subject = find_subject("weave", "all", optimizer)
    ways = replace(IN_TURNS, stride=stride)
    steps = make_steps(entry, num_steps=3, num_microbatches=4)
    hosted, visiting = count_hosted(subject, ways)
    chunks = hosted + visiting
    assert visiting == (0 if stride == 0 else chunks // stride)
    seen = []
    with open_engine(
        subject,
        ways,
        num_microbatches=4,
        max_grad_norm=clip_of(optimizer),
        scratch=tmp_path,
    ) as engine:
        for number, feeds in enumerate(steps, 1):
            engine.train_step(feeds, step=number, learning_rate=subject.optimizer.lr)
            seen.append(read_states(engine, subject.weights))
    for number in (1, 2, 3):
        plain = train_plainly(
            build_model(entry), subject.optimizer, steps[:number],
            max_grad_norm=clip_of(optimizer),
        )  # fmt: skip
        for state, tensors in plain.states.items():
            for parameter, tensor in tensors.items():
                assert same_bits(seen[number - 1][state][parameter], tensor), (number, parameter)


def test_the_strides_divide_and_do_not() -> None:
    subject = find_subject("weave")
    chunks = sum(count_hosted(subject, IN_TURNS))
    assert {chunks % stride == 0 for stride in STRIDES if stride > 1} == {True, False}
    assert max(STRIDES) > chunks


@pytest.mark.parametrize("stride", [0, 2, 3])
def test_bfloat16_parameters_are_made_anew_from_the_master(stride: int, tmp_path: Path) -> None:
    entry = ZOO["llama"]
    steps = make_steps(entry, num_steps=3, num_microbatches=2)
    words = AdamW(lr=3e-3)
    subject = trace_subject(
        build_model(entry), batch_of(steps), words, compute_dtype=torch.bfloat16
    )
    curve = train_by_plan(subject, RESIDENT, steps, max_grad_norm=0.1, scratch=tmp_path)
    for ways in (IN_HOST, AT_DEVICE, ANYWHERE):
        ways = replace(ways, stride=stride)
        other = train_by_plan(subject, ways, steps, max_grad_norm=0.1, scratch=tmp_path)
        assert find_differences(curve, other) == ()
    plan = make_plan(
        subject.traced.model, words, AT_DEVICE,
        num_microbatches=2, clips=True, compute_dtype="bfloat16",
    )  # fmt: skip
    tasks = lower_plan(plan, subject.traced.model, "train_step").tasks
    outward = [t for t in tasks if isinstance(t, Copy) and t.target == "host"]
    assert not any(task.buffer.startswith("param/") for task in outward)


def test_a_norm_that_is_not_finite_stops_before_any_host_update(tmp_path: Path) -> None:
    entry = ZOO["weave"]
    subject = find_subject("weave")
    steps = make_steps(entry, num_steps=2, num_microbatches=1)
    spoilt = {**subject.weights, "norm.bias": torch.full_like(subject.weights["norm.bias"], 1e38)}
    ways = replace(IN_HOST, stride=2)
    with (
        open_engine(
            replace(subject, weights=spoilt), ways,
            num_microbatches=1, max_grad_norm=1.0, scratch=tmp_path,
        ) as engine,
        pytest.raises(NonFiniteError),
    ):  # fmt: skip
        engine.train_step(steps[0], step=1, learning_rate=1e-3)


@pytest.mark.parametrize("name", ["llama", "weave"])
def test_micro_batches_in_layers_have_the_same_bits(name: str, tmp_path: Path) -> None:
    """What is updated where does not depend on the order of the micro-batches."""
    subject = find_subject(name)
    steps = make_steps(ZOO[name], num_steps=2, num_microbatches=3)
    resident = replace(RESIDENT, tied_sum="per_step")
    curve = train_by_plan(subject, resident, steps, max_grad_norm=0.1, scratch=tmp_path)
    for ways in (IN_TURNS, ANYWHERE):
        ways = replace(ways, stride=2, order="layered", tied_sum="per_step")
        other = train_by_plan(subject, ways, steps, max_grad_norm=0.1, scratch=tmp_path)
        assert find_differences(curve, other) == ()
