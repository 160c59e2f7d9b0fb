"""Overhead when the model fits: all resident against the plain eager loop, step for step.

SmolLM2-135M, where its folder is there, and a random GPT-2 of 125M shape. Each side lives in a
process of its own: the plain loop is the transformers model in eager mode with
`torch.optim.AdamW(fused=True)`; the other side is a session under the plan that the search finds
when memory is plenty. Both clip by the same float64 norm, have the same threads and the same
C-heap settings, and take turns by the step, so that what else the machine does hits both alike.
Per pair of steps the ratio of CPU seconds and of wall time is taken. The bar is for the median: it
must not be above 1 by more than the run's own spread, that is, the lower end of the median's 95 %
confidence interval (from the order of the ratios alone) must be at most 1. The losses of both sides
must be the same bits: a faster sum of something else would be no feat.

The plain loop with AdamW's `foreach=True`, and with AdamW as it is by default, takes its turns too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import comb
from multiprocessing.connection import Connection
from statistics import median
from typing import Final, Literal, cast

import torch
import transformers
from torch import Tensor, nn

from bench.reference import call_loss, group_names, make_optimizer
from bench.report import ROOT, Bench, Figure, at_most, holds, run_bench, shown
from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.optim.norm import clip_coefficient, global_norm
from packhorse.optim.optimizers import AdamW
from packhorse.plan.spec import OptimizerPlan, Plan
from packhorse.runtime.memory.heap import set_heap_mode
from packhorse.search.search import find_plan
from packhorse.search.space import Arithmetic, Candidate
from packhorse.trainer.candidates import TracingRequest, trace_candidates
from packhorse.trainer.session import Session
from packhorse.trainer.weights import ModuleWeights
from packhorse.units import GIB, format_ns

LIMIT: Final = 1.00
CONFIDENCE: Final = 0.95
NUM_STEPS: Final = 12
NUM_QUICK_STEPS: Final = 4
NUM_WARM_STEPS: Final = 2
ROWS: Final = 2
LENGTH: Final = 256
CLIP: Final = 1.0
SMOLLM2: Final = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
OPTIMIZER: Final = AdamW(lr=1e-5, weight_decay=0.0)
_PLENTY_BYTES: Final = 64 * GIB

Side = Literal["plain", "planned", "foreach", "default"]
Step = Callable[[int, Mapping[str, Tensor]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both sides are told; goes to the processes."""

    model: str
    num_threads: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One step of one side."""

    loss: float
    cpu_ns: int
    wall_ns: int


def build_smollm2() -> nn.Module:
    """The quickstart's model with its weights."""
    return transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)


def build_gpt2() -> nn.Module:
    """A random GPT-2 of 125M shape; without dropout, whose masks eager draws in its own order."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "SmolLM2-135M": build_smollm2,
    "GPT-2 125M": build_gpt2,
}


def measure(bench: Bench) -> None:
    """Measure each model with each number of threads."""
    for name in bench.options.models or list(MODELS):
        if name == "SmolLM2-135M" and not SMOLLM2.is_dir():
            bench.say(f"{name} is left out: `make assets` makes its folder")
            continue
        for num_threads in _choose_threads(bench):
            setting = Setting(
                model=name,
                num_threads=num_threads,
                rows=bench.options.rows,
                length=bench.options.length,
            )
            num_steps = bench.options.steps or (NUM_QUICK_STEPS if bench.quick else NUM_STEPS)
            tokens = setting.rows * setting.length
            words = "1 thread" if num_threads == 1 else f"{num_threads} threads"
            title = f"{name}, {tokens} tokens a step, {words}, {num_steps} pairs of steps"
            bench.add(title, compare_sides(bench, setting, num_steps))


def compare_sides(bench: Bench, setting: Setting, num_steps: int) -> list[Figure]:
    """Let all sides take turns and compare their steps with the plain loop's."""
    sides: tuple[Side, ...] = ("plain", "planned", "foreach", "default")
    steps: dict[Side, list[Taken]] = {side: [] for side in sides}
    with ExitStack() as stack:
        children = {side: stack.enter_context(_Child(side, setting)) for side in sides}
        about = children["planned"].about
        bench.say(f"{setting.model}: all sides ready; {about}")
        for step in range(1, NUM_WARM_STEPS + num_steps + 1):
            # Who goes first changes, so that none always meets the caches that another warmed.
            turn = step % len(sides)
            for side in (*sides[turn:], *sides[:turn]):
                steps[side].append(children[side].step(step))
            words = "; ".join(f"{side} {_describe(steps[side][-1])}" for side in sides)
            bench.say(f"step {step}: {words}")
    plain = steps["plain"]
    same = sum(o.loss == t.loss for t, o in zip(plain, steps["planned"], strict=True))
    counted = plain[NUM_WARM_STEPS:]
    cpu, wall = _ratios(plain, steps["planned"])
    figures = [
        *_judge("CPU seconds", cpu),
        *_judge("wall time", wall),
        shown("plain step, median CPU", median(t.cpu_ns for t in counted), show=format_ns),
        shown("plain step, median wall", median(t.wall_ns for t in counted), show=format_ns),
    ]
    for side in ("foreach", "default"):
        cpu, wall = _ratios(plain, steps[side])
        words = f"{_show_ratio(median(cpu))} in CPU, {_show_ratio(median(wall))} in wall time"
        figures.append(shown(f"AdamW {side} over fused, median ratio", words))
    return [
        *figures,
        holds(
            "losses with the same bits",
            same == len(plain),
            measured=f"{same} of {len(plain)}",
            bar=f"= {len(plain)}",
        ),
        shown("plan", about),
    ]


def lower_end(ratios: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """The lower end of the confidence interval of the median, from the order of the values.

    The k-th smallest value is above the median only if fewer than k of n fair coins show heads; k
    is as large as the confidence allows. Of too few values it is the smallest.
    """
    count = len(ratios)
    allowed = (1 - confidence) / 2 * 2**count
    rank = 0
    while rank + 1 < count and sum(comb(count, heads) for heads in range(rank + 1)) <= allowed:
        rank += 1
    return sorted(ratios)[max(rank - 1, 0)]


def _ratios(theirs: Sequence[Taken], ours: Sequence[Taken]) -> tuple[list[float], list[float]]:
    pairs = list(zip(theirs, ours, strict=True))[NUM_WARM_STEPS:]
    cpu = [other.cpu_ns / plain.cpu_ns for plain, other in pairs]
    return cpu, [other.wall_ns / plain.wall_ns for plain, other in pairs]


def _judge(name: str, ratios: Sequence[float]) -> list[Figure]:
    return [
        shown(f"{name}, median ratio", median(ratios), show=_show_ratio),
        at_most(
            f"{name}, lower end of the median's interval",
            lower_end(ratios),
            LIMIT,
            show=_show_ratio,
        ),
        shown(f"{name}, lowest and highest ratio", _show_range(ratios)),
    ]


class _Child:
    """A process that takes a step when told to."""

    def __init__(self, side: Side, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(side, setting, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.about = str(self._receive())

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(timeout=60)
        self._process.kill()

    def step(self, number: int) -> Taken:
        """Take one step and wait for it."""
        self._connection.send(number)
        return cast("Taken", self._receive())

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit("a side ended before its step was done; see its message") from None


def _serve(side: Side, setting: Setting, connection: Connection) -> None:
    torch.set_num_threads(setting.num_threads)
    step, about = _open_planned(setting) if side == "planned" else _open_plain(setting, side)
    connection.send(about)
    while True:
        try:
            number = cast("int", connection.recv())
        except EOFError:
            return
        batch = _make_batch(setting, number)
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        loss = step(number, batch)
        connection.send(
            Taken(
                loss=loss,
                cpu_ns=time.process_time_ns() - cpu_ns,
                wall_ns=time.perf_counter_ns() - wall_ns,
            )
        )


def _make_batch(setting: Setting, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    # Below the vocabulary of each model here.
    tokens = torch.randint(0, 49_000, (setting.rows, setting.length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _num_labels(setting: Setting) -> float:
    return float(setting.rows * (setting.length - 1))


def _open_plain(setting: Setting, side: Side) -> tuple[Step, str]:
    set_heap_mode("keep")
    module = MODELS[setting.model]().train()
    parameters = list(module.parameters())
    words = {"lr": OPTIMIZER.lr, "weight_decay": OPTIMIZER.weight_decay}
    optimizer = make_optimizer(module, OPTIMIZER)
    if side == "foreach":
        optimizer = torch.optim.AdamW(parameters, foreach=True, **words)
    elif side == "default":
        optimizer = torch.optim.AdamW(parameters, **words)
    denominator = torch.tensor(_num_labels(setting))

    def step(number: int, batch: Mapping[str, Tensor]) -> float:
        del number
        optimizer.zero_grad()
        loss = call_loss(module, {**batch, "denominator": denominator})
        loss.backward()
        coefficient = clip_coefficient(global_norm([p.grad for p in parameters]), CLIP)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient)
        optimizer.step()
        return float(loss.detach())

    return step, "the plain loop"


def _open_planned(setting: Setting) -> tuple[Step, str]:
    module = MODELS[setting.model]().train()
    machine = _describe_plenty(setting.num_threads)
    candidates = trace_candidates(
        module,
        _make_batch(setting, 0),
        TracingRequest(
            name=setting.model,
            groups=group_names(module, OPTIMIZER),
            compute_dtype=torch.float32,
        ),
        machine,
        global_rows=setting.rows,
        # The plain loop takes the batch whole, and so must a plan with the same bits.
        microbatch_rows=setting.rows,
        loss_chunk_tokens="whole",
    )
    plan = find_plan(
        [
            Candidate(model=e.traced.model, profile=e.profile, loss_chunk_tokens=None)
            for e in candidates.entries
        ],
        machine,
        optimizer=OptimizerPlan(
            name="adamw", states=OPTIMIZER.state_names, master=False, clips=True
        ),
        arithmetic=Arithmetic(
            compute_dtype="float32",
            tied_sum="per_microbatch",
            attention=candidates.attention,
            num_threads=setting.num_threads,
            device="cpu",
            num_workers=1,
        ),
        global_batch_rows=setting.rows,
    )
    traced = candidates.find(rows=setting.rows, loss_chunk_tokens=None).traced
    session = Session(traced, plan, optimizer=OPTIMIZER, max_grad_norm=CLIP, seed=1, scratch=None)
    session.begin(ModuleWeights(module))
    denominator = _num_labels(setting)

    def step(number: int, batch: Mapping[str, Tensor]) -> float:
        result = session.train_step(
            batch, denominator=denominator, step=number, learning_rate=OPTIMIZER.lr
        )
        return result.loss

    return step, _describe_plan(plan, len(session.programs["train_step"].tasks))


def _describe_plan(plan: Plan, num_tasks: int) -> str:
    places = {
        tier.value
        for chunk in plan.chunks
        for tier in (chunk.parameters, chunk.gradients, chunk.optimizer)
    }
    activations = {block.activations.value for block in plan.blocks}
    return (
        f"all states: {', '.join(sorted(places))}; activations: {', '.join(sorted(activations))};"
        f" heap: {plan.heap.value}; {len(plan.chunks)} chunks, {num_tasks} tasks"
    )


def _describe_plenty(num_threads: int) -> Machine:
    """A machine where everything fits; its rates decide nothing that this bench measures."""
    return Machine(
        name="plenty",
        source="hand",
        fingerprint="plenty",
        measured_at="2026-01-01T00:00:00+00:00",
        device="cpu",
        num_cores=num_threads,
        num_threads=num_threads,
        bf16_native=False,
        tiers=(Tier(name="device", total_bytes=_PLENTY_BYTES, budget_bytes=_PLENTY_BYTES),),
        links=tuple[Link, ...](),
        matmul=(MatmulPoint(dtype="float32", size=1024, flops_per_s=5e10),),
        memory_bytes_per_s=1e10,
        updates=(UpdateRate(tier="device", parameters_per_s=2e8),),
        heap=Heap(map_cost=0.2, keep_slack=0.2),
    )


def _choose_threads(bench: Bench) -> Sequence[int]:
    if bench.options.threads:
        return bench.options.threads
    return [torch.get_num_threads()]


def _describe(taken: Taken) -> str:
    return f"{format_ns(taken.cpu_ns)} CPU, {format_ns(taken.wall_ns)} wall"


def _show_ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def _show_range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="only these models")
    parser.add_argument("--threads", nargs="+", type=int, help="intra-op threads, one table each")
    parser.add_argument("--steps", type=int, help="pairs of steps that are counted")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of a step")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")


if __name__ == "__main__":
    sys.exit(run_bench("overhead", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
