"""The verifier over all ranks: do their programs fit each other?

In: the programs of ranks 0, 1, ... for the same step, and the parts of the model that they were
compiled for. Out: a `Proof` for each, or a `RuleError`: each program passes alone, and together

    whole      the parts are those of one model, and each rank has its program
    messages   both ends of every channel have the same messages in the same order
    deadlock   the joint replay, in which a send ends only when its receive has begun, never sticks

In the joint replay each rank goes through its program task by task. So ranks that pass cannot wait
for each other for ever on any transport, buffered or not, however far their lanes run ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from packhorse.errors import RuleError
from packhorse.model.spec import Model
from packhorse.program.bulk import collector_waits
from packhorse.program.program import Program, Proof
from packhorse.program.tasks import Recv, Send
from packhorse.verifier.failures import name_task
from packhorse.verifier.messages import check_channels
from packhorse.verifier.rules import verify_program

WHOLE: Final = "whole"
DEADLOCK: Final = "deadlock"
NUM_SHOWN: Final = 12


@collector_waits()
def verify_ranks(
    programs: Sequence[Program], models: Sequence[Model] | None = None
) -> tuple[Proof, ...]:
    """Verify each rank's program, then all of them together.

    Args:
        programs: by rank.
        models: the parts of the ranks, if they are known.

    Raises:
        RuleError: the first rule that is broken, the rank and the place.
        MismatchError: a program was compiled for another model.
    """
    _check_whole(programs, models)
    proofs = tuple(
        verify_program(program, None if models is None else models[rank])
        for rank, program in enumerate(programs)
    )
    check_channels(programs)
    check_deadlock(programs)
    return proofs


def check_deadlock(programs: Sequence[Program]) -> None:
    """Replay all ranks' messages; channels are known to match.

    Raises:
        RuleError: ranks wait for each other; names what each of them waits at.
    """
    lists = [
        [(at, task) for at, task in enumerate(program.tasks) if isinstance(task, Send | Recv)]
        for program in programs
    ]
    at = [0] * len(lists)
    pending = list(range(len(lists)))
    while pending:
        rank = pending.pop()
        while at[rank] < len(lists[rank]):
            _, task = lists[rank][at[rank]]
            peer = task.peer
            if at[peer] == len(lists[peer]):
                break
            _, answer = lists[peer][at[peer]]
            if type(answer) is type(task) or answer.peer != rank or answer.buffer != task.buffer:
                break
            at[rank] += 1
            at[peer] += 1
            pending.append(peer)
    stuck = [rank for rank, place in enumerate(at) if place < len(lists[rank])]
    if stuck:
        shown = [
            f"rank {rank} waits at {name_task(programs[rank], lists[rank][at[rank]][0])}"
            for rank in stuck
        ]
        rest = len(shown) - NUM_SHOWN
        more = [f"and {rest} more"] if rest > 0 else []
        raise RuleError(
            f"{len(stuck)} of {len(programs)} ranks wait for each other for ever",
            rule=DEADLOCK,
            where="\n".join([*shown[:NUM_SHOWN], *more]),
            fix="let every rank send and receive in one order that all of them keep",
        )


def _check_whole(programs: Sequence[Program], models: Sequence[Model] | None) -> None:
    ranks = [program.rank for program in programs]
    if ranks != list(range(len(programs))):
        raise _not_whole(f"the programs are of ranks {ranks}, not of 0 to {len(programs) - 1}")
    first = programs[0]
    for program in programs:
        key = (program.kind, program.model, program.num_microbatches)
        if key != (first.kind, first.model, first.num_microbatches):
            raise _not_whole(
                f"rank {program.rank} has a {program.kind} program of model {program.model} with"
                f" {program.num_microbatches} micro-batches, rank 0 a {first.kind} program of model"
                f" {first.model} with {first.num_microbatches}"
            )
    if models is None:
        return
    owners = {None if model.part is None else model.part.owners for model in models}
    parts = [0 if model.part is None else model.part.rank for model in models]
    if len(owners) > 1 or parts != ranks:
        raise _not_whole("the parts are not those of one model, cut in one way, rank by rank")
    (cut,) = owners
    if len(programs) != (1 if cut is None else max(cut) + 1):
        raise _not_whole(f"the model is cut for {max(cut or (0,)) + 1} ranks, not {len(programs)}")


def _not_whole(what: str) -> RuleError:
    return RuleError(
        what,
        rule=WHOLE,
        where="all ranks",
        fix="compile one plan for all ranks, and take every rank's program",
    )
