"""When does each task of each rank run? All ranks together.

In: the programs of ranks 0, 1, ..., their costs. Out: a `Timeline` for each, on one clock. Each
rank is simulated as if it were alone, up to its next message:

    a message starts when both ends are ready, its lanes free, the receiver's place reserved
    it ends a transfer later on both ranks, and takes its lane on either side meanwhile

Programs that pass the joint replay always get through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from packhorse.errors import RuleError
from packhorse.program.bulk import collector_waits
from packhorse.program.program import Program
from packhorse.program.tasks import Recv, Send
from packhorse.simulator.costs import MachineCosts
from packhorse.simulator.engine import (
    Meeting,
    Times,
    Walk,
    lanes_of_run,
    rounds_of,
    tell_times,
    walk_tasks,
)
from packhorse.simulator.footprints import Footprint, find_footprints
from packhorse.simulator.ledger import Ledger
from packhorse.timeline.names import name_of
from packhorse.timeline.spec import Timeline


@collector_waits()
def simulate_ranks(
    programs: Sequence[Program], costs: Sequence[MachineCosts]
) -> tuple[Timeline, ...]:
    """Predict a step of all ranks, behind another one, as the runtime runs it.

    Args:
        costs: by rank; a message takes what its sender's link says.

    Raises:
        RuleError: ranks wait for each other for ever (`deadlock`), or as `simulate_program`.
    """
    ranks = [_Rank(program, cost) for program, cost in zip(programs, costs, strict=True)]
    pending = deque(range(len(ranks)))
    waiting: dict[int, Meeting] = {}
    for each in ranks:
        each.begin()
    while pending:
        rank = pending.popleft()
        meeting = ranks[rank].meeting
        if meeting is None:
            continue
        peer = _peer_of(meeting)
        other = waiting.get(peer)
        if other is None or not _answers(meeting, rank, other, peer):
            waiting[rank] = meeting
            continue
        del waiting[peer]
        sent = meeting if isinstance(meeting.task, Send) else other
        start_ns = max(meeting.ready_ns, other.ready_ns)
        for end in (rank, peer):
            ranks[end].go_on(start_ns, start_ns + sent.duration_ns)
            pending.append(end)
    if waiting:
        raise RuleError(
            f"{len(waiting)} of {len(ranks)} ranks wait for each other for ever",
            rule="deadlock",
            where="\n".join(
                f"rank {rank} waits at {name_of(meeting.task)}"
                for rank, meeting in sorted(waiting.items())[:12]
            ),
            fix="verify the programs of all ranks together",
        )
    zero_ns = min(min(rank.times.starts_ns, default=0) for rank in ranks)
    return tuple(
        tell_times(rank.program.rank, rank.ordered, rank.times, rank.ledger, zero_ns)
        for rank in ranks
    )


class _Rank:
    # A rank on its way through its program: at a meeting, or at the end with its times.

    def __init__(self, program: Program, costs: MachineCosts) -> None:
        workers, shared = lanes_of_run(program, costs.machine)
        footprints = find_footprints(program, costs=costs, shared=shared)
        self.program = program
        self.ordered: Sequence[Footprint] = footprints.of_tasks
        self.ledger = Ledger(footprints, self.ordered, program.pools)
        self.meeting: Meeting | None = None
        self._walk: Walk = walk_tasks(
            self.ordered, self.ledger, workers, shared, rounds_of(program)
        )
        self._times: Times | None = None

    @property
    def times(self) -> Times:
        assert self._times is not None
        return self._times

    def begin(self) -> None:
        try:
            self.meeting = next(self._walk)
        except StopIteration as end:
            self.meeting, self._times = None, end.value

    def go_on(self, start_ns: int, end_ns: int) -> None:
        try:
            self.meeting = self._walk.send((start_ns, end_ns))
        except StopIteration as end:
            self.meeting, self._times = None, end.value


def _peer_of(meeting: Meeting) -> int:
    assert isinstance(meeting.task, Send | Recv)
    return meeting.task.peer


def _answers(one: Meeting, rank: int, other: Meeting, peer: int) -> bool:
    first, second = one.task, other.task
    assert isinstance(first, Send | Recv)
    assert isinstance(second, Send | Recv)
    kinds = {type(first), type(second)}
    return (
        kinds == {Send, Recv}
        and first.buffer == second.buffer
        and (first.peer, second.peer) == (peer, rank)
    )
