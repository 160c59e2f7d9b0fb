"""What each distinct block costs in time, at one micro-batch shape. Torch-free.

In: a model and a machine (analytic), or bodies run on this machine (measured). Out: a `Profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packhorse.model.spec import BodyId


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTime:
    """How long one run of a body takes, with a kept heap.

    `forward_ns` keeps saved values, `discard_ns` keeps outputs only (it is also the time of a
    Forward whose block recomputes), `backward_ns` is 0 for a block without a backward.
    """

    forward_ns: int
    discard_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times of every distinct body of a model at `rows` x `length`.

    `base_bytes` is what the process holds beside everything that the ledger counts (interpreter
    objects of the traced graphs, tokenizer, allocator), measured after tracing; 0 if unknown.
    `busy_share` is the share of the compute threads' time that other processes took while bodies
    were measured.
    """

    model: str
    rows: int
    length: int
    source: Literal["analytic", "measured"]
    bodies: Mapping[BodyId, BodyTime]
    base_bytes: int
    busy_share: float = 0.0
