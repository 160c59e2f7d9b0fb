"""Parameters of one element, of no dimension and of odd lengths, wherever their states lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.planned import Ways, trace_subject, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import batch_of
from packhorse.optim.optimizers import SGD, AdamW, Optimizer

WIDTH, VOCABULARY = 5, 11
IN_HOST = Ways(
    parameters=("host",), gradients=("host",), optimizer=("host",), update=("host",),
    chunk_bytes=4096,
)  # fmt: skip
ON_DISK = Ways(parameters=("disk",), gradients=("disk",), optimizer=("disk",), chunk_bytes=4096)
ANYWHERE = Ways(
    parameters=("disk", "host", "device"),
    gradients=("host", "disk", "device", "device"),
    optimizer=("host", "disk", "device"),
    update=("host", "host", "device"),
    chunk_bytes=4096,
)


class OddBlock(nn.Module):
    """A layer of odd width with a gain without dimension and a bias of one element."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(torch.tanh(self.up(x_BTD))) * self.gain + self.bias


class Odd(nn.Module):
    """Blocks of widths that fill no page, and one that fills a page and one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(inner) for inner in (1, 3, 7, 1025))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(x_BTD * self.scale)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


def build(frozen: str | None) -> nn.Module:
    torch.manual_seed(3)
    module = Odd()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    return module


def make_steps() -> list[tuple[dict[str, Tensor], ...]]:
    draw = torch.Generator().manual_seed(5)

    def feed() -> dict[str, Tensor]:
        rows = {
            name: torch.randint(0, VOCABULARY, (2, 6), generator=draw)
            for name in ("input_ids", "labels")
        }
        return {**rows, "denominator": torch.tensor(2.0)}

    return [(feed(), feed()) for _ in range(3)]


@pytest.mark.parametrize("frozen", [None, "gain", "up"])
@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [(AdamW(lr=1e-2), 0.05), (AdamW(lr=1e-2), None), (SGD(lr=1e-2), 0.05)],
    ids=["clipped", "adamw", "sgd"],
)
def test_odd_sizes_have_the_bits_of_the_plain_loop(
    tmp_path: Path, frozen: str | None, optimizer: Optimizer, clip: float | None
) -> None:
    steps = make_steps()
    plain = train_plainly(build(frozen), optimizer, steps, max_grad_norm=clip)
    subject = trace_subject(build(frozen), batch_of(steps), optimizer)
    ways = [ON_DISK, *(replace(w, stride=k) for w in (IN_HOST, ANYWHERE) for k in (0, 2, 1000))]
    for way in ways:
        curve = train_by_plan(subject, way, steps, max_grad_norm=clip, scratch=tmp_path)
        assert find_differences(plain, curve) == (), way
