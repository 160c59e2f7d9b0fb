"""Random small programs that pass the sequential replay, random costs, and a slow simulator.

The slow simulator is the memory contract spelt out: a clock that ticks nanosecond by nanosecond, an
issuing thread, first-in first-out lanes and workers. It shares no code with the one under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId
from packhorse.program.lanes import assign_lanes
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Copy,
    Emit,
    Forward,
    Free,
    Lane,
    Task,
    Update,
    reads_of,
    workspace_of,
    writes_of,
)

DEVICE = PoolId("device")
HOST = PoolId("host")
DISK = PoolId("disk")
TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCosts:
    """Costs by task, for tests: durations are looked up by identity of the value."""

    table: Mapping[Task, int]

    def duration_ns(self, task: Task) -> int:
        return self.table[task]


def make_program(
    tasks: list[Task], sizes: Mapping[str, int], *, homes: Mapping[str, str], capacity: int
) -> Program:
    """A program over buffers that may lie in all tiers; only the device is tight."""
    return Program(
        kind="train_step",
        model="none",
        rank=0,
        num_microbatches=1,
        pools=(
            Pool(id=DEVICE, tier="device", capacity_bytes=capacity),
            Pool(id=HOST, tier="host", capacity_bytes=10_000),
            Pool(id=DISK, tier="disk", capacity_bytes=10_000),
        ),
        workspace_pool=DEVICE,
        buffers={
            BufferId(name): Buffer(
                id=BufferId(name),
                size_bytes=size,
                pools={"device": DEVICE, "host": HOST, "disk": DISK},
                home=homes.get(name),
            )
            for name, size in sizes.items()
        },
        layout=Layout(chunks=(), slots={}, dtypes={}),
        tasks=tuple(tasks),
    )


def draw_program(random: Random, num_tasks: int) -> tuple[Program, TableCosts]:
    """Draw a program that passes the sequential replay, with durations of 1 to 9 ns."""
    sizes = {f"b{n}": random.randint(1, 20) for n in range(random.randint(2, 7))}
    homes = {name: random.choice(TIERS) for name in sizes if random.random() < 0.7}
    capacity = sum(sizes[name] for name, home in homes.items() if home == "device")
    capacity += random.randint(20, 50)
    present = set(homes.items())
    used = sum(sizes[name] for name, tier in present if tier == "device")
    tasks: list[Task] = []
    while len(tasks) < num_tasks:
        task, workspace = _draw_task(random, sorted(sizes), sorted(present), len(tasks)), 0
        if task is None:
            continue
        workspace = workspace_of(task)
        new = [place for place in writes_of(task) if place not in present]
        grown = used + sum(sizes[name] for name, tier in new if tier == "device")
        if grown + workspace > capacity:
            continue
        used = grown
        present |= set(new)
        if isinstance(task, Free):
            present.remove((task.buffer, task.tier))
            used -= sizes[task.buffer] if task.tier == "device" else 0
        tasks.append(task)
    program = make_program(tasks, sizes, homes=homes, capacity=capacity)
    return program, TableCosts(table={task: random.randint(1, 9) for task in tasks})


def _draw_task(random: Random, names: list[str], present: list, index: int) -> Task | None:
    def some(tier: str) -> tuple[BufferId, ...]:
        here = [name for name, at in present if at == tier]
        return tuple(random.sample(here, min(len(here), random.randint(0, 2))))

    def others() -> tuple[BufferId, ...]:
        return tuple(BufferId(name) for name in random.sample(names, random.randint(0, 2)))

    match random.randint(0, 6):
        case 0 | 1:
            return Forward(
                block=index,
                microbatch=0,
                reads=some("device"),
                writes=others(),
                workspace_bytes=random.randint(0, 12),
            )
        case 2:
            return Update(
                chunk=index, where="host", reads=some("host"), writes=(), workspace_bytes=0
            )
        case 3 | 4 if present:
            name, tier = random.choice(present)
            target = random.choice([other for other in TIERS if other != tier])
            return Copy(buffer=name, source=tier, target=target)
        case 5 if present:
            name, tier = random.choice(present)
            return Free(buffer=name, tier=tier)
        case 6 if some("device"):
            here = [name for name, at in present if at == "device"]
            return Emit(buffer=random.choice(here))
        case _:
            return None


def simulate_slowly(
    program: Program, costs: TableCosts, workers: Mapping[Lane, str], issuer: str
) -> tuple[list[tuple[int, int]], int]:
    """Give (start, end) of every task, and the device's peak."""
    tasks = program.tasks
    count = len(tasks)
    sizes = {name: buffer.size_bytes for name, buffer in program.buffers.items()}
    present = {(b.id, b.home) for b in program.buffers.values() if b.home is not None}
    capacity = program.pools[0].capacity_bytes
    used = sum(sizes[name] for name, tier in present if tier == "device")
    peak = used
    conflicts = [[e for e in range(t) if _conflict(tasks[e], tasks[t])] for t in range(count)]
    start: list[int | None] = [None] * count
    end: list[int | None] = [None] * count
    lanes = assign_lanes(tasks)
    done = [False] * count
    issued = 0
    now = 0
    while not all(done):
        for t in range(issued):
            if not done[t] and end[t] is not None and end[t] <= now:
                done[t] = True
                used -= workspace_of(tasks[t])
                if isinstance(tasks[t], Free) and tasks[t].tier == "device":
                    used -= sizes[tasks[t].buffer]
        moved = True
        while moved:
            moved = False
            inline_busy = any(not done[t] and workers[lanes[t]] == issuer for t in range(issued))
            if issued < count and not inline_busy:
                task = tasks[issued]
                new = [place for place in writes_of(task) if place not in present]
                need = workspace_of(task) + sum(
                    sizes[name] for name, tier in new if tier == "device"
                )
                if used + need <= capacity:
                    used += need
                    peak = max(peak, used)
                    present |= set(new)
                    if isinstance(task, Free):
                        present.discard((task.buffer, task.tier))
                    issued += 1
                    moved = True
            for t in range(issued):
                worker = workers[lanes[t]]
                blocked = any(not done[e] for e in range(t) if workers[lanes[e]] == worker) or any(
                    not done[e] for e in conflicts[t]
                )
                if start[t] is None and not blocked:
                    start[t], end[t] = now, now + costs.duration_ns(tasks[t])
                    moved = True
        now += 1
        assert now < 100_000, "the slow simulator is stuck"
    return list(zip(start, end, strict=True)), peak


def _conflict(earlier: Task, later: Task) -> bool:
    def changes(task: Task) -> set:
        freed = {(task.buffer, task.tier)} if isinstance(task, Free) else set()
        return set(writes_of(task)) | freed

    def touches(task: Task) -> set:
        return set(reads_of(task)) | changes(task)

    return bool(changes(earlier) & touches(later) or touches(earlier) & changes(later))
