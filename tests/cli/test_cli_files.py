"""Commands on files: lower, check, simulate, explain, compare, clean; all of them without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import write_plan_folder
from models import make_model

from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.cluster import Cluster
from packhorse.machine.cluster_files import write_cluster
from packhorse.machine.files import read_machine, write_machine
from packhorse.machine.spec import Drive
from packhorse.model.files import format_model
from packhorse.plan.files import read_plan
from packhorse.program.digest import digest_program
from packhorse.program.text import parse_program
from packhorse.storage.extents import lay_out_extents
from packhorse.storage.kept_layout import describe_layout
from packhorse.storage.kept_state import KeptState, find_kept, name_owner
from packhorse.storage.record import Entry, create_record
from packhorse.storage.scratch_space import Scratch, ScratchPart, claim_space
from packhorse.timeline.files import format_timeline, read_timeline
from packhorse.trainer.run_folder import claim_run
from packhorse.verifier.rules import RULES


def test_lower_prints_a_program_that_parses(shell, plan_folder):
    done = shell("lower", plan_folder / "plan.json")
    assert (done.code, done.err) == (0, "")
    program = parse_program(done.out)
    assert program.kind == "train_step"
    document = shell("lower", plan_folder / "plan.json", "--json").document
    assert document["text"] == done.out
    assert document["digest"] == digest_program(program)
    assert document["tasks"] == len(program.tasks)


@pytest.mark.parametrize("kind", ["train_step", "evaluate", "load", "save", "persist", "restore"])
def test_lower_has_all_kinds(shell, plan_folder, tmp_path, kind):
    done = shell("lower", plan_folder, "--kind", kind, "--out", tmp_path / "p.txt")
    assert (done.code, done.out) == (0, "")
    assert parse_program((tmp_path / "p.txt").read_text()).kind == kind


def test_lower_has_one_rank(shell, plan_folder):
    done = shell("lower", plan_folder / "plan.json", "--rank", "1")
    assert done.code == 2
    assert "there is no rank 1" in done.err


def test_a_plan_without_its_model_says_where_it_should_be(shell, plan_folder):
    model = (plan_folder / "model.json").rename(plan_folder / "elsewhere.json")
    done = shell("lower", plan_folder / "plan.json")
    assert done.code == 2
    assert str(plan_folder / "model.json") in done.err
    assert shell("lower", plan_folder / "plan.json", "--model", model).code == 0


def test_a_plan_of_another_name_has_companions_of_that_name(shell, plan_folder):
    for old, new in (("plan.json", "big.json"), ("model.json", "big.model.json")):
        (plan_folder / old).rename(plan_folder / new)
    assert shell("lower", plan_folder / "big.json").code == 0


def test_check_proves_every_program_of_a_plan(shell, plan_folder):
    done = shell("check", plan_folder / "plan.json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok  ")
    for kind in ("train_step", "evaluate", "load", "save"):
        assert f"{kind} program of" in done.out
    document = shell("check", plan_folder / "plan.json", "--json").document
    assert document["ok"] is True
    assert set(document["rules"]) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", ["model.json", "machine.json", "profile.json", "timeline.json"])
def test_check_knows_a_file_by_its_kind(shell, plan_folder, name):
    shell("simulate", plan_folder / "plan.json")
    done = shell("check", plan_folder / name, "--json")
    assert done.code == 0
    assert done.document["kind"] == name.removesuffix(".json")


def test_check_knows_a_cluster(shell, tmp_path):
    sample = Path(__file__).parents[2] / "machines" / "eight-unlike-ranks.yaml"
    done = shell("check", sample)
    assert (done.code, done.err) == (0, "")
    document = shell("check", sample, "--json").document
    assert (document["kind"], document["ranks"], document["links"]) == ("cluster", 8, 56)
    text = sample.read_text()
    (tmp_path / "c.yaml").write_text(text.partition("links:")[0])
    assert (
        "56 of the 56 ways from rank to rank have no link"
        in shell("check", tmp_path / "c.yaml").err
    )
    (tmp_path / "c.yaml").write_text(text.replace("latency_ns: 60000", "latency: 60000"))
    done = shell("check", tmp_path / "c.yaml")
    assert done.code == 2
    assert "did you mean 'latency_ns'?" in done.err


def test_check_names_the_rule_and_the_task_that_breaks_it(shell, plan_folder):
    shell("lower", plan_folder / "plan.json", "--out", plan_folder / "p.txt")
    lines = (plan_folder / "p.txt").read_text().splitlines(keepends=True)
    index = next(at for at, line in enumerate(lines) if " UPD " in line)
    (plan_folder / "p.txt").write_text("".join(lines[:index] + lines[index + 1 :]))
    done = shell("check", plan_folder / "p.txt")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: rule coverage: ")
    document = shell("check", plan_folder / "p.txt", "--json").document
    assert document["error"]["error"] == "RuleError"


def test_check_of_a_program_uses_the_model_beside_it(shell, plan_folder, tmp_path):
    shell("lower", plan_folder / "plan.json", "--out", plan_folder / "p.txt")
    document = shell("check", plan_folder / "p.txt", "--json").document
    assert document["with_model"] is True
    alone = (plan_folder / "p.txt").rename(tmp_path / "p.txt")
    done = shell("check", alone)
    assert done.code == 0
    assert "warning: name its model for all rules" in done.err


def test_check_names_the_line_of_a_damaged_program(shell, plan_folder):
    shell("lower", plan_folder / "plan.json", "--out", plan_folder / "p.txt")
    text = (plan_folder / "p.txt").read_text().replace("home=", "hom=", 1)
    (plan_folder / "p.txt").write_text(text)
    done = shell("check", plan_folder / "p.txt")
    assert done.code == 2
    assert "p.txt: line " in done.err


def test_check_refuses_a_plan_that_does_not_fit_its_budget(shell, plan_folder):
    content = json.loads((plan_folder / "plan.json").read_text())
    content["budget_bytes"]["device"] = "2MiB"
    (plan_folder / "plan.json").write_text(json.dumps(content))
    done = shell("check", plan_folder / "plan.json")
    assert done.code == 3
    assert "rule capacity" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kind": "packhorse/plan", "version": 99}', "version 99"),
        ('{"kind": "packhorse/spell", "version": 1}', "unknown kind 'packhorse/spell'"),
        ('{"a": 1}', "names no kind"),
        ('{"a": ', "neither JSON nor YAML"),
        ("just words", "names no kind"),
        ("model_name_or_path: x\ntrain_dat: y\n", "train_dat"),
    ],
)
def test_check_refuses_what_it_cannot_read(shell, tmp_path, text, said):
    (tmp_path / "file").write_text(text)
    done = shell("check", tmp_path / "file")
    assert done.code == 2
    assert said in done.err
    assert "fix:" in done.err


def test_check_refuses_a_timeline_that_runs_backwards(shell, plan_folder):
    shell("simulate", plan_folder / "plan.json")
    path = plan_folder / "timeline.json"
    content = json.loads(path.read_text())
    first = content["spans"][0]
    first[4], first[5] = first[5] + 1, first[4]
    path.write_text(json.dumps(content))
    done = shell("check", path)
    assert done.code == 2
    assert "spans[0]" in done.err


def test_check_of_a_folder_checks_all_its_files(shell, plan_folder, tmp_path):
    shell("simulate", plan_folder / "plan.json", "--out", plan_folder / "timeline-predicted.json")
    document = shell("check", plan_folder, "--json").document
    assert document["kind"] == "run folder"
    names = [each.partition(":")[0] for each in document["checked"]]
    assert names == [
        "machine.json", "model.json", "profile.json", "plan.json", "timeline-predicted.json",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    assert shell("check", tmp_path / "empty").code == 2
    assert shell("check", tmp_path / "missing").code == 2


def test_simulate_keeps_the_promise_of_the_plan(shell, plan_folder):
    plan = read_plan(plan_folder / "plan.json")
    done = shell("simulate", plan_folder / "plan.json", "--svg", plan_folder / "t.svg", "--json")
    assert done.code == 0
    assert plan.prediction is not None
    assert done.document["step_ns"] == plan.prediction.step_ns
    timeline = read_timeline(plan_folder / "timeline.json")
    assert timeline.step_ns == plan.prediction.step_ns
    trace = json.loads((plan_folder / "timeline.trace.json").read_text())
    assert len(trace["traceEvents"]) > len(timeline.spans)
    assert (plan_folder / "t.svg").read_text().startswith("<svg")


def test_simulate_takes_programs_other_machines_and_lanes(shell, plan_folder):
    path = plan_folder / "p.txt"
    shell("lower", plan_folder / "plan.json", "--out", path)
    one = shell("simulate", path, "--json").document
    assert one["makespan_ns"] == shell("simulate", plan_folder, "--json").document["makespan_ns"]
    in_turn = shell("simulate", path, "--one-by-one", "--json").document
    assert in_turn["makespan_ns"] > one["makespan_ns"]
    there = shell("simulate", path, "--machine", "h100-80gb", "--json")
    assert there.code == 2 or there.document["makespan_ns"] != one["makespan_ns"]
    done = shell("simulate", plan_folder / "machine.json")
    assert done.code == 2
    assert "a machine cannot be simulated" in done.err


def test_simulate_draws_lanes_and_pools(shell, plan_folder):
    done = shell("simulate", plan_folder)
    assert done.out.startswith("compute ")
    assert "pool device" in done.out
    assert "wrote " in done.err
    assert max(map(len, done.out.splitlines())) <= 100


def test_an_unknown_machine_names_the_nearest(shell, plan_folder):
    done = shell("simulate", plan_folder / "plan.json", "--machine", "rtx-4080")
    assert done.code == 2
    assert "rtx-4090" in done.err


def test_explain_shows_causes_choices_and_relief(shell, plan_folder):
    done = shell("explain", plan_folder)
    assert (done.code, done.err) == (0, "")
    for word in ("Memory, device", "Step, ", "Bound by", "Choices", "Clipping"):
        assert word in done.out
    document = shell("explain", plan_folder / "plan.json", "--json").document
    plan = read_plan(plan_folder / "plan.json")
    assert plan.prediction is not None
    assert document["step_ns"] == plan.prediction.step_ns
    assert document["run"] is None
    # What was tried is listed, but not what would change the numbers.
    assert f"Faster: {document['relief'][0].split(':')[0]}" in " ".join(done.out.split())
    assert not any("clipping" in each for each in document["relief"])
    (plan_folder / "profile.json").unlink()
    assert "which are not beside it" in " ".join(shell("explain", plan_folder).out.split())
    assert shell("explain", plan_folder, "--json").document["relief"] is None


@pytest.mark.parametrize("command", ["lower", "simulate"])
def test_a_plan_of_another_model_is_told_by_the_first_difference(shell, plan_folder, command):
    other = make_model(num_layers=2, hidden=256, vocabulary=512)
    (plan_folder / "model.json").write_text(format_model(other))
    done = shell(command, plan_folder / "plan.json")
    assert done.code == 2
    assert "block 3 is layers.3 in the plan, head in the model" in done.err


def test_compare_takes_a_run_folder_or_two_timelines(shell, plan_folder):
    predicted, measured = (plan_folder / f"timeline-{n}.json" for n in ("predicted", "measured"))
    done = shell("compare", plan_folder)
    assert done.code == 2
    assert "no timeline-predicted.json and no timeline-measured.json" in done.err
    shell("simulate", plan_folder, "--one-by-one", "--out", predicted)
    shell("simulate", plan_folder, "--out", measured)
    done = shell("compare", plan_folder)
    assert (done.code, done.err) == (0, "")
    assert "predicted" in done.out
    document = shell("compare", predicted, measured, "--json").document
    assert document["step_ns"]["error"] > 0
    assert document["same_tasks"] is True
    trace = plan_folder / "both.json"
    shell("compare", plan_folder, "--trace", trace)
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {1, 2}
    assert shell("compare", predicted).code == 2
    assert shell("compare", predicted, measured, measured).code == 2


def test_compare_writes_the_rates_of_a_run_into_a_machine(shell, plan_folder):
    predicted, measured = (plan_folder / f"timeline-{n}.json" for n in ("predicted", "measured"))
    out = plan_folder / "as-measured.json"
    shell("simulate", plan_folder, "--out", predicted)
    step = read_timeline(predicted)
    slow = {"forward": 2, "backward": 2, "recompute": 2, "update": 4, "disk_read": 8}
    measured.write_text(
        format_timeline(
            replace(
                step,
                source="measured",
                spans=tuple(
                    replace(s, end_ns=s.start_ns + s.duration_ns * slow.get(s.kind, 1))
                    for s in step.spans
                ),
            )
        )
    )
    done = shell("compare", plan_folder, "--machine-out", out, "--json")
    assert done.code == 0
    factors = done.document["machine_factors"]
    assert factors["compute"] == 0.5
    assert factors["update"] == 0.25
    before, after = read_machine(plan_folder / "machine.json"), read_machine(out)
    assert after.compute_scale == 2 * before.compute_scale
    assert after.updates[0].parameters_per_s == before.updates[0].parameters_per_s / 4
    assert after.tiers == before.tiers
    assert shell("check", out).code == 0
    shown = shell("compare", plan_folder, "--machine-out", out)
    assert "compute at 50.0 %, updates at 25.0 % of the planned rates" in " ".join(
        shown.out.split()
    )
    refused = shell("compare", predicted, measured, "--machine-out", out)
    assert refused.code == 2
    assert "do not say on which machine" in refused.err
    (plan_folder / "machine.json").unlink()
    refused = shell("compare", plan_folder, "--machine-out", out)
    assert refused.code == 2
    assert "has no machine.json" in refused.err


def test_compare_lays_the_process_beside_the_plan(shell, plan_folder):
    for name in ("predicted", "measured"):
        shell("simulate", plan_folder, "--out", plan_folder / f"timeline-{name}.json")
    assert shell("compare", plan_folder, "--json").document["process_bytes"] is None
    lines = [{"step": 1, "process_gib": 0.25}, {"step": 2, "process_gib": 0.5}]
    (plan_folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    plan = read_plan(plan_folder / "plan.json")
    assert plan.prediction is not None
    found = shell("compare", plan_folder, "--json").document["process_bytes"]
    assert found["measured"] == 1 << 29
    assert found["predicted"] == sum(plan.prediction.peak_bytes["device"].values())


def make_leftovers(folder: Path) -> None:
    (folder / "checkpoint-4.tmp-0123abcd").mkdir(parents=True)
    (folder / "checkpoint-4.tmp-0123abcd" / "model.safetensors").write_bytes(bytes(1000))
    (folder / "checkpoint-2.old-0123abcd").mkdir()
    (folder / "packhorse-tier.scratch").write_bytes(bytes(2000))
    (folder / "notes.txt").write_text("mine")


def test_clean_says_what_it_is_and_removes_nothing_unasked(shell, tmp_path):
    make_leftovers(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = shell("clean", tmp_path)
    assert done.code == 2
    assert "add --yes" in done.err
    assert "checkpoint-4.tmp-0123abcd: an unfinished save" in done.out
    assert sorted(tmp_path.iterdir()) == before


def test_clean_leaves_a_live_run_alone(shell, tmp_path):
    make_leftovers(tmp_path)
    before = sorted(tmp_path.iterdir())
    with claim_run(tmp_path):
        done = shell("clean", tmp_path, "--yes")
        assert done.code == 2
        assert f"in use by process {os.getpid()}" in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_training_in_the_folder_of_a_live_run_is_refused_at_once(shell, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    run = tmp_path / "run"
    recipe.write_text(f"model_name_or_path: m\ntrain_data: d.jsonl\noutput_dir: {run}\n")
    with claim_run(run):
        for more in ((), ("--resume",)):
            done = shell("train", recipe, *more)
            assert done.code == 2
            assert f"the run folder is in use by process {os.getpid()}" in done.err


def test_clean_removes_leftovers_and_nothing_else(shell, tmp_path):
    make_leftovers(tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    document = shell("clean", tmp_path, "--yes", "--json").document
    assert document["removed"] is True
    assert [Path(each["path"]).name for each in document["found"]] == [
        "checkpoint-2.old-0123abcd", "checkpoint-4.tmp-0123abcd", "packhorse-tier.scratch",
    ]  # fmt: skip
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-1", "checkpoint-2", "notes.txt"]
    done = shell("clean", tmp_path)
    assert (done.code, done.out) == (0, f"nothing unfinished in {tmp_path}\n")
    assert shell("clean", tmp_path / "missing").code == 2


def keep_state(scratch: Path, run: Path, step: int) -> KeptState:
    """What a killed run leaves in its scratch folder."""
    keep_in(Scratch(parts=(ScratchPart(folder=scratch),)), run, step, size_bytes=4096)
    ((kept,), _) = find_kept(scratch)
    return kept


def keep_in(scratch: Scratch, run: Path, step: int, *, size_bytes: int) -> None:
    extents = lay_out_extents({"grad/0": size_bytes})
    with claim_space(scratch) as space:
        space.create_file("state", size_bytes).close()
        header = {"owner": name_owner(run), **describe_layout(space, extents, ())}
        record = create_record(space.file_path("record"), header, num_buffers=0)
        record.add(Entry(step=step, slots=(), state={}))
        record.close()


def test_clean_says_which_state_it_would_give_up(shell, tmp_path):
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    keep_state(scratch, run, 12)
    make_machine_file(run, scratch)
    for path in (run, scratch):
        done = shell("clean", path)
        assert done.code == 2
        assert f"the state of the run in {run} after step 12, 4.00 KiB" in done.out
        assert "the record of packhorse-state.scratch" in done.out
    assert shell("clean", run, "--yes").code == 0
    assert find_kept(scratch) == ((), ())
    assert not list(scratch.glob("*.scratch"))


def test_clean_of_a_run_leaves_the_state_of_another_alone(shell, tmp_path):
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    kept = keep_state(scratch, tmp_path / "other", 12)
    (scratch / "packhorse-old.scratch").write_bytes(bytes(4096))
    make_machine_file(run, scratch)
    document = shell("clean", run, "--yes", "--json").document
    assert [Path(each["path"]).name for each in document["found"]] == ["packhorse-old.scratch"]
    assert find_kept(scratch) == ((kept,), ())
    assert shell("clean", scratch, "--yes").code == 0
    assert find_kept(scratch) == ((), ())


def keep_striped_state(first: Path, second: Path, run: Path, step: int) -> None:
    """What a killed run leaves in two scratch folders."""
    scratch = Scratch(parts=(ScratchPart(folder=first), ScratchPart(folder=second)))
    keep_in(scratch, run, step, size_bytes=3 << 20)


def test_clean_finds_every_part_of_a_state_and_no_other(shell, tmp_path):
    run, first, second, third = (tmp_path / name for name in ("run", "a", "b", "c"))
    run.mkdir()
    keep_striped_state(first, second, run, 12)
    keep_striped_state(third, second, tmp_path / "other", 7)
    make_machine_file(run, first, second)
    done = shell("clean", run)
    assert done.out.count(f"the state of the run in {run} after step 12") == 2
    assert "no state" not in done.out
    assert shell("clean", run, "--yes").code == 0
    assert find_kept(first) == ((), ())
    ((kept,), _) = find_kept(third)
    assert [part.parent for part in kept.parts] == [second]
    assert len(list(second.glob("*.scratch"))) == 1
    # Named alone, the first folder speaks for the others.
    done = shell("clean", third)
    assert done.out.count("the state of the run in") == 2
    assert shell("clean", third, "--yes").code == 0
    assert not list(second.glob("*.scratch"))


def test_clean_gives_state_up_that_cannot_be_read_but_not_that_of_another_run(shell, tmp_path):
    run, other, first, second = (tmp_path / name for name in ("run", "other", "a", "b"))
    run.mkdir()
    keep_striped_state(first, second, other, 12)
    make_machine_file(run, first, second)
    ((kept,), _) = find_kept(first)
    kept.parts[0].rename(tmp_path / "away")
    assert shell("clean", run, "--yes").out == f"nothing unfinished in {run}\n"
    (tmp_path / "away").rename(kept.parts[0])
    assert find_kept(first) == ((kept,), ())
    with kept.file.open("r+b") as file:
        file.truncate(4096)
    done = shell("clean", first, "--yes")
    assert done.out.count("state that cannot be read: the file it speaks of") == 3
    assert not list(tmp_path.rglob("*.scratch"))


def make_machine_file(run: Path, scratch: Path, *others: Path) -> None:
    machine = load_known_machine("laptop-16gb")
    drives = tuple(
        Drive(
            path=str(folder),
            budget_bytes=1,
            read_bytes_per_s=1,
            write_bytes_per_s=1,
            measured_bytes=1,
            direct=True,
            block_bytes=4096,
            num_threads=1,
            huge_pages=True,
        )
        for folder in (scratch, *others)
    )
    tiers = [
        replace(tier, path=str(scratch), drives=drives if others else ()) if tier.path else tier
        for tier in machine.tiers
    ]
    write_machine(replace(machine, tiers=tuple(tiers)), run / "machine.json")


def test_plans_are_read_without_torch(tmp_path):
    write_plan_folder(tmp_path)
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "safetensors", "transformers"]))
from packhorse.cli.main import run_arguments
for command in ("lower", "check", "simulate", "explain"):
    assert run_arguments([command, {str(tmp_path / "plan.json")!r}, "--json"]) == 0, command
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_clean_finds_the_scratch_files_of_every_rank(shell, tmp_path):
    machines = []
    for rank in range(2):
        scratch = tmp_path / "scratch" / f"rank-{rank}"
        scratch.mkdir(parents=True)
        (scratch / "packhorse-tier.scratch").write_bytes(bytes(1000 + rank))
        machine = load_known_machine("laptop-16gb")
        tiers = tuple(
            replace(tier, path=str(scratch), drives=()) if tier.name == "disk" else tier
            for tier in machine.tiers
        )
        machines.append(replace(machine, tiers=tiers))
    run = tmp_path / "run"
    run.mkdir()
    write_cluster(
        Cluster(name="two", ranks=tuple(machines), hosts=("here", "here")), run / "machine.json"
    )
    document = shell("clean", run, "--yes", "--json").document
    assert [each["size_bytes"] for each in document["found"]] == [1000, 1001]
    assert not list(tmp_path.rglob("*.scratch"))
