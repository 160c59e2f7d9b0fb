"""What the GPU bench trains: decoders of any size with random weights, and the plain loop.

In: a shape, a device. Out: a module that returns its loss, batches of random tokens, and what plain
PyTorch does with both. Nothing beside torch is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from packhorse.optim.optimizers import AdamW

Batch = Mapping[str, Tensor]
_SCALE: Final = 0.02
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder and its step: `rows` of `length` tokens in `num_microbatches`."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
    vocabulary: int
    length: int
    rows: int
    num_microbatches: int

    @property
    def microbatch_rows(self) -> int:
        """Rows of a micro-batch."""
        return self.rows // self.num_microbatches

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


class Layer(nn.Module):
    """Causal attention and a gated product, each behind a norm and beside what came in.

    `fused` takes torch's own attention; without, it is written out.
    """

    def __init__(self, shape: Shape, *, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = shape.num_heads, fused
        self.first_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.second_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Give what comes in and what was made of it."""
        x_BTD = x_BTD + self.out(self._attend(self.first_norm(x_BTD)))
        y_BTD = self.second_norm(x_BTD)
        return x_BTD + self.down(functional.silu(self.gate(y_BTD)) * self.up(y_BTD))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        rows, length, width = x_BTD.shape
        parts = self.qkv(x_BTD).view(rows, length, 3, self.num_heads, width // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        else:
            scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) * q_BHTK.shape[-1] ** -0.5
            ahead_TT = torch.ones_like(scores_BHTT[0, 0], dtype=torch.bool).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(ahead_TT, -1e9)
            y_BHTK = scores_BHTT.softmax(-1) @ v_BHTK
        return y_BHTK.transpose(1, 2).reshape(rows, length, width)


class Decoder(nn.Module):
    """A decoder with learnt positions and an own head; gives the mean loss."""

    def __init__(self, shape: Shape, *, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.width))
        self.layers = nn.ModuleList(Layer(shape, fused=fused) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Give the mean loss."""
        x_BTD = self.embed(input_ids) + self.positions
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels.flatten())


def make_decoder(shape: Shape, *, fused: bool, seed: int, draw_on: str, keep_on: str) -> Decoder:
    """Make a decoder whose weights are drawn on one device and kept on another."""
    with torch.device("meta"):
        decoder = Decoder(shape, fused=fused)
    decoder.to_empty(device=keep_on)
    generator = torch.Generator(draw_on).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            drawn = torch.randn(parameter.shape, device=draw_on, generator=generator)
            parameter.copy_(drawn.mul_(_SCALE))
    return decoder


def make_batches(shape: Shape, num_steps: int) -> list[Batch]:
    """Random tokens, each the label of the one before."""
    generator = torch.Generator().manual_seed(1)
    size = (num_steps, shape.rows, shape.length)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
    return [{"input_ids": each, "labels": each.roll(-1, dims=-1)} for each in tokens]


def train_plainly(
    decoder: Decoder,
    shape: Shape,
    batches: Sequence[Batch],
    words: AdamW,
    *,
    max_grad_norm: float,
    device: str,
    bf16: bool,
) -> tuple[list[float], list[int]]:
    """Train with everything in the device's memory; give losses and wall times in ns."""
    optimizer = torch.optim.AdamW(
        decoder.parameters(),
        lr=words.lr,
        betas=words.betas,
        eps=words.eps,
        weight_decay=words.weight_decay,
        fused=True,
    )
    losses: list[float] = []
    taken_ns: list[int] = []
    for batch in batches:
        begin_ns = time.perf_counter_ns()
        total = 0.0
        for first in range(0, shape.rows, shape.microbatch_rows):
            part = {
                name: rows[first : first + shape.microbatch_rows].to(device)
                for name, rows in batch.items()
            }
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
                loss = decoder(**part) / shape.num_microbatches
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(decoder.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device != "cpu":
            torch.cuda.synchronize()
        losses.append(total)
        taken_ns.append(time.perf_counter_ns() - begin_ns)
    return losses, taken_ns


class MemoryWatch:
    """Asks again and again what is in use, on a thread of its own, and keeps the largest answer."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._read())
            if self._over.wait(_POLL_S):
                return


def read_driver_bytes() -> int:
    """What the driver says is in use on the device, by whomever and for whatever."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes
