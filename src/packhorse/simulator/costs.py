"""How long each task takes on a machine, in whole nanoseconds.

In: machine, profile, model and program. Out: `TaskCosts`, one cost model; whoever has a better
one passes any object with `duration_ns(task)` to the simulator instead.

What is modelled:

    Forward, Recompute, Backward   the body's time, times the machine's compute_scale, and times
                                   1 + map_cost when the heap is mapped
    InputGrad, WeightGrad          a Backward's time, shared out by what the halves compute and move
    Backward, WeightGrad           plus adding to gradients of earlier micro-batches, and plus the
                                   pages of those that it begins, where chunks take turns in memory
    Copy, Import, Export           latency + bytes / link rate
    Update                         bytes that it moves, at the rate at which fused AdamW moves them,
                                   those of scaling the gradient included where it clips
    Feed, GradNorm, SegmentNorm    bytes / memory bandwidth, for SegmentNorm several times
    SegmentNorm, Update            longer in a program that moves to or from the disk beside them
    every task                     a constant for being issued, looked up and recorded
    what computes on all cores     longer by what copies and issuing take of them: see `crowding`
    Copy beside that               longer by what it waits for a core
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import Final, Literal, Protocol, assert_never

from packhorse.errors import InputError, MismatchError
from packhorse.machine.spec import Link, Machine, PeerLink, TierName
from packhorse.model.spec import ITEM_BYTES, BlockId, BodyId, Model
from packhorse.profile.analytic import estimate_input_share, estimate_split_ns
from packhorse.profile.spec import BodyTime, Profile
from packhorse.program.buffers import NORM, BufferId
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Feed,
    Forward,
    Free,
    GradNorm,
    Import,
    InputGrad,
    PackLosses,
    PackNorms,
    Recompute,
    Recv,
    SegmentNorm,
    Send,
    SumTied,
    Task,
    Update,
    WeightGrad,
)
from packhorse.simulator.crowding import (
    MOST_CROWDING,
    computes_here,
    core_ns,
    is_crowded,
    is_team_work,
    total_core_ns,
    waiting_ns,
)

# What an interpreter spends around a task: tens of dictionary look-ups, two clock readings and a
# ledger entry; a whole small body with its buffers was measured at 46 us.
TASK_NS: Final = 20_000

# Dropping a buffer is one madvise or one free. Unmapping costs a few microseconds for each
# 2 MiB page, far below the time of filling it again, so one constant serves all sizes.
FREE_NS: Final = 10_000

# Segments are widened to float64 in the cache and reduced there, which computes more than it
# moves: measured on three CPUs, four to seven times as long as reading the gradient once.
NORM_PASSES: Final = 6

# Passes over memory beside a disk that reads and writes, which moves through the same memory.
# In steps of a 350 M decoder on two cores norms took 10 to 27 % longer, updates 4 to 33 %.
BESIDE_DISK: Final = 1.2

# Adding one gradient to another reads both and writes one; scaling one reads and writes it.
ADD_PASSES: Final = 3
SCALE_PASSES: Final = 2

# fp32 AdamW reads parameter, gradient and two moments and writes all but the gradient.
ADAMW_MOVED_BYTES: Final = 28


class CostModel(Protocol):
    """Anything that knows how long a task takes."""

    def duration_ns(self, task: Task) -> int:
        """Give the duration of a task, at least 0."""
        ...


class MachineCosts(CostModel, Protocol):
    """A cost model of a known machine, whose lanes are known with it."""

    @property
    def machine(self) -> Machine:
        """The machine that tasks run on."""
        ...


class KnownCosts:
    """The durations of the tasks of one program, worked out once, for other orders of them."""

    def __init__(self, tasks: Sequence[Task], costs: CostModel) -> None:
        # Held, so that no other task can come to the same id.
        self._tasks = tuple(tasks)
        self._duration_ns = {id(task): costs.duration_ns(task) for task in self._tasks}

    def duration_ns(self, task: Task) -> int:
        """Give the duration of one of the very tasks that are known."""
        return self._duration_ns[id(task)]


class TaskCosts:
    """The cost model of one program on one machine.

    Args:
        heap: the plan's heap mode: `map` gives large blocks back at once and pays for it in compute
            time.
    """

    def __init__(
        self,
        *,
        machine: Machine,
        profile: Profile,
        model: Model,
        program: Program,
        heap: Literal["keep", "map"],
    ) -> None:
        self.machine = machine
        self.profile = profile
        self.model = model
        self.program = program
        self.heap: Literal["keep", "map"] = heap

    def duration_ns(self, task: Task) -> int:
        """Give the duration of a task as it runs in the program.

        Raises:
            MismatchError: the profile or program belongs to another model.
            InputError: the machine has no rate for what the task does.
        """
        alone_ns = self.alone_ns(task)
        if is_team_work(task):
            return ceil(alone_ns * self.crowding)
        if isinstance(task, Copy) and is_crowded(self.machine):
            return alone_ns + waiting_ns(task, self.program, self.machine)
        return alone_ns

    def core_ns(self, task: Task) -> int:
        """How long a task keeps a core busy that computing lacks; 0 where there is one to spare.

        Where lanes take turns nothing runs beside computing; that is the program's to say, so
        whoever asks for tasks of one without transfers has to know.
        """
        return core_ns(task, self.program, self.machine) if is_crowded(self.machine) else 0

    @cached_property
    def crowding(self) -> float:
        """How many times as long as alone computing takes in the program, for lack of cores."""
        tasks = self.program.tasks
        if not is_crowded(self.machine) or not has_transfers(tasks):
            return 1.0
        others_ns = total_core_ns(self.program, self.machine)
        team_ns = sum([self.alone_ns(task) for task in tasks if is_team_work(task)])
        return min(1 + others_ns / team_ns, MOST_CROWDING) if team_ns else 1.0

    def alone_ns(self, task: Task) -> int:
        """Give the duration of a task with no other beside it.

        Raises:
            MismatchError, InputError: as `duration_ns`.
        """
        match task:
            case Free():
                return FREE_NS
            case Copy():
                link = self._link(task.source, task.target)
                return TASK_NS + self._transfer_ns(link, task.buffer)
            case Forward():
                time = self._body_time(task.block)
                saves = _names_any("saved/", task.writes)
                return TASK_NS + self._heaped(time.forward_ns if saves else time.discard_ns)
            case Recompute():
                return TASK_NS + self._heaped(self._body_time(task.block).forward_ns)
            case Backward():
                time = self._body_time(task.block)
                return TASK_NS + self._heaped(time.backward_ns) + self._gradients_ns(task)
            case InputGrad():
                return TASK_NS + self._heaped(self._input_ns(task.block))
            case WeightGrad():
                input_ns = self._input_ns(task.block)
                rest_ns = self._body_time(task.block).backward_ns - input_ns
                half_ns = rest_ns + estimate_split_ns(input_ns, rest_ns)
                return TASK_NS + self._heaped(half_ns) + self._gradients_ns(task)
            case Update():
                return TASK_NS + ceil(self._update_ns(task) * self._beside_disk)
            case SegmentNorm():
                passes_ns = self._memory_ns(NORM_PASSES * self._sizes_of(task.reads))
                return TASK_NS + ceil(passes_ns * self._beside_disk)
            case GradNorm():
                return TASK_NS + self._memory_ns(self._sizes_of(task.reads))
            case Feed():
                return TASK_NS + self._memory_ns(self._sizes_of(task.writes))
            case Import():
                return TASK_NS + self._outside_ns(task.buffer, "disk", "device")
            case Export():
                return TASK_NS + self._outside_ns(task.buffer, "device", "disk")
            case Send() | Recv():
                return TASK_NS + self._message_ns(task)
            case SumTied():
                passes = 1 + ADD_PASSES * (len(task.reads) - 1)
                return TASK_NS + self._memory_ns(passes * self._sizes_of(task.writes))
            case PackNorms() | PackLosses():
                return TASK_NS + self._memory_ns(2 * self._sizes_of(task.reads))
            case Emit():
                return TASK_NS
        assert_never(task)

    def _body_time(self, block: int) -> BodyTime:
        if not 0 <= block < len(self.model.blocks):
            raise MismatchError(
                f"the program runs block {block}, but {self.model.name} has"
                f" {len(self.model.blocks)} blocks",
                fix="lower the plan again for this model",
            )
        body = self.model.blocks[BlockId(block)].body
        time = self.profile.bodies.get(body)
        if time is None:
            raise MismatchError(
                f"the profile has no times for body {body}",
                where=f"block {self.model.blocks[block].name} of {self.model.name}",
                fix="profile this model at this micro-batch shape",
            )
        return time

    def _input_ns(self, block: int) -> int:
        time = self._body_time(block)
        return round(time.backward_ns * self._input_shares[self.model.blocks[BlockId(block)].body])

    @cached_property
    def _input_shares(self) -> Mapping[BodyId, float]:
        return {
            block.body: estimate_input_share(self.model, self.machine, block)
            for block in reversed(self.model.blocks)
            if block.has_backward
        }

    def _heaped(self, duration_ns: int) -> int:
        scale = self.machine.compute_scale
        if self.heap == "map":
            scale *= 1 + self.machine.heap.map_cost
        return duration_ns if scale == 1 else ceil(duration_ns * scale)

    def _gradients_ns(self, task: Backward | WeightGrad) -> int:
        return self._pages_ns(task) + self._added_ns(task)

    def _pages_ns(self, task: Backward | WeightGrad) -> int:
        # Bodies are measured with gradients that have their pages. In a step whose chunks take
        # turns in memory, one that is begun gets pages that the kernel makes and clears, as a read
        # does: where that was measured, it counts.
        if not self._page_ns_per_byte:
            return 0
        begun = set(task.writes).difference(task.reads)
        made = tuple(buffer for buffer in begun if buffer.startswith("grad/"))
        return round(self._sizes_of(made) * self._page_ns_per_byte)

    @cached_property
    def _page_ns_per_byte(self) -> float:
        link = self.machine.link("disk", "device")
        is_here = computes_here(self.machine)
        if link is None or not is_here or not has_transfers(self.program.tasks):
            return 0.0
        return link.core_ns_per_byte or 0.0

    def _added_ns(self, task: Backward | WeightGrad) -> int:
        # A body's time is that of its first micro-batch, which writes its gradients into their
        # chunks. Later ones write them into workspace and add from there: two reads, one write.
        if not self.program.layout.chunks or not _names_any("grad/", task.reads):
            return 0
        return self._adding_ns[task.block]

    @cached_property
    def _adding_ns(self) -> Sequence[int]:
        # Of each block.
        item_bytes = ITEM_BYTES[self.program.layout.dtypes.get("grad", "float32")]
        parameters = self.model.parameters
        return [
            self._memory_ns(
                ADD_PASSES
                * item_bytes
                * sum(
                    parameters[n].num_elements for n in block.parameters if parameters[n].trainable
                )
            )
            for block in self.model.blocks
        ]

    @cached_property
    def _beside_disk(self) -> float:
        moves = any(
            isinstance(task, Copy) and "disk" in (task.source, task.target)
            for task in self.program.tasks
        )
        return BESIDE_DISK if moves and computes_here(self.machine) else 1.0

    def _update_ns(self, task: Update) -> int:
        rate = next((u for u in self.machine.updates if u.tier == task.where), None)
        if rate is None:
            raise InputError(
                f"the machine has no update rate for the tier {task.where}",
                where=f"machine {self.machine.name}, update of chunk {task.chunk}",
                fix="probe the machine again, or add the tier to `updates` of its file",
            )
        chunk = self.program.layout.chunks[task.chunk]
        dtypes: Mapping[str, str] = self.program.layout.dtypes
        moved_bytes = sum(
            ITEM_BYTES[dtypes[state]]
            for state in (buffer.split("/", 1)[0] for buffer in task.reads + task.writes)
            if state in dtypes
        )
        if NORM in task.reads:
            moved_bytes += SCALE_PASSES * ITEM_BYTES[dtypes["grad"]]
        share = moved_bytes / ADAMW_MOVED_BYTES
        return ceil(chunk.num_elements * share * 1e9 / rate.parameters_per_s)

    def _link(self, source: TierName, target: TierName) -> Link:
        link = self._links.get((source, target))
        if link is None:
            raise InputError(
                f"the machine has no link from {source} to {target}",
                where=f"machine {self.machine.name}",
                fix="probe the machine with both tiers in its budget, or add the link to its file",
            )
        return link

    @cached_property
    def _links(self) -> Mapping[tuple[TierName, TierName], Link]:
        # The first of several counts.
        return {(link.source, link.target): link for link in reversed(self.machine.links)}

    @cached_property
    def _peers(self) -> Mapping[int, PeerLink]:
        return {link.peer: link for link in reversed(self.machine.peers)}

    def _transfer_ns(self, link: Link, buffer: BufferId) -> int:
        size_bytes = self.program.buffers[buffer].size_bytes
        return link.latency_ns + ceil(size_bytes * 1e9 / link.bytes_per_s)

    def _message_ns(self, task: Send | Recv) -> int:
        link = self._peers.get(task.peer)
        if link is None:
            raise InputError(
                f"the machine has no link to rank {task.peer}",
                where=f"machine {self.machine.name}",
                fix="probe all ranks together, or add the link to `peers` of its file",
            )
        size_bytes = self.program.buffers[task.buffer].size_bytes
        return link.latency_ns + ceil(size_bytes * 1e9 / link.bytes_per_s)

    def _outside_ns(self, buffer: BufferId, source: TierName, target: TierName) -> int:
        # Weights and checkpoints lie in files: the disk's link is the nearest known rate.
        link = self.machine.link(source, target)
        if link is None:
            return self._memory_ns(self.program.buffers[buffer].size_bytes)
        return self._transfer_ns(link, buffer)

    def _sizes_of(self, buffers: tuple[BufferId, ...]) -> int:
        return sum(self.program.buffers[buffer].size_bytes for buffer in buffers)

    def _memory_ns(self, size_bytes: int) -> int:
        return ceil(size_bytes * 1e9 / self.machine.memory_bytes_per_s)


def _names_any(start: str, names: tuple[BufferId, ...]) -> bool:
    return any(name.startswith(start) for name in names)
