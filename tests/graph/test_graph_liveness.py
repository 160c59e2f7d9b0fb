"""What a body declares to hold is what it holds: measured operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from subjects import find_subject
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.graph.halving import halve_backwards
from packhorse.graph.liveness import (
    LARGE_BLOCK_BYTES,
    HeapUse,
    bytes_of,
    find_heap_use,
    peak_bytes,
    storages_of,
)
from packhorse.units import MIB


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that live at the same time, those of `known` tensors left out."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {key for tensor in known for key, _ in storages_of(tensor)}
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.watch(item)
        self.peak = max(self.peak, sum(self.live.values()))
        return result

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in self.live:
            return
        self.live[key] = storage.nbytes()
        # The storage lives as long as a tensor of it; tensors of views hold their base.
        weakref.finalize(storage, self.live.pop, key, None)


def run_measured(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    with torch.no_grad(), LiveBytes(arguments) as live:
        results = graph(*arguments)
    return list(results), live.peak


def make_arguments(graph: fx.GraphModule) -> list[Tensor]:
    """Real tensors like the placeholders of a graph."""
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            if fake.is_floating_point():
                real = torch.randn(fake.shape, generator=generator, dtype=fake.dtype).abs()
            else:
                real = torch.ones(fake.shape, dtype=fake.dtype)
            made.append(real)
    return made


def own_bytes(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> int:
    known = {key for tensor in arguments for key, _ in storages_of(tensor)}
    found = {key: size for tensor in tensors for key, size in storages_of(tensor)}
    return sum(size for key, size in found.items() if key not in known)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "weave"])
def test_forward_never_holds_more_than_declared(name: str) -> None:
    traced = find_subject(name).traced
    for body, code in traced.code.items():
        costs = traced.model.bodies[body]
        arguments = make_arguments(code.keep)
        results, peak = run_measured(code.keep, arguments)
        kept = own_bytes(results, arguments)
        outputs = own_bytes(results[: code.num_outputs], arguments)
        assert kept - outputs == costs.saved_bytes
        assert peak <= kept + costs.forward_workspace_bytes
        results, peak = run_measured(code.discard, arguments)
        assert own_bytes(results, arguments) == outputs
        assert peak <= outputs + costs.discard_workspace_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "weave"])
def test_backward_never_holds_more_than_declared(name: str) -> None:
    traced = find_subject(name).traced
    for body, code in traced.code.items():
        if code.backward is None:
            continue
        made = code.backward
        for microbatch, variant in ((0, made.first), (0, made.apart_first), (1, made.later)):
            arguments = make_arguments(variant.graph)
            results, peak = run_measured(variant.graph, arguments)
            created = own_bytes(results, arguments)
            assert peak <= created + traced.model.bodies[body].workspace_of_backward(microbatch)


def test_a_step_of_one_microbatch_needs_no_room_for_a_gradient_beside_its_chunk() -> None:
    model = find_subject("weave").traced.model
    more: list[int] = []
    for block in model.blocks:
        body = model.body_of(block.id)
        more.append(body.workspace_of_backward(1) - body.workspace_of_backward(0))
        assert 0 <= more[-1] <= 4 * max(model.parameters[p].num_elements for p in block.parameters)
        untold = replace(body, first_backward_workspace_bytes=None)
        assert untold.workspace_of_backward(0) == body.backward_workspace_bytes
    assert any(more)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "weave"])
def test_halves_never_hold_more_than_declared(name: str) -> None:
    traced = halve_backwards(find_subject(name).traced)
    for body, halves in traced.halves.items():
        spec = traced.model.bodies[body].halves
        assert spec is not None
        if halves.input is None or halves.weight is None:
            continue
        arguments = make_arguments(halves.input.first.graph)
        results, peak = run_measured(halves.input.first.graph, arguments)
        count = len(halves.input.input_grads)
        grads, stash = results[:count], results[count:]
        assert own_bytes(stash, [*arguments, *grads]) <= spec.stash_bytes
        created = own_bytes(grads, arguments)
        assert peak <= created + spec.stash_bytes + halves.input_workspace_bytes
        for variant in (halves.weight.first, halves.weight.later):
            arguments = make_arguments(variant.graph)
            results, peak = run_measured(variant.graph, arguments)
            created = own_bytes(results, arguments)
            assert peak <= created + halves.weight_workspace_bytes


def trace(function, *arguments: Tensor) -> fx.Graph:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(a.shape, dtype=a.dtype) for a in arguments]
        return make_fx(function)(*fakes).graph


def test_peak_by_hand() -> None:
    """x is 400 bytes: y lives with z, then only z with the result."""
    x = torch.ones(100)

    def chain(x: Tensor) -> Tensor:
        y = x + 1
        z = y * 2
        return z.sum()

    graph = trace(chain, x)
    assert peak_bytes(graph) == 800
    assert peak_bytes(graph, at_least_bytes=400) == 800
    assert peak_bytes(graph, at_least_bytes=401) == 0
    assert bytes_of([node for node in graph.nodes if node.op == "call_function"]) == 804


def test_large_and_small_blocks_are_at_their_fullest_at_different_moments() -> None:
    """The small ones are gone when the large one comes."""
    x = torch.ones(MIB // 4)

    def steps(x: Tensor) -> Tensor:
        y = (x + 1) * (x + 2)
        z = y.sum() + torch.ones(LARGE_BLOCK_BYTES // 4)
        return z.sum()

    use = find_heap_use(trace(steps, x))
    assert use.large_bytes == 2 * LARGE_BLOCK_BYTES
    assert use.small_bytes == 3 * MIB
    assert find_heap_use() == HeapUse(large_bytes=0, small_bytes=0)
    assert find_heap_use(trace(steps, x), trace(torch.sum, x)) == use


def test_views_hold_their_bytes_once_and_arguments_are_free() -> None:
    x = torch.ones(10, 10)

    def views(x: Tensor) -> Tensor:
        y = x[:, :10]
        z = (y + 1).view(100)
        return z[:50] * z[50:]

    assert peak_bytes(trace(views, x)) == 400 + 200


def test_owned_arguments_count_until_their_last_use() -> None:
    x = torch.ones(100)

    def late(x: Tensor) -> Tensor:
        y = x * 2
        return y + 1

    graph = trace(late, x)
    holder = next(iter(graph.nodes))
    keys = frozenset(key for key, _ in storages_of(holder.meta["val"]))
    assert peak_bytes(graph) == 800
    assert peak_bytes(graph, owned=keys) == 800


def test_the_measure_sees_a_body_that_holds_more() -> None:
    x = torch.ones(100)

    with torch.no_grad(), LiveBytes([x]) as live:
        held = [x + index for index in range(5)]
        held[0].add_(held[1])
    assert live.peak == 5 * 400
