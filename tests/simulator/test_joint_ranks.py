"""All ranks on one clock: the times of a pipeline are those of its closed formula."""

from __future__ import annotations

import pytest

from packhorse.errors import RuleError
from packhorse.machine.catalogue import load_known_machine
from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId
from packhorse.program.program import Program
from packhorse.program.tasks import Backward, Forward, Free, Recv, Send, Task
from packhorse.simulator.joint import simulate_ranks

POOL = PoolId("device")
FORWARD_NS, BACKWARD_NS, SEND_NS = 100, 200, 10


class Costs:
    """A forward, a backward and a message each take their time; the rest takes none."""

    machine = load_known_machine("laptop-16gb")

    def duration_ns(self, task: Task) -> int:
        match task:
            case Forward():
                return FORWARD_NS
            case Backward():
                return BACKWARD_NS
            case Send() | Recv():
                return SEND_NS
            case _:
                return 0


def make_chain(num_ranks: int, num_microbatches: int) -> list[Program]:
    """All forwards, then all backwards: a stage a rank."""
    programs = []
    for rank in range(num_ranks):
        tasks: list[Task] = []
        names: set[BufferId] = set()

        def value(kind: str, rank: int, microbatch: int, names: set[BufferId] = names) -> BufferId:
            name = BufferId(f"{kind}/h{rank}@{microbatch}")
            names.add(name)
            return name

        for mb in range(num_microbatches):
            reads, kept = (), value("saved", rank, mb)
            if rank:
                reads = (value("value", rank - 1, mb),)
                tasks.append(Recv(buffer=reads[0], peer=rank - 1))
            makes = (kept,)
            if rank + 1 < num_ranks:
                makes = (kept, value("value", rank, mb))
            tasks.append(
                Forward(block=0, microbatch=mb, reads=reads, writes=makes, workspace_bytes=0)
            )
            if rank + 1 < num_ranks:
                tasks.append(Send(buffer=makes[1], peer=rank + 1))
                tasks.append(Free(buffer=makes[1], tier="device"))
            tasks += [Free(buffer=name, tier="device") for name in reads]
        for mb in range(num_microbatches):
            reads = (value("saved", rank, mb),)
            if rank + 1 < num_ranks:
                reads = (*reads, value("dvalue", rank, mb))
                tasks.append(Recv(buffer=reads[1], peer=rank + 1))
            makes = (value("dvalue", rank - 1, mb),) if rank else ()
            tasks.append(
                Backward(block=0, microbatch=mb, reads=reads, writes=makes, workspace_bytes=0)
            )
            tasks += [Free(buffer=name, tier="device") for name in reads]
            if rank:
                tasks.append(Send(buffer=makes[0], peer=rank - 1))
                tasks.append(Free(buffer=makes[0], tier="device"))
        programs.append(
            Program(
                kind="evaluate",
                model="m",
                rank=rank,
                num_microbatches=num_microbatches,
                pools=(Pool(id=POOL, tier="device", capacity_bytes=1 << 20),),
                workspace_pool=POOL,
                buffers={
                    name: Buffer(id=name, size_bytes=8, pools={"device": POOL}, home=None)
                    for name in sorted(names)
                },
                layout=Layout(chunks=(), slots={}, dtypes={}),
                tasks=tuple(tasks),
            )
        )
    return programs


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (3, 1)])
def test_a_pipeline_takes_what_its_formula_says(num_ranks: int, num_microbatches: int) -> None:
    programs = make_chain(num_ranks, num_microbatches)
    timelines = simulate_ranks(programs, [Costs()] * num_ranks)
    stages = num_microbatches + num_ranks - 1
    hops = 2 * (num_ranks - 1) * SEND_NS
    wanted_ns = stages * (FORWARD_NS + BACKWARD_NS) + hops
    assert max(timeline.makespan_ns for timeline in timelines) == wanted_ns
    for timeline in timelines:
        busy_ns = timeline.busy_ns("compute")
        assert busy_ns == num_microbatches * (FORWARD_NS + BACKWARD_NS)


def test_both_ends_of_a_message_are_at_the_same_time() -> None:
    first, second = simulate_ranks(make_chain(2, 3), [Costs()] * 2)
    sent = [(s.start_ns, s.end_ns) for s in first.spans if s.lane == "send 1"]
    received = [(s.start_ns, s.end_ns) for s in second.spans if s.lane == "receive 0"]
    assert [end - start for start, end in sent if end > start] == [SEND_NS] * 3
    assert [times for times in sent if times[0] < times[1]] == received


def test_ranks_that_wait_for_ever_are_told() -> None:
    first, second = make_chain(2, 2)
    lost = Program(**{**{f: getattr(second, f) for f in second.__slots__}, "tasks": ()})
    with pytest.raises(RuleError, match="rule deadlock: 1 of 2 ranks wait"):
        simulate_ranks([first, lost], [Costs()] * 2)
