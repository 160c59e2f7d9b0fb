"""Dropout noise that every plan draws alike.

In: the key (run seed, step, global micro-batch, ordinal of the random node in the unsplit graph).
Out: a tensor that is 0 with probability p and 1 / (1 - p) otherwise. torch's global generator is
never touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.graph.interpret import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKey:
    """What the noise of a micro-batch depends on, beside the node."""

    seed: int
    step: int
    microbatch: int


def draw_noise(noise: Noise, key: NoiseKey, ordinal: int) -> Tensor:
    """Draw one noise tensor of `noise.shape` and `noise.dtype`."""
    text = f"{key.seed} {key.step} {key.microbatch} {ordinal}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    drawn = torch.empty(noise.shape, dtype=noise.dtype)
    if noise.p >= 1:
        return drawn.zero_()
    return drawn.bernoulli_(1 - noise.p, generator=generator).div_(1 - noise.p)
