"""Folders and recipes that the tests of the commands share."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from models import make_model, make_plan

from packhorse.cli.main import run_arguments
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.files import write_machine
from packhorse.model.files import format_model
from packhorse.plan.files import format_plan
from packhorse.plan.spec import Plan
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.files import format_profile
from packhorse.search.prediction import predict_plan
from packhorse.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


def run_shell(*arguments: object) -> Done:
    """Run a command in this process, on a screen of 100 columns, and capture both streams."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = run_arguments([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code=code, out=out.getvalue(), err=err.getvalue())


def write_plan_folder(folder: Path) -> Plan:
    """Write a plan of a made-up model, with model, machine and profile beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(num_layers=3, hidden=256, vocabulary=512)
    machine = load_known_machine("laptop-16gb")
    profile = estimate_profile(model, machine)
    plan = replace(
        make_plan(
            model,
            chunk_bytes=1 << 20,
            parameters=["device", "disk"],
            optimizer=["disk"],
            activations=["recompute", "keep"],
            num_microbatches=2,
        ),
        budget_bytes={"device": 64 * MIB, "disk": 256 * MIB},
    )
    plan = replace(plan, prediction=predict_plan(plan, model, profile, machine))
    (folder / "model.json").write_text(format_model(model))
    write_machine(machine, folder / "machine.json")
    (folder / "profile.json").write_text(format_profile(profile))
    (folder / "plan.json").write_text(format_plan(plan))
    return plan


def write_tiny_recipe(folder: Path, **changes: object) -> Path:
    """Write a recipe of a two-layer Llama with random weights and data that is tokens already."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    (folder / "tiny").mkdir(parents=True, exist_ok=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    rows = [{"input_ids": [(7 * row + 3 * at) % 64 for at in range(12)]} for row in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    machine = load_known_machine("laptop-16gb")
    tiers = tuple(
        replace(tier, path=str(folder / "scratch")) if tier.path else tier for tier in machine.tiers
    )
    write_machine(replace(machine, tiers=tiers, num_threads=1), folder / "machine.json")
    recipe = {
        "kind": "packhorse/recipe",
        "version": 1,
        "model_name_or_path": str(folder / "tiny" / "config.json"),
        "train_data": [str(folder / "rows.jsonl")],
        "data_format": "tokens",
        "data_cache": str(folder / "cache"),
        "max_length": 16,
        "global_batch_size": 4,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 0.01,
        "save_steps": 2,
        "output_dir": str(folder / "run"),
        "budget": {"device": "2GiB", "disk": {"path": str(folder / "scratch"), "size": "64MiB"}},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe | changes))
    return path
