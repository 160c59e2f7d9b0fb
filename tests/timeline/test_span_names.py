from typing import get_args

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
from packhorse.timeline.names import (
    KINDS,
    LANES,
    is_lane,
    kind_of,
    name_of,
    order_lanes,
    words_for,
)

COMPUTE = {"block": 3, "microbatch": 1, "reads": (), "writes": (), "workspace_bytes": 0}
NAMES = {
    Feed(microbatch=1, writes=()): ("feed @1", "feed"),
    Forward(**COMPUTE): ("forward 3@1", "forward"),
    Recompute(**COMPUTE): ("recompute 3@1", "recompute"),
    Backward(**COMPUTE): ("backward 3@1", "backward"),
    InputGrad(**COMPUTE): ("input_grad 3@1", "input_grad"),
    WeightGrad(**COMPUTE): ("weight_grad 3@1", "weight_grad"),
    SegmentNorm(chunk=2, reads=(), writes=(), workspace_bytes=0): ("norm 2", "norm"),
    GradNorm(reads=(), writes=()): ("norm", "norm"),
    SumTied(parameter="w", reads=(), writes=()): ("sum w", "backward"),
    PackNorms(reads=(), writes=()): ("pack norms", "norm"),
    PackLosses(reads=(), writes=()): ("pack losses", "emit"),
    Send(buffer="b", peer=1): ("send b to 1", "send"),
    Recv(buffer="b", peer=0): ("receive b from 0", "receive"),
    Update(chunk=2, where="device", reads=(), writes=(), workspace_bytes=0): (
        "update 2",
        "update",
    ),
    Copy(buffer="b", source="disk", target="device"): ("copy b disk -> device", "disk_read"),
    Copy(buffer="b", source="device", target="disk"): ("copy b device -> disk", "disk_write"),
    Copy(buffer="b", source="host", target="device"): ("copy b host -> device", "copy_in"),
    Copy(buffer="b", source="device", target="host"): ("copy b device -> host", "copy_out"),
    Free(buffer="b", tier="host"): ("free b host", "free"),
    Emit(buffer="b"): ("emit b", "emit"),
    Import(buffer="b"): ("import b", "import"),
    Export(buffer="b"): ("export b", "export"),
}


def test_every_task_has_its_name_and_kind():
    assert {type(task) for task in NAMES} == set(get_args(Task))
    assert {task: (name_of(task), kind_of(task)) for task in NAMES} == NAMES


def test_kinds_and_lanes_are_complete():
    assert {kind for _, kind in NAMES.values()} == set(KINDS)
    assert set(LANES) == set(get_args(OwnLane))
    assert all(is_lane(lane_of(task)) for task in NAMES)
    assert not any(map(is_lane, ("send", "receive x", "computes")))


def test_lanes_of_a_rank_come_before_those_to_others():
    found = ["receive 10", "send 2", "disk_read", "send 10", "compute", "receive 2"]
    assert order_lanes(found) == (
        "compute",
        "disk_read",
        "receive 10",
        "send 10",
        "receive 2",
        "send 2",
    )


def test_words_for_people():
    assert words_for("disk_read") == "read from disk"
    assert words_for("copy_in") == "copy in"
    assert words_for("forward") == "forward"
