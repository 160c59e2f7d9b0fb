"""`packhorse train --machine` with a machine that is only acted: same numbers, its pace."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from cli_cases import run_shell
from tiny_runs import write_model, write_rows

from packhorse.timeline.files import read_timeline

SAMPLE = Path(__file__).parents[2] / "machines" / "emulated-a100.yaml"
LOSSES = ("loss", "grad_norm")


def train(folder: Path, name: str, *arguments: object, **changes: object) -> list[dict]:
    recipe = folder / f"{name}.yaml"
    content = {
        "model_name_or_path": str(folder / "model"),
        "train_data": str(folder / "train.jsonl"),
        "data_cache": str(folder / "cache"),
        "data_format": "text",
        "max_length": 16,
        "global_batch_size": 4,
        "max_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": False,
        "output_dir": str(folder / name),
        "save_steps": None,
        **changes,
    }
    recipe.write_text(yaml.safe_dump(content))
    done = run_shell("train", recipe, *arguments)
    assert done.code == 0, done.err
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in LOSSES} for line in lines]


def test_training_at_another_machines_pace(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 20)
    acted = train(
        tmp_path,
        "acted",
        "--machine",
        SAMPLE,
        "--budget",
        "device=4MiB,host=64MiB",
        plan={
            "parameters": "host",
            "gradients": "host",
            "optimizer": "host",
            "update": "host",
            "stride": 2,
            "chunk_bytes": "8KiB",
            "microbatch_rows": 4,
        },
    )
    here = train(tmp_path, "here", plan={"microbatch_rows": 4, "num_threads": 1})
    assert acted == here
    timeline = read_timeline(tmp_path / "acted" / "timeline-measured.json")
    copies = [span for span in timeline.spans if span.lane in ("copy_in", "copy_out")]
    updates = [span for span in timeline.spans if span.kind == "update"]
    assert {span.lane for span in updates} == {"compute", "update"}
    # 4 ms is the latency of the sample's links; a lane makes up for at most 2 ms.
    moved = [span for span in copies if not span.name.startswith("free")]
    assert moved
    assert all(span.duration_ns >= 2_000_000 for span in moved)
