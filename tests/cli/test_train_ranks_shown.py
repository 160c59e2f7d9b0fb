"""`packhorse train` under torchrun: one spawn of two ranks, resumed by one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import run_shell, write_tiny_recipe

from packhorse.plan.rank_files import read_rank_plans
from packhorse.timeline.files import read_timeline

ROOT = Path(__file__).parents[2]
CLUSTER = """
kind: packhorse/cluster
version: 1
name: pair
ranks:
  - {machine: machine.json, count: 2, host: one}
links:
  all: {bytes_per_s: 2.0e+9, latency_ns: 20000}
"""
PLAN = {"tied_sum": "per_step", "microbatch_rows": 1, "schedule": "1f1b"}


def train_on_two(folder: Path, recipe: Path, *arguments: str):
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "packhorse", "train", str(recipe), "--machine", str(folder / "pair.yaml")),
        *arguments,
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=110, check=False,
    )  # fmt: skip


def write_recipe(folder: Path, name: str) -> Path:
    return write_tiny_recipe(
        folder,
        bf16=False,
        plan=PLAN,
        per_device_train_batch_size=None,
        output_dir=str(folder / name),
    )


def read_losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    recipe = write_recipe(folder, "two")
    (folder / "pair.yaml").write_text(CLUSTER)
    done = train_on_two(folder, recipe, "--set", "max_steps=2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["steps"] == 2
    return folder


def test_the_run_folder_has_the_files_of_all_ranks(folder: Path) -> None:
    run = folder / "two"
    plans = read_rank_plans(run / "plan.json")
    assert len(plans.ranks) == 2
    for side, source in (("predicted", "simulated"), ("measured", "measured")):
        for rank, ending in ((0, ""), (1, "-rank-1")):
            timeline = read_timeline(run / f"timeline-{side}{ending}.json")
            assert (timeline.rank, timeline.source) == (rank, source)
    predicted = [run / "timeline-predicted.json", run / "timeline-predicted-rank-1.json"]
    assert max(read_timeline(path).step_ns for path in predicted) == plans.step_ns
    assert (run / "logs" / "rank-1.log").is_file()


def test_the_commands_read_the_run(folder: Path) -> None:
    run = folder / "two"
    for command in ("explain", "compare", "check"):
        assert run_shell(command, run).code == 0
    ranks = run_shell("compare", run, "--json").document["ranks"]
    assert all(each["same_tasks"] for each in ranks)


def test_one_process_goes_on_in_the_bits_of_its_own_run(folder: Path) -> None:
    machine = folder / "machine.json"
    recipe = write_recipe(folder, "one")
    assert run_shell("train", recipe, "--machine", machine, "--set", "max_steps=2").code == 0
    losses = read_losses(folder / "two")
    assert losses == read_losses(folder / "one")
    shutil.copytree(folder / "two", folder / "resumed")
    recipe = write_recipe(folder, "resumed")
    done = run_shell("train", recipe, "--machine", machine, "--resume", "--set", "max_steps=3")
    assert done.code == 0, done.err
    assert "the run so far had 2 ranks" in done.err
    assert len(read_losses(folder / "resumed")) == 3


def test_plans_of_ranks_are_refused_by_one_process(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text((folder / "two" / "plan.json").read_text())
    recipe = write_recipe(tmp_path, "other")
    done = run_shell("train", recipe, "--plan", plan, "--machine", tmp_path / "machine.json")
    assert done.code == 2
    assert "is for 2 ranks, and one process was started" in done.err
    assert "torchrun --nproc-per-node 2 -m packhorse train RECIPE" in done.err
