"""A backward in two halves against the same backward whole: CPU time, bits, what waits in between.

A decoder layer of Llama's and one of GPT-2's shape, width 256, 512 tokens, one thread. The whole
backward and its two halves take turns on the same values, in the first micro-batch, which writes
gradients, and in a later one, which adds to them. All gradients must have the same bits. What waits
between the halves is measured in storages: the stash, and whatever else of the layer the second
half reads; it is held against what the layer saved for its backward. The split that torch's own
pipelining makes of the same layer in eager mode takes its turns too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from bench.material import make_config, make_tied_config
from bench.planned import trace_subject
from bench.reference import same_bits
from bench.report import Bench, Figure, at_most, holds, run_bench, shown
from bench.turns import take_turns
from packhorse.graph.code import BackwardCode, BackwardVariant, BodyCode, HalvesCode
from packhorse.graph.halves import cut_backward
from packhorse.graph.liveness import storages_of
from packhorse.optim.optimizers import AdamW
from packhorse.runtime.memory.heap import set_heap_mode
from packhorse.units import format_bytes, format_ns, format_percent

MAX_TIME_RATIO: Final = 1.06
MAX_KEPT_RATIO: Final = 1.0
WIDTH: Final = 256
LENGTH: Final = 512
NUM_TURNS: Final = 60
NUM_QUICK_TURNS: Final = 15
_SCALE: Final = 0.02
CONFIGS: Final[Mapping[str, Callable[..., transformers.PretrainedConfig]]] = {
    "Llama": make_config,
    "GPT-2": make_tied_config,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A body with real values: what its forward took and made, and gradients of its outputs."""

    code: BodyCode
    backward: BackwardCode
    halves: HalvesCode
    parameters: Sequence[Tensor]
    constants: Sequence[Tensor]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    saved: Sequence[Tensor]
    tangents: Sequence[Tensor]

    def arguments(
        self, backward: BackwardCode, variant: BackwardVariant, sinks: Sequence[Tensor]
    ) -> list[Tensor]:
        """What a backward, or a half, takes behind what was saved or stashed."""
        return [*self.named(backward), *(sinks[index] for index in variant.sinks)]

    def named(self, backward: BackwardCode) -> list[Tensor]:
        """What a backward, or a half, reads by name."""
        return [
            *(self.parameters[index] for index in backward.parameters),
            *(self.constants[index] for index in backward.constants),
            *(self.inputs[index] for index in backward.inputs),
            *(self.outputs[index] for index in backward.outputs),
            *(self.tangents[index] for index in backward.tangents),
        ]


def measure(bench: Bench) -> None:
    """Cut each layer and let whole and halves take turns."""
    set_heap_mode("keep")
    torch.set_num_threads(bench.options.threads)
    num_turns = bench.options.turns or (NUM_QUICK_TURNS if bench.quick else NUM_TURNS)
    for name, configure in CONFIGS.items():
        bench.say(f"tracing {name}")
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            configure(width=WIDTH, num_layers=3), dtype=torch.float32
        )
        layer, cut_ns = open_layer(module)
        bench.say(f"{name}: turns")
        with torch.no_grad():
            figures = [*compare_bits(layer), *compare_memory(layer)]
            for kind in ("first", "later"):
                figures += compare_time(layer, kind, num_turns)
        figures.append(shown("cutting its backward takes, once", cut_ns, show=format_ns))
        bench.say(f"{name}: torch's own split")
        figures.append(
            shown("torch's pipelining, eager, median ratio", split_eagerly(module, num_turns))
        )
        bench.add(f"a layer of {name}'s shape, width {WIDTH}, {LENGTH} tokens", figures)


def open_layer(module: nn.Module) -> tuple[Layer, int]:
    """Trace a model, run the forward of its second decoder layer, and cut the backward."""
    tokens = torch.randint(0, 1000, (1, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    traced = trace_subject(module, batch, AdamW(lr=1e-4)).traced
    block = next(b for b in traced.model.blocks if b.name.endswith((".layers.1", ".h.1")))
    code = traced.code[block.body]
    begin_ns = time.process_time_ns()
    halves = cut_backward(code)
    cut_ns = time.process_time_ns() - begin_ns
    assert code.backward is not None
    assert halves is not None
    holders = [node for node in code.keep.graph.nodes if node.op == "placeholder"]
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.randn(node.meta["val"].shape, generator=generator).mul_(_SCALE) for node in holders
    ]
    constants = list(traced.constants[block.id])
    first, count = len(block.parameters), len(block.parameters) + len(constants)
    made[first:count] = constants
    with torch.no_grad():
        results = code.keep(*made)
    outputs = results[: code.num_outputs]
    layer = Layer(
        code=code,
        backward=code.backward,
        halves=halves,
        parameters=made[:first],
        constants=constants,
        inputs=made[count:],
        outputs=outputs,
        saved=results[code.num_outputs :],
        tangents=[torch.randn(o.shape, generator=generator).mul_(_SCALE) for o in outputs],
    )
    return layer, cut_ns


def run_whole(layer: Layer, kind: str, sinks: Sequence[Tensor]) -> list[Tensor]:
    """Run the backward whole; gives the gradients of inputs."""
    variant: BackwardVariant = getattr(layer.backward, kind)
    return variant.graph(*layer.saved, *layer.arguments(layer.backward, variant, sinks))


def run_halves(layer: Layer, kind: str, sinks: Sequence[Tensor]) -> list[Tensor]:
    """Run one half after the other; gives the gradients of inputs."""
    grads, stash = run_input_half(layer)
    second = layer.halves.weight
    assert second is not None
    variant: BackwardVariant = getattr(second, kind)
    variant.graph(*stash, *layer.arguments(second, variant, sinks))
    return grads


def run_input_half(layer: Layer) -> tuple[list[Tensor], list[Tensor]]:
    """Run the first half; gives the gradients of inputs and the stash."""
    first = layer.halves.input
    assert first is not None
    results = list(first.first.graph(*layer.saved, *layer.named(first)))
    count = len(first.input_grads)
    return results[:count], results[count:]


def compare_bits(layer: Layer) -> list[Figure]:
    """Run two micro-batches both ways and compare every gradient."""
    found: list[list[Tensor]] = []
    for run in (run_whole, run_halves):
        sinks = [torch.zeros_like(parameter) for parameter in layer.parameters]
        grads = [grad for kind in ("first", "later") for grad in run(layer, kind, sinks)]
        found.append([*grads, *sinks])
    same = [same_bits(one, other) for one, other in zip(*found, strict=True)]
    return [
        holds(
            "gradients with the same bits",
            all(same),
            measured=f"{sum(same)} of {len(same)}",
            bar=f"= {len(same)}",
        )
    ]


def compare_memory(layer: Layer) -> list[Figure]:
    """Weigh what waits between the halves against what was saved."""
    second = layer.halves.weight
    assert second is not None
    _, stash = run_input_half(layer)
    parameters = {key for tensor in layer.parameters for key, _ in storages_of(tensor)}
    kept_bytes = weigh([*stash, *layer.named(second)], but=parameters)
    given = {key for tensor in (*layer.inputs, *layer.outputs) for key, _ in storages_of(tensor)}
    saved_bytes = weigh(layer.saved, but=parameters | given)
    return [
        shown("saved for the backward", saved_bytes, show=format_bytes),
        shown("kept between the halves", kept_bytes, show=format_bytes),
        at_most(
            "kept, of what was saved",
            kept_bytes / saved_bytes,
            MAX_KEPT_RATIO,
            show=format_percent,
        ),
    ]


def compare_time(layer: Layer, kind: str, num_turns: int) -> list[Figure]:
    """Let whole and halves take turns."""
    sinks = [torch.zeros_like(parameter) for parameter in layer.parameters]

    def whole(turn: int) -> None:
        del turn
        run_whole(layer, kind, sinks)

    def halves(turn: int) -> None:
        del turn
        run_halves(layer, kind, sinks)

    def first_half(turn: int) -> None:
        del turn
        run_input_half(layer)

    pairs = take_turns(whole, halves, num_turns)
    ratios = [ours.cpu_ns / theirs.cpu_ns for theirs, ours in pairs]
    share = median(f.cpu_ns for _, f in take_turns(whole, first_half, max(num_turns // 4, 3)))
    whole_ns = median(theirs.cpu_ns for theirs, _ in pairs)
    words = f"{kind} micro-batch"
    return [
        at_most(
            f"{words}: halves over whole, CPU, median", median(ratios), MAX_TIME_RATIO, show=_ratio
        ),
        shown(f"{words}: lowest and highest", f"{min(ratios):.3f} to {max(ratios):.3f}"),
        shown(f"{words}: whole, median CPU", whole_ns, show=format_ns),
        shown(f"{words}: of it the first half", share / whole_ns, show=format_percent),
    ]


def split_eagerly(module: nn.Module, num_turns: int) -> str:
    """Time torch's own split of the same layer against one call of autograd."""
    layers = module.model.layers if hasattr(module, "model") else module.transformer.h
    taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    layer = layers[1]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: taken.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        module(torch.randint(0, 1000, (1, LENGTH)), use_cache=False)
    hook.remove()
    ((hidden, *args), kwargs) = taken[0]
    weights = list(layer.parameters())

    def forward() -> tuple[Tensor, Tensor]:
        given = hidden.detach().requires_grad_()
        output = layer(given, *args, **kwargs)
        return given, output[0] if isinstance(output, tuple) else output

    ratios: list[float] = []
    for turn in range(num_turns):
        spent: dict[str, int] = {}
        for way in ("whole", "halves") if turn % 2 else ("halves", "whole"):
            given, output = forward()
            tangent = torch.ones_like(output)
            begin_ns = time.process_time_ns()
            if way == "whole":
                torch.autograd.grad(output, [given, *weights], tangent)
            else:
                _, groups = stage_backward_input([output], [tangent], [given], iter(weights))
                stage_backward_weight(iter(weights), groups)
            spent[way] = time.process_time_ns() - begin_ns
            layer.zero_grad(set_to_none=True)
        ratios.append(spent["halves"] / spent["whole"])
    return _ratio(median(ratios))


def weigh(tensors: Iterable[Tensor], *, but: set[int]) -> int:
    """Bytes of the distinct storages behind tensors."""
    found = {key: size for tensor in tensors for key, size in storages_of(tensor)}
    return sum(size for key, size in found.items() if key not in but)


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--turns", type=int, help="turns of each side that are counted")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")


if __name__ == "__main__":
    sys.exit(run_bench("split", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
