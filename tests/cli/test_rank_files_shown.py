"""Commands on the files of several ranks: explain, lower, simulate, compare, check, clean."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from packhorse.compiler.ranks import cut_stages
from packhorse.machine.cluster_files import read_cluster, write_cluster
from packhorse.plan.rank_files import read_rank_plans
from packhorse.profile.files import read_profile
from packhorse.program.text import parse_program
from packhorse.search.rank_plans import predict_ranks
from packhorse.timeline.files import format_timeline, name_for_rank, read_timeline
from tests.support.rank_sets import make_case

CASE = make_case()


@pytest.fixture
def folder(tmp_path) -> Path:
    CASE.write(tmp_path / "plans")
    return tmp_path / "plans"


def test_explain_says_all_of_every_rank(shell, folder):
    done = shell("explain", folder / "plan.json")
    assert (done.code, done.err) == (0, "")
    for words in ("Order, 1f1b of 2 stages", "Rank 0, blocks", "Rank 1, blocks", "Busiest: "):
        assert words in done.out
    document = shell("explain", folder, "--json").document
    assert document["schedule"] == "1f1b"
    assert len(document["ranks"]) == 2
    assert document["bottleneck"].startswith("busiest: compute of rank ")
    (folder / "profile.json").unlink()
    assert "which are not beside it" in " ".join(shell("explain", folder).out.split())


def test_lower_prints_the_program_of_each_rank(shell, folder):
    for rank in (0, 1):
        done = shell("lower", folder / "plan.json", "--rank", rank)
        assert (done.code, done.err) == (0, "")
        program = parse_program(done.out)
        assert program.rank == rank
        assert any(type(task).__name__ == "Send" for task in program.tasks)
    assert parse_program(shell("lower", folder, "--kind", "evaluate").out).kind == "evaluate"
    done = shell("lower", folder / "plan.json", "--rank", "2")
    assert done.code == 2
    assert "there is no rank 2: the plan is for ranks 0 to 1" in done.err


def test_a_program_of_a_rank_is_not_simulated_alone(shell, folder):
    shell("lower", folder / "plan.json", "--rank", "1", "--out", folder / "one.txt")
    done = shell("simulate", folder / "one.txt")
    assert done.code == 2
    assert "the program of rank 1 of several" in done.err


def test_simulate_writes_a_timeline_for_each_rank_and_one_trace(shell, folder):
    done = shell("simulate", folder / "plan.json", "--svg", folder / "step.svg")
    assert (done.code, done.err.count("wrote")) == (0, 1)
    rows = [line for line in done.out.splitlines() if line.startswith("rank ")]
    assert [row[:6] for row in rows[:2]] == ["rank 0", "rank 1"]
    assert all({"F", "B"} <= set(row) for row in rows[:2])
    names = ("timeline.json", "timeline-rank-1.json")
    timelines = [read_timeline(folder / name) for name in names]
    assert [each.rank for each in timelines] == [0, 1]
    assert max(each.step_ns for each in timelines) == CASE.plans.step_ns
    trace = json.loads((folder / "timeline.trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
    assert "rank 1" in (folder / "step.svg").read_text()
    out = folder / "other" / "t.json"
    document = shell("simulate", folder, "--out", out, "--json").document
    assert [Path(each).name for each in document["files"]] == [
        "t.json", "t-rank-1.json", "t.trace.json",
    ]  # fmt: skip
    assert document["step_ns"] == CASE.plans.step_ns
    assert [each["compute_ns"] for each in document["ranks"]] == list(CASE.plans.compute_ns)
    for name in names:
        assert shell("check", folder / name).code == 0


def test_simulate_on_other_machines(shell, folder):
    cluster = CASE.cluster
    slower = tuple(
        replace(each, memory_bytes_per_s=each.memory_bytes_per_s / 4) for each in cluster.ranks
    )
    write_cluster(replace(cluster, ranks=slower), folder / "slow.json")
    before = shell("simulate", folder, "--json").document
    after = shell("simulate", folder, "--machine", folder / "slow.json", "--json").document
    assert after["step_ns"] > before["step_ns"]
    write_cluster(make_case(3).cluster, folder / "three.json")
    done = shell("simulate", folder, "--machine", folder / "three.json")
    assert done.code == 2
    assert "three.json has 3 ranks, and the plan is for 2" in done.err
    assert shell("simulate", folder, "--one-by-one").code == 2
    (folder / "machine.json").unlink()
    done = shell("simulate", folder)
    assert done.code == 2
    assert "there is no machine.json beside the plan" in done.err


def write_run(folder, factor=2):
    """Timelines as a run leaves them, the second rank so many times slower than planned."""
    plans = read_rank_plans(folder / "plan.json")
    profile = read_profile(folder / "profile.json")
    parts = cut_stages(plans.pipeline, CASE.model)
    timelines = predict_ranks(
        plans.ranks, parts, (profile, profile), read_cluster(folder / "machine.json").ranks
    )
    for timeline in timelines:
        slow = factor if timeline.rank else 1
        spans = tuple(
            replace(each, start_ns=each.start_ns * slow, end_ns=each.end_ns * slow)
            for each in timeline.spans
        )
        measured = replace(
            timeline, source="measured", spans=spans, since_ns=timeline.since_ns * slow
        )
        for name, each in (("predicted", timeline), ("measured", measured)):
            path = folder / name_for_rank(f"timeline-{name}.json", timeline.rank)
            path.write_text(format_timeline(each))


def test_compare_lays_every_rank_side_by_side(shell, folder):
    done = shell("compare", folder)
    assert done.code == 2
    assert "no timeline-predicted.json and no timeline-measured.json" in done.err
    assert "timeline-measured-rank-1.json" in done.err
    write_run(folder)
    done = shell("compare", folder)
    assert (done.code, done.err) == (0, "")
    for words in ("rank 0", "rank 1", "idle, of its step", "-50.0 %"):
        assert words in done.out
    one = shell("compare", folder, "--rank", "1").out
    assert one.startswith("rank 1\n")
    assert "busy time by lane" in one
    assert shell("compare", folder, "--rank", "2").code == 2
    assert "timeline-measured-rank-1.json: a measured timeline" in shell("check", folder).out
    document = shell("compare", folder, "--json").document
    assert [each["rank"] for each in document["ranks"]] == [0, 1]
    assert document["ranks"][1]["step_ns"]["error"] == pytest.approx(-0.5)
    assert set(document["ranks"][0]["idle"]) == {"predicted", "measured"}


def test_compare_writes_a_trace_and_the_machines_as_measured(shell, folder):
    write_run(folder)
    trace, machines = folder / "both.json", folder / "as-measured.json"
    done = shell("compare", folder, "--trace", trace, "--machine-out", machines)
    assert done.code == 0
    assert "rank 1: " in done.out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3, 4}
    before, after = CASE.cluster.ranks, read_cluster(machines).ranks
    assert after[0].compute_scale == pytest.approx(before[0].compute_scale)
    assert after[1].compute_scale == pytest.approx(2 * before[1].compute_scale)
    assert [each.peers for each in after] == [each.peers for each in before]


def move_scratch(cluster, scratch):
    """Each rank's own folder in one, as training gives it."""
    return replace(
        cluster,
        ranks=tuple(
            replace(
                machine,
                tiers=tuple(
                    replace(tier, path=str(scratch / f"rank-{rank}"), drives=())
                    if tier.name == "disk"
                    else tier
                    for tier in machine.tiers
                ),
            )
            for rank, machine in enumerate(cluster.ranks)
        ),
    )


def test_clean_finds_the_scratch_of_every_rank(shell, tmp_path):
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    write_cluster(move_scratch(CASE.cluster, scratch), run / "machine.json")
    for rank in (0, 1):
        (scratch / f"rank-{rank}").mkdir(parents=True)
        (scratch / f"rank-{rank}" / "packhorse-tier.scratch").write_bytes(bytes(4096))
    document = shell("clean", run, "--yes", "--json").document
    assert [Path(each["path"]).parent.name for each in document["found"]] == ["rank-0", "rank-1"]
    assert not list(scratch.rglob("*.scratch"))
    assert shell("clean", run).out == f"nothing unfinished in {run}\n"


def test_clean_of_the_folder_above_finds_the_ranks_in_it(shell, tmp_path):
    scratch = tmp_path / "scratch"
    for rank in (0, 1):
        (scratch / f"rank-{rank}").mkdir(parents=True)
    (scratch / "rank-1" / "packhorse-tier.scratch").write_bytes(bytes(4096))
    done = shell("clean", scratch, "--yes")
    assert "rank-1/packhorse-tier.scratch: a scratch file that holds no state" in done.out
    assert not list(scratch.rglob("*.scratch"))


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "safetensors", "transformers"]))
from packhorse.cli.main import run_arguments
for command in ("explain", "lower", "simulate", "check"):
    assert run_arguments([command, sys.argv[1]]) == 0, command
"""


def test_ranks_are_shown_without_torch(folder):
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
