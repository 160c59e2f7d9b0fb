"""Copy what some results need out of a graph.

In: the nodes of a traced graph, its arguments and results. Out: a graph module of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from packhorse.graph.liveness import storages_of
from packhorse.graph.nodes import writes_in_place


def extract_graph(
    nodes: list[fx.Node], holders: list[fx.Node], results: list[fx.Node], inside: set[fx.Node]
) -> fx.GraphModule:
    """Copy what `results` need out of the joint graph; in-place writes to kept bytes come along."""
    needed = needed_for(nodes, results, inside)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for holder in holders:
        mapping[holder] = graph.placeholder(holder.name)
        mapping[holder].meta = holder.meta
    for node in nodes:
        if node in needed:
            mapping[node] = graph.node_copy(node, lambda source: mapping[source])
    output = graph.output([mapping[node] for node in results])
    output.meta = {}
    return fx.GraphModule({}, graph)


def needed_for(
    nodes: Iterable[fx.Node], results: Iterable[fx.Node], inside: set[fx.Node]
) -> set[fx.Node]:
    """The nodes of `inside` that results depend on, in-place writes to what they read included."""
    needed = closure_of(results, inside)
    while True:
        kept = _keys(needed)
        writers = [
            node
            for node in nodes
            if node in inside
            and node not in needed
            and writes_in_place(node)
            and _keys([node.args[0]] if isinstance(node.args[0], fx.Node) else []) & kept
        ]
        if not writers:
            return needed
        needed |= closure_of(writers, inside)


def closure_of(results: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `inside` that results are computed from, themselves included."""
    needed: set[fx.Node] = set()
    pending = [node for node in results if node in inside]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [source for source in node.all_input_nodes if source in inside]
    return needed


def _keys(nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(key for node in nodes for key, _ in storages_of(node.meta.get("val")))
