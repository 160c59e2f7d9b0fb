"""The plan: every decision, and why. Torch-free.

In: what the search decided or a person pinned. Out: a frozen `Plan` that the compiler lowers to a
program. Chunks, blocks and parameters are spoken of by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Generic, Literal, TypeVar

from packhorse.machine.spec import Drive, TierName
from packhorse.schedule.spec import Schedule

T = TypeVar("T")
ActivationChoice = Literal["keep", "recompute", "offload"]
HeapMode = Literal["keep", "map"]
Order = Literal["depth_first", "layered", "scheduled"]
Durable = int | Literal["off"]
CacheMode = Literal["none", "valleys"]
TiedSum = Literal["per_microbatch", "per_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[T]):
    """A decision and its reason, in words a person can act on."""

    value: T
    because: str


DEPTH_FIRST: Final[Choice[Order]] = Choice(
    value="depth_first", because="one micro-batch after another, where nothing else is said"
)
BOUNDARIES_STAY: Final[Choice[TierName]] = Choice(
    value="device", because="values stay in the device, where nothing else is said"
)
SCHEDULED: Final[Choice[Order]] = Choice(
    value="scheduled", because="ranks share the model: its schedule gives the order"
)
NO_OFFLOAD: Final[Choice[TierName]] = Choice(
    value="device", because="no block's saved values leave the device, where nothing else is said"
)
IN_DEVICE: Final[Choice[TierName]] = Choice(
    value="device", because="in the device, where nothing else is said"
)
NOT_DURABLE: Final[Choice[Durable]] = Choice(
    value="off", because="checkpoints alone are kept, where nothing else is said"
)
NO_CACHE: Final[Choice[CacheMode]] = Choice(
    value="none", because="what leaves the device comes back, where nothing else is said"
)
NO_STRIDE: Final[Choice[int]] = Choice(
    value=0, because="each chunk is updated in its own tier, where nothing else is said"
)
NO_PREFETCH: Final[Choice[int]] = Choice(
    value=0, because="each copy is asked for at its use, where nothing else is said"
)


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
    tied_sum: TiedSum
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
    """A chunk: its pieces in order, and the tier where each of its states lies between uses.

    `update` is the tier in which the optimizer changes it: `device`, or `host` where the plan's
    stride leaves it there.
    """

    pieces: tuple[Piece, ...]
    group: str
    trainable: bool
    parameters: Choice[TierName]
    gradients: Choice[TierName]
    optimizer: Choice[TierName]
    update: Choice[TierName] = IN_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What happens to the values that a block saves for its backward.

    They are kept in the device, made again by a second forward, or offloaded to the plan's tier for
    that and brought back.
    """

    name: str
    activations: Choice[ActivationChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan promises for one step.

    `peak_bytes` gives per tier the bytes of each cause at the moment of that tier's peak
    (parameters, gradients, optimizer, activations, logits, buffers, workspace, base);
    `step_ns` is the time of the step. Lanes run beside each other, so what they do adds up to more
    (or, where they wait, to less): `time_ns` gives by cause (forward, backward, recompute, update,
    norm, disk_read, disk_write) how long something is busy with it, `lane_ns` the same by what is
    busy (compute, update, disk, copy_in, copy_out). `kept_bytes_per_step` are written behind on
    top, spread over the steps between.
    """

    step_ns: int
    peak_bytes: Mapping[TierName, Mapping[str, int]]
    time_ns: Mapping[str, int]
    lane_ns: Mapping[str, int]
    disk_read_bytes: int
    disk_written_bytes: int
    scratch_bytes: int
    bottleneck: str
    kept_bytes_per_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How ranks share a model: where it is cut into stages, and who computes what when.

    The same on every rank. `bounds` has the first block of every stage, and the number of blocks.
    """

    name: Choice[str]
    schedule: Schedule
    bounds: Choice[tuple[int, ...]]

    @property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        return tuple(range(first, stop) for first, stop in pairwise(self.bounds.value))

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of every block."""
        return tuple(
            self.schedule.placement[stage][0]
            for stage, blocks in enumerate(self.stages)
            for _ in blocks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision for one model on one machine, or for one rank's part of it.

    `order` is that of the micro-batches: each goes through all blocks before the next begins, or
    all go through a block before the next block; or, where ranks share the model, as the schedule
    of `pipeline` says. `boundaries` is the tier where values that pass
    from block to block wait between uses that are far apart. `offload` is the tier where blocks
    that offload have what they saved, `device` where none does. `budget_bytes` is what each tier
    may use; `heap_slack` is the share that a kept heap is given above its live bytes; `pins` names
    the choices that a person fixed. `scratch` is the folder of the disk tier that it was made for,
    None if that is unknown or elsewhere, and `drives` all of its folders as the machine measured
    them. `stride` is 0 when each chunk is updated in its own tier, 1 when all are in the device,
    else every `stride`-th of those that may be updated in the host visits the device. Every so many
    steps as `durable` says the state is kept in the scratch folder, so that a run that is killed
    goes on from there; "off" keeps checkpoints alone. With `cache` "valleys" what would leave the
    device between two uses stays where memory has a valley: no task becomes fuller by that than the
    fullest.
    `prefetch` is the number of compute tasks by which a copy into the device may come before its
    use.
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
    drives: tuple[Drive, ...] = ()
    order: Choice[Order] = DEPTH_FIRST
    boundaries: Choice[TierName] = BOUNDARIES_STAY
    offload: Choice[TierName] = NO_OFFLOAD
    stride: Choice[int] = NO_STRIDE
    durable: Choice[Durable] = NOT_DURABLE
    cache: Choice[CacheMode] = NO_CACHE
    prefetch: Choice[int] = NO_PREFETCH
    pipeline: PipelinePlan | None = None

    @property
    def offloads(self) -> bool:
        """Whether any block offloads what it saves."""
        return any(block.activations.value == "offload" for block in self.blocks)

    @property
    def update_tiers(self) -> tuple[TierName, ...]:
        """Where each chunk is updated: of those that may be in the host, every k-th is not.

        Deep Optimizer States (Maurya et al., Middleware 2024): the states of every k-th chunk
        visit the device while the host updates the others.
        """
        tiers: list[TierName] = []
        num_hosted = 0
        for chunk in self.chunks:
            hosted = chunk.trainable and chunk.update.value == "host"
            num_hosted += hosted
            visits = self.stride.value > 0 and num_hosted % self.stride.value == 0
            tiers.append("host" if hosted and not visits else "device")
        return tuple(tiers)
