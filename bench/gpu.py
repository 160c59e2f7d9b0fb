"""What only a GPU can show: numbers, overlap, interleaved updates, and a decoder of 3 B parameters.

A decoder with random weights is trained on one GPU under plans of all kinds: everything in the
device, states and updates in the host, updates in turns, recomputed. All plans must give the same
bits, and losses close to those of plain PyTorch. Then every stride of interleaved updates is run
against the one that the model of rates chooses. Then 3 B parameters are trained with 16 GiB of the
device and 48 GiB of the host, four micro-batches a step, with bf16 beside fp32 master weights: what
the driver says is in use at most must keep to the budget and to the prediction, the step must take
as long as predicted, and the measured timeline must show the copies behind the computing. Plain
PyTorch trains the same model beside it, in as much of the device as it wants.

Parts run in this order and each is begun only while there is time; one that is not is missed.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

import packhorse
from bench.children import work_folder
from bench.gpu_subjects import (
    Batch,
    Decoder,
    MemoryWatch,
    Shape,
    make_batches,
    make_decoder,
    read_driver_bytes,
    train_plainly,
)
from bench.report import Bench, Figure, at_least, at_most, holds, run_bench, shown
from packhorse.errors import PackhorseError
from packhorse.machine.spec import Machine, TierName
from packhorse.optim.optimizers import AdamW
from packhorse.plan.spec import Plan
from packhorse.program.tasks import GradNorm
from packhorse.timeline.spec import Span, Timeline
from packhorse.trainer.module_run import Run
from packhorse.units import GIB, format_bytes, format_ns

NO_GPU: Final = 2
LIMIT_S: Final = 450.0
NEAR: Final = 1.05
PEAK_SHARE: Final = 0.05
STEP_SHARE: Final = 0.15
OVERLAP_SHARE: Final = 0.8
LOSS_SHARE: Final = 1e-4
BF16_LOSS_SHARE: Final = 2e-2
MAX_NORM: Final = 1.0
SEED: Final = 7
BUDGETS: Final[Mapping[TierName, int]] = {"device": 16 * GIB, "host": 48 * GIB}
WORDS: Final = AdamW(lr=1e-4, weight_decay=0.0)

# What tracing may end with where nobody has traced before.
_SURPRISES: Final = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

SMALL: Final = Shape(
    width=256, inner=704, num_layers=4, num_heads=4, vocabulary=512,
    length=128, rows=4, num_microbatches=2,
)  # fmt: skip
MIDDLE: Final = Shape(
    width=1536, inner=4096, num_layers=12, num_heads=12, vocabulary=1024,
    length=256, rows=4, num_microbatches=1,
)  # fmt: skip
LARGE: Final = Shape(
    width=3072, inner=8192, num_layers=25, num_heads=24, vocabulary=32_000,
    length=2048, rows=4, num_microbatches=4,
)  # fmt: skip

IN_DEVICE: Final = {"parameters": "device", "gradients": "device", "optimizer": "device"}
IN_HOST: Final = {"parameters": "host", "optimizer": "host", "update": "host"}
WAYS: Final[Mapping[str, Mapping[str, object]]] = {
    "all in the device": {**IN_DEVICE, "recompute": "none"},
    "recomputed": {**IN_DEVICE, "recompute": "all"},
    "states and updates in the host": {**IN_HOST, "stride": 0, "recompute": "none"},
    "updates in turns": {**IN_HOST, "stride": 2, "recompute": "all"},
}
STRIDES: Final = (0, 1, 2, 3, 4, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run showed; `warm` are all steps but the first."""

    losses: Sequence[float]
    step_ns: Sequence[int]
    timelines: Sequence[Timeline]
    update_ns: Sequence[int]
    states: Mapping[str, Tensor]

    @property
    def warm_ns(self) -> int:
        """Median wall time of a step."""
        return round(statistics.median(self.step_ns[1:]))


def measure(bench: Bench) -> None:
    """Probe, then run the parts while there is time."""
    began = time.monotonic()
    bench.say("probing")
    machine = probe_gpu()
    fused = choose_attention(bench, machine)
    parts: Mapping[str, Callable[[], None]] = {
        "numbers": lambda: add_numbers(bench, machine, SMALL, fused=fused),
        "strides": lambda: add_strides(bench, machine, MIDDLE, fused=fused, num_steps=5),
        "3 B parameters": lambda: add_large(bench, machine, LARGE, fused=fused, num_steps=5),
    }
    for name, run in parts.items():
        if bench.quick and name == "3 B parameters":
            bench.add(name, [shown("left out", "a quick run")])
            continue
        elapsed_s = time.monotonic() - began
        if elapsed_s > LIMIT_S * (0.8 if name == "strides" else 0.6):
            late = f"not begun after {elapsed_s:.0f} s"
            bench.add(name, [holds("run", False, measured=late, bar="in time")])
            continue
        bench.say(name)
        run()


def probe_gpu() -> Machine:
    """This machine, with the device and the host alone, at the budgets of the bench."""
    with work_folder("gpu") as folder:
        return grant(packhorse.probe({"disk": str(folder)}, device="cuda"), BUDGETS)


def grant(machine: Machine, budgets: Mapping[TierName, int]) -> Machine:
    """Leave out the disk, which no plan for a GPU uses yet, and set the budgets."""
    return replace(
        machine,
        tiers=tuple(
            replace(
                tier,
                budget_bytes=budgets[tier.name],
                total_bytes=max(tier.total_bytes, budgets[tier.name]),
            )
            for tier in machine.tiers
            if tier.name in budgets
        ),
        links=tuple(
            link for link in machine.links if link.source in budgets and link.target in budgets
        ),
    )


def choose_attention(bench: Bench, machine: Machine) -> bool:
    """Whether torch's own attention can be traced and run here; else it is written out."""
    try:
        plan = plan_for(SMALL, machine, {}, fused=True)
        module = make_decoder(SMALL, fused=True, seed=SEED, draw_on=machine.device, keep_on="cpu")
        run_plan(module, plan, make_batches(SMALL, 1), keeps=False)
    except (PackhorseError, *_SURPRISES) as error:
        bench.say(f"torch's own attention: {type(error).__name__}: {error}")
        words = f"{type(error).__name__}: {str(error)[:200]}"
        bench.add("attention", [holds("torch's own", False, measured=words, bar="runs")])
        return False
    return True


def plan_for(
    shape: Shape,
    machine: Machine,
    pins: Mapping[str, object],
    *,
    fused: bool,
    bf16: bool = False,
    measured: bool = False,
) -> Plan:
    """Find the plan of a shape; the module that it is found for has no values."""
    with torch.device("meta"):
        module = Decoder(shape, fused=fused)
    (batch,) = make_batches(shape, 1)
    return packhorse.find_plan(
        module,
        batch,
        machine,
        optimizer=WORDS,
        max_grad_norm=MAX_NORM,
        bf16=bf16,
        pins={"microbatch_rows": shape.microbatch_rows, **pins},
        measure=measured,
    )


def run_plan(module: Decoder, plan: Plan, batches: Sequence[Batch], *, keeps: bool) -> Ran:
    """Train a module under a plan; its parameters are on `meta` afterwards."""
    losses: list[float] = []
    step_ns: list[int] = []
    timelines: list[Timeline] = []
    with Run(module, plan=plan, optimizer=WORDS, max_grad_norm=MAX_NORM) as run:
        for batch in batches:
            begin_ns = time.perf_counter_ns()
            losses.append(run.step(batch))
            found = run.timeline  # waits for the step's last write
            step_ns.append(time.perf_counter_ns() - begin_ns)
            assert found is not None
            timelines.append(found)
        tasks = run.programs["train_step"].program.tasks
        norms = {index for index, task in enumerate(tasks) if isinstance(task, GradNorm)}
        states = run.state_dict() if keeps else {}
    return Ran(
        losses=losses,
        step_ns=step_ns,
        timelines=timelines,
        update_ns=[updates_of(timeline, norms) for timeline in timelines],
        states=states,
    )


def updates_of(timeline: Timeline, norms: set[int]) -> int:
    """From the end of the norm to the end of the step."""
    norm_ns = max(span.end_ns for span in timeline.spans if span.index in norms)
    return timeline.makespan_ns - norm_ns


def hidden_share(timeline: Timeline) -> float:
    """The share of the copies' time in which the device or the host computed as well."""
    copies = [span for span in timeline.spans if span.lane in ("copy_in", "copy_out")]
    busy = merge([span for span in timeline.spans if span.lane in ("compute", "update")])
    whole_ns = sum(span.duration_ns for span in copies)
    hidden_ns = sum(
        max(0, min(span.end_ns, stop_ns) - max(span.start_ns, start_ns))
        for span in copies
        for start_ns, stop_ns in busy
    )
    return hidden_ns / whole_ns if whole_ns else 0.0


def merge(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Join spans that meet: when any of them ran."""
    joined: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda each: each.start_ns):
        if joined and span.start_ns <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end_ns))
        else:
            joined.append((span.start_ns, span.end_ns))
    return joined


def add_numbers(bench: Bench, machine: Machine, shape: Shape, *, fused: bool) -> None:
    """Every kind of plan against the others, bit by bit, and against plain PyTorch, closely."""
    batches = make_batches(shape, 4)
    draw_on = machine.device
    figures: list[Figure] = []
    for bf16 in (False, True):
        ran: dict[str, Ran] = {}
        with deterministic():
            for name, pins in WAYS.items():
                bench.say(f"numbers: {name}, {'bf16' if bf16 else 'fp32'}")
                plan = plan_for(
                    shape, machine, {"chunk_bytes": "256KiB", **pins}, fused=fused, bf16=bf16
                )
                module = make_decoder(shape, fused=fused, seed=SEED, draw_on=draw_on, keep_on="cpu")
                ran[name] = run_plan(module, plan, batches, keeps=True)
            module = make_decoder(shape, fused=fused, seed=SEED, draw_on=draw_on, keep_on=draw_on)
            plain, _ = train_plainly(
                module, shape, batches, WORDS, max_grad_norm=MAX_NORM, device=draw_on, bf16=bf16
            )
        first = next(iter(ran.values()))
        kind = "bf16" if bf16 else "fp32"
        figures += [
            holds(
                f"{kind}: {name}",
                same_run(first, other),
                measured="same" if same_run(first, other) else "differ",
                bar="the first plan's bits",
            )
            for name, other in list(ran.items())[1:]
        ]
        distance = max(abs(a / b - 1) for a, b in zip(first.losses, plain, strict=True))
        limit = BF16_LOSS_SHARE if bf16 else LOSS_SHARE
        figures.append(at_most(f"{kind}: losses from plain PyTorch's", distance, limit))
    bench.add("numbers", figures)


def same_run(one: Ran, other: Ran) -> bool:
    """Whether two runs have the same losses and weights in every bit."""
    return one.losses == other.losses and all(
        torch.equal(one.states[name], other.states[name]) for name in one.states
    )


def add_strides(
    bench: Bench, machine: Machine, shape: Shape, *, fused: bool, num_steps: int
) -> None:
    """Interleaved updates on this machine, stride by stride, against the model's."""
    batches = make_batches(shape, num_steps)
    strides = STRIDES[:3] if bench.quick else STRIDES
    fixed = {**IN_HOST, "chunk_bytes": "64MiB"}
    chosen = plan_for(shape, machine, fixed, fused=fused).stride
    taken: dict[int, int] = {}
    for stride in dict.fromkeys((*strides, chosen.value)):
        plan = plan_for(shape, machine, {**fixed, "stride": stride}, fused=fused)
        module = make_decoder(shape, fused=fused, seed=SEED, draw_on=machine.device, keep_on="cpu")
        ran = run_plan(module, plan, batches, keeps=False)
        taken[stride] = min(ran.update_ns[1:])
        bench.say(f"stride {stride}: updates {format_ns(taken[stride])}")
    best = min(taken, key=taken.__getitem__)
    bench.add(
        "updates by stride",
        [
            *(shown(f"stride {k}", ns, show=format_ns) for k, ns in sorted(taken.items())),
            shown("stride chosen", f"{chosen.value}: {chosen.because}"),
            shown("best stride measured", best),
            at_most("chosen over best measured", taken[chosen.value] / taken[best], NEAR),
        ],
    )


def add_large(bench: Bench, machine: Machine, shape: Shape, *, fused: bool, num_steps: int) -> None:
    """A model whose states do not fit: memory, time and overlap against the prediction."""
    plan = plan_for(shape, machine, {}, fused=fused, bf16=True, measured=True)
    prediction = plan.prediction
    assert prediction is not None
    bench.say(f"predicted {format_ns(prediction.step_ns)}: {prediction.bottleneck}")
    give_memory_back(machine)
    module = make_decoder(shape, fused=fused, seed=SEED, draw_on=machine.device, keep_on="cpu")
    give_memory_back(machine)
    batches = make_batches(shape, num_steps)
    read = read_driver_bytes if machine.device == "cuda" else lambda: 0
    with MemoryWatch(read) as watch:
        ran = run_plan(module, plan, batches, keeps=False)
    give_memory_back(machine)
    budget = next(tier for tier in machine.tiers if tier.name == "device").budget_bytes
    predicted_bytes = sum(prediction.peak_bytes["device"].values())
    bench.say("plain PyTorch")
    module = make_decoder(
        shape, fused=fused, seed=SEED, draw_on=machine.device, keep_on=machine.device
    )
    losses, plain_ns = train_plainly(
        module, shape, batches[:3], WORDS,
        max_grad_norm=MAX_NORM, device=machine.device, bf16=True,
    )  # fmt: skip
    distance = max(abs(a / b - 1) for a, b in zip(ran.losses, losses, strict=False))
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    hidden = hidden_share(ran.timelines[-1])
    bench.add(
        f"{num_parameters / 1e9:.2f} B parameters, device {format_bytes(budget)}",
        [
            shown("device peak, predicted", predicted_bytes, show=format_bytes),
            at_most("device peak, by the driver", watch.peak_bytes, budget, show=format_bytes),
            at_most(
                "peak from the prediction", abs(watch.peak_bytes / predicted_bytes - 1), PEAK_SHARE
            ),
            shown("step, predicted", prediction.step_ns, show=format_ns),
            shown("step, measured", ran.warm_ns, show=format_ns),
            shown("what limits it", prediction.bottleneck),
            at_most(
                "step from the prediction", abs(ran.warm_ns / prediction.step_ns - 1), STEP_SHARE
            ),
            at_least("copies behind computing", hidden, OVERLAP_SHARE),
            shown("tokens/s", shape.num_tokens * 1e9 / ran.warm_ns),
            shown("tokens/s, plain PyTorch", shape.num_tokens * 1e9 / min(plain_ns[1:])),
            at_most("losses from plain PyTorch's", distance, BF16_LOSS_SHARE),
        ],
    )


def give_memory_back(machine: Machine) -> None:
    """Let nothing of what came before count for what comes."""
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def deterministic() -> Generator[None]:
    """Let kernels be chosen that give the same bits each time; says nothing of those without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # torch makes this name by replacing the module's class.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]  see above
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench where there is a GPU."""
    if not torch.cuda.is_available():
        built = (
            "this torch is built without CUDA" if torch.version.cuda is None else "see nvidia-smi"
        )
        print(f"bench.gpu: torch finds no GPU here ({built}); nothing was run", file=sys.stderr)
        return NO_GPU
    return run_bench("gpu", "What only a GPU can show.", measure, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
