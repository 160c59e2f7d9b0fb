"""Graphs by the shortest calls: the same operators, overloads and bits."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from subjects import find_subject
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.zoo import ZOO
from packhorse.graph import direct
from packhorse.graph.direct import make_direct

aten = torch.ops.aten
SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 6, generator=SEED), torch.randn(6, 4, generator=SEED)
CUBE = torch.randn(2, 3, 4, generator=SEED)
ROW, COLUMN, POINT = X[0].clone(), Y[:, 0].clone(), torch.tensor(2.5)
CALLS = [
    (aten.view.default, (X, [2, -1]), {}),
    (aten.view.default, (X[0, :1].clone(), []), {}),
    (aten.permute.default, (CUBE, [2, 0, 1]), {}),
    (aten.permute.default, (POINT, []), {}),
    (aten.expand.default, (POINT, []), {}),
    (aten.expand.default, (X.view(4, 1, 6), [4, 5, 6]), {}),
    (aten.t.default, (X,), {}),
    (aten.t.default, (ROW,), {}),
    (aten.transpose.int, (CUBE, 0, -1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.select.int, (X, 1, 2), {}),
    (aten.add_.Tensor, (X.clone(), X), {}),
    (aten.add_.Tensor, (X.clone(), X), {"alpha": 2}),
    (aten.copy_.default, (X.clone(), X), {}),
    (aten.mm.default, (X, Y), {}),
    (aten.mm.out, (X, Y), {"out": torch.empty(4, 4)}),
    (aten.bmm.default, (CUBE, CUBE.transpose(1, 2)), {}),
    (aten.addmm.default, (X[:, 0].clone(), X, Y), {}),
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
    (aten.native_layer_norm.default, (X, [6], ROW, COLUMN, 1e-5), {}),
    (aten.native_layer_norm.default, (X, [6], None, None, 1e-5), {}),
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
    assert [call[0] for call in mode.called] == [aten.view.default] * 2 + [aten.t.default]
    x.meta["val"] = X
    with Overloads() as mode:
        found = make_direct(module)(X)
    assert [call[0] for call in mode.called] == [aten.view.default, aten.t.default]
    assert all(map(torch.equal, found, module.forward(X)))
    # Where it does not lie in one piece, another way may leave other strides.
    x.meta["val"] = Y.t()
    with Overloads() as mode:
        make_direct(module)(X)
    assert len(mode.called) == 3
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


def test_a_graph_with_attributes_runs_as_it_is():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(aten.mul.Tensor, (x, graph.get_attr("factor")))])
    module = fx.GraphModule({"factor": POINT}, graph)
    assert torch.equal(make_direct(module)(X)[0], X * 2.5)


def test_slices_and_nested_arguments_are_spelled():
    graph = fx.Graph()
    x = graph.placeholder("x")
    part = graph.call_function(operator.getitem, (x, (slice(1, None, 2), slice(None, 3))))
    graph.output([graph.call_function(aten.cat.default, ([part, part],), {"dim": 1})])
    found = make_direct(fx.GraphModule({}, graph))(X)
    assert torch.equal(found[0], torch.cat([X[1::2, :3]] * 2, 1))


def make_value(node: fx.Node) -> torch.Tensor:
    """Small values of an argument's kind; integers are valid tokens and labels everywhere."""
    like = node.meta["val"]
    made = torch.zeros(like.shape, dtype=like.dtype)
    return made.normal_(generator=SEED) if like.is_floating_point() else made


@pytest.mark.parametrize("name", sorted(ZOO))
def test_whole_bodies_give_the_bits_of_their_graphs(name):
    traced = find_subject(name).traced
    for body in traced.code.values():
        graphs = [body.keep, body.discard, body.evaluate]
        if body.backward is not None:
            graphs += [body.backward.first.graph, body.backward.later.graph]
        for graph in graphs:
            arguments = [make_value(node) for node in graph.graph.nodes if node.op == "placeholder"]
            results = []
            for run in (graph.forward, make_direct(graph)):
                given = [each.clone() for each in arguments]
                with torch.no_grad():
                    results.append((*run(*given), *given))
            assert all(
                torch.equal(one, other) and one.stride() == other.stride()
                for one, other in zip(*results, strict=True)
                if isinstance(one, torch.Tensor)
            )
