"""The optimizer's update of resident fp32 chunks against torch's own on separate parameters.

The parameters of a decoder lie in the product's chunks and are updated piece by piece, as an Update
task does. `torch.optim.AdamW(fused=True)` updates the same values in tensors of their own. The two
take turns in one process, each turn is timed in CPU and in wall time, and at the end the weights
must be the same bits. In the same way AdamW with `foreach=True`, AdamW as it is by default, and a
stream that only moves the bytes (four arrays read, three written) take turns with the fused one.
DeepSpeed's CPU Adam does so in an environment of its own, where it can be installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import torch
import transformers
from torch import Tensor, nn

from bench.material import VOCABULARY, make_config
from bench.peers import ask_peer, find_peer
from bench.planned import Subject, Ways, make_plan, trace_subject
from bench.reference import make_optimizer, same_bits
from bench.report import Bench, Figure, at_least, holds, run_bench, shown
from bench.turns import Taken, Turn, take_turns
from packhorse.compiler.layout import lay_out_chunks
from packhorse.optim.groups import hyperparameters
from packhorse.optim.optimizers import AdamW
from packhorse.optim.update import update_shard
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.units import MIB, format_bytes, format_ns

LIMIT: Final = 0.98
OPTIMIZER: Final = AdamW(lr=1e-4, weight_decay=0.01)
CHUNK_BYTES: Final = 32 * MIB
NUM_TURNS: Final = 20
NUM_QUICK_TURNS: Final = 5
LENGTH: Final = 16
PEER_LIMIT_S: Final = 900.0
_MOVED_BYTES: Final = 28


def measure(bench: Bench) -> None:
    """Let each way take turns with the fused optimizer of torch."""
    width, num_layers = (256, 4) if bench.quick else (768, 12)
    num_turns = bench.options.turns or (NUM_QUICK_TURNS if bench.quick else NUM_TURNS)
    torch.set_num_threads(bench.options.threads)
    bench.say("tracing the model")
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(
        make_config(width=width, num_layers=num_layers), dtype=torch.float32
    )
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    subject = trace_subject(module, {"input_ids": tokens, "labels": tokens}, OPTIMIZER)
    num_parameters = subject.traced.model.num_parameters
    bench.add(
        "what is updated",
        [
            shown("parameters", num_parameters),
            shown("moved by an update", _MOVED_BYTES * num_parameters, show=format_bytes),
            shown("threads", torch.get_num_threads()),
            shown("turns of each side", num_turns),
        ],
    )
    gradients = _fill_gradients(module)
    fused = _update_plainly(module, make_optimizer(module, OPTIMIZER))
    _compare_chunks(bench, subject, module, gradients, fused, num_turns)
    for title, options in {"foreach=True": {"foreach": True}, "by default": {}}.items():
        bench.say(f"AdamW, {title}")
        other = _copy_parameters(module)
        optimizer = torch.optim.AdamW(other.parameters(), lr=OPTIMIZER.lr, **options)
        pairs = take_turns(fused, _update_plainly(other, optimizer), num_turns)
        bench.add(f"torch.optim.AdamW, {title}", list_speeds(pairs))
        del other, optimizer
    bench.say("the memory stream")
    pairs = take_turns(fused, _make_stream(num_parameters), num_turns)
    rate = _MOVED_BYTES * num_parameters * 1e9 / median(ours.wall_ns for _, ours in pairs)
    bench.add(
        "a stream that reads four arrays and writes three",
        [*list_speeds(pairs), shown("its rate", f"{format_bytes(rate)}/s")],
    )
    _compare_peer(bench, [tuple(p.shape) for p in module.parameters()], num_turns)


def list_speeds(
    pairs: Sequence[tuple[Taken, Taken]], *, limit: float | None = None
) -> list[Figure]:
    """Speeds against the fused optimizer, in CPU and wall time; above 1 is faster."""
    cpu = [theirs.cpu_ns / ours.cpu_ns for theirs, ours in pairs]
    wall = [theirs.wall_ns / ours.wall_ns for theirs, ours in pairs]
    figures: list[Figure] = []
    for name, ratios in (("CPU seconds", cpu), ("wall time", wall)):
        words = f"speed against fused, {name}, median"
        if limit is None:
            figures.append(shown(words, median(ratios), show=_show_ratio))
        else:
            figures.append(at_least(words, median(ratios), limit, show=_show_ratio))
        figures.append(shown(f"{name}, slowest and fastest", _show_range(ratios)))
    return [
        *figures,
        shown("fused, median CPU", median(t.cpu_ns for t, _ in pairs), show=format_ns),
        shown("this way, median CPU", median(o.cpu_ns for _, o in pairs), show=format_ns),
        shown("this way, median wall", median(o.wall_ns for _, o in pairs), show=format_ns),
    ]


def _compare_chunks(
    bench: Bench,
    subject: Subject,
    module: nn.Module,
    gradients: Mapping[str, Tensor],
    fused: Turn,
    num_turns: int,
) -> None:
    bench.say("packhorse's chunks")
    model = subject.traced.model
    plan = make_plan(
        model, OPTIMIZER, Ways(chunk_bytes=CHUNK_BYTES), num_microbatches=1, clips=False
    )
    layout = lay_out_chunks(plan, model)
    memory = ChunkMemory(layout)
    for chunk in layout.chunks:
        for state in layout.dtypes:
            memory.commit(state, chunk)
            memory.tensor(state, chunk).zero_()
    for name, tensor in subject.weights.items():
        memory.parameter("param", name).copy_(tensor)
        memory.parameter("grad", name).copy_(gradients[name])
    groups = {chunk.group: hyperparameters(OPTIMIZER, chunk.group) for chunk in layout.chunks}

    def update(turn: int) -> None:
        for chunk in layout.chunks:
            update_shard(
                groups[chunk.group],
                step=turn,
                learning_rate=OPTIMIZER.lr,
                param=memory.tensor("param", chunk),
                grad=memory.tensor("grad", chunk),
                states={name: memory.tensor(name, chunk) for name in OPTIMIZER.state_names},
                pieces=[(start, stop) for start, stop, _, _ in memory.pieces(chunk)],
            )

    pairs = take_turns(fused, update, num_turns)
    same = [
        same_bits(memory.parameter("param", name), parameter.detach())
        for name, parameter in module.named_parameters()
    ]
    bench.add(
        "packhorse, resident chunks",
        [
            *list_speeds(pairs, limit=LIMIT),
            shown("chunks", len(layout.chunks)),
            holds(
                "parameters with the same bits at the end",
                all(same),
                measured=f"{sum(same)} of {len(same)}",
                bar=f"= {len(same)}",
            ),
        ],
    )
    memory.close()


def _compare_peer(bench: Bench, shapes: Sequence[Sequence[int]], num_turns: int) -> None:
    bench.say("DeepSpeed's CPU Adam, in its own environment")
    title = "DeepSpeedCPUAdam"
    answer = ask_peer(
        find_peer("deepspeed"),
        "bench.peer_update",
        {"shapes": shapes, "num_turns": num_turns, "num_threads": torch.get_num_threads()},
        limit_s=PEER_LIMIT_S,
    )
    if isinstance(answer, str):
        bench.add(title, [shown("speed against fused", answer)])
        return
    pairs = [
        (Taken(cpu_ns=a, wall_ns=b), Taken(cpu_ns=c, wall_ns=d)) for a, b, c, d in answer["pairs"]
    ]
    bench.add(title, [*list_speeds(pairs), shown("version", answer["version"])])


def _fill_gradients(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).mul_(1e-3)
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _update_plainly(module: nn.Module, optimizer: torch.optim.Optimizer) -> Turn:
    del module  # the optimizer holds its parameters

    def update(turn: int) -> None:
        del turn
        optimizer.step()

    return update


def _copy_parameters(module: nn.Module) -> nn.ParameterList:
    copies = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in module.parameters())
    for copy, parameter in zip(copies, module.parameters(), strict=True):
        copy.grad = parameter.grad
    return copies


def _make_stream(num_elements: int) -> Turn:
    # In place, as an update does it: what is written has been read.
    one, two, three, four = torch.ones(4, num_elements)

    def stream(turn: int) -> None:
        del turn
        one.add_(two)
        three.neg_()
        four.neg_()

    return stream


def _show_ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def _show_range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--turns", type=int, help="turns of each side that are counted")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")


if __name__ == "__main__":
    sys.exit(run_bench("update", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
