"""Runs a graph by the shortest calls: its operators by Python's own bindings of them.

In: a graph as `trace` makes it. Out: a function of the same arguments with the same results, bit
for bit. `torch.ops` boxes the arguments of each call, and a graph of autograd turns views to and
fro: beside small matrix products both show. What is called here parses to the very same overloads,
so the kernels are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

Direct = Callable[..., Sequence[Tensor]]

_ATEN: Final = torch.ops.aten
# Methods of the first argument by name; the sizes that these take are spelled one by one.
_SIZED: Final[Mapping[object, str]] = {
    _ATEN.view.default: "view",
    _ATEN.permute.default: "permute",
    _ATEN.expand.default: "expand",
}
_METHODS: Final[Mapping[object, str]] = {
    _ATEN.t.default: "t",
    _ATEN.transpose.int: "transpose",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.select.int: "select",
    _ATEN.add_.Tensor: "add_",
    _ATEN.copy_.default: "copy_",
}
_FUNCTIONS: Final[Mapping[object, Callable[..., object]]] = {
    _ATEN.mm.default: torch.mm,
    _ATEN.mm.out: torch.mm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.add.Tensor: torch.add,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.div.Tensor: torch.div,
    _ATEN.neg.default: torch.neg,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.mean.dim: torch.mean,
    _ATEN.cat.default: torch.cat,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.gelu.default: torch.nn.functional.gelu,
}


def make_direct(module: fx.GraphModule) -> Direct:
    """Make a function that does what a graph does; values go as soon as nothing needs them.

    A graph that reads attributes or calls modules stays as it is.
    """
    if any(
        node.op not in ("placeholder", "call_function", "output") for node in module.graph.nodes
    ):
        return module.forward
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _shorten_views(graph)
    return _Writer(graph).make()


def _shorten_views(graph: fx.Graph) -> None:
    """Undo what is turned back, and take a view of a view from where it comes."""
    for node in graph.nodes:
        inner = node.args[0] if node.args else None
        if not isinstance(inner, fx.Node) or inner.target is not node.target:
            continue
        if node.target is _ATEN.t.default:
            node.replace_all_uses_with(_first(inner))
        elif node.target is _ATEN.view.default and _is_contiguous(_first(inner)):
            node.args = (_first(inner), *node.args[1:])
    for node in reversed(graph.nodes):
        if not node.users and node.target in (_ATEN.t.default, _ATEN.view.default):
            graph.erase_node(node)


def _is_contiguous(node: fx.Node) -> bool:
    # Elsewhere a way around may leave other strides in lengths of one, and kernels look at strides.
    value: object = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node), "the first argument of an operator on tensors is one"
    return first


class _Writer:
    """Writes a graph as the text of a function; what has no text is handed to it by name."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self._names = {node: f"v{at}" for at, node in enumerate(self._nodes)}
        self._held: dict[str, object] = {}
        self._names_of_held: dict[int, str] = {}

    def make(self) -> Direct:
        """Write the function and give it."""
        parameters = [self._names[node] for node in self._nodes if node.op == "placeholder"]
        lines = self._write_lines()
        text = "\n".join(
            [
                f"def make({', '.join(self._held)}):",
                f"    def body({', '.join(parameters)}):",
                *(f"        {line}" for line in lines),
                "    return body",
            ]
        )
        scope: dict[str, Any] = {}  # Any: what `exec` defines has no type
        exec(compile(text, "<packhorse body>", "exec"), scope)
        made: Direct = scope["make"](**self._held)
        return made

    def _write_lines(self) -> list[str]:
        last_users = self._find_last_users()
        lines: list[str] = []
        for node in self._nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                lines.append(f"return {self._spell(node.args[0])}")
                continue
            call = self._spell_call(node)
            lines.append(f"{self._names[node]} = {call}" if node.users else call)
            if ended := last_users.get(node):
                lines.append(f"{' = '.join(self._names[each] for each in ended)} = None")
        return lines

    def _find_last_users(self) -> dict[fx.Node, list[fx.Node]]:
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for used in node.all_input_nodes:
                last[used] = node
        ended: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last.items():
            if node.op != "output":
                ended.setdefault(node, []).append(used)
        return ended

    def _spell_call(self, node: fx.Node) -> str:
        args, target = node.args, node.target
        if target is operator.getitem:
            return f"{self._spell(args[0])}[{self._spell(args[1])}]"
        is_of_tensor = bool(args) and isinstance(args[0], fx.Node | list | tuple)
        if is_of_tensor and target in _SIZED:
            # Without a size there is nothing to spell: the empty list is the argument.
            sizes = args[1] if isinstance(args[1], list | tuple) and args[1] else args[1:]
            return f"{self._spell(args[0])}.{_SIZED[target]}({self._spell_all(sizes, node)})"
        if is_of_tensor and target in _METHODS:
            return f"{self._spell(args[0])}.{_METHODS[target]}({self._spell_all(args[1:], node)})"
        called = _FUNCTIONS.get(target, target) if is_of_tensor else target
        return f"{self._hold(called)}({self._spell_all(args, node)})"

    def _spell_all(self, args: Sequence[Argument], node: fx.Node) -> str:
        named = [f"{name}={self._spell(value)}" for name, value in node.kwargs.items()]
        return ", ".join([*map(self._spell, args), *named])

    def _spell(self, value: Argument) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self._spell, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._spell(each)}, ' for each in value)})"
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._spell, ends))})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._hold(value)

    def _hold(self, value: object) -> str:
        name = self._names_of_held.setdefault(id(value), f"c{len(self._names_of_held)}")
        self._held[name] = value
        return name
