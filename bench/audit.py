"""Every task of a real program deleted, repeated or swapped with its neighbour, one at a time.

The program is a training step of a tiny Llama with everything on disk, recompute and two
micro-batches. Each change must be seen: by the verifier, which rejects the program by a rule, or,
where the changed program is still right by every rule (two neighbours that do not touch each other,
for example), by the audit of a run against the proof of the unchanged program. Either must name the
task.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch

from bench.planned import KINDS, PLACES, Subject, Ways, load_weights, make_plan, trace_subject
from bench.report import Bench, exactly, run_bench, shown
from bench.zoo import ZOO, Step, batch_of, build_model, make_optimizer_words, make_steps
from packhorse.compiler.lower import Lowerer
from packhorse.compiler.runs import Runs
from packhorse.errors import AuditError, RuleError
from packhorse.graph.halving import halve_backwards
from packhorse.model.spec import Model
from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Task
from packhorse.program.text import format_task
from packhorse.runtime.engine import Engine
from packhorse.verifier.rules import verify_program

MODEL: Final = "llama"
NUM_MICROBATCHES: Final = 2
ON_DISK: Final = replace(PLACES["all on disk"], activations=("recompute",))
Change = Literal["deleted", "repeated", "swapped"]
CHANGES: Final[tuple[Change, ...]] = ("deleted", "repeated", "swapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A program in which the task at `index` of the real one is changed."""

    change: Change
    index: int
    task: Task
    program: Program

    def names_task(self, message: str) -> bool:
        """Whether a message names the changed task, or one that the change broke."""
        words = " ".join(message.split())
        return any(name_task(task) in words for task in (self.task, *self.program.tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Who saw a mutant, and in which words; `by` is None for one that nobody saw."""

    mutant: Mutant
    by: str | None
    message: str


def name_task(task: Task) -> str:
    """What a task is called in messages: its line up to what it reads and writes."""
    words = " ".join(format_task(task).split())
    return re.split(r" (?:at|reads|writes|work)=", words)[0]


def make_mutants(program: Program) -> Iterator[Mutant]:
    """Every single change of a program's order of tasks."""
    tasks = program.tasks
    for change in CHANGES:
        for index in range(len(tasks)):
            changed = _change(tasks, change, index)
            if changed != tasks:
                yield Mutant(
                    change=change,
                    index=index,
                    task=tasks[index],
                    program=replace(program, tasks=changed),
                )


class Range:
    """A model, the proved programs of a plan, and a fresh engine for each mutant."""

    def __init__(
        self,
        subject: Subject,
        steps: tuple[Step, ...],
        scratch: Path,
        ways: Ways,
        runs: Runs,
    ) -> None:
        plan = make_plan(
            subject.traced.model,
            subject.optimizer,
            ways,
            num_microbatches=len(steps[0]),
            clips=True,
        )
        model = subject.traced.model
        self._subject = subject
        self._steps = steps
        self._scratch = scratch
        lowerer = Lowerer(model, runs)
        self.programs: Mapping[ProgramKind, Program] = {
            kind: lowerer.lower(plan, kind) for kind in KINDS
        }
        self._proofs = {kind: verify_program(p, model) for kind, p in self.programs.items()}

    @property
    def program(self) -> Program:
        """The training step."""
        return self.programs["train_step"]

    def judge(self, mutant: Mutant) -> Finding:
        """Verify a mutant, and run it if it passes."""
        try:
            verify_program(mutant.program, self._subject.traced.model)
        except RuleError as error:
            return Finding(mutant=mutant, by=f"rule {error.rule}", message=str(error))
        try:
            self.run(mutant.program)
        except AuditError as error:
            return Finding(mutant=mutant, by="audit", message=str(error))
        return Finding(mutant=mutant, by=None, message="")

    def run(self, program: Program) -> None:
        """Run a training step in audit mode, against the proof of the unchanged program."""
        with Engine(
            traced=self._subject.traced,
            programs={**self.programs, "train_step": program},
            proofs=self._proofs,
            optimizer=self._subject.optimizer,
            max_grad_norm=1.0,
            seed=1,
            scratch=self._scratch,
            num_threads=1,
            heap="keep",
            audit=True,
        ) as engine:
            load_weights(engine, self._subject.weights)
            for step, feeds in enumerate(self._steps, 1):
                engine.train_step(feeds, step=step, learning_rate=1e-3)


def make_range(
    scratch: Path,
    ways: Ways = ON_DISK,
    order: Callable[[Model, int], Runs] | None = None,
) -> Range:
    """The range of this bench, or of another plan; `order` may run backwards in halves."""
    entry = ZOO[MODEL]
    steps = make_steps(entry, num_steps=1, num_microbatches=NUM_MICROBATCHES)
    optimizer = make_optimizer_words("adamw", entry, "all")
    subject = trace_subject(build_model(entry), batch_of(steps), optimizer)
    if order is None:
        return Range(subject, steps, scratch, ways, ())
    subject = replace(subject, traced=halve_backwards(subject.traced))
    runs = order(subject.traced.model, NUM_MICROBATCHES)
    return Range(subject, steps, scratch, ways, runs)


def measure(bench: Bench) -> None:
    """Judge every mutant; a quick run takes every fifth."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="packhorse-audit-") as scratch:
        ground = make_range(Path(scratch))
        bench.say(f"a program of {len(ground.program.tasks)} tasks")
        ground.run(ground.program)
        mutants = list(make_mutants(ground.program))
        if bench.quick:
            mutants = mutants[::5]
        findings: list[Finding] = []
        for number, mutant in enumerate(mutants, 1):
            findings.append(ground.judge(mutant))
            if number % 200 == 0:
                bench.say(f"{number} of {len(mutants)}")
    for finding in findings:
        if finding.by is None or not finding.mutant.names_task(finding.message):
            mutant = finding.mutant
            bench.say(f"  task {mutant.index} {mutant.change}: {format_task(mutant.task)}")
    for change in CHANGES:
        chosen = [finding for finding in findings if finding.mutant.change == change]
        seen = sum(finding.by is not None for finding in chosen)
        named = sum(finding.mutant.names_task(finding.message) for finding in chosen)
        counts = Counter(finding.by for finding in chosen if finding.by)
        bench.add(
            f"tasks {change}",
            [
                exactly("seen", seen, len(chosen)),
                exactly("seen with a task named", named, len(chosen)),
                *(shown(f"by {by}", count) for by, count in counts.most_common()),
            ],
        )


def _change(tasks: tuple[Task, ...], change: Change, index: int) -> tuple[Task, ...]:
    match change:
        case "deleted":
            return tasks[:index] + tasks[index + 1 :]
        case "repeated":
            return tasks[: index + 1] + tasks[index:]
        case "swapped":
            return (*tasks[:index], *tasks[index : index + 2][::-1], *tasks[index + 2 :])


if __name__ == "__main__":
    sys.exit(run_bench("audit", __doc__.splitlines()[0], measure))
