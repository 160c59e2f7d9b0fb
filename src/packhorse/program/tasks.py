"""The closed union of tasks: what a rank can be told to do.

A task says what it reads and writes by buffer name; dependencies follow from that and are never
written by hand. A write of a buffer that the task does not read creates the buffer in the device
tier; a write of one that it also reads changes it in place. No tensors, no durations. A Send and
the Recv that answers it name the same buffer, each on its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packhorse.program.buffers import NORM, BufferId, ChunkId, TierName

OwnLane = Literal["compute", "update", "copy_in", "copy_out", "disk_read", "disk_write"]
Lane = OwnLane | str
"""A lane of the rank's own, or one that leads to or from another rank, such as `send 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Place the step inputs of a micro-batch in the device tier."""

    microbatch: int
    writes: tuple[BufferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run a block's forward; it keeps saved values when `writes` names a `saved/` buffer."""

    block: int
    microbatch: int
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run a block's forward again to create its saved values; its outputs are dropped."""

    block: int
    microbatch: int
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run a block's backward: gradients of its inputs, and of its parameters into chunks."""

    block: int
    microbatch: int
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrad:
    """Run the half of a backward that gives gradients of inputs; leaves a stash for the other."""

    block: int
    microbatch: int
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGrad:
    """Run the half of a backward that gives gradients of parameters, into chunks.

    It goes with an InputGrad; for a block whose inputs get no gradient it is the whole backward.
    """

    block: int
    microbatch: int
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTied:
    """Add the sums of all users of a tied parameter, in the order of `reads`, into its chunks."""

    parameter: str
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentNorm:
    """Sum the squares of a chunk's gradient in float64 over fixed segments of each parameter."""

    chunk: ChunkId
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackNorms:
    """Put the segment norms of a rank's chunks, in the order of parameters, into one buffer."""

    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLosses:
    """Put the losses of all micro-batches into one buffer."""

    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradNorm:
    """Add all segment norms, this rank's and packed ones, in the order of the parameters.

    Writes the global norm.
    """

    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Apply the optimizer to a chunk in the tier `where`; clips when it reads `norm`."""

    chunk: ChunkId
    where: TierName
    reads: tuple[BufferId, ...]
    writes: tuple[BufferId, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy a buffer from one tier to another; reserves it there when it is absent."""

    buffer: BufferId
    source: TierName
    target: TierName


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Drop a buffer from a tier."""

    buffer: BufferId
    tier: TierName


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Hand a buffer to another rank; complete when that one has taken it."""

    buffer: BufferId
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Take a buffer from another rank; creates it in the device tier."""

    buffer: BufferId
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Hand a small buffer (a loss, the norm) to whoever runs the step."""

    buffer: BufferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Fill a state of a chunk from outside (weights, a checkpoint); creates it in the device."""

    buffer: BufferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Hand a state of a chunk that lies in the device tier to whoever saves it."""

    buffer: BufferId


BlockTask = Forward | Recompute | Backward | InputGrad | WeightGrad
"""What runs the body of a block, or a part of it."""

Task = (
    Feed
    | Forward
    | Recompute
    | Backward
    | InputGrad
    | WeightGrad
    | SumTied
    | SegmentNorm
    | PackNorms
    | PackLosses
    | GradNorm
    | Update
    | Copy
    | Free
    | Send
    | Recv
    | Emit
    | Import
    | Export
)

Accesses = tuple[TierName, tuple[BufferId, ...], TierName, tuple[BufferId, ...]]
"""The tier of the reads, the reads, the tier of the writes, the writes."""


def accesses_of(task: Task) -> Accesses:
    """What a task reads and writes, and in which tiers: a task reads in one, and writes in one."""
    # Whoever plans asks this millions of times, so the most frequent kinds come first.
    match task:
        case Free():
            return task.tier, (task.buffer,), task.tier, ()
        case Copy():
            return task.source, (task.buffer,), task.target, (task.buffer,)
        case Forward() | Backward() | Recompute() | InputGrad() | WeightGrad():
            return "device", task.reads, "device", task.writes
        case Send() | Emit() | Export():
            return "device", (task.buffer,), "device", ()
        case Recv() | Import():
            return "device", (), "device", (task.buffer,)
        case Update():
            return task.where, task.reads, task.where, task.writes
        case Feed():
            return "device", (), "device", task.writes
        case SegmentNorm() | GradNorm() | SumTied() | PackNorms() | PackLosses():
            return "device", task.reads, "device", task.writes


def reads_of(task: Task) -> tuple[tuple[BufferId, TierName], ...]:
    """Every buffer a task reads, with the tier where it must be present."""
    tier, read, _, _ = accesses_of(task)
    return tuple([(buffer, tier) for buffer in read])


def writes_of(task: Task) -> tuple[tuple[BufferId, TierName], ...]:
    """Every buffer a task creates or changes, with its tier. Free is not a write."""
    _, _, tier, written = accesses_of(task)
    return tuple([(buffer, tier) for buffer in written])


def workspace_of(task: Task) -> int:
    """Bytes of the compute pool that a task holds only while it runs."""
    match task:
        case Copy() | Free():
            return 0
        case Forward() | Backward() | Recompute() | SegmentNorm() | Update():
            return task.workspace_bytes
        case InputGrad() | WeightGrad():
            return task.workspace_bytes
        case SumTied() | PackNorms() | PackLosses() | Send() | Recv():
            return 0
        case Feed() | GradNorm() | Emit() | Import() | Export():
            return 0


def lane_of(task: Task) -> Lane:
    """The lane that executes a task by itself; `assign_lanes` tells that of a Free in a program.

    The norm, a few bytes that all updates in the host wait for, never queues behind gradients.
    """
    match task:
        case Free() | Forward() | Backward():
            return "compute"
        case Copy():
            return _copy_lane(task)
        case Send():
            return send_lane(task.peer)
        case Recv():
            return receive_lane(task.peer)
        case Update():
            return "update" if task.where == "host" else "compute"
        case _:
            return "compute"


def _copy_lane(task: Copy) -> Lane:
    if task.buffer == NORM:
        return "compute"
    if task.source == "disk":
        return "disk_read"
    if task.target == "disk":
        return "disk_write"
    return "copy_in" if task.target == "device" else "copy_out"


def send_lane(peer: int) -> Lane:
    """Name the lane on which buffers go to another rank."""
    return f"send {peer}"


def receive_lane(peer: int) -> Lane:
    """Name the lane on which buffers come from another rank."""
    return f"receive {peer}"
