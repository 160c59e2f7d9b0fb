"""One rank of a pipeline that is run by packhorse and by torch.distributed.pipelining, in turns.

In: `python -m bench.pipeline_worker SPECIFICATION FOLDER` under torchrun. Out: FOLDER/RANK.json:
for each way the wall and CPU time of every counted step, and for packhorse how long its compute
lane was busy and every task took. Both compute with the same module in the same processes, one step
each in turn. Named schedules are cut into stages of as many blocks each on both sides; `planned` is
what packhorse finds for itself, schedule and cuts, and `1f1b, cut by plan` is torch's 1F1B with the
cuts that it finds for that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional

from bench.planned import Subject, Ways, load_weights, trace_subject
from bench.ranked import Ranked, Stages, lower_ranks, spread_blocks
from packhorse.compiler.passes.exchange import find_channels
from packhorse.graph.halving import halve_backwards
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.cluster import Links
from packhorse.machine.probe_links import (
    PeerRates,
    format_rates,
    measure_peer,
    parse_rates,
    serve_peer,
    spread_links,
)
from packhorse.optim.optimizers import AdamW
from packhorse.plan.spec import OptimizerPlan
from packhorse.profile.files import format_profile, parse_profile
from packhorse.profile.measure import measure_profile
from packhorse.profile.spec import Profile
from packhorse.program.program import Program
from packhorse.program.tasks import Recv, Send, Task
from packhorse.runtime.engine import Engine
from packhorse.runtime.transport.processes import ProcessTransport
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.schedule.finding import NAMES
from packhorse.schedule.spec import Schedule
from packhorse.search.pipeline import find_pipeline
from packhorse.search.ranks import RankSpec
from packhorse.timeline.spec import Timeline

LEARNING_RATE: Final = 1e-4
NUM_WARM_STEPS: Final = 2
THEIRS: Final[Mapping[str, str]] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
NUM_RANKS: Final = 2
PLANNED: Final = "planned"
CUT_BY_PLAN: Final = "1f1b, cut by plan"
MACHINE: Final = replace(load_known_machine("laptop-16gb"), num_threads=1)
PROFILE_S: Final = 60.0
ROOMY_BYTES: Final = 1 << 40

Step = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder and its batch."""

    width: int
    num_layers: int
    vocabulary: int
    rows: int
    length: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A schedule with its name, and the blocks of its stages."""

    name: str
    schedule: Schedule
    stages: Stages


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(width // 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Give the next hidden state."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """An embedding, layers and a head; returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Give the loss of a micro-batch."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return mean_loss(self.head(self.norm(x)), labels)


class Stage(nn.Module):
    """Some of a decoder's blocks: 0 is the embedding, the last one norm and head."""

    def __init__(self, decoder: Decoder, blocks: Sequence[int]) -> None:
        super().__init__()
        every: list[nn.Module] = [
            decoder.embed,
            *decoder.layers,
            nn.Sequential(decoder.norm, decoder.head),
        ]
        self.blocks = nn.Sequential(*(every[block] for block in blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Give what the next stage takes, or the logits."""
        return self.blocks(x)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_batch(shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a whole step."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_microbatches * shape.rows, shape.length)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
    return tokens, tokens.roll(-1, dims=-1)


class Ours:
    """A step under packhorse."""

    def __init__(
        self, subject: Subject, shape: Shape, cut: Cut, store: dist.Store, scratch: Path
    ) -> None:
        self._shape = shape
        rank = dist.get_rank()
        self.ranked = lower(subject, shape, cut)
        part = self.ranked.parts[rank]
        self.engine = Engine(
            traced=part,
            programs={kind: found[rank] for kind, found in self.ranked.programs.items()},
            proofs={kind: found[rank] for kind, found in self.ranked.proofs.items()},
            optimizer=subject.optimizer,
            max_grad_norm=None,
            seed=1,
            scratch=scratch,
            num_threads=1,
            heap="keep",
            process_bytes=1 << 40,  # the others share this process, and its memory
            transport=ProcessTransport(find_channels(part.model), store),
        )
        load_weights(self.engine, subject.weights)
        self.timelines: list[Timeline] = []
        self._number = 0

    def step(self, turn: int) -> None:
        """Train a step."""
        tokens, labels = make_batch(self._shape, turn)
        denominator = torch.tensor(float(self._shape.num_microbatches))
        feeds = [
            {"input_ids": ids, "labels": wanted, "denominator": denominator}
            for ids, wanted in zip(
                tokens.split(self._shape.rows), labels.split(self._shape.rows), strict=True
            )
        ]
        self._number += 1
        result = self.engine.train_step(feeds, step=self._number, learning_rate=LEARNING_RATE)
        self.timelines.append(result.timeline)


def trace(shape: Shape) -> Subject:
    """Trace the decoder, its backwards whole and in halves."""
    torch.manual_seed(0)
    tokens, labels = make_batch(shape, 0)
    feed = {"input_ids": tokens[: shape.rows], "labels": labels[: shape.rows]}
    subject = trace_subject(Decoder(shape), feed, AdamW(lr=LEARNING_RATE))
    return replace(subject, traced=halve_backwards(subject.traced))


def choose_cut(subject: Subject, shape: Shape, name: str, profile: Profile, links: Links) -> Cut:
    """A named schedule with even cuts; or what packhorse chooses by the profile and the links."""
    model = subject.traced.model
    if name not in (PLANNED, CUT_BY_PLAN):
        schedule = make_named(name, NUM_RANKS, shape.num_microbatches, even_costs(NUM_RANKS))
        return Cut(name=name, schedule=schedule, stages=spread_blocks(model, schedule.num_stages))
    pipeline = find_pipeline(
        model,
        [RankSpec(profile=profile, budget_bytes=ROOMY_BYTES)] * NUM_RANKS,
        links,
        num_microbatches=shape.num_microbatches,
        optimizer=OptimizerPlan(
            name="adamw", states=subject.optimizer.state_names, master=False, clips=False
        ),
        names=NAMES if name == PLANNED else ("1f1b",),
    )
    ids = [block.id for block in model.blocks]
    stages = [ids[first:last] for first, last in pairwise(pipeline.bounds.value)]
    return Cut(name=pipeline.schedule_name.value, schedule=pipeline.schedule, stages=stages)


def lower(subject: Subject, shape: Shape, cut: Cut) -> Ranked:
    """Lower and verify all ranks' programs."""
    return lower_ranks(
        subject,
        cut.schedule,
        cut.stages,
        [Ways(chunk_bytes=1 << 24)],
        num_microbatches=shape.num_microbatches,
        clips=False,
    )


class Theirs:
    """A step under torch.distributed.pipelining; it tells the global norm, as packhorse does.

    Args:
        stages: where the model is cut; None: into stages of as many blocks each.
    """

    def __init__(self, shape: Shape, family: str, stages: Stages | None = None) -> None:
        torch.manual_seed(0)
        self._shape = shape
        decoder = Decoder(shape)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        per_rank = 1 if family in ("gpipe", "1f1b") else 2
        num_stages = per_rank * num_ranks
        num_blocks = shape.num_layers + 2
        bounds = [num_blocks * at // num_stages for at in range(num_stages + 1)]
        if stages is not None:
            bounds = [0, *accumulate(map(len, stages))]
        if family == "zbv":
            own = [rank, num_stages - 1 - rank]
        else:
            own = list(range(rank, num_stages, num_ranks))
        modules = [Stage(decoder, range(bounds[at], bounds[at + 1])) for at in own]
        parts = [
            pipelining.PipelineStage(module, at, num_stages, torch.device("cpu"))
            for module, at in zip(modules, own, strict=True)
        ]
        made: Any = getattr(pipelining, THEIRS[family])  # Any: one of several classes
        self._schedule = made(
            parts[0] if per_rank == 1 else parts, shape.num_microbatches, loss_fn=mean_loss
        )
        self._parameters = [p for module in modules for p in module.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, fused=True)
        self._has_first, self._has_last = 0 in own, num_stages - 1 in own

    def step(self, turn: int) -> None:
        """Train a step."""
        tokens, labels = make_batch(self._shape, turn)
        inputs = (tokens,) if self._has_first else ()
        if self._has_last:
            self._schedule.step(*inputs, target=labels, losses=[])
        else:
            self._schedule.step(*inputs)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self._parameters if p.grad is not None]
        )
        squares = norm.square()
        dist.all_reduce(squares)
        self.norm = float(squares.sqrt())
        self._optimizer.step()
        self._optimizer.zero_grad()


def share_profile(subject: Subject) -> Profile:
    """Measure the blocks on rank 0, while the other one waits, and give that to both."""
    told: list[str | None] = [None]
    if not dist.get_rank():
        told = [format_profile(measure_profile(subject.traced, MACHINE, limit_s=PROFILE_S).profile)]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    return parse_profile(told[0], where="rank 0")


def share_rates(store: dist.Store) -> list[str]:
    """Measure the messages between the ranks, as `packhorse probe` does; what each rank says."""
    rank = dist.get_rank()
    ways = [(0, 1), (1, 0)]
    channels = ProcessTransport(ways, store)
    rates: dict[tuple[int, int], PeerRates] = {}
    for source, target in ways:
        if rank == source:
            rates[source, target] = measure_peer(channels, target, num_threads=1)
        else:
            serve_peer(channels, source)
    channels.close()
    told: list[str] = [""] * NUM_RANKS
    dist.all_gather_object(told, format_rates(rates))
    return told


def find_links(rates: Sequence[str]) -> Links:
    """The links of ranks on one computer."""
    return spread_links(["here"] * NUM_RANKS, parse_rates(rates))


def time_steps(ways: Mapping[str, Step], num_steps: int) -> dict[str, list[dict[str, int]]]:
    """Let each way do a step in turn; a barrier stands before and after each."""
    taken: dict[str, list[dict[str, int]]] = {name: [] for name in ways}
    for turn in range(NUM_WARM_STEPS + num_steps):
        for name, step in ways.items():
            dist.barrier()
            cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
            step(turn)
            cpu_ns = time.process_time_ns() - cpu_ns
            dist.barrier()
            wall_ns = time.perf_counter_ns() - wall_ns
            if turn >= NUM_WARM_STEPS:
                taken[name].append({"cpu_ns": cpu_ns, "wall_ns": wall_ns})
    return taken


def tell_tasks(program: Program, timelines: Sequence[Timeline]) -> dict[str, list[int]]:
    """The median duration of every task that computes, and the shortest of every message."""
    found: dict[str, list[int]] = {"duration_ns": []}
    by_index: dict[int, list[int]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            by_index.setdefault(span.index, []).append(span.end_ns - span.start_ns)
    for index, task in enumerate(program.tasks):
        times = by_index[index]
        found["duration_ns"].append(min(times) if _waits(task) else round(median(times)))
    return found


def _waits(task: Task) -> bool:
    return isinstance(task, Send | Recv)


def main(specification: str, folder: str) -> None:
    """Run all ways in turns and write what they took."""
    found = json.loads(Path(specification).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    shape = Shape(**found["shape"])
    scratch = Path(folder) / f"scratch-{rank}"
    scratch.mkdir(exist_ok=True)
    subject = trace(shape)
    profile, rates = share_profile(subject), share_rates(store)
    links = find_links(rates)
    cuts = {
        name: choose_cut(subject, shape, name, profile, links)
        for name in (*found["ours"], CUT_BY_PLAN)
    }
    ours = {name: Ours(subject, shape, cuts[name], store, scratch) for name in found["ours"]}
    theirs = {name: Theirs(shape, name) for name in found["theirs"]}
    theirs[CUT_BY_PLAN] = Theirs(shape, "1f1b", cuts[CUT_BY_PLAN].stages)
    ways: dict[str, Step] = {f"packhorse {name}": each.step for name, each in ours.items()}
    ways |= {f"torch {name}": each.step for name, each in theirs.items()}
    taken = time_steps(ways, found["num_steps"])
    told = {
        name: {
            **tell_tasks(each.ranked.programs["train_step"][rank], each.timelines[NUM_WARM_STEPS:]),
            "busy_ns": [t.busy_ns("compute") for t in each.timelines[NUM_WARM_STEPS:]],
            "step_ns": [t.makespan_ns for t in each.timelines[NUM_WARM_STEPS:]],
        }
        for name, each in ours.items()
    }
    answer = {
        "taken": taken,
        "told": told,
        "profile": format_profile(profile),
        "rates": rates,
        "planned": cuts[PLANNED].name,
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    for each in ours.values():
        each.engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
