"""The verifier: is this program right?

In: a program, and the model it was compiled for (without it, only what follows from the program
alone is checked). Out: a `Proof`, or a `RuleError` that names the first broken rule, the task with
three neighbours on each side, the buffers, the values and the limits. It shares no code with the
compiler: what it expects, it derives from model and layout.

    declared  every buffer that a task names is declared, with a pool in the tier where it is used
    layout    chunks and slots are aligned, do not overlap, and no cut changes a norm
    coverage  everything happens exactly once: blocks, micro-batches, chunks, losses, states
    messages  what crosses between ranks does so once, in its turn, to the right one    (*)
    order     gradients are summed in the agreed order, norms and updates come after them
    reads     each task reads and writes exactly what the model says; sizes are the model's  (*)
    present   what is read or freed is there, what is created is not there yet
    fresh     nobody reads a stale copy; the newest copy of what is needed is never freed
    capacity  no pool ever holds more than its capacity, workspace counted
    steady    a program ends in the state in which it began, so every further step is the first one

(*) mostly with a model only. The replay is sequential: each task ends before the next one begins. A
program that passes can neither exceed its budget nor deadlock however far lanes run ahead:
reservations are made in program order and no task waits for a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from packhorse.errors import MismatchError
from packhorse.model.spec import Model
from packhorse.program.bulk import collector_waits
from packhorse.program.digest import digest_program
from packhorse.program.program import Program, Proof, ProofEntry
from packhorse.verifier.capacity import check_capacity, check_start
from packhorse.verifier.coverage import check_coverage
from packhorse.verifier.declared import check_declared
from packhorse.verifier.freshness import check_fresh
from packhorse.verifier.layout import check_layout
from packhorse.verifier.messages import check_lives
from packhorse.verifier.order import check_order
from packhorse.verifier.outline import Outline, outline_program
from packhorse.verifier.presence import check_present
from packhorse.verifier.reads import check_reads
from packhorse.verifier.replay import Replay
from packhorse.verifier.steadiness import check_steady


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclarationRule:
    """A rule over what a program declares; it is checked before all others."""

    name: str
    check: Callable[[Program, Model | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineRule:
    """A rule over the program as a whole."""

    name: str
    check: Callable[[Outline], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRule:
    """A rule over the state before the first task of the replay."""

    name: str
    check: Callable[[Replay], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRule:
    """A rule over the replay's state just before a task happens."""

    name: str
    check: Callable[[Replay], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """A rule over the replay's state after the last task of a step."""

    name: str
    check: Callable[[Replay], None]


Rule = DeclarationRule | OutlineRule | StartRule | TaskRule | StepRule

RULES: Final[tuple[Rule, ...]] = (
    DeclarationRule(name="declared", check=check_declared),
    DeclarationRule(name="layout", check=check_layout),
    OutlineRule(name="coverage", check=check_coverage),
    OutlineRule(name="messages", check=check_lives),
    OutlineRule(name="order", check=check_order),
    OutlineRule(name="reads", check=check_reads),
    StartRule(name="capacity", check=check_start),
    TaskRule(name="present", check=check_present),
    TaskRule(name="fresh", check=check_fresh),
    TaskRule(name="capacity", check=check_capacity),
    StepRule(name="steady", check=check_steady),
)
TASK_CHECKS: Final = tuple(rule.check for rule in RULES if isinstance(rule, TaskRule))


@collector_waits()
def verify_program(program: Program, model: Model | None = None) -> Proof:
    """Replay a program and check every rule.

    Returns:
        The proof: the program's digest, and per task of a step what each pool held.

    Raises:
        RuleError: the first rule that the program breaks, and where.
        MismatchError: the program was compiled for another model.
    """
    if model is not None and model.fingerprint != program.model:
        raise MismatchError(
            f"the program was compiled for model {program.model}, not for {model.fingerprint}",
            where=f"model {model.name}",
            fix="lower the plan again for this model",
        )
    outline = _check_whole(program, model)
    replay = Replay(program, outline.touches)
    for rule in RULES:
        if isinstance(rule, StartRule):
            rule.check(replay)
    entries = _replay_tasks(replay)
    return Proof(digest=digest_program(program), entries=tuple(entries))


def _check_whole(program: Program, model: Model | None) -> Outline:
    for rule in RULES:
        if isinstance(rule, DeclarationRule):
            rule.check(program, model)
    outline = outline_program(program, model)
    for rule in RULES:
        if isinstance(rule, OutlineRule):
            rule.check(outline)
    return outline


def _replay_tasks(replay: Replay) -> list[ProofEntry]:
    entries: list[ProofEntry] = []
    for index, task in enumerate(replay.program.tasks):
        replay.begin_task(index)
        for check in TASK_CHECKS:
            check(replay)
        peak_bytes = replay.peak_bytes
        replay.end_task()
        entries.append(ProofEntry(task=task, used_bytes=replay.used_bytes, peak_bytes=peak_bytes))
    for rule in RULES:
        if isinstance(rule, StepRule):
            rule.check(replay)
    return entries
