"""How a task is called on a timeline: a short name, and the kind that reports group by.

In: a task. Out: texts. The simulator and the runtime both name their spans here, so that a
predicted and a measured span of the same task can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, assert_never

from packhorse.program.buffers import NORM
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
    Lane,
    OwnLane,
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
    lane_of,
)

KINDS: Final[tuple[str, ...]] = (
    "forward",
    "recompute",
    "backward",
    "input_grad",
    "weight_grad",
    "norm",
    "update",
    "disk_read",
    "disk_write",
    "copy_in",
    "copy_out",
    "send",
    "receive",
    "feed",
    "free",
    "emit",
    "import",
    "export",
)

ALL_REDUCE: Final = "all_reduce"
"""The kind and the lane of what sums gradients over replicas: no task of a program, but of time."""

LANES: Final[tuple[OwnLane, ...]] = (
    "compute",
    "update",
    "copy_in",
    "copy_out",
    "disk_read",
    "disk_write",
)

_WORDS: Final[Mapping[str, str]] = {
    "disk_read": "read from disk",
    "disk_write": "write to disk",
    "all_reduce": "all-reduce",
    "copy_in": "copy in",
    "copy_out": "copy out",
    "base": "process itself",
    "slots": "kept steps",
    "ahead": "brought ahead",
}


def kind_of(task: Task) -> str:
    """Give the kind that reports group a task by; copies are told apart by their lane."""
    match task:
        case Free():
            return "free"
        case Copy():
            return "norm" if task.buffer == NORM else lane_of(task)
        case Forward():
            return "forward"
        case Recompute():
            return "recompute"
        case Backward():
            return "backward"
        case InputGrad():
            return "input_grad"
        case WeightGrad():
            return "weight_grad"
        case SegmentNorm() | PackNorms() | GradNorm():
            return "norm"
        case SumTied():
            return "backward"
        case PackLosses():
            return "emit"
        case Send():
            return "send"
        case Recv():
            return "receive"
        case Update():
            return "update"
        case Feed():
            return "feed"
        case Emit():
            return "emit"
        case Import():
            return "import"
        case Export():
            return "export"
    assert_never(task)


def name_of(task: Task) -> str:
    """Name a task in a few words, such as `forward 3@0` or `copy param/2 disk -> device`."""
    match task:
        case Free():
            return f"free {task.buffer} {task.tier}"
        case Copy():
            return f"copy {task.buffer} {task.source} -> {task.target}"
        case Forward() | Recompute() | Backward() | InputGrad() | WeightGrad():
            return f"{kind_of(task)} {task.block}@{task.microbatch}"
        case SegmentNorm():
            return f"norm {task.chunk}"
        case GradNorm():
            return "norm"
        case SumTied():
            return f"sum {task.parameter}"
        case PackNorms():
            return "pack norms"
        case PackLosses():
            return "pack losses"
        case Send():
            return f"send {task.buffer} to {task.peer}"
        case Recv():
            return f"receive {task.buffer} from {task.peer}"
        case Update():
            return f"update {task.chunk}"
        case Feed():
            return f"feed @{task.microbatch}"
        case Emit():
            return f"emit {task.buffer}"
        case Import():
            return f"import {task.buffer}"
        case Export():
            return f"export {task.buffer}"
    assert_never(task)


def order_lanes(lanes: Iterable[Lane]) -> tuple[Lane, ...]:
    """Put lanes in the order in which they are shown: a rank's own first."""
    found = set(lanes)
    own = [lane for lane in LANES if lane in found]
    return (*own, *sorted(found - set(own), key=lambda lane: (lane.split()[-1:], lane)))


def is_lane(name: str) -> bool:
    """Whether a name is that of a lane."""
    direction, _, peer = name.partition(" ")
    return name in LANES or (direction in ("send", "receive") and peer.isdecimal())


def words_for(kind: str) -> str:
    """Spell a kind, a lane or a cause of memory for people."""
    return _WORDS.get(kind, kind.replace("_", " "))
