"""`packhorse train` under torchrun: the numbers of one process, and what the run folder is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from cli_cases import run_shell
from safetensors.torch import load_file
from tiny_runs import write_model, write_rows

from packhorse.timeline.files import read_timeline

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "machines" / "emulated-a100.yaml"
KEYS = ("step", "loss", "grad_norm", "eval_loss")
MS = 1_000_000


def write_recipe(folder: Path, name: str, **changes: object) -> Path:
    path = folder / f"{name}.yaml"
    content = {
        "model_name_or_path": str(folder / "model"),
        "train_data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        "data_cache": str(folder / "cache"),
        "data_format": "text",
        "max_length": 16,
        "global_batch_size": 4,
        "max_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": False,
        "output_dir": str(folder / name),
        "save_steps": None,
        "plan": {"microbatch_rows": 1, "tied_sum": "per_step", "num_threads": 1},
    }
    path.write_text(yaml.safe_dump(content | changes))
    return path


def read_numbers(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: line.get(key) for key in KEYS} for line in map(json.loads, lines)]


def train_ranks(folder: Path, num_ranks: int, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={num_ranks}", "-m", "packhorse", "train"),
            *map(str, arguments),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_two_acted_ranks_have_the_bits_of_one_process_at_their_own_pace(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 20)
    write_rows(tmp_path / "eval.jsonl", 7, first=1000)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        yaml.safe_dump(
            {
                "kind": "packhorse/cluster",
                "version": 1,
                "name": "two",
                "ranks": [{"machine": str(SAMPLE), "count": 2, "host": "here"}],
                "links": {"all": {"bytes_per_s": 1e8, "latency_ns": 6 * MS}},
            }
        )
    )
    one = write_recipe(tmp_path, "one")
    alone = run_shell("train", one, "--machine", cluster)
    assert alone.code == 2
    assert "is for 2 ranks, and one process was started" in alone.err
    assert run_shell("train", one, "--machine", SAMPLE).code == 0
    done = train_ranks(tmp_path, 2, write_recipe(tmp_path, "two"), "--machine", cluster)
    assert done.returncode == 0, done.stderr
    assert "acted on this CPU" in done.stderr + done.stdout
    assert read_numbers(tmp_path / "two") == read_numbers(tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert list(ours) == list(theirs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    for name in ("timeline-measured.json", "timeline-measured-rank-1.json"):
        timeline = read_timeline(tmp_path / "two" / name)
        lanes = ("send", "receive")
        messages = [s for s in timeline.spans if s.lane.startswith(lanes) and "free" not in s.name]
        assert messages
        # A lane makes up for at most 2 ms that it slept too long.
        assert all(span.duration_ns >= 4 * MS for span in messages)
    check_commands(tmp_path / "two")


def check_commands(folder: Path) -> None:
    """What reads a run folder or a plan of one rank reads those of several."""
    assert run_shell("compare", folder, "--json").code == 0
    ours = [folder / f"timeline-{kind}-rank-1.json" for kind in ("predicted", "measured")]
    compared = run_shell("compare", *ours, "--json")
    assert compared.code == 0, compared.err
    explained = run_shell("explain", folder, "--json")
    assert explained.code == 0, explained.err
    assert len(explained.document["ranks"]) == 2
    assert run_shell("explain", folder, "--rank", "1").code == 0
    assert "there is no rank 2" in run_shell("explain", folder, "--rank", "2").err
    lowered = run_shell("lower", folder, "--rank", "1", "--json")
    assert lowered.code == 0, lowered.err
    assert lowered.document["rank"] == 1
    assert "ranks 0 to 1" in run_shell("lower", folder, "--rank", "2").err
    assert run_shell("check", folder).code == 0
    alone = run_shell("train", folder.parent / "one.yaml", "--plan", folder / "plan.json")
    assert alone.code == 2
    assert "torchrun --nproc-per-node 2" in alone.err
