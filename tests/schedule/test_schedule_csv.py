"""torch's CSV: what we write, torch reads and finds right; what torch writes, we read."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given

from packhorse.errors import FileFormatError, RuleError
from packhorse.schedule.csv_text import format_csv, parse_csv
from packhorse.schedule.proof import check_schedule
from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, WeightGrad
from tests.schedule.schedule_cases import NAMES, make_even, named_schedules


@given(case=named_schedules())
def test_what_was_written_is_read_back(case: tuple[str, Schedule]) -> None:
    _, schedule = case
    assert parse_csv(format_csv(schedule)) == schedule


def test_cells_of_every_kind() -> None:
    schedule = parse_csv("0F0,,1F0,\n2F0,2I0,2W0,(2F1;2B1)OVERLAP_F_B\n")
    assert schedule.placement == {0: (0,), 1: (0,), 2: (1,)}
    assert schedule.orders[1] == (
        Forward(stage=2, microbatch=0),
        InputGrad(stage=2, microbatch=0),
        WeightGrad(stage=2, microbatch=0),
        Forward(stage=2, microbatch=1),
        Backward(stage=2, microbatch=1),
    )


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("0F0,0X0", "'0X0' is no task", "row 1, column 2"),
        ("0F0\n1F", "'1F' is no task", "row 2, column 1"),
        ("0F0,0SEND_F0", "'0SEND_F0' is a transfer", "row 1, column 2"),
        ("0UNSHARD,0F0", "'0UNSHARD' is a transfer", "row 1, column 1"),
        (",,\n", "the text has no tasks", "row 1"),
        ("", "the text has no tasks", "row 1"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, what: str, where: str) -> None:
    with pytest.raises(FileFormatError) as found:
        parse_csv(text)
    assert found.value.what.startswith(what)
    assert found.value.where == where


@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_it_and_finds_it_right(name: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make_even(name, 4, 8)
    rows = list(csv.reader(io.StringIO(format_csv(schedule))))
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    assert [[str(action) for action in actions[rank]] for rank in range(4)] == rows
    found = schedules._validate_schedule(actions, 4, schedule.num_stages, 8)
    assert found == {stage: ranks[0] for stage, ranks in schedule.placement.items()}


def list_torch(torch_name: str, *, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """What torch computes for four ranks, dumped as torch dumps it and read by us."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = getattr(schedules, torch_name)
    maker = kind.__new__(kind)
    maker.pp_group_size, maker.n_local_stages = 4, stages_per_rank
    maker._stages = [None] * stages_per_rank
    maker.num_stages = maker._num_stages = 4 * stages_per_rank
    maker._n_microbatches = num_microbatches
    maker.number_of_rounds = max(1, num_microbatches // 4)
    maker.microbatches_per_round = num_microbatches // maker.number_of_rounds
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows(maker._calculate_single_rank_operations(rank) for rank in range(4))
    return parse_csv(text.getvalue())


@pytest.mark.parametrize(
    ("torch_name", "name", "num_microbatches"),
    [
        ("ScheduleZBVZeroBubble", "zb-v", 10),
        ("ScheduleZBVZeroBubble", "zb-v", 3),
        ("ScheduleDualPipeV", "dualpipe-v", 11),
        ("ScheduleInterleaved1F1B", "interleaved", 12),
    ],
)
def test_torch_lists_are_ours(torch_name: str, name: str, num_microbatches: int) -> None:
    listed = list_torch(torch_name, stages_per_rank=2, num_microbatches=num_microbatches)
    assert listed == make_even(name, 4, num_microbatches)


def test_torch_lists_that_are_not_ours_are_judged() -> None:
    check_schedule(
        list_torch("ScheduleInterleavedZeroBubble", stages_per_rank=2, num_microbatches=8)
    )
    # Backwards last in, first out: right for torch, but with other sums.
    with pytest.raises(RuleError, match="rule order: rank 0 computes 4B6 after 4B7"):
        check_schedule(list_torch("ScheduleLoopedBFS", stages_per_rank=2, num_microbatches=8))
