"""Runs from end to end: bitwise the plain loop, killed and resumed, stopped, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny_runs import (
    ALL_IN_MEMORY,
    ALL_ON_DISK,
    PlainLoop,
    make_machine,
    offer,
    plan_run,
    prepare,
    write_rows,
)

from packhorse.checkpoint.folders import find_checkpoints
from packhorse.data.batches import Batch, Batches
from packhorse.errors import (
    FileFormatError,
    InputError,
    MismatchError,
    NonFiniteError,
    RecipeError,
    StoppedError,
    StorageError,
)
from packhorse.machine.process_memory import largest_resident_bytes
from packhorse.timeline.drift import busy_times
from packhorse.timeline.spec import Timeline
from packhorse.trainer.observer import SilentObserver, StepReport, TrainResult, Watch
from packhorse.trainer.run_folder import (
    Beginning,
    Resume,
    ResumeFrom,
    ResumeNewest,
    StartFresh,
    claim_run,
    find_beginning,
    read_metrics,
    read_resume,
)
from packhorse.trainer.session import Session
from packhorse.trainer.training import train
from packhorse.units import GIB

FRESH = StartFresh()
NOTHING_KEPT = {**ALL_ON_DISK, "durable": "off"}
CURVE = ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate")


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


class KillAt(SilentObserver):
    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, report: StepReport) -> None:
        if report.step == self.step:
            raise Killed


class SignalAt(SilentObserver):
    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step = step
        self.number = number

    def stepped(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), self.number)


class Listener(SilentObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, text: str) -> None:
        self.notes.append(text)


def run(
    folder: Path,
    *,
    resume: Resume = FRESH,
    observer: SilentObserver | None = None,
    watch: Watch | None = None,
    baseline_bytes: int | None = None,
    **changes: object,
) -> TrainResult:
    machine = make_machine(folder)
    prepared = prepare(folder, machine, **{"per_device_train_batch_size": 2, **changes})
    plan = plan_run(prepared, machine)
    traced = offer(prepared, machine).find(
        rows=plan.numerics.microbatch_rows.value,
        loss_chunk_tokens=plan.numerics.loss_chunk_tokens.value,
    )
    return train(
        prepared,
        plan=plan,
        machine=machine,
        traced=traced.traced,
        resume=resume,
        observer=observer,
        watch=watch,
        baseline_bytes=baseline_bytes,
        audit=True,
    )


def curve(folder: Path) -> list[dict[str, object]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: line.get(name) for name in CURVE} for line in lines]


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def assert_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> None:
    theirs = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": ALL_ON_DISK},
        {"plan": ALL_IN_MEMORY, "max_grad_norm": None},
        {"plan": ALL_ON_DISK, "optim": "sgd", "sgd_momentum": 0.9, "max_grad_norm": None},
        {"plan": ALL_ON_DISK, "packing": True},
        {"plan": {**ALL_IN_MEMORY, "attention": "eager"}},
        {"plan": {"activations": "offload", "optimizer": "disk", "durable": 2}},
    ],
    ids=["disk", "memory", "sgd", "packing", "eager", "offload"],
)
def test_losses_norms_and_weights_are_those_of_the_plain_loop(
    tmp_path: Path, changes: dict[str, object]
):
    run(tmp_path, **changes)
    machine = make_machine(tmp_path)
    prepared = prepare(tmp_path, machine, **changes)
    plain = load(tmp_path / "model")
    if "eager" in str(changes):
        plain.set_attn_implementation("eager")
    loop = PlainLoop(plain, prepared, microbatch_rows=2)
    loop.run(1, 6)
    lines = [line for line in curve(tmp_path / "run") if line["loss"] is not None]
    assert [line["loss"] for line in lines] == loop.losses
    assert [line["grad_norm"] for line in lines] == loop.norms
    assert_same_weights(plain, load(tmp_path / "run"))
    assert loop.losses[-1] < loop.losses[0]


@pytest.mark.parametrize("killed_at", [3, 5])
def test_a_killed_run_resumes_to_the_same_curve_under_another_plan(tmp_path: Path, killed_at: int):
    options: dict[str, object] = {"eval_data": str(tmp_path / "eval.jsonl"), "eval_steps": 2}
    straight = {**options, "output_dir": str(tmp_path / "straight"), "plan": ALL_IN_MEMORY}
    run(tmp_path, **straight)
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(killed_at), plan=ALL_ON_DISK, **{**options, "save_steps": 2})
    result = run(tmp_path, resume=ResumeNewest(), plan=ALL_IN_MEMORY, **options)
    assert result.resumed_from is not None
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert_same_weights(load(tmp_path / "run"), load(tmp_path / "straight"))


def test_dropout_resumes_bitwise(tmp_path: Path):
    changes: dict[str, object] = {"plan": {"recompute": "all"}}
    prepare(tmp_path, make_machine(tmp_path))
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "attention_dropout": 0.2}))
    run(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4), **changes)
    run(tmp_path, resume=ResumeNewest(), **changes)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(StoppedError) as caught:
        run(tmp_path, observer=SignalAt(2, number), plan=NOTHING_KEPT)
    assert signal.getsignal(number) is before
    assert caught.value.exit_code == 75
    assert f"stopped by {number.name} after step 2 of 6" in str(caught.value)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    run(tmp_path, resume=ResumeNewest(), plan=NOTHING_KEPT)
    assert [line["step"] for line in curve(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


class SignalWhileEvaluating(SilentObserver):
    """Sends a signal in the evaluation that comes after so many steps of this process."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, report: StepReport) -> None:
        del report
        self.steps -= 1

    def progressed(self, what: str, done: int, total: int | None) -> None:
        if what == "evaluating" and (done, total) == (1, 3) and not self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("eval_steps", "stopped_at"), [(4, 4), (None, 6)])
def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(
    tmp_path: Path, eval_steps: int | None, stopped_at: int
):
    options: dict[str, object] = {
        "eval_data": str(tmp_path / "eval.jsonl"), "eval_steps": eval_steps,
    }  # fmt: skip
    run(tmp_path, output_dir=str(tmp_path / "straight"), **options)
    with pytest.raises(StoppedError, match=f"after step {stopped_at}"):
        run(tmp_path, observer=SignalWhileEvaluating(stopped_at), **options)
    assert evaluated_steps(tmp_path / "run") == ([0] if eval_steps else [])
    with pytest.raises(StoppedError, match=f"after step {stopped_at}"):
        run(tmp_path, observer=SignalWhileEvaluating(0), resume=ResumeNewest(), **options)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    run(tmp_path, resume=ResumeNewest(), **options)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert_same_weights(load(tmp_path / "run"), load(tmp_path / "straight"))


def evaluated_steps(folder: Path) -> list[object]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["step"] for line in lines if "eval_loss" in line]


def test_evaluation_comes_before_the_first_step_then_in_steps_and_at_the_end(tmp_path: Path):
    options: dict[str, object] = {"eval_data": str(tmp_path / "eval.jsonl"), "max_steps": 5}
    with pytest.raises(StoppedError, match="before the first step") as caught:
        run(tmp_path, observer=SignalWhileEvaluating(0), eval_steps=2, **options)
    assert "--resume" in str(caught.value)
    run(tmp_path, resume=ResumeNewest(), eval_steps=2, **options)
    assert evaluated_steps(tmp_path / "run") == [0, 2, 4, 5]
    run(tmp_path, output_dir=str(tmp_path / "end"), eval_steps=None, **options)
    assert evaluated_steps(tmp_path / "end") == [5]


def test_an_eval_loss_that_is_not_finite_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluate = Session.evaluate

    def spoil(session: Session, inputs: Mapping[str, torch.Tensor], **options: float):
        return replace(evaluate(session, inputs, **options), loss=float("nan"))

    monkeypatch.setattr(Session, "evaluate", spoil)
    listener = Listener()
    options: dict[str, object] = {"eval_data": str(tmp_path / "eval.jsonl"), "eval_steps": None}
    run(tmp_path, observer=listener, max_steps=1, **options)
    assert any("the eval_loss after step 1 is nan" in note for note in listener.notes)
    assert curve(tmp_path / "run")[-1]["eval_loss"] is None


def test_a_batch_without_labels_is_skipped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_batch = Batches.batch

    def mask_second(batches: Batches, step: int) -> Batch:
        batch = make_batch(batches, step)
        if step != 1:
            return batch
        masked = torch.full_like(batch.inputs["labels"], -100)
        return replace(batch, inputs={**batch.inputs, "labels": masked}, num_items=0)

    monkeypatch.setattr(Batches, "batch", mask_second)
    listener = Listener()
    result = run(tmp_path, observer=listener, max_steps=2, save_steps=1)
    assert any("step 2 is skipped" in note for note in listener.notes)
    first, second = curve(tmp_path / "run")
    assert (second["step"], second["loss"]) == (2, None)
    assert result.loss == first["loss"]
    assert_same_weights(
        load(tmp_path / "run" / "checkpoint-1"), load(tmp_path / "run" / "checkpoint-2")
    )


def test_what_a_watch_says_of_a_step_is_noted_and_logged(tmp_path: Path):
    seen: list[Timeline] = []

    def watch(timeline: Timeline) -> str | None:
        seen.append(timeline)
        return "the disk is slow" if len(seen) == 2 else None

    listener = Listener()
    run(tmp_path, observer=listener, watch=watch, max_steps=3, plan=ALL_ON_DISK)
    assert listener.notes.count("the disk is slow") == 1
    (log,) = (tmp_path / "run" / "logs").iterdir()
    assert log.read_text().count("the disk is slow") == 1
    assert len(seen) == 3
    assert all(busy > 0 for timeline in seen for busy in busy_times(timeline).values())


def test_a_run_folder_is_for_one_process_at_a_time(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4))
    unfinished = tmp_path / "run" / "checkpoint-4.tmp-0123abcd"
    unfinished.mkdir()
    with claim_run(tmp_path / "run"):
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
            run(tmp_path, resume=ResumeNewest())
        assert unfinished.exists()
    run(tmp_path, resume=ResumeNewest())
    assert not unfinished.exists()


def test_a_signal_while_the_checkpoint_is_checked_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(folder: Path, resume: Resume, scratch: Path | None) -> Beginning:
        os.kill(os.getpid(), signal.SIGTERM)
        return find_beginning(folder, resume, scratch)

    monkeypatch.setattr("packhorse.trainer.starting.find_beginning", interrupt)
    with pytest.raises(StoppedError, match="stopped by SIGTERM before the first step"):
        run(tmp_path, resume=ResumeNewest())


class SignalWhileLoading(SilentObserver):
    def progressed(self, what: str, done: int, total: int | None) -> None:  # noqa: ARG002  the protocol's
        if what == "loading":
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_right_after_resuming_from_another_folder_can_be_resumed(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4), output_dir=str(tmp_path / "other"))
    resume = ResumeFrom(path=tmp_path / "other" / "checkpoint-3")
    with pytest.raises(StoppedError, match="after step 3"):
        run(tmp_path, resume=resume, observer=SignalWhileLoading())
    result = run(tmp_path, resume=ResumeNewest())
    assert result.resumed_from == tmp_path / "run" / "checkpoint-3"


def test_a_checkpoint_that_made_room_for_one_that_never_came_is_resumed(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4))
    (tmp_path / "run" / "checkpoint-3").rename(tmp_path / "run" / "checkpoint-3.old-0123abcd")
    result = run(tmp_path, resume=ResumeNewest())
    assert result.resumed_from == tmp_path / "run" / "checkpoint-3"


def test_no_second_branch_begins_beside_newer_checkpoints(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), save_steps=2)
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="has checkpoint-4 already"):
        run(tmp_path, resume=ResumeFrom(path=folder / "checkpoint-2"))
    (folder / "checkpoint-4").rename(tmp_path / "aside")
    result = run(tmp_path, resume=ResumeFrom(path=folder / "checkpoint-2"))
    assert result.resumed_from == folder / "checkpoint-2"


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from packhorse.checkpoint import save
from packhorse.trainer.run_folder import ResumeNewest
from test_training import run

folder, when = Path(sys.argv[1]), int(sys.argv[2])
committed = [0]
commit = save.commit_folder

def commit_or_die(temporary, final):
    committed[0] += 1
    if committed[0] == when:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(temporary, final)

save.commit_folder = commit_or_die
run(folder, resume=ResumeNewest(), save_steps=1)
"""


def test_a_process_killed_inside_a_save_loses_nothing_durable(tmp_path: Path):
    run(tmp_path, output_dir=str(tmp_path / "straight"), save_steps=1)
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "support"), *sys.path])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path), "3"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [p.name for p in find_checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]
    assert list((tmp_path / "run").glob("*.tmp-*"))
    listener = Listener()
    run(tmp_path, resume=ResumeNewest(), observer=listener, save_steps=1)
    assert any("an interrupted save left" in note for note in listener.notes)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert not list((tmp_path / "run").glob("*.tmp-*"))


def test_state_of_an_earlier_run_is_never_written_over(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4))
    with pytest.raises(InputError) as caught:
        run(tmp_path)
    assert "checkpoint-3" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "another output_dir" in str(caught.value)


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), save_steps=2)
    with (tmp_path / "run" / "checkpoint-4" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    listener = Listener()
    result = run(tmp_path, resume=ResumeNewest(), observer=listener)
    assert result.resumed_from == tmp_path / "run" / "checkpoint-2"
    assert any("checkpoint-4 is skipped" in note for note in listener.notes)
    with pytest.raises(FileFormatError, match="damaged"):
        run(tmp_path, resume=ResumeFrom(path=tmp_path / "run" / "checkpoint-4"), max_steps=8)


def test_resuming_nothing_starts_afresh_and_says_so_or_refuses(tmp_path: Path):
    listener = Listener()
    run(tmp_path, resume=ResumeNewest(), observer=listener, max_steps=1)
    assert any("begins at step 1" in note for note in listener.notes)
    with pytest.raises(InputError, match="no checkpoint to resume from"):
        run(
            tmp_path,
            resume=read_resume(None, fallback=True),
            output_dir=str(tmp_path / "other"),
        )


def test_other_data_or_another_seed_cannot_resume(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4))
    with pytest.raises(MismatchError, match="seed is 42, this run's is 43"):
        run(tmp_path, resume=ResumeNewest(), seed=43)
    write_rows(tmp_path / "train.jsonl", 41)
    with pytest.raises(MismatchError, match="num_rows is 43, this run's is 44"):
        run(tmp_path, resume=ResumeNewest())


def test_evaluation_data_changes_nothing_of_the_training(tmp_path: Path):
    lengths: list[int] = []
    digests: list[str] = []
    machine = make_machine(tmp_path)
    for words in (None, 3, 15):
        changes: dict[str, object] = {"max_length": 64}
        if words is not None:
            changes["eval_data"] = str(tmp_path / "eval.jsonl")
            prepare(tmp_path, machine)
            row = json.dumps({"text": " ".join(["w1"] * 4 * words)})
            (tmp_path / "eval.jsonl").write_text(f"{row}\n")
        data = prepare(tmp_path, machine, **changes).data
        lengths.append(data.row_length)
        digests.append(data.digest)
        if data.evaluation is not None:
            assert data.evaluation.row_length == data.row_length
    assert len(set(lengths)) == len(set(digests)) == 1


def test_a_loss_that_is_not_finite_ends_the_run_and_spoils_no_checkpoint(tmp_path: Path):
    with pytest.raises(NonFiniteError) as caught:
        run(
            tmp_path, learning_rate=1e30, warmup_steps=0, max_grad_norm=None, save_steps=1,
            save_total_limit=None,
        )  # fmt: skip
    assert "step 2" in str(caught.value) or "step 3" in str(caught.value)
    assert "learning_rate" in str(caught.value)


def test_the_disk_must_hold_what_the_run_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packhorse.storage.space.free_bytes", lambda _: 40 << 20)
    with pytest.raises(StorageError, match="what this run saves does not fit"):
        run(tmp_path, plan=ALL_IN_MEMORY)
    assert not find_checkpoints(tmp_path / "run")


def test_a_plan_for_another_batch_is_refused(tmp_path: Path):
    machine = make_machine(tmp_path)
    plan = plan_run(prepare(tmp_path, machine), machine)
    other = prepare(tmp_path, machine, global_batch_size=8)
    with pytest.raises(RecipeError, match="the recipe asks for 8"):
        train(other, plan=plan, machine=machine)


def test_the_memory_of_the_process_is_measured_beside_the_ledger(tmp_path: Path):
    seen: list[int | None] = []

    class Watcher(SilentObserver):
        def stepped(self, report: StepReport) -> None:
            seen.append(report.process_bytes)

    run(tmp_path, max_steps=1)
    assert "process_gib" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    before = largest_resident_bytes()
    run(tmp_path, max_steps=2, output_dir=str(tmp_path / "told"), observer=Watcher(),
        baseline_bytes=before - (64 << 20))  # fmt: skip
    lines = read_metrics(tmp_path / "told" / "metrics.jsonl")
    assert [line["process_gib"] for line in lines] == [(size or 0) / GIB for size in seen]
    assert 64 << 20 <= (seen[0] or 0) <= (seen[1] or 0) <= largest_resident_bytes()


def test_old_checkpoints_go_and_the_folder_is_complete(tmp_path: Path):
    run(tmp_path, save_steps=2, save_total_limit=2)
    folder = tmp_path / "run"
    assert [path.name for path in find_checkpoints(folder)] == ["checkpoint-4", "checkpoint-6"]
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "recipe.yaml", "machine.json", "plan.json", "timeline-measured.json", "metrics.jsonl",
        "logs", "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert "step 6 loss" in (folder / "logs" / "rank-0.log").read_text()
    assert not list((tmp_path / "scratch").glob("*.scratch"))


def test_random_weights_from_a_config_alone_are_the_same_each_time(tmp_path: Path):
    prepare(tmp_path, make_machine(tmp_path))
    config = str(tmp_path / "model" / "config.json")
    for name in ("one", "two"):
        run(tmp_path, model_name_or_path=config, output_dir=str(tmp_path / name), max_steps=2)
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert_same_weights(load(tmp_path / "one"), load(tmp_path / "two"))


def test_bfloat16_trains_close_to_float32_and_resumes_bitwise(tmp_path: Path):
    run(tmp_path, output_dir=str(tmp_path / "exact"))
    run(tmp_path, output_dir=str(tmp_path / "straight"), bf16=True)
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(4), bf16=True, plan=ALL_ON_DISK)
    run(tmp_path, resume=ResumeNewest(), bf16=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    exact = [line["loss"] for line in curve(tmp_path / "exact")]
    rounded = [line["loss"] for line in curve(tmp_path / "straight")]
    assert exact != rounded
    torch.testing.assert_close(torch.tensor(rounded), torch.tensor(exact), rtol=2e-2, atol=0)


def test_frozen_parameters_stay_as_they_were(tmp_path: Path):
    run(tmp_path, freeze=["*.mlp.*", "model.embed_tokens.weight"], plan=ALL_ON_DISK)
    before, after = load(tmp_path / "model"), dict(load(tmp_path / "run").named_parameters())
    for name, parameter in before.named_parameters():
        frozen = ".mlp." in name or "embed_tokens" in name
        assert torch.equal(parameter, after[name]) == frozen, name


@pytest.mark.parametrize("source", ["model", "model/config.json"])
def test_frozen_parameters_lose_no_bit_to_bfloat16(tmp_path: Path, source: str):
    options: dict[str, object] = {
        "freeze": ["*.mlp.*"], "bf16": True, "plan": ALL_ON_DISK, "save_total_limit": None,
        "model_name_or_path": str(tmp_path / source),
    }  # fmt: skip
    prepare(tmp_path, make_machine(tmp_path))
    machine = make_machine(tmp_path)
    weights = prepare(tmp_path, machine, model_name_or_path=str(tmp_path / source)).open_weights()
    with pytest.raises(Killed):
        run(tmp_path, observer=KillAt(5), **options)
    run(tmp_path, resume=ResumeNewest(), **options)
    for folder in ("run", "run/checkpoint-3", "run/checkpoint-6"):
        for name, parameter in load(tmp_path / folder).named_parameters():
            if ".mlp." in name:
                exact = torch.empty(parameter.numel())
                weights.read_into(name, 0, parameter.numel(), exact)
                assert torch.equal(parameter.flatten(), exact), (folder, name)
    weights.close()


def test_evaluation_is_the_mean_over_all_label_tokens(tmp_path: Path):
    run(
        tmp_path, eval_data=str(tmp_path / "eval.jsonl"), eval_steps=None, max_steps=2,
        learning_rate=0.0,
    )  # fmt: skip
    model = load(tmp_path / "model").eval()
    machine = make_machine(tmp_path)
    data = prepare(tmp_path, machine, eval_data=str(tmp_path / "eval.jsonl")).data
    assert data.evaluation is not None
    total, items = 0.0, 0
    for index in range(data.evaluation.steps_per_epoch):
        batch = data.evaluation.batch(index)
        with torch.no_grad():
            found = model(
                input_ids=batch.inputs["input_ids"], labels=batch.inputs["labels"],
                num_items_in_batch=torch.tensor(1.0),
            )  # fmt: skip
        total += float(found.loss)
        items += batch.num_items
    last = curve(tmp_path / "run")[-1]["eval_loss"]
    assert last == pytest.approx(total / items, rel=1e-6)


def test_evaluation_keeps_nothing_of_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []
    evaluate = Session.evaluate

    def watch(session: Session, inputs: Mapping[str, torch.Tensor], **options: float):
        seen.extend(weakref.ref(tensor) for tensor in inputs.values())
        result = evaluate(session, inputs, **options)
        alive.append(sum(reference() is not None for reference in seen))
        return result

    monkeypatch.setattr(Session, "evaluate", watch)
    make_data = prepare(tmp_path, make_machine(tmp_path))
    write_rows(tmp_path / "eval.jsonl", 60, first=1000)
    run(tmp_path, eval_data=str(tmp_path / "eval.jsonl"), eval_steps=None, max_steps=1)
    assert len(alive) > 12
    assert max(alive) <= 2 * len(make_data.example)


def test_a_plan_is_for_its_optimizer_alone(tmp_path: Path):
    machine = make_machine(tmp_path)
    prepared = prepare(tmp_path, machine)
    plan = plan_run(prepared, machine)
    clips = replace(plan, optimizer=replace(plan.optimizer, clips=False))
    with pytest.raises(InputError, match="does not clip"):
        train(prepared, plan=clips, machine=machine)
