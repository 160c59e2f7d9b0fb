"""Interleaved updates on emulated nodes: stride by stride, against the model that chooses one.

A stack of equal layers is trained with its states in the host, on an emulated machine: real
threads, copies and updates, each as slow as the rates of a node with an A100 or an H100 say, all
divided by one factor. Every stride k is run (0: all updates in the host; 1: all chunks visit the
device; k: every k-th does), and a static split: within the same budget of the device, as many
chunks as fit keep their optimizer states there. The time of the updates is that from the global
norm to the end of the step; the weights of every run must be the same bits.

The rates are those of Deep Optimizer States' published logs: copies in and out together 14 GB/s
and 0.85 Gparam/s in the host for each of four A100; for each of four H100 2.2 Gparam/s in the host,
and copies as fast as half of the chunks took in the device. Updates in the device take a fiftieth
of a nanosecond a parameter and less. A downcast on the host has no part in them: parameters return
on a lane of their own, as where it is overlapped already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.children import work_folder
from bench.planned import Subject, Ways, make_plan, read_states, start_plan, trace_subject
from bench.reference import Feed, same_bits
from bench.report import Bench, Figure, at_least, at_most, holds, run_bench, shown
from packhorse.compiler.lower import lower_plan
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.emulation import slow_down
from packhorse.machine.spec import Machine, TierName, UpdateRate
from packhorse.optim.optimizers import AdamW
from packhorse.plan.pins import Pins
from packhorse.plan.spec import Choice, OptimizerPlan, Plan
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.spec import Profile
from packhorse.program.program import Program
from packhorse.program.tasks import GradNorm
from packhorse.search.evaluation import need_of
from packhorse.search.stride import UpdateLegs, find_legs, model_stride, place_updates
from packhorse.simulator.costs import TaskCosts
from packhorse.simulator.engine import simulate_run
from packhorse.timeline.spec import Timeline
from packhorse.units import GIB, format_bytes, format_ns

NEAR: Final = 1.03
BOUND: Final = 1.05
GAIN: Final = 1.25
SLOWDOWN: Final = 400.0
WIDTH: Final = 512
LENGTH: Final = 512
VOCABULARY: Final = 64
MAX_NORM: Final = 1.0
NUM_WARM_STEPS: Final = 1
STRIDES: Final = (0, 1, 2, 3, 4, 5, 6)
# Of the time that a layer's gradient takes to leave, its backward takes so much: what the update
# waits for is the norm, not the link.
BACKWARD_SHARE: Final = 1.5
_WORKING_STATES: Final = 4  # parameter, gradient and two moments
_OPTIMIZER: Final = OptimizerPlan(
    name="adamw", states=("exp_avg", "exp_avg_sq"), master=False, clips=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The rates of one rank of a node; updates are whole ones, clipping included.

    The shorter its steps, the more of them are run.
    """

    known: str
    num_steps: int
    link_bytes_per_s: float
    host_per_s: float
    device_per_s: float


NODES: Final[Mapping[str, Node]] = {
    "A100 node": Node(
        known="a100-80gb",
        num_steps=3,
        link_bytes_per_s=7e9,
        host_per_s=0.85e9,
        device_per_s=50e9,
    ),
    "H100 node": Node(
        known="h100-80gb",
        num_steps=6,
        link_bytes_per_s=23e9,
        host_per_s=2.2e9,
        device_per_s=80e9,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run showed: the least time of a step's updates, device bytes, weights."""

    update_ns: int
    simulated_ns: int
    device_bytes: int
    overrun_ns: int
    states: Mapping[str, Mapping[str, Tensor]]


class Stack(nn.Module):
    """Equal linear layers between an embedding and a head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Give the mean loss."""
        x_BTD = self.embed(input_ids)
        for layer in self.layers:
            x_BTD = x_BTD + torch.relu(layer(x_BTD))
        logits_BTV = self.head(x_BTD)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


def measure(bench: Bench) -> None:
    """Run every stride on every node; a quick run takes one node and a shorter stack."""
    num_layers = 16 if bench.quick else 24
    strides = STRIDES[:5] if bench.quick else STRIDES
    nodes = list(NODES.items())[:1] if bench.quick else list(NODES.items())
    steps = _make_steps(max(node.num_steps for _, node in nodes))
    batch = {name: steps[0][name] for name in ("input_ids", "labels")}
    torch.manual_seed(0)
    subject = trace_subject(Stack(num_layers), batch, AdamW(lr=1e-4))
    for name, node in nodes:
        num_steps = NUM_WARM_STEPS + 1 if bench.quick else node.num_steps
        machine = _emulate(node)
        profile = estimate_profile(subject.traced.model, machine)
        with work_folder("stride") as folder:
            bench.say(name)
            _measure_node(
                bench, name, subject, machine, profile, strides, steps[:num_steps], folder
            )


def _measure_node(
    bench: Bench,
    name: str,
    subject: Subject,
    machine: Machine,
    profile: Profile,
    strides: Sequence[int],
    steps: Sequence[Feed],
    folder: Path,
) -> None:
    hosted = _grant_device(subject, _plan_hosted(subject, machine), strides)
    sizes = _sizes_of(hosted)
    legs = find_legs(machine, hosted.optimizer)
    assert legs is not None
    chosen = place_updates(hosted, subject.traced.model, profile, machine, pins=Pins()).stride
    ran: dict[int, Ran] = {}
    for stride in strides:
        plan = replace(hosted, stride=Choice(value=stride, because="it is asked for"))
        ran[stride] = _run(subject, plan, machine, profile, steps, folder)
        _tell(bench, f"{name}, stride {stride}", ran[stride])
    static = _plan_static(subject, hosted)
    split = _run(subject, static, machine, profile, steps, folder)
    _tell(bench, f"{name}, static split", split)
    bench.add(f"{name}: updates by stride", _list_strides(ran, split, static, legs, sizes))
    bench.add(
        f"{name}: the stride of the model",
        _judge(ran, split, chosen, legs, sizes, hosted.budget_bytes["device"]),
    )


def _list_strides(
    ran: Mapping[int, Ran], split: Ran, static: Plan, legs: UpdateLegs, sizes: Sequence[int]
) -> list[Figure]:
    figures: list[Figure] = []
    for stride, found in ran.items():
        figures += [
            shown(f"stride {stride}, measured", found.update_ns, show=format_ns),
            shown(f"stride {stride}, simulated", found.simulated_ns, show=format_ns),
            shown(f"stride {stride}, bound", legs.bound_ns(sizes, stride), show=format_ns),
        ]
    num_resident = sum(chunk.optimizer.value == "device" for chunk in static.chunks)
    return [
        *figures,
        shown("static split, measured", split.update_ns, show=format_ns),
        shown("static split, chunks in the device", num_resident),
    ]


def _judge(
    ran: Mapping[int, Ran],
    split: Ran,
    chosen: Choice[int],
    legs: UpdateLegs,
    sizes: Sequence[int],
    budget_bytes: int,
) -> list[Figure]:
    best = min(ran, key=lambda stride: ran[stride].update_ns)
    mine = ran[chosen.value]
    bits = all(
        same_bits(mine.states[state][name], other.states[state][name])
        for other in (*ran.values(), split)
        for state, tensors in mine.states.items()
        for name in tensors
    )
    # Of the whole step: work that this machine was too slow or too busy for.
    late = max(found.overrun_ns / found.update_ns for found in ran.values())
    return [
        shown("both legs balance at", legs.balance),
        shown("stride of the model alone", model_stride(legs, sizes)),
        shown("stride chosen, confirmed by the simulator", chosen.value),
        shown("best stride measured", best),
        at_most("chosen over best measured", mine.update_ns / ran[best].update_ns, NEAR),
        at_most(
            "measured over the bound", mine.update_ns / legs.bound_ns(sizes, chosen.value), BOUND
        ),
        at_least("faster than all in the host", ran[0].update_ns / mine.update_ns, GAIN),
        at_least("faster than the static split", split.update_ns / mine.update_ns, GAIN),
        shown("device budget of every run", budget_bytes, show=format_bytes),
        shown("device peak, chosen", mine.device_bytes, show=format_bytes),
        shown("device peak, static split", split.device_bytes, show=format_bytes),
        holds("weights and moments", bits, measured="same" if bits else "differ", bar="same bits"),
        shown("work beyond its pace, share of the updates", late),
    ]


def _emulate(node: Node) -> Machine:
    budgets: dict[TierName, int] = {"device": 2 * GIB, "host": 4 * GIB}
    slow = slow_down(load_known_machine(node.known), SLOWDOWN, budgets)
    link_bytes_per_s = node.link_bytes_per_s / SLOWDOWN
    clipping = _find_clipping(slow)
    rates: dict[TierName, float] = {"host": node.host_per_s, "device": node.device_per_s}
    # A layer's backward: four operations for each of its parameters and tokens.
    flops_per_s = LENGTH * link_bytes_per_s / BACKWARD_SHARE
    return replace(
        slow,
        links=tuple(
            replace(link, bytes_per_s=link_bytes_per_s, latency_ns=0) for link in slow.links
        ),
        matmul=tuple(replace(point, flops_per_s=flops_per_s) for point in slow.matmul),
        updates=tuple(
            UpdateRate(tier=tier, parameters_per_s=rate * clipping / SLOWDOWN)
            for tier, rate in rates.items()
        ),
    )


def _find_clipping(machine: Machine) -> float:
    # How much longer an update that clips takes than the plain one whose rate a machine declares.
    clipped = find_legs(machine, _OPTIMIZER)
    plain = find_legs(machine, replace(_OPTIMIZER, clips=False))
    assert clipped is not None
    assert plain is not None
    return clipped.host_ns / plain.host_ns


def _plan_hosted(subject: Subject, machine: Machine) -> Plan:
    """A plan with every state in the host; gradients leave only for updates in the host."""
    ways = Ways(
        parameters=("host",),
        optimizer=("host",),
        update=("host",),
        heap="map",
        chunk_bytes=4 * WIDTH * WIDTH,
    )
    plan = make_plan(subject.traced.model, subject.optimizer, ways, num_microbatches=1, clips=True)
    return replace(plan, budget_bytes={t.name: t.budget_bytes for t in machine.tiers})


def _grant_device(subject: Subject, hosted: Plan, strides: Sequence[int]) -> Plan:
    """Grant what the step needs at any stride, and room for one more chunk at work."""
    needs = [
        _need_device(
            subject, replace(hosted, stride=Choice(value=stride, because="it is asked for"))
        )
        for stride in strides
    ]
    room = _WORKING_STATES * hosted.chunk_bytes.value
    return replace(hosted, budget_bytes={**hosted.budget_bytes, "device": max(needs) + room})


def _need_device(subject: Subject, plan: Plan) -> int:
    return need_of(plan, lower_plan(plan, subject.traced.model, "train_step"))["device"]


def _plan_static(subject: Subject, hosted: Plan) -> Plan:
    """As many chunks as the same budget holds have their states in the device for good.

    They are updated there, the others in the host.
    """
    best = hosted
    sizes = _sizes_of(hosted)
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    in_device: Choice[TierName] = Choice(value="device", because="a static split")
    for count in range(1, len(sizes) + 1):
        resident = largest_first[:count]
        chunks = tuple(
            replace(chunk, optimizer=in_device, update=in_device) if index in resident else chunk
            for index, chunk in enumerate(hosted.chunks)
        )
        plan = replace(hosted, chunks=chunks)
        if _need_device(subject, plan) > hosted.budget_bytes["device"]:
            break
        best = plan
    return best


def _sizes_of(plan: Plan) -> list[int]:
    """Parameters of each chunk, in the order of the strides."""
    return [sum(piece.stop - piece.start for piece in chunk.pieces) for chunk in plan.chunks]


def _run(
    subject: Subject,
    plan: Plan,
    machine: Machine,
    profile: Profile,
    steps: Sequence[Feed],
    folder: Path,
) -> Ran:
    def pace(program: Program) -> list[int]:
        costs = TaskCosts(
            machine=machine,
            profile=profile,
            model=subject.traced.model,
            program=program,
            heap=plan.heap.value,
        )
        if program.kind != "train_step":
            return [0] * len(program.tasks)
        return [costs.duration_ns(task) for task in program.tasks]

    program = lower_plan(plan, subject.traced.model, "train_step")
    costs = TaskCosts(
        machine=machine,
        profile=profile,
        model=subject.traced.model,
        program=program,
        heap=plan.heap.value,
    )
    with start_plan(
        subject, plan, max_grad_norm=MAX_NORM, scratch=folder, pace=pace, audit=False
    ) as engine:
        results = [
            engine.train_step([feed], step=step, learning_rate=subject.optimizer.lr)
            for step, feed in enumerate(steps, 1)
        ]
        timelines = [result.timeline for result in results[NUM_WARM_STEPS:]]
        peaks = timelines[-1].peak_bytes
        device = [pool.id for pool in program.pools if pool.tier == "device"]
        return Ran(
            # Whatever else this machine does only adds to what is paced.
            update_ns=min(_update_ns(program, timeline) for timeline in timelines),
            simulated_ns=_update_ns(program, simulate_run(program, costs=costs)),
            device_bytes=sum(peaks[pool] for pool in device),
            overrun_ns=round(engine.overrun_ns / len(results)),
            states=read_states(engine, subject.weights),
        )


def _update_ns(program: Program, timeline: Timeline) -> int:
    """From the end of the norm to the end of the step."""
    norm = next(s for s in timeline.spans if isinstance(program.tasks[s.index], GradNorm))
    return max(span.end_ns for span in timeline.spans) - norm.end_ns


def _make_steps(num_steps: int) -> list[Feed]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (num_steps, 1, LENGTH), generator=generator)
    one = torch.tensor(1.0)
    return [{"input_ids": t, "labels": t.roll(1, dims=-1), "denominator": one} for t in tokens]


def _tell(bench: Bench, what: str, ran: Ran) -> None:
    bench.say(
        f"{what}: {format_ns(ran.update_ns)}, simulated {format_ns(ran.simulated_ns)},"
        f" device {format_bytes(ran.device_bytes)}, late {format_ns(ran.overrun_ns)}"
    )


if __name__ == "__main__":
    sys.exit(run_bench("stride", "Interleaved updates, stride by stride.", measure))
