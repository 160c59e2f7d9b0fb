"""Audit: a run that does what its program does not say ends, and names the task or buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import find_subject

from bench.planned import KINDS, PLACES, load_weights, make_plan, open_engine, read_states
from bench.zoo import ZOO, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.errors import AuditError, MismatchError, StorageError
from packhorse.program.program import Program
from packhorse.program.tasks import Backward, Forward, Free, Recompute, Task
from packhorse.program.text import format_task
from packhorse.runtime.engine import Engine
from packhorse.runtime.performing import Performer
from packhorse.runtime.prepared import prepare_program
from packhorse.verifier.rules import verify_program

ON_DISK = replace(PLACES["all on disk"], activations=("recompute",))
STEPS = make_steps(ZOO["weave"], num_steps=2, num_microbatches=2)


def make_programs() -> dict[str, Program]:
    subject = find_subject("weave")
    plan = make_plan(
        subject.traced.model, subject.optimizer, ON_DISK, num_microbatches=2, clips=True
    )
    return {kind: lower_plan(plan, subject.traced.model, kind) for kind in KINDS}


def make_engine(programs, proofs, scratch: Path, **changes) -> Engine:
    subject = find_subject("weave")
    engine = Engine(
        traced=changes.get("traced", subject.traced),
        programs=programs,
        proofs=proofs,
        optimizer=subject.optimizer,
        max_grad_norm=1.0,
        seed=1,
        scratch=scratch,
        num_threads=1,
        heap="keep",
        audit=True,
    )
    load_weights(engine, subject.weights)
    return engine


def run_changed(scratch: Path, change) -> None:
    """Run a step whose program is changed, with a proof that agrees with the changed program."""
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    program = programs["train_step"]
    proof = proofs["train_step"]
    tasks = tuple(change(task) for task in program.tasks)
    assert tasks != program.tasks
    entries = tuple(
        replace(entry, task=task) for entry, task in zip(proof.entries, tasks, strict=False)
    )
    programs["train_step"] = replace(program, tasks=tasks)
    proofs["train_step"] = replace(proof, entries=entries)
    with make_engine(programs, proofs, scratch) as engine:
        engine.train_step(STEPS[0], step=1, learning_rate=1e-3)


def without(task: Task, kind: type, prefix: str, field: str) -> Task:
    """Take the first buffer of a kind out of what a task declares."""
    if (
        not isinstance(task, kind)
        or getattr(task, "microbatch", 0)
        or getattr(task, "block", 2) != 2
    ):
        return task
    names = getattr(task, field)
    found = next((name for name in names if name.startswith(prefix)), None)
    return replace(task, **{field: tuple(name for name in names if name != found)})


@pytest.mark.parametrize(
    ("kind", "prefix", "field", "words"),
    [
        (Forward, "param/", "reads", "does not declare"),
        (Backward, "param/", "reads", "does not declare"),
        (Backward, "grad/", "writes", "does not declare"),
    ],
)
def test_a_body_that_uses_an_undeclared_chunk(kind, prefix, field, words, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=words) as caught:
        run_changed(tmp_path, lambda task: without(task, kind, prefix, field))
    assert prefix in str(caught.value)
    assert "blocks.1" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "prefix"), [(Forward, "value/"), (Recompute, "value/"), (Backward, "saved/")]
)
def test_a_body_that_misses_an_undeclared_value(kind, prefix, tmp_path: Path) -> None:
    with pytest.raises(AuditError) as caught:
        run_changed(tmp_path, lambda task: without(task, kind, prefix, "reads"))
    assert prefix in str(caught.value)


def test_a_value_of_another_size_than_declared(tmp_path: Path) -> None:
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    program = programs["train_step"]
    for name in ("value/h2@0", "saved/2@1", "dvalue/h3@0", "norm/0"):
        smaller = replace(program.buffers[name], size_bytes=program.buffers[name].size_bytes - 4)
        changed = replace(program, buffers={**program.buffers, name: smaller})
        with (
            make_engine({**programs, "train_step": changed}, proofs, tmp_path) as engine,
            pytest.raises(AuditError) as caught,
        ):
            engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
        assert name in str(caught.value)
        assert f"declares {smaller.size_bytes}" in str(caught.value)


def test_another_order_than_the_proved_one(tmp_path: Path) -> None:
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    tasks = list(programs["train_step"].tasks)
    places = [i for i, task in enumerate(tasks) if type(task).__name__ == "Free"]
    first = next(i for i in places if i + 1 in places)
    tasks[first], tasks[first + 1] = tasks[first + 1], tasks[first]
    programs["train_step"] = replace(programs["train_step"], tasks=tuple(tasks))
    with pytest.raises(AuditError, match=f"task {first} is not the task that was proved"):
        make_engine(programs, proofs, tmp_path)


def test_a_longer_program_than_its_proof_is_refused(tmp_path: Path) -> None:
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    proof = proofs["train_step"]
    proofs["train_step"] = replace(proof, entries=proof.entries[:-1])
    with pytest.raises(AuditError, match="tasks were proved, the program has"):
        make_engine(programs, proofs, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_program_of_another_model_is_refused(tmp_path: Path) -> None:
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    with pytest.raises(MismatchError, match="was compiled for model"):
        make_engine(programs, proofs, tmp_path, traced=find_subject("llama").traced)


@contextlib.contextmanager
def running(scratch: Path) -> Iterator[Engine]:
    with open_engine(
        find_subject("weave"), ON_DISK, num_microbatches=2, max_grad_norm=1.0, scratch=scratch
    ) as engine:
        yield engine


def test_the_wrong_number_of_microbatches_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as engine, pytest.raises(MismatchError, match="3 micro-batches"):
        engine.train_step([*STEPS[0], STEPS[0][0]], step=1, learning_rate=1e-3)


@pytest.mark.parametrize("damage", ["truncated", "replaced", "removed"])
def test_a_scratch_file_damaged_under_a_run_ends_it(damage: str, tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
        (scratch,) = tmp_path.glob("*.scratch")
        match damage:
            case "truncated":
                with scratch.open("r+b") as file:
                    file.truncate(4096)
            case "replaced":
                copy = scratch.with_name("copy")
                copy.write_bytes(scratch.read_bytes())
                copy.replace(scratch)
            case "removed":
                scratch.unlink()
        with pytest.raises(StorageError) as caught:
            engine.train_step(STEPS[1], step=2, learning_rate=1e-3)
        assert str(scratch) in str(caught.value)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
        before = read_states(engine, find_subject("weave").weights)
        once = engine.evaluate(STEPS[1])
        assert engine.evaluate(STEPS[1]).losses == once.losses
        assert once.grad_norm is None
        after = read_states(engine, find_subject("weave").weights)
    for state, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after[state][name])


def test_the_timeline_has_every_task_and_the_proved_memory(tmp_path: Path) -> None:
    programs = make_programs()
    proof = verify_program(programs["train_step"], find_subject("weave").traced.model)
    with running(tmp_path) as engine:
        result = engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
    spans = result.timeline.spans
    assert [span.index for span in spans] == list(range(len(programs["train_step"].tasks)))
    assert all(span.start_ns <= span.end_ns for span in spans)
    for pool, peak in proof.peak_bytes.items():
        curve = [point.used_bytes for point in result.timeline.memory[pool]]
        capacity = {each.id: each.capacity_bytes for each in programs["train_step"].pools}[pool]
        # Lanes that run ahead use more than one task after another would, never more than is there.
        assert peak <= max(curve) <= capacity
    assert result.disk_read_bytes > 0
    assert result.disk_written_bytes > 0


def test_an_error_of_a_free_names_the_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frees that go along with a task are told apart from it, and from each other."""
    programs = make_programs()
    model = find_subject("weave").traced.model
    proofs = {kind: verify_program(program, model) for kind, program in programs.items()}
    jobs = prepare_program(programs["train_step"], proofs["train_step"]).jobs
    job = next(job for job in jobs if len(job.frees) > 1)
    free = Performer.free

    def fail(performer: Performer, task: Free, program: Program) -> None:
        if task is job.frees[1]:
            raise StorageError("the drive is gone", where="the scratch file")
        free(performer, task, program)

    with make_engine(programs, proofs, tmp_path) as engine:
        monkeypatch.setattr(Performer, "free", fail)
        with pytest.raises(StorageError) as caught:
            engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
    words = f"task {job.index + 2} of step 1: {format_task(job.frees[1])}"
    assert caught.value.where == f"the scratch file\n{words}"
