"""A backward cut in two gives what the whole gives, bit by bit, and keeps little in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from subjects import find_subject
from test_graph_liveness import make_arguments
from torch import Tensor, fx, nn
from torch.nn import functional

from bench.planned import trace_subject
from bench.reference import same_bits
from bench.zoo import ZOO
from packhorse.graph.code import BackwardCode, BackwardVariant, HalvesCode
from packhorse.graph.halving import halve_backwards
from packhorse.graph.trace import Traced
from packhorse.optim.optimizers import AdamW

VARIANTS = ("first", "later", "apart_first", "apart_later")


def halves_of(traced: Traced) -> list[tuple[str, BackwardCode, HalvesCode]]:
    """Bodies that have both halves."""
    found = halve_backwards(traced).halves
    return [
        (body, code.backward, found[body])
        for body, code in traced.code.items()
        if code.backward is not None and found[body].input and found[body].weight
    ]


def names_of(graph: fx.GraphModule) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


def operations_of(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def run(
    graph: fx.GraphModule, given: Sequence[Tensor], named: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run a graph on what comes first and what it names; also gives the sinks."""
    names = names_of(graph)
    rest = {name: named[name].clone() for name in names[len(given) :]}
    with torch.no_grad():
        results = list(graph(*given, *rest.values()))
    return results, {name: tensor for name, tensor in rest.items() if name.startswith("sink_")}


def run_halves(
    halves: HalvesCode, kind: str, named: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """The gradients of inputs, running sums of tied parameters, and the sinks."""
    first, second = halves.input, halves.weight
    assert first is not None
    assert second is not None
    results, _ = run(first.first.graph, (), named)
    count = len(first.input_grads)
    sums, sinks = run(getattr(second, kind).graph, results[count:], named)
    return results[:count], sums, sinks


@pytest.mark.parametrize("name", ZOO)
def test_halves_have_the_bits_of_the_whole(name: str) -> None:
    traced = find_subject(name).traced
    cut = halves_of(traced)
    assert len(cut) >= 2
    for _, backward, halves in cut:
        for kind in VARIANTS:
            variant: BackwardVariant = getattr(backward, kind)
            arguments = make_arguments(variant.graph)
            named = dict(zip(names_of(variant.graph), arguments, strict=True))
            whole, sinks = run(variant.graph, (), named)
            grads, sums, found = run_halves(halves, kind, named)
            for one, other in zip(whole, [*grads, *sums], strict=True):
                assert same_bits(one, other)
            assert sinks.keys() == found.keys()
            for sink, tensor in sinks.items():
                assert same_bits(tensor, found[sink]), sink


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3", "mixtral"])
def test_less_is_kept_between_the_halves_of_a_layer_than_was_saved(name: str) -> None:
    subject = find_subject(name)
    for body, _, halves in halves_of(subject.traced):
        spec = subject.traced.model.bodies[body]
        assert 0 < halves.kept_bytes <= spec.saved_bytes
    layer = next(b for b in subject.traced.model.blocks if b.name.endswith(("layers.1", "h.1")))
    halves = halve_backwards(subject.traced).halves[layer.body]
    assert halves.kept_bytes <= 0.85 * subject.traced.model.body_of(layer.id).saved_bytes


@pytest.mark.parametrize("name", ZOO)
def test_halves_share_the_products_of_the_whole(name: str) -> None:
    model = halve_backwards(find_subject(name).traced).model
    for body in model.bodies.values():
        halves = body.halves
        if halves is None or halves.input is None or halves.weight is None:
            continue
        assert halves.input.compute_flops + halves.weight.compute_flops == body.backward_flops
        assert halves.weight.compute_flops > 0


def test_nobody_pays_who_does_not_ask() -> None:
    traced = find_subject("llama").traced
    assert traced.halves == {}
    assert all(body.halves is None for body in traced.model.bodies.values())
    assert halve_backwards(traced).code is traced.code


def test_the_first_block_has_no_gradient_of_inputs_and_a_frozen_one_none_of_parameters() -> None:
    traced = halve_backwards(find_subject("llama").traced)
    first = traced.model.bodies[traced.model.blocks[0].body]
    assert first.halves is not None
    assert first.halves.input is None
    assert first.halves.stash_bytes == 0
    assert first.halves.weight is not None
    assert first.halves.weight.workspace_bytes == first.backward_workspace_bytes
    assert traced.halves[first.id].weight is traced.code[first.id].backward
    frozen = halve_backwards(find_subject("llama", "frozen").traced)
    block = next(b for b in frozen.model.blocks if b.name == "model.layers.2")
    halves = frozen.model.body_of(block.id).halves
    assert halves is not None
    assert halves.weight is None
    assert frozen.halves[block.body].input is frozen.code[block.body].backward
    lowest = next(b for b in frozen.model.blocks if b.has_backward)
    halves = frozen.model.body_of(lowest.id).halves
    assert halves is not None
    assert halves.input is None


class Pool(nn.Module):
    """Adds what the mean over tokens gives; each token's gradient is a copy of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.linear(x_BTD).mean(1, keepdim=True)


class Pooled(nn.Module):
    """Layers whose cut has something to decide, each a block between narrow values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.bias = nn.Linear(16, 16)
        self.pool = Pool()
        self.head = nn.Linear(16, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        x_BTD = functional.silu(x_BTD) * self.scale
        x_BTD = functional.silu(self.bias(x_BTD))
        x_BTD = self.pool(x_BTD)
        logits_BTV = self.head(functional.silu(x_BTD))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module", name="pooled")
def make_pooled() -> Traced:
    torch.manual_seed(0)
    tokens = torch.randint(0, 30, (2, 24))
    module = Pooled()
    return trace_subject(module, {"input_ids": tokens, "labels": tokens}, AdamW(lr=1e-3)).traced


def test_what_keeps_less_is_done_early_or_again(pooled: Traced) -> None:
    seen: dict[str, tuple[list[str], list[str]]] = {}
    for block in pooled.model.blocks:
        halves = halve_backwards(pooled).halves.get(block.body)
        if halves is None or halves.input is None or halves.weight is None:
            continue
        first, second = (operations_of(h.bare.graph) for h in (halves.input, halves.weight))
        for parameter in block.parameters:
            seen[parameter.partition(".")[0]] = first, second
    # A sum over two large values: finished in the first half.
    assert "aten.sum.dim_IntList" in seen["scale"][0]
    assert "aten.mul.Tensor" not in seen["scale"][1]
    # A sum over a value that the product keeps anyway: left to the second.
    assert "aten.sum.dim_IntList" in seen["bias"][1]
    # The copies of a small gradient are made again.
    assert "aten.div.Scalar" in seen["pool"][0]
    assert "aten.div.Scalar" in seen["pool"][1]
    for first, _ in seen.values():
        assert "aten.embedding_dense_backward.default" not in first


def test_a_cut_of_a_larger_micro_batch_is_the_same_with_more_bytes() -> None:
    small, large = (
        halve_backwards(find_subject("llama", rows=rows).traced).model for rows in (2, 4)
    )
    for one, other in zip(small.bodies.values(), large.bodies.values(), strict=True):
        assert one.halves is not None
        assert other.halves is not None
        if one.halves.stash_bytes:
            assert 1.9 < other.halves.stash_bytes / one.halves.stash_bytes <= 2
        for mine, theirs in (
            (one.halves.input, other.halves.input),
            (one.halves.weight, other.halves.weight),
        ):
            if mine is not None and theirs is not None:
                free = {"compute_flops": 0, "moved_bytes": 0, "workspace_bytes": 0}
                assert replace(mine, **free) == replace(theirs, **free)
