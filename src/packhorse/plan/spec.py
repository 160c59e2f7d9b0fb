"""The plan: every decision, and why. Torch-free.

In: what the search decided or a person pinned. Out: a frozen `Plan` that the compiler lowers to a
program. Chunks, blocks and parameters are spoken of by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from packhorse.machine.spec import TierName

T = TypeVar("T")
ActivationChoice = Literal["keep", "recompute"]
HeapMode = Literal["keep", "map"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[T]):
    """A decision and its reason, in words a person can act on."""

    value: T
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The choices that may change rounding: equal numerics mean equal bits.

    `loss_chunk_tokens` is None when logits exist whole. `num_workers` is the number of logical
    workers that the global batch is given to. `instructions` is the family of vector instructions
    that a CPU computes with, None on another device or where it is not known.
    """

    microbatch_rows: Choice[int]
    num_microbatches: int
    num_workers: int
    compute_dtype: str
    loss_chunk_tokens: Choice[int | None]
    tied_sum: Literal["per_microbatch", "per_step"]
    attention: Literal["causal", "eager", "native"]
    num_threads: int
    device: str
    instructions: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """What the update needs: its name, its states beside the parameter, clipping.

    `states` are names such as `exp_avg`; `master` is True when an fp32 copy of the parameters is
    kept because they compute in a narrower dtype.
    """

    name: Literal["adamw", "sgd"]
    states: tuple[str, ...]
    master: bool
    clips: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a parameter, row-major."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """A chunk: its pieces in order, and the tier where each of its states lies between uses."""

    pieces: tuple[Piece, ...]
    group: str
    trainable: bool
    parameters: Choice[TierName]
    gradients: Choice[TierName]
    optimizer: Choice[TierName]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What happens to the values that a block saves for its backward."""

    name: str
    activations: Choice[ActivationChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan promises for one step.

    `peak_bytes` gives per tier the bytes of each cause at the moment of that tier's peak
    (parameters, gradients, optimizer, activations, logits, buffers, workspace, base);
    `time_ns` gives the step time by cause (forward, backward, recompute, update, norm, disk_read,
    disk_write), `step_ns` the whole.
    """

    step_ns: int
    peak_bytes: Mapping[TierName, Mapping[str, int]]
    time_ns: Mapping[str, int]
    disk_read_bytes: int
    disk_written_bytes: int
    scratch_bytes: int
    bottleneck: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision for one model on one machine.

    `budget_bytes` is what each tier may use; `heap_slack` is the share that a kept heap is given
    above its live bytes; `pins` names the choices that a person fixed. `scratch` is the folder of
    the disk tier that it was made for, None if that is unknown or elsewhere.
    """

    model: str
    model_name: str
    machine: str
    length: int
    budget_bytes: Mapping[TierName, int]
    base_bytes: int
    numerics: Numerics
    optimizer: OptimizerPlan
    heap: Choice[HeapMode]
    heap_slack: float
    chunk_bytes: Choice[int]
    chunks: tuple[ChunkPlan, ...]
    blocks: tuple[BlockPlan, ...]
    pins: tuple[str, ...]
    prediction: Prediction | None
    scratch: str | None = None
