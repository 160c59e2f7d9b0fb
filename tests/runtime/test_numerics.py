"""The choices that may change rounding: chunked loss and compute dtype; plans still agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import find_subject
from torch import Tensor, nn
from torch.nn import functional

from bench.planned import PLACES, RESIDENT, Ways, trace_subject, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, batch_of, build_model, make_steps
from packhorse.graph.interpret import chunked_loss
from packhorse.optim.optimizers import SGD, AdamW

OTHER_PLANS = (
    Ways(activations=("recompute",), heap="map"),
    replace(PLACES["all on disk"], activations=("keep", "recompute"), chunk_bytes=4096),
)


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_chunked_loss_has_the_gradients_of_the_whole(chunk: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    hidden, weight, offset = leaf(2, 24, 16), leaf(50, 16), leaf(50) if bias else None
    target = torch.randint(0, 50, (48,), generator=generator)
    target[::5] = -100
    leaves = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    found = chunked_loss(hidden, weight, offset, target, chunk)
    grads = torch.autograd.grad(found / 7, leaves)
    logits = functional.linear(hidden, weight, offset).view(48, 50)
    whole = functional.cross_entropy(logits, target, reduction="sum")
    expected = torch.autograd.grad(whole / 7, leaves)
    assert abs(found.item() - whole.item()) < 1e-5 * whole.item()
    for one, other in zip(grads, expected, strict=True):
        assert relative(one, other) < 1e-5


def test_chunked_loss_without_any_label_is_zero() -> None:
    hidden = torch.ones(6, 4, requires_grad=True)
    weight = torch.ones(9, 4, requires_grad=True)
    loss = chunked_loss(hidden, weight, None, torch.full((6,), -100), 4)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.item() == 0
    assert all(grad.abs().sum() == 0 for grad in grads)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_with_chunked_loss_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """The buffer of momentum is the gradient; all plans have the same bits."""
    entry = ZOO[name]
    steps = make_steps(entry, num_steps=1, num_microbatches=2)
    words = SGD(lr=1e-2, momentum=0.9)
    subject = replace(find_subject(name, chunk_tokens=10), optimizer=words)
    assert subject.traced.loss_can_be_chunked
    curve = train_by_plan(subject, RESIDENT, steps, max_grad_norm=None, scratch=tmp_path)
    plain = train_plainly(build_model(entry), words, steps, max_grad_norm=None)
    assert curve.totals[0] == pytest.approx(plain.totals[0], rel=1e-6)
    for parameter, grad in plain.states["momentum_buffer"].items():
        assert relative(curve.states["momentum_buffer"][parameter], grad) < 1e-5, parameter
    for ways in OTHER_PLANS:
        other = train_by_plan(subject, ways, steps, max_grad_norm=None, scratch=tmp_path)
        assert find_differences(curve, other) == ()


def test_chunked_loss_never_holds_all_logits() -> None:
    whole = find_subject("llama").traced
    chunked = find_subject("llama", chunk_tokens=10).traced
    logits_bytes = 48 * 97 * 4
    head = whole.model.blocks[-1].body
    small = chunked.model.blocks[-1].body
    hidden_bytes = 48 * 32 * 4
    spared = whole.model.bodies[head].saved_bytes - chunked.model.bodies[small].saved_bytes
    assert spared >= logits_bytes - hidden_bytes
    for code in (chunked.code[small].keep, chunked.code[small].discard):
        sizes = [
            node.meta["val"].untyped_storage().nbytes()
            for node in code.graph.nodes
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
        ]
        assert max(sizes) < logits_bytes


@pytest.mark.parametrize("name", ["llama", "weave"])
def test_bfloat16_compute_is_close_and_equal_between_plans(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    steps = make_steps(entry, num_steps=4, num_microbatches=2)
    words = AdamW(lr=3e-3)
    subject = trace_subject(
        build_model(entry), batch_of(steps), words, compute_dtype=torch.bfloat16
    )
    curve = train_by_plan(subject, RESIDENT, steps, max_grad_norm=1.0, scratch=tmp_path)
    plain = train_plainly(build_model(entry), words, steps, max_grad_norm=1.0)
    for one, other in zip(curve.totals, plain.totals, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
    for parameter, tensor in plain.states["param"].items():
        master = curve.states["master"][parameter]
        assert master.dtype == torch.float32
        assert relative(master, tensor) < 3e-2, parameter
        assert torch.equal(curve.states["param"][parameter], master.to(torch.bfloat16))
    for ways in OTHER_PLANS:
        other = train_by_plan(subject, ways, steps, max_grad_norm=1.0, scratch=tmp_path)
        assert find_differences(curve, other) == ()


class Rough(nn.Module):
    """In-place operations, a padding row, an embedding used twice, a token that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.unused.requires_grad_(False)
        self.head = nn.Linear(16, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids) - self.embed(labels.clamp(min=0)).mean(1, keepdim=True)
        for layer in self.layers:
            y_BTD = layer(x_BTD)
            y_BTD[:, 0].mul_(0.5)
            y_BTD[..., 3:5] += x_BTD[..., :2]
            x_BTD = y_BTD.relu_() + 1
        x_BTD = x_BTD.masked_fill(input_ids.unsqueeze(-1) == 3, 0.0)
        logits_BTV = self.head(x_BTD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("count", [1, 3])
def test_in_place_writes_and_padding_have_the_bits_of_the_plain_loop(
    count: int, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Rough()

    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(3):
        tokens = torch.randint(0, 6, (count, 2, 9), generator=generator)
        tokens[0, 0, :4] = 0
        steps.append(
            [
                {"input_ids": t, "labels": t.roll(1), "denominator": torch.tensor(float(count))}
                for t in tokens
            ]
        )
    words = SGD(lr=0.1, momentum=0.9)
    batch = {key: steps[0][0][key] for key in ("input_ids", "labels")}
    subject = trace_subject(build(), batch, words)
    plain = train_plainly(build(), words, steps, max_grad_norm=None)
    for ways in (RESIDENT, *OTHER_PLANS):
        curve = train_by_plan(subject, ways, steps, max_grad_norm=None, scratch=tmp_path)
        assert find_differences(plain, curve) == ()
