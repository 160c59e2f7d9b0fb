"""One rank whose bodies do next to nothing, under packhorse and torch.distributed.pipelining.

In: `python -m bench.actions_worker SPECIFICATION FOLDER` under torchrun. Out: FOLDER/RANK.json: for
each way the CPU time of all threads of this process over every counted step, what gloo's own took
of it, how many compute actions a step has on this rank, and how long their bodies alone take:
packhorse's graphs are called again with the arguments that a step gave them, one behind the other
and on one thread; torch's stages are run forward and backward by hand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import pipelining

from bench.pipeline_worker import mean_loss
from bench.planned import RESIDENT, Subject, load_weights, trace_subject
from bench.ranked import Ranked, lower_ranks, spread_blocks
from packhorse.compiler.passes.exchange import find_channels
from packhorse.graph.direct import Direct
from packhorse.optim.optimizers import AdamW
from packhorse.program.program import Program
from packhorse.program.tasks import Backward, Forward
from packhorse.runtime import bodies
from packhorse.runtime.engine import Engine
from packhorse.runtime.transport.processes import ProcessTransport
from packhorse.runtime.transport.spec import Transport
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named

LEARNING_RATE: Final = 1e-4
WIDTH: Final = 8
ROWS: Final = 1
LENGTH: Final = 8
NUM_WARM_STEPS: Final = 3
NUM_REPLAYS: Final = 5

Step = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A stack and its batch."""

    num_layers: int
    num_microbatches: int


class Stack(nn.Module):
    """An embedding, linear layers and a loss, all of width 8."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(shape.num_layers)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Give the loss of a micro-batch."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return mean_loss(x, labels)


def make_batch(shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a whole step."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_microbatches * ROWS, LENGTH)
    tokens = torch.randint(0, WIDTH, size, generator=generator)
    return tokens, tokens.roll(-1, dims=-1)


class Bodies:
    """What engines of this process call as bodies; notes the calls while it is asked to.

    To be made before the engines: it stands in for what makes their functions of graphs.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Direct, tuple[Tensor, ...]]] = []
        self._notes = False
        self._make = bodies.make_direct
        bodies.make_direct = self._watch

    def time(self, step: Callable[[], None], num_actions: int) -> list[int]:
        """Take a step, then call its bodies alone; gives the CPU time of all, each time.

        Raises:
            RuntimeError: the step has not called as many bodies as it has actions.
        """
        self._notes = True
        step()
        self._notes = False
        if len(self._calls) != num_actions:
            raise RuntimeError(f"{num_actions} actions have called {len(self._calls)} bodies")
        taken: list[int] = []
        with torch.no_grad():
            for _ in range(NUM_REPLAYS):
                begin_ns = time.process_time_ns()
                for body, arguments in self._calls:
                    body(*arguments)
                taken.append(time.process_time_ns() - begin_ns)
        self._calls.clear()
        return taken

    def _watch(self, graph: fx.GraphModule) -> Direct:
        body = self._make(graph)

        def call(*arguments: Tensor) -> Sequence[Tensor]:
            if self._notes:
                self._calls.append((body, arguments))
            return body(*arguments)

        return call


class Ours:
    """A step under packhorse, on one rank or as one of several."""

    def __init__(
        self, shape: Shape, scratch: Path, store: dist.Store | None, watched: Bodies
    ) -> None:
        torch.manual_seed(0)
        tokens, labels = make_batch(shape, 0)
        self._shape = shape
        self._bodies = watched
        subject = trace_subject(
            Stack(shape),
            {"input_ids": tokens[:ROWS], "labels": labels[:ROWS]},
            AdamW(lr=LEARNING_RATE),
        )
        rank, num_ranks = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())
        ranked = lower(subject, shape, num_ranks)
        part = ranked.parts[rank]
        self.program: Program = ranked.programs["train_step"][rank]
        transport: Transport | None = None
        if store is not None:
            transport = ProcessTransport(find_channels(part.model), store)
        self.engine = Engine(
            traced=part,
            programs={kind: found[rank] for kind, found in ranked.programs.items()},
            proofs={kind: found[rank] for kind, found in ranked.proofs.items()},
            optimizer=subject.optimizer,
            max_grad_norm=None,
            seed=1,
            scratch=scratch,
            num_threads=1,
            heap="keep",
            process_bytes=1 << 40,  # the other ways share this process, and its memory
            transport=transport,
        )
        load_weights(self.engine, subject.weights)
        self._number = 0

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of blocks in a step."""
        return sum(isinstance(task, Forward | Backward) for task in self.program.tasks)

    def step(self, turn: int) -> None:
        """Train a step."""
        tokens, labels = make_batch(self._shape, turn)
        denominator = torch.tensor(float(self._shape.num_microbatches))
        feeds = [
            {"input_ids": ids, "labels": wanted, "denominator": denominator}
            for ids, wanted in zip(tokens.split(ROWS), labels.split(ROWS), strict=True)
        ]
        self._number += 1
        self.engine.train_step(feeds, step=self._number, learning_rate=LEARNING_RATE)

    def time_bodies(self) -> list[int]:
        """The CPU time of a step's bodies alone."""

        def step() -> None:
            self.step(0)
            self.engine.settle()

        return self._bodies.time(step, self.num_actions)


def lower(subject: Subject, shape: Shape, num_ranks: int) -> Ranked:
    """Lower and verify all ranks' programs under 1F1B."""
    schedule = make_named("1f1b", num_ranks, shape.num_microbatches, even_costs(num_ranks))
    return lower_ranks(
        subject,
        schedule,
        spread_blocks(subject.traced.model, schedule.num_stages),
        [RESIDENT],
        num_microbatches=shape.num_microbatches,
        clips=False,
    )


class Theirs:
    """A step of torch's 1F1B, with one stage of one linear layer on each rank."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self._shape = shape
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._module = nn.Linear(WIDTH, WIDTH, bias=False)
        stage = pipelining.PipelineStage(self._module, rank, num_ranks, torch.device("cpu"))
        self._schedule = pipelining.Schedule1F1B(stage, shape.num_microbatches, loss_fn=_sum)
        self._is_first, self._is_last = rank == 0, rank == num_ranks - 1
        size = (shape.num_microbatches * ROWS, LENGTH, WIDTH)
        self._batch = torch.ones(size)

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of stages in a step."""
        return 2 * self._shape.num_microbatches

    def step(self, turn: int) -> None:
        """Train a step, without an optimizer."""
        del turn
        inputs = (self._batch,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*inputs, target=self._batch, losses=[])
        else:
            self._schedule.step(*inputs)
        self._module.zero_grad()

    def time_bodies(self) -> list[int]:
        """The CPU time of a step's forwards and backwards alone, autograd's part included."""
        given = self._batch[:ROWS]
        taken: list[int] = []
        for _ in range(NUM_REPLAYS):
            begin_ns = time.process_time_ns()
            for _ in range(self._shape.num_microbatches):
                x = given if self._is_first else given.detach().requires_grad_()
                y = self._module(x)
                if self._is_last:
                    _sum(y, given).backward()
                else:
                    y.backward(given)
            taken.append(time.process_time_ns() - begin_ns)
            self._module.zero_grad()
        return taken


def _sum(output: Tensor, target: Tensor) -> Tensor:
    del target
    return output.sum()


def time_steps(
    ways: Mapping[str, Step], num_steps: int, *, ranked: bool
) -> dict[str, list[dict[str, int]]]:
    """Let each way do a step in turn; gives the CPU time of each, and gloo's part of it."""
    taken: dict[str, list[dict[str, int]]] = {name: [] for name in ways}
    for turn in range(NUM_WARM_STEPS + num_steps):
        for name, step in ways.items():
            if ranked:
                dist.barrier()
            gloo_ns, begin_ns = read_gloo_ns(), time.process_time_ns()
            step(turn)
            cpu_ns = time.process_time_ns() - begin_ns
            if turn >= NUM_WARM_STEPS:
                taken[name].append({"cpu_ns": cpu_ns, "gloo_ns": read_gloo_ns() - gloo_ns})
    return taken


def read_gloo_ns() -> int:
    """The CPU time that the threads of torch's transport have taken so far."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text(encoding="ascii"):
            total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total_ns


def main(specification: str, folder: str) -> None:
    """Run both ways in turns and write what they took."""
    found: dict[str, Any] = json.loads(Path(specification).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    scratch = Path(folder) / f"scratch-{rank}"
    scratch.mkdir(exist_ok=True)
    watched = Bodies()
    ours = {
        name: Ours(Shape(**shape), scratch, store, watched)
        for name, shape in found["shapes"].items()
    }
    theirs = Theirs(Shape(**next(iter(found["shapes"].values()))))
    ways: dict[str, Ours | Theirs] = {**ours, "torch": theirs}
    steps = {name: way.step for name, way in ways.items()}
    taken = time_steps(steps, found["num_steps"], ranked=True)
    answer = {
        name: {
            "cpu_ns": [step["cpu_ns"] for step in taken[name]],
            "gloo_ns": [step["gloo_ns"] for step in taken[name]],
            "num_actions": way.num_actions,
            "bodies_ns": way.time_bodies(),
        }
        for name, way in ways.items()
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    for each in ours.values():
        each.engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
