"""Commands that begin with a recipe: init, data, plan, train; on a model of two tiny layers."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import yaml
from cli_cases import run_shell, write_tiny_recipe

from packhorse.cli.init import suggest_length
from packhorse.cli.samples import Sample
from packhorse.cli.training_screen import TrainingScreen
from packhorse.machine.files import parse_machine, write_machine
from packhorse.machine.probe import _look
from packhorse.trainer.candidates import LATER_BYTES
from packhorse.trainer.observer import SilentObserver
from packhorse.trainer.saving import RunSaver
from packhorse.units import GIB


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_tiny_recipe(tmp_path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A plan for the tiny recipe, made by the command; its answer lies beside it."""
    folder = tmp_path_factory.mktemp("planned")
    recipe = write_tiny_recipe(folder)
    done = run_shell(
        "plan", recipe, "--json", "--set", "plan.recompute=all",
        "--machine", folder / "machine.json", "--out", folder / "plan.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    (folder / "answer.json").write_text(done.out)
    return folder / "plan.json"


def train(shell, recipe: Path, *more: object):
    return shell("train", recipe, "--machine", recipe.parent / "machine.json", *more)


def test_init_writes_a_recipe_that_is_right(shell, recipe, tmp_path):
    out = tmp_path / "new.yaml"
    arguments = ("init", tmp_path / "tiny" / "config.json", tmp_path / "rows.jsonl", "--out", out)
    done = shell(*arguments)
    assert done.code == 0
    assert "gradient_checkpointing" in done.out
    content = yaml.safe_load(out.read_text())
    assert content["data_format"] == "tokens"
    assert "eval_split" not in content  # of 16 rows
    assert content["max_length"] == 32  # the model's positions; rows have 12 tokens
    assert max(map(len, out.read_text().splitlines())) < 200
    checked = shell("check", out)
    assert (checked.code, checked.err) == (0, "")
    again = shell(*arguments)
    assert again.code == 2
    assert "--force" in again.err
    document = shell(*arguments, "--force", "--json").document
    assert document["formats"] == ["tokens"]
    assert "deepspeed" in document["decided_by_the_plan"]


@pytest.mark.parametrize(
    ("lengths", "flows", "limit", "length", "because"),
    [
        ((10, 20, 100), False, None, 128, "95 % of 3 rows have at most 100 tokens"),
        ((10,) * 99 + (9000,), False, None, 64, "the longest has 9000"),
        ((5000,) * 9, False, 8192, 4096, "longer ones need memory"),
        ((5000,) * 9, False, 2048, 2048, "the model has 2048 positions"),
        ((900,), True, None, 1024, "running text is cut"),
        ((900,), True, 512, 512, "running text is cut"),
        ((), False, None, 64, "0 rows"),
    ],
)
def test_init_suggests_a_length_from_the_data(lengths, flows, limit, length, because):
    sample = Sample(formats=("text",), lengths=lengths, flows=flows, num_files=1, size_bytes=1)
    suggested, reason = suggest_length(sample, limit)
    assert suggested == length
    assert because in reason


def test_data_counts_and_shows_rows(shell, recipe):
    done = shell("data", recipe, "--show", "1")
    assert done.code == 0
    assert "row 0, from" in done.out
    assert "[[" in done.out
    document = shell("data", recipe, "--show", "2", "--json").document
    (training,) = document["sets"]
    assert (training["rows"], training["tokens"]) == (16, 192)
    assert training["made_because"] is None
    assert len(document["rows"]) == 2
    (cache,) = {path.parent for path in (recipe.parent / "cache").rglob("manifest.json")}
    for path in (cache, cache / "manifest.json"):
        checked = shell("check", path)
        assert checked.code == 0, checked.err
        assert "token cache of 16 rows, 192 tokens" in " ".join(checked.out.split())
    (cache / "tokens.bin").write_bytes(b"")
    assert shell("check", cache).code == 2
    assert document["steps"] == 3


def test_plan_writes_five_files_that_agree(shell, planned):
    folder, document = planned.parent, json.loads((planned.parent / "answer.json").read_text())
    assert document["run"]["steps"] == 3
    assert {choice["value"] for choice in document["choices"]} >= {"recompute"}
    assert [Path(name).name for name in document["files"]] == [
        "plan.json", "model.json", "machine.json", "profile.json", "run.json",
    ]  # fmt: skip
    assert shell("check", planned).code == 0
    simulated = shell("simulate", planned, "--out", folder / "t.json", "--json").document
    assert simulated["step_ns"] == document["step_ns"]
    explained = shell("explain", planned, "--json").document
    assert explained == {key: value for key, value in document.items() if key != "files"}
    assert explained["clipping"].startswith("Clipping takes")
    assert shell("check", folder / "run.json").code == 0


def test_a_plan_for_this_computer_counts_what_the_process_itself_holds(shell, recipe, tmp_path):
    path = tmp_path / "machine.json"
    arguments = ("plan", recipe, "--json", "--machine", path, "--out", tmp_path / "plan.json")
    said = "is not this computer as it was measured, so the plan counts no base"
    elsewhere = shell(*arguments)
    assert said in " ".join(elsewhere.err.split())
    assert json.loads((tmp_path / "plan.json").read_text())["base_bytes"] == 0
    machine = parse_machine(path.read_text())
    facts = {"threads": machine.num_threads, "device": "cpu"}
    found = _look(folders=[tier.path for tier in machine.tiers if tier.path], **facts)
    write_machine(replace(machine, source="probe", fingerprint=found.fingerprint), path)
    here = shell(*arguments)
    assert said not in " ".join(here.err.split())
    base_bytes = json.loads((tmp_path / "plan.json").read_text())["base_bytes"]
    assert base_bytes >= LATER_BYTES
    # A budget that `train` would refuse for its base is not called a fit.
    done = shell(*arguments, "--memory", base_bytes)
    assert done.code == 3
    assert done.document["error"]["error"] == "DoesNotFitError"


def test_a_plan_that_does_not_fit_names_a_budget_and_writes_nothing(shell, recipe, tmp_path):
    done = shell(
        "plan", recipe, "--memory", "64KiB", "--json",
        "--machine", tmp_path / "machine.json", "--out", tmp_path / "plan.json",
    )  # fmt: skip
    assert done.code == 3
    assert done.document["error"]["error"] == "DoesNotFitError"
    assert not (tmp_path / "plan.json").exists()
    # What is advised works when it is typed back, and is typed as it was.
    (advised,) = re.findall(r"--memory (\d+MiB):", done.document["error"]["fix"])
    assert "--budget" not in done.document["error"]["fix"]
    machine = ("--machine", tmp_path / "machine.json", "--out", tmp_path / "plan.json")
    again = shell("plan", recipe, *machine, "--memory", advised)
    assert again.code == 0, again.err


def test_a_refusal_names_the_budget_where_it_was_given(shell, recipe, tmp_path):
    machine = ("--json", "--machine", tmp_path / "machine.json", "--out", tmp_path / "plan.json")
    done = shell("plan", recipe, *machine, "--budget", "device=64KiB")
    assert re.search(r"--budget device=\d+MiB: about", done.document["error"]["fix"])
    content = json.loads(recipe.read_text())
    content["budget"]["device"] = "64KiB"
    recipe.write_text(json.dumps(content))
    done = shell("plan", recipe, *machine)
    (typed, written) = re.search(
        r"--budget device=(\d+MiB) \(in a recipe: budget: {device: (\d+MiB)}\)",
        done.document["error"]["fix"],
    ).groups()
    assert typed == written


def test_rates_and_times_measured_on_a_busy_machine_are_said_so(shell, recipe, planned, tmp_path):
    machine = json.loads((tmp_path / "machine.json").read_text()) | {"busy_share": 0.75}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    arguments = ("plan", recipe, "--machine", tmp_path / "machine.json", "--out")
    done = shell(*arguments, tmp_path / "plan.json")
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "busy while its rates were measured" in warning
    assert "75.0 % of the compute threads' time" in warning
    assert warning.endswith("when it is idle, measure again with `packhorse probe --fresh`")
    (tmp_path / "machine.json").write_text(json.dumps(machine | {"busy_share": 0.0}))
    assert "busy" not in shell(*arguments, tmp_path / "plan.json").err
    # The plan's times stay with it: a run by it, and a run that is resumed, say so too.
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"busy_share": 0.5}))
    done = train(shell, recipe, "--plan", tmp_path / "plan.json", "--budget", "device=64KiB")
    assert (
        "warning: the machine was busy while the times of the blocks that lie beside the plan were"
        " measured"
    ) in done.err


def test_a_recipe_is_no_plan_and_the_command_that_makes_one_is_named(shell, recipe):
    for command in ("explain", "lower"):
        done = shell(command, recipe)
        assert done.code == 2
        assert "this is a recipe, and a plan is wanted" in done.err
        assert f"packhorse plan {recipe}" in done.err
    unnamed = json.loads(recipe.read_text())
    del unnamed["kind"]
    recipe.write_text(json.dumps(unnamed))
    assert f"packhorse plan {recipe}" in shell("explain", recipe).err
    recipe.write_text("{}")
    assert "this is no plan: it names no kind" in shell("explain", recipe).err


def test_check_of_a_recipe_says_what_is_not_there_yet(shell, recipe, tmp_path):
    assert "the model is there" in shell("check", recipe).out
    (tmp_path / "tiny" / "config.json").rename(tmp_path / "elsewhere.json")
    done = shell("check", recipe)
    assert done.code == 2
    assert f"there is no model at {tmp_path / 'tiny' / 'config.json'}" in done.err
    assert "make it first, as the comments of the recipe may say" in done.err
    assert str(Path.cwd()) in done.err
    content = json.loads(recipe.read_text()) | {"model_name_or_path": "someone/some-model"}
    recipe.write_text(json.dumps(content))
    assert "the model is on the Hub: not looked for" in shell("check", recipe).out
    content["train_data"] = [str(tmp_path / "no" / "rows.jsonl")]
    recipe.write_text(json.dumps(content))
    done = shell("check", recipe)
    assert "does not exist either: make it first" in done.err


def test_settings_and_budgets_are_refused_by_name(shell, recipe, tmp_path):
    machine = ("--machine", tmp_path / "machine.json", "--out", tmp_path / "plan.json")
    done = shell("plan", recipe, *machine, "--set", "learning_rat=1e-4")
    assert done.code == 2
    assert "learning_rate" in done.err
    done = shell("plan", recipe, *machine, "--budget", "devise=1GiB")
    assert done.code == 2
    assert "did you mean 'device'?" in done.err


def test_train_is_stopped_resumed_and_ends_with_a_model(shell, recipe, planned, tmp_path):
    stepped = TrainingScreen.stepped

    def interrupt(self, report):
        stepped(self, report)
        signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(TrainingScreen, "stepped", interrupt):
        done = train(shell, recipe, "--plan", planned, "--audit")
    assert done.code == 75, done.err
    assert done.out.startswith("plan    tiny on laptop-16gb")
    assert all(line == line.rstrip() for line in done.out.splitlines())
    assert "stopped by SIGTERM after step 1 of 3" in done.err
    assert f"packhorse train {recipe} --resume --machine {tmp_path / 'machine.json'}" in done.err
    refused = train(shell, recipe, "--plan", planned)
    assert refused.code == 2
    assert "--resume" in refused.err
    run = tmp_path / "run"
    unfinished = "note: the run is not complete: 1 of 3 steps are finished\n"
    assert shell("compare", run).err.count(unfinished) == 1

    done = train(shell, recipe, "--resume")
    assert done.code == 0, done.err
    assert "note: " not in shell("compare", run).err
    assert f"note: 1 step is finished in {run}\n" in done.err
    assert f"by the plan of the run that is resumed: {run / 'plan.json'}" in done.err
    assert done.err.count("loading libraries") == 1
    said = " ".join(done.out.split())
    assert re.search(
        r"so far 1 of 3 steps are done; the last step took [\d.]+ \w+: [\d.]+ \w+ for the 2 that"
        r" are left; the plan says",
        said,
    )
    assert re.search(
        r"process: [\d.]+ \w+ of memory at its largest: what the device's budget", said
    )
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if line[:6].strip().isdigit()] == ["2", "3"]
    for head in ("loss   ", "time   ", "peak   ", "model  "):
        assert any(line.startswith(head) for line in lines), head
    assert f"from_pretrained('{run}')" in done.out
    assert {path.name for path in run.iterdir()} >= {
        "recipe.yaml", "machine.json", "plan.json", "model.json", "profile.json", "metrics.jsonl",
        "timeline-predicted.json", "timeline-measured.json", "checkpoint-3", "model.safetensors",
    }  # fmt: skip
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    checked = shell("check", run)
    assert checked.code == 0, checked.err
    assert shell("compare", run).code == 0
    assert shell("explain", run, "--json").document["run"]["steps"] == 3


def test_train_answers_programs_on_stdout(shell, recipe, planned, tmp_path):
    done = train(shell, recipe, "--plan", planned, "--json", "--set", "max_steps=1")
    assert done.code == 0, done.err
    assert done.document["output_dir"] == str(tmp_path / "run")
    assert done.document["steps"] == 1
    assert done.document["peak_bytes"]["device"] <= 2 * GIB


def test_train_by_a_plan_that_needs_too_much_is_refused(shell, recipe, planned):
    done = train(shell, recipe, "--plan", planned, "--budget", "device=64KiB")
    assert (done.code, done.out) == (3, "")
    assert "tier device: need" in done.err


def test_what_a_plan_file_promises_is_not_believed(shell, recipe, planned, tmp_path):
    promising = tmp_path / "plan.json"
    for prediction in (None, {"peak_bytes": {"device": {}, "disk": {}}}):
        content = json.loads(planned.read_text())
        changed = prediction and content["prediction"] | prediction
        promising.write_text(json.dumps(content | {"prediction": changed}))
        done = train(shell, recipe, "--plan", promising, "--budget", "device=64KiB")
        assert (done.code, done.out) == (3, ""), done.err
        assert "tier device: need" in done.err


def test_a_plan_made_with_other_instructions_says_so(shell, recipe, planned, tmp_path):
    content = json.loads(planned.read_text())
    content["numerics"]["instructions"] = "abacus"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    done = train(shell, recipe, "--plan", tmp_path / "plan.json", "--set", "max_steps=1")
    assert done.code == 0, done.err
    assert "the plan was made for abacus instructions" in done.err


def test_a_resumed_run_that_must_be_planned_again_keeps_its_numerics(shell, recipe, tmp_path):
    pins = {"numerics": {"loss_chunk_tokens": "whole"}, "parameters": "device"}
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"plan": pins}))
    first = train(shell, recipe, "--set", "max_steps=2")
    assert first.code == 0, first.err
    machine = tmp_path / "machine.json"
    content = json.loads(machine.read_text()) | {"num_threads": 2}
    machine.write_text(json.dumps(content))
    plan = tmp_path / "run" / "plan.json"
    before = json.loads(plan.read_text())
    # As a run was that needed more than there is now.
    before["base_bytes"] = 8 << 30
    plan.write_text(json.dumps(before))
    again = train(shell, recipe, "--resume", "--set", "plan.parameters=disk")
    assert again.code == 0, again.err
    assert "so a new plan is made" in again.err
    after = json.loads(plan.read_text())["numerics"]
    assert after["num_threads"] == before["numerics"]["num_threads"] == 1
    for name in ("microbatch_rows", "loss_chunk_tokens"):
        assert after[name]["value"] == before["numerics"][name]["value"]


def test_the_estimate_of_a_run_counts_its_evaluations_and_what_is_saved(shell, tmp_path):
    recipe = write_tiny_recipe(tmp_path, eval_split=0.25, eval_steps=2, num_train_epochs=1)
    folder = tmp_path / "planned"
    planned = shell(
        "plan", recipe, "--json", "--machine", tmp_path / "machine.json",
        "--out", folder / "plan.json",
    )  # fmt: skip
    assert planned.code == 0, planned.err
    run = planned.document["run"]
    # Before the first step, after the second and after the third.
    assert run["evaluations"] == 3
    assert run["evaluation_ns"] > 0
    started = RunSaver.ensure_space
    sizes: list[int] = []

    def note(self: RunSaver, **steps: int) -> None:
        sizes.extend((self.checkpoint_bytes, self.model_bytes))
        started(self, **steps)

    with mock.patch.object(RunSaver, "ensure_space", note):
        done = train(shell, recipe, "--plan", folder / "plan.json")
    assert done.code == 0, done.err
    assert sizes == [run["checkpoint_bytes"], run["weights_bytes"]]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("eval_loss" in line for line in metrics) == run["evaluations"]


def test_train_for_a_device_that_is_not_here_is_refused_before_planning(
    shell, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = shell("train", recipe, "--machine", "rtx-4090")
    assert (done.code, done.out) == (2, "")
    assert "computes on cuda, and torch finds no GPU here" in done.err
    assert not (tmp_path / "run").exists()


def test_a_signal_before_the_first_step_changes_nothing(shell, recipe, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr("packhorse.trainer.preparation.prepare_run", interrupt)
    before = signal.getsignal(signal.SIGUSR1)
    done = train(shell, recipe)
    assert done.code == 75
    assert "before the first step" in done.err
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_screen_watches_like_any_observer():
    wanted = {name for name in vars(SilentObserver) if not name.startswith("_")}
    assert wanted <= set(vars(TrainingScreen))
