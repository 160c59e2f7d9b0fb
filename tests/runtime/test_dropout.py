"""Dropout: the same in every plan, another in every step and micro-batch, off in evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.planned import PLACES, RESIDENT, Subject, Ways, open_engine, trace_subject, train_by_plan
from bench.reference import call_loss, find_differences, train_plainly
from bench.zoo import ZOO, batch_of, build_gpt2, make_steps
from packhorse.graph.interpret import Noise
from packhorse.optim.optimizers import SGD, AdamW
from packhorse.runtime.noise import NoiseKey, draw_noise

ENTRY = ZOO["gpt2"]
DEFAULT = 0.1  # of GPT-2: embeddings, residuals and attention


def build(dropout: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_gpt2(dropout).train()


@cache
def find_dropping(lr: float = 1e-2) -> Subject:
    steps = make_steps(ENTRY, num_steps=1, num_microbatches=1)
    return trace_subject(build(DEFAULT), batch_of(steps), AdamW(lr=lr))


def run(ways: Ways, scratch: Path, *, seed: int = 1, num_steps: int = 3):
    steps = make_steps(ENTRY, num_steps=num_steps, num_microbatches=4)
    return train_by_plan(
        find_dropping(), ways, steps, max_grad_norm=1.0, scratch=scratch, seed=seed
    )


def test_every_plan_draws_the_same(tmp_path: Path) -> None:
    plain = run(RESIDENT, tmp_path)
    for ways in (
        Ways(activations=("recompute",)),
        replace(PLACES["all on disk"], activations=("recompute", "keep")),
        replace(PLACES["optimizer on disk"], heap="map", chunk_bytes=4096),
    ):
        assert find_differences(plain, run(ways, tmp_path)) == ()


def test_another_seed_draws_otherwise(tmp_path: Path) -> None:
    one, other = run(RESIDENT, tmp_path, num_steps=1), run(RESIDENT, tmp_path, seed=2, num_steps=1)
    assert one.totals != other.totals


def test_torchs_own_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    run(RESIDENT, tmp_path, num_steps=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_each_step_and_microbatch_draws_its_own(tmp_path: Path) -> None:
    """Learning rate 0 and the same micro-batch four times: only the noise differs."""
    feed = make_steps(ENTRY, num_steps=1, num_microbatches=1)[0][0]
    still = replace(find_dropping(), optimizer=SGD(lr=0.0, weight_decay=0.02))
    curve = train_by_plan(still, RESIDENT, [[feed] * 4] * 3, max_grad_norm=1.0, scratch=tmp_path)
    losses = [loss for step in curve.losses for loss in step]
    assert len(set(losses)) == len(losses) == 12
    dry = call_loss(build(DEFAULT).eval(), feed).item()
    assert abs(sum(losses) / 12 - dry) < 0.1 * dry


def test_evaluation_drops_nothing(tmp_path: Path) -> None:
    (step,) = make_steps(ENTRY, num_steps=1, num_microbatches=2)
    with open_engine(
        find_dropping(), RESIDENT, num_microbatches=2, max_grad_norm=1.0, scratch=tmp_path
    ) as engine:
        result = engine.evaluate(step)
        assert engine.evaluate(step).losses == result.losses
    module = build(DEFAULT).eval()
    with torch.no_grad():
        assert result.losses == tuple(float(call_loss(module, feed)) for feed in step)


def test_without_dropout_the_traced_attention_is_eagers(tmp_path: Path) -> None:
    """The control of this file: the same model with rate 0 has the bits of the plain loop."""
    steps = make_steps(ENTRY, num_steps=2, num_microbatches=2)
    subject = trace_subject(build(0.0), batch_of(steps), AdamW(lr=1e-2))
    curve = train_by_plan(subject, RESIDENT, steps, max_grad_norm=1.0, scratch=tmp_path)
    plain = train_plainly(build(0.0), AdamW(lr=1e-2), steps, max_grad_norm=1.0)
    assert find_differences(plain, curve) == ()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_noise_has_the_right_mean_and_share_of_zeros(p: float) -> None:
    count = 200_000
    noise = Noise(shape=(count,), p=p, dtype=torch.float32)
    drawn = draw_noise(noise, NoiseKey(seed=3, step=2, microbatch=1), 5)
    share = (drawn == 0).double().mean().item()
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs(share - p) < 4 * deviation
    assert abs(drawn.double().mean().item() - 1) < 4 * deviation / (1 - p)
    kept = torch.tensor(1.0) / (1 - p)
    assert set(drawn.unique().tolist()) == {0.0, kept.item()}


def test_noise_depends_on_each_part_of_its_key() -> None:
    noise = Noise(shape=(64,), p=0.5, dtype=torch.float32)
    keys = [
        (NoiseKey(seed=seed, step=step, microbatch=microbatch), ordinal)
        for seed in (0, 1)
        for step in (1, 2)
        for microbatch in (0, 1)
        for ordinal in (0, 1)
    ]
    drawn = [draw_noise(noise, key, ordinal) for key, ordinal in keys]
    assert len({tuple(tensor.tolist()) for tensor in drawn}) == len(keys)
    again = [draw_noise(noise, key, ordinal) for key, ordinal in keys]
    assert all(torch.equal(one, other) for one, other in zip(drawn, again, strict=True))


def test_all_and_nothing_dropped() -> None:
    key = NoiseKey(seed=0, step=1, microbatch=0)
    everything = draw_noise(Noise(shape=(9,), p=1.0, dtype=torch.float32), key, 0)
    assert torch.equal(everything, torch.zeros(9))


class Ordered(nn.Module):
    """Three dropouts in three equal blocks: bodies are shared, draws must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), 0.5, training=self.training)
        return functional.mse_loss(x, y)


def test_equal_blocks_draw_their_own_noise() -> None:
    batch = {"x": torch.ones(2, 64), "y": torch.zeros(2, 64)}
    traced = trace_subject(Ordered().train(), batch, SGD()).traced
    ordinals = [ordinal for block in traced.noise_ordinals.values() for ordinal in block]
    assert ordinals == list(range(4))
    assert len(traced.code) < len(traced.model.blocks)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_dropout_is_right_on_average(causal: bool) -> None:
    """The spelled-out attention with all noise 1 is the fused one."""
    from packhorse.graph.interpret import BlockInterpreter

    class Attending(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                q, k, v, dropout_p=0.25, is_causal=causal
            )

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(3))
    graph = torch.export.export(Attending(), (q, k, v), strict=True).graph
    interpreter = BlockInterpreter(
        graph, module="", training=True, noise=(torch.ones(2, 4, 6, 6),), chunk_tokens=None
    )
    (found,) = interpreter.run(q, k, v)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (request,) = interpreter.requests
    assert (request.p, request.shape) == (0.25, (2, 4, 6, 6))
