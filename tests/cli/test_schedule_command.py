"""`packhorse schedule`, and `packhorse check` of a schedule."""

from __future__ import annotations

import pytest
from picture_texts import assert_texts_are_apart

from packhorse.cli.schedule_costs import read_costs
from packhorse.errors import InputError
from packhorse.report.svg import WIDTH
from packhorse.schedule.costs import UNIT_BYTES, even_costs
from packhorse.schedule.csv_text import format_csv, parse_csv
from packhorse.schedule.families import FAMILIES
from packhorse.schedule.finding import NAMES
from tests.schedule.schedule_cases import make_even

SIZES = ("--ranks", 4, "--microbatches", 8)
OWN = """
from packhorse.schedule.spec import Backward, Forward, Schedule


def straight(ranks, microbatches, costs):
    times = range(microbatches)
    orders = [
        [task(stage=rank, microbatch=m) for task in (Forward, Backward) for m in times]
        for rank in range(ranks)
    ]
    return Schedule(placement={rank: rank for rank in range(ranks)}, orders=orders)


def circle(ranks, microbatches, costs):
    made = straight(ranks, microbatches, costs)
    made.orders[0].insert(1, made.orders[0].pop(microbatches))
    return made


def small(ranks, microbatches, costs):
    return straight(ranks, microbatches - 1, costs)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_shown(shell, name):
    done = shell("schedule", name, *SIZES)
    assert (done.code, done.err) == (0, "schedule: searching\n" if name == "searched" else "")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"{name}: 4 ranks, ")
    assert all(lines[1 + rank].startswith(f"rank {rank}  ") for rank in range(4))
    assert "with the flush" in done.out
    assert lines[-4].startswith("rank 0: 0F0 ")


def test_both_ways_of_counting_idle_time(shell):
    done = shell("schedule", "zb-v", *SIZES, "--json").document
    assert done["bubble"] == pytest.approx(3 / (6 * 8 + 3))
    assert done["idle_in_span"] == 0
    assert done["idle_in_span_of_rank"] == [0] * 4
    assert done["peak_shares"] == [4] * 4
    assert done["orders"][0][:2] == ["0F0", "0F1"]
    assert done["placement"]["7"] == [0]
    assert "step 25.5 ms, idle 5.9 % with the flush, 0.0 % in the ranks' own spans" in (
        shell("schedule", "zb-v", *SIZES).out
    )


def test_one_of_everything(shell):
    done = shell("schedule", "1f1b", "--ranks", 1, "--microbatches", 1)
    assert done.out.startswith("1f1b: 1 rank, 1 stage, 1 microbatch\nrank 0  F0--B0------\n")


def test_pictures_and_csv_are_written(shell, tmp_path):
    svg, csv = tmp_path / "new" / "a.svg", tmp_path / "a.csv"
    done = shell("schedule", "zb-h1", *SIZES, "--svg", svg, "--csv", csv)
    assert done.code == 0
    assert f"wrote {svg}, {csv}" in done.err
    assert "zb-h1: 4 ranks, 4 stages, 8 microbatches" in svg.read_text()
    assert parse_csv(csv.read_text()) == make_even("zb-h1", 4, 8)
    shown = shell("schedule", csv, "--json").document
    assert shown["orders"] == shell("schedule", "zb-h1", *SIZES, "--json").document["orders"]
    done = shell("schedule", csv, "--ranks", 3)
    assert (done.code, done.out) == (2, "")
    assert "--ranks is 3, and the file has 4" in done.err


def test_all_names_are_compared(shell):
    done = shell("schedule", *SIZES, "--memory-cap", 4)
    assert (done.code, done.err) == (0, "")
    assert all(f"\n{name} " in done.out for name in FAMILIES)
    lines = shell("schedule", *SIZES, "--memory-cap", 4, "--json").document["schedules"]
    fits = {line["name"] for line in lines if line["fits"]}
    assert fits == {"1f1b", "zb-h1", "zb-v", "v-half", "v-min"}
    assert shell("schedule", *SIZES, "--csv", "a.csv").code == 2
    assert "--stages is for one schedule" in shell("schedule", *SIZES, "--stages", 4).err


def test_costs_and_caps_change_what_is_found(shell):
    costs = ("--costs", "F=1,I=1.3,W=0.6,send=0.2", "--memory-cap", 3)
    found = shell("schedule", "searched", *SIZES, *costs, "--json").document
    named = shell("schedule", *SIZES, *costs, "--json").document["schedules"]
    best_ns = min(line["makespan_ns"] for line in named if line["fits"])
    assert found["makespan_ns"] < best_ns
    assert max(found["peak_shares"]) <= 3


def test_more_than_the_cap_is_refused(shell):
    done = shell("schedule", "gpipe", *SIZES, "--memory-cap", "8,8,7,8")
    assert done.code == 3
    assert "1 rank saves more than it may" in done.err
    assert "rank 2 saves 8 and may save 7" in done.err
    assert done.out.startswith("gpipe: ")
    done = shell("schedule", "gpipe", *SIZES, "--memory-cap", 2, "--json")
    assert (done.code, list(done.document)) == (3, ["error"])


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_of_replicas_are_legible(shell, tmp_path, name):
    svg = tmp_path / "a.svg"
    sizes = ("--ranks", 16, "--microbatches", 64, "--replicas", 64, "--costs", "reduce=9")
    assert shell("schedule", name, *sizes, "--svg", svg).code == 0
    assert_texts_are_apart(svg.read_text(), WIDTH)
    assert f"{name}: 16 ranks, " in svg.read_text()
    assert "64 microbatches, 64 replicas" in svg.read_text()


def test_replicas_are_shown_once_with_what_summing_takes(shell):
    alone = shell("schedule", "zb-v", *SIZES, "--json").document
    more = ("--replicas", 16, "--costs", "F=1,reduce=3")
    done = shell("schedule", "zb-v", *SIZES, *more, "--json").document
    assert (done["replicas"], done["ranks_of_all"], done["microbatches_of_all"]) == (16, 64, 128)
    assert done["orders"] == alone["orders"]
    assert done["placement"]["7"] == list(range(0, 64, 4))
    # Rank 3 sums a half of 3 ms beside its last tasks, and the other half behind them.
    assert done["makespan_ns"] == alone["makespan_ns"] + 1_500_000
    said = shell("schedule", "zb-v", *SIZES, *more).out
    assert "one of 16 replicas, all alike: 64 ranks in all, 128 microbatches a step" in said
    assert "A all-reduce" in said
    lines = shell("schedule", *SIZES, *more, "--json").document["schedules"]
    (line,) = [line for line in lines if line["name"] == "zb-v"]
    assert line["makespan_ns"] == done["makespan_ns"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zb-v", "--ranks", 4), "--microbatches is missing"),
        (("zb-v", "--microbatches", 4), "--ranks is missing"),
        (("zbv", *SIZES), "nearest: zb-v"),
        (("zb-v", *SIZES, "--stages", 4), "zb-v on 4 ranks has 8 stages, not 4"),
        (("none.csv",), "cannot read the file"),
        (("none.py:vee", *SIZES), "there is no such file"),
        (("zb-v", *SIZES, "--costs", "X=1"), "'X=1' is no cost"),
        (("zb-v", *SIZES, "--costs", "reduce=1"), "reduce is what summing gradients over replicas"),
        (("zb-v", *SIZES, "--machine", "h200"), "--machine has no effect without --model"),
        (("zb-v", *SIZES, "--link", "1GB"), "--link has no effect without --model"),
    ],
)
def test_what_cannot_be_done_ends_with_2(shell, arguments, said):
    done = shell("schedule", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_ones_own_schedule_is_proved_right_or_told_why_not(shell, own):
    done = shell("check", f"{own}:straight", *SIZES)
    assert done.code == 0
    said = " ".join(done.out.split())
    assert "a schedule of 64 tasks: 4 ranks, 4 stages, 8 microbatches" in said
    assert shell("schedule", f"{own}:straight", *SIZES).code == 0
    done = shell("check", f"{own}:circle", *SIZES)
    assert (done.code, done.out) == (3, "")
    assert "rule deadlock: 2 ranks wait for each other in a circle" in done.err
    assert "rank 0 waits at task 1, 0B0, for 1B0, which rank 1 has as task 8" in done.err
    assert "rank 1 waits at task 1, 1F1, for 0F1, which rank 0 has as task 2" in done.err
    done = shell("check", f"{own}:small", *SIZES)
    assert done.code == 2
    assert "the schedule is of 4 ranks and 7 microbatches, not of 4 and 8" in done.err
    assert shell("check", f"{own}:straight").code == 2


def test_check_reads_csv_and_keeps_sizes_for_schedules(shell, tmp_path, plan_folder):
    path = tmp_path / "a.csv"
    path.write_text(format_csv(make_even("dualpipe-v", 2, 5)))
    done = shell("check", path, "--json")
    assert done.document["kind"] == "schedule"
    assert (done.document["ranks"], done.document["microbatches"]) == (2, 5)
    path.write_text("0F0,0B0\n1F0,1Q0\n")
    done = shell("check", path)
    assert done.code == 2
    assert f"where: {path}: row 2, column 2" in done.err
    done = shell("check", plan_folder / "plan.json", "--ranks", 4)
    assert done.code == 2
    assert "--ranks and --microbatches are for schedules" in done.err


def test_costs_as_typed():
    assert read_costs("", None, 3) == even_costs(3)
    assert read_costs("F=0.5, W=3/4,send=0.1", "4", 2) == even_costs(
        2,
        forward_ns=500_000,
        weight_grad_ns=750_000,
        send_ns=100_000,
        cap_bytes=(4 * UNIT_BYTES,) * 2,
    )
    along = read_costs("F=1:2:3:4,saved=1", "1.5,2", 2)
    assert [part.forward_ns for part in along.parts] == [1e6, 2e6, 3e6, 4e6]
    assert [part.input_grad_ns for part in along.parts] == [500_000] * 4
    assert sum(part.saved_bytes for part in along.parts) == 2 * UNIT_BYTES
    assert along.cap_bytes == (3 * UNIT_BYTES // 2, 2 * UNIT_BYTES)


@pytest.mark.parametrize(
    ("costs", "cap", "said"),
    [
        ("F", None, "'F' is no cost"),
        ("G=1", None, "'G=1' is no cost"),
        ("F=1,F=2", None, "F is given twice"),
        ("F=-1", None, "'-1' is no number"),
        ("F=a", None, "'a' is no number"),
        ("F=1/0", None, "'1/0' is no number"),
        ("F=1:2,I=1:2:3", None, "F has 2 numbers and I has 3"),
        ("send=1:2", None, "send has several numbers"),
        ("F=0,I=0,W=0", None, "nothing takes any time"),
        ("", "1,2,3", "3 caps are given for 2 ranks"),
        ("", "x", "'x' is no number"),
    ],
)
def test_costs_that_are_wrong(costs, cap, said):
    with pytest.raises(InputError) as found:
        read_costs(costs, cap, 2)
    assert said in found.value.what
    assert found.value.fix
