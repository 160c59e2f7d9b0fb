"""Names of buffers, pools of memory, and the flat layout of parameters in chunks.

A buffer's name says what it holds: `param/3` (a state of chunk 3), `value/h2@0` (a value of
micro-batch 0), `dvalue/h2@0` (its gradient), `saved/2@0` (what block 2 saved for its backward),
`stash/2@0` (what the first half of its backward leaves for the second),
`wgrad/embed.weight@1` (the running gradient of a tied parameter, apart from its chunk from the
second micro-batch on), `wsum/embed.weight/0` (what block 0 adds to a tied parameter in a whole
step, where each user is summed on its own; the block's number is global), `norm/3` (segment norms
of chunk 3), `norms@1` (all segment norms of rank 1), `losses` (of all micro-batches) and `norm`
(the global norm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NewType

BufferId = NewType("BufferId", str)
ChunkId = NewType("ChunkId", int)
PoolId = NewType("PoolId", str)
TierName = Literal["device", "host", "disk"]

PAGE_BYTES: Final = 4096
CHUNK_ALIGN_ELEMENTS: Final = 524_288  # 2 MiB of fp32: one huge page, 32 norm segments
SLOT_ALIGN_ELEMENTS: Final = 32  # 64 bytes also in bf16
NORM_SEGMENT_ELEMENTS: Final = 16_384
NORM_WORKSPACE_BYTES: Final = 8 * 4 * NORM_SEGMENT_ELEMENTS  # four segments in float64 at a time
NORM: Final = BufferId("norm")
LOSSES: Final = BufferId("losses")


def state_id(state: str, chunk: ChunkId) -> BufferId:
    """Name a state (`param`, `grad`, `exp_avg`, ...) of a chunk."""
    return BufferId(f"{state}/{chunk}")


def split_state(buffer: BufferId) -> tuple[str, ChunkId]:
    """The state and the chunk behind a name that `state_id` gave."""
    state, _, chunk = buffer.partition("/")
    return state, ChunkId(int(chunk))


def value_id(value: str, microbatch: int) -> BufferId:
    """Name a value of a micro-batch."""
    return BufferId(f"value/{value}@{microbatch}")


def value_grad_id(value: str, microbatch: int) -> BufferId:
    """Name the gradient of a value of a micro-batch."""
    return BufferId(f"dvalue/{value}@{microbatch}")


def saved_id(block: int, microbatch: int) -> BufferId:
    """Name what a block saved for its backward."""
    return BufferId(f"saved/{block}@{microbatch}")


def stash_id(block: int, microbatch: int) -> BufferId:
    """Name what a block's InputGrad leaves for its WeightGrad."""
    return BufferId(f"stash/{block}@{microbatch}")


def tied_grad_id(parameter: str, microbatch: int) -> BufferId:
    """Name the running gradient of a tied parameter inside one micro-batch, not the first.

    In micro-batch 0 nothing is in the parameter's chunk yet, so the running sum is made there.
    """
    return BufferId(f"wgrad/{parameter}@{microbatch}")


def tied_sum_id(parameter: str, block: int) -> BufferId:
    """Name what one user of a tied parameter, not the last, has added up over the micro-batches."""
    return BufferId(f"wsum/{parameter}/{block}")


def split_sum(buffer: BufferId) -> tuple[str, int]:
    """The parameter and the user behind a name that `tied_sum_id` gave."""
    parameter, _, block = buffer.removeprefix("wsum/").rpartition("/")
    return parameter, int(block)


def split_value(buffer: BufferId) -> str:
    """The value behind a name that `value_id` or `value_grad_id` gave."""
    return buffer.partition("/")[2].rpartition("@")[0]


def norm_id(chunk: ChunkId) -> BufferId:
    """Name the segment norms of a chunk's gradient."""
    return BufferId(f"norm/{chunk}")


def packed_norms_id(rank: int) -> BufferId:
    """Name the segment norms that a rank counts, in the order of the parameters."""
    return BufferId(f"norms@{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A share of one tier with a capacity of its own.

    When the C heap keeps what is freed, what it holds cannot serve chunks: then the device tier
    has the pools `chunks` and `heap`; else one pool serves both.
    """

    id: PoolId
    tier: TierName
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named run of bytes.

    `pools` gives the pool it occupies in each tier where it may lie. `home` is the tier where a
    step finds and leaves it; None means that it lives only inside a step.
    """

    id: BufferId
    size_bytes: int
    pools: Mapping[TierName, PoolId]
    home: TierName | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of the flat parameter space that is moved and updated as one.

    `start` and `num_elements` are in elements; `start` is a multiple of CHUNK_ALIGN_ELEMENTS, so
    a parameter larger than a chunk lies contiguously in neighbouring chunks.
    """

    id: ChunkId
    start: int
    num_elements: int
    group: str
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter lies in the flat space, in elements."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    num_elements: int

    @property
    def stop(self) -> int:
        """First element after the parameter."""
        return self.start + self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The flat space: chunks in order, a slot per parameter, and the dtype of each state.

    Every state (`param`, `grad`, `exp_avg`, ...) of a chunk repeats the layout of its parameters.
    """

    chunks: tuple[Chunk, ...]
    slots: Mapping[str, Slot]
    dtypes: Mapping[str, str]

    @property
    def num_elements(self) -> int:
        """Length of the flat space."""
        return max((c.start + c.num_elements for c in self.chunks), default=0)

    def chunks_of(self, parameter: str) -> tuple[Chunk, ...]:
        """The chunks that hold a parameter, in order."""
        slot = self.slots[parameter]
        return tuple(
            chunk
            for chunk in self.chunks
            if chunk.start < slot.stop and slot.start < chunk.start + chunk.num_elements
        )

    def slots_of(self, chunk: Chunk) -> tuple[Slot, ...]:
        """The slots that lie at least partly in a chunk, in order."""
        stop = chunk.start + chunk.num_elements
        found = (s for s in self.slots.values() if s.start < stop and chunk.start < s.stop)
        return tuple(sorted(found, key=lambda slot: slot.start))
