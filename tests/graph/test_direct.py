"""Graphs by the shortest calls: the same operators, overloads and bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packhorse.graph import direct
from packhorse.graph.direct import make_direct

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(6, 4)
CUBE = torch.randn(2, 3, 4)
NORM = (X, [6], torch.randn(6), torch.randn(6), 1e-5)
CALLS = [
    (aten.view.default, (X, [2, -1]), {}),
    (aten.permute.default, (CUBE, [2, 0, 1]), {}),
    (aten.expand.default, (X.view(4, 1, 6), [4, 5, 6]), {}),
    (aten.t.default, (X,), {}),
    (aten.transpose.int, (CUBE, 0, -1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.select.int, (X, 1, 2), {}),
    (aten.add_.Tensor, (X.clone(), X), {}),
    (aten.add_.Tensor, (X.clone(), X), {"alpha": 2}),
    (aten.copy_.default, (X.clone(), X), {}),
    (aten.mm.default, (X, Y), {}),
    (aten.mm.out, (X, Y), {"out": torch.empty(4, 4)}),
    (aten.bmm.default, (CUBE, CUBE.transpose(1, 2)), {}),
    (aten.addmm.default, (torch.randn(4), X, Y), {}),
    (aten.add.Tensor, (X, X), {}),
    (aten.add.Tensor, (X, 2), {}),
    (aten.add.Tensor, (X, X), {"alpha": 0.5}),
    (aten.sub.Tensor, (X, 0.5), {}),
    (aten.mul.Tensor, (X, 0.125), {}),
    (aten.mul.Tensor, (torch.tensor(3), 2), {}),
    (aten.div.Tensor, (X, X), {}),
    (aten.div.Tensor, (X, 3), {}),
    (aten.neg.default, (X,), {}),
    (aten.rsqrt.default, (X.abs(),), {}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Tensor_Scalar, (X.abs(), -0.5), {}),
    (aten.sum.dim_IntList, (X, [0], True), {}),
    (aten.sum.dim_IntList, (X, [0, 1]), {"dtype": torch.float64}),
    (aten.mean.dim, (X, [-1], True), {}),
    (aten.cat.default, ([X, X], -1), {}),
    (aten.native_layer_norm.default, NORM, {}),
    (aten.gelu.default, (X,), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    # Those that have no short call.
    (aten.slice.Tensor, (X, 1, 0, 3), {}),
    (aten.scalar_tensor.default, (2.5,), {"dtype": torch.float64}),
    (aten.sum.default, (X,), {}),
    (aten.full.default, ([2, 2], float("-inf")), {"dtype": torch.float32}),
]


class Overloads(TorchDispatchMode):
    """Keeps which overloads are called, with what beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        plain = [arg for arg in args if not isinstance(arg, torch.Tensor)]
        self.called.append((func, str(plain), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


def as_graph(target, args, kwargs):
    """A graph of one call whose tensors are its arguments."""
    graph, tensors = fx.Graph(), []

    def place(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return graph.placeholder(f"x{len(tensors)}")
        return [place(each) for each in value] if isinstance(value, list) else value

    placed = [place(each) for each in args]
    named = {name: place(each) for name, each in kwargs.items()}
    graph.output([graph.call_function(target, tuple(placed), named)])
    return fx.GraphModule({}, graph), tensors


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS)
def test_a_call_parses_to_the_very_overload_with_the_same_arguments(target, args, kwargs):
    module, tensors = as_graph(target, args, kwargs)
    results, overloads = [], []
    for run in (module.forward, make_direct(module)):
        copies = [tensor.clone() for tensor in tensors]
        with torch.no_grad(), Overloads() as mode:
            results.append((*run(*copies), *copies))
        overloads.append([call[0] for call in mode.called])
    assert overloads[0] == overloads[1] == [target]
    for expected, found in zip(*results, strict=True):
        for one, other in zip(
            tree_leaves(expected),
            tree_leaves(found),
            strict=True,
        ):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


def test_every_short_call_is_among_those_that_are_tried():
    tried = {target for target, _, _ in CALLS}
    assert {*direct._SIZED, *direct._METHODS, *direct._FUNCTIONS} <= tried


def test_views_that_are_turned_back_are_left_out():
    graph = fx.Graph()
    x = graph.placeholder("x")
    turned = graph.call_function(aten.t.default, (x,))
    back = graph.call_function(aten.t.default, (turned,))
    flat = graph.call_function(aten.view.default, (back, [24]))
    rows = graph.call_function(aten.view.default, (flat, [3, 8]))
    graph.output([rows, graph.call_function(aten.t.default, (back,))])
    module = fx.GraphModule({}, graph)
    with Overloads() as mode:
        found = make_direct(module)(X)
    assert [call[0] for call in mode.called] == [aten.view.default, aten.t.default]
    assert all(map(torch.equal, found, module.forward(X)))
    assert len(graph.nodes) == 7, "the traced graph stays as it is"


def test_a_value_goes_when_nothing_needs_it_any_more():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    kept = []

    def watch(tensor):
        kept.append(weakref.ref(tensor))
        return tensor + 1

    def look(tensor):
        gc.collect()
        assert kept[0]() is None
        return tensor

    second = graph.call_function(watch, (first,))
    graph.output([graph.call_function(look, (second,))])
    assert torch.equal(make_direct(fx.GraphModule({}, graph))(X)[0], 1 - X)
    assert len(kept) == 1
