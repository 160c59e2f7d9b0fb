"""Cut the backward of a body in two: gradients of inputs now, gradients of parameters later.

In: the backward graph of a body, never autograd a second time. Out: its halves, each a backward of
its own, and what waits between them, the stash.

    input half     what the gradients of inputs need, and what makes the stash smaller
    weight half    the rest, led to the sinks as in a whole backward

    for each operation of the rest, last first:
        if less is kept with it and what it needs in the input half: move them there
    for each kept value that the input half makes by cheap operations:
        if less is kept with what these read: compute it again in the weight half

So a norm's weight gradient, a sum over two large values, is finished in the input half, while a
bias's, the sum of a value that a matrix product keeps anyway, is not. Matrix products, gradients of
embeddings and whatever adds to the running gradient of a tied parameter stay in the weight half.
The operations are those of the whole backward on the same values, and only the weight half touches
sinks: so sums have the same bits, in the order in which weight halves run.

Gradients of the block's outputs, its values and its parameters are read again by name, not
stashed. What is stashed has bytes of its own, or those of saved values, which it takes over.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import fx

from packhorse.graph.code import (
    BackwardCode,
    BackwardVariant,
    BodyCode,
    GradsOf,
    HalvesCode,
)
from packhorse.graph.extract import extract_graph, needed_for
from packhorse.graph.flops import count_node_flops
from packhorse.graph.liveness import bytes_of, find_heap_use, peak_bytes, storages_of
from packhorse.graph.nodes import is_operation, tensor_of, writes_in_place
from packhorse.graph.partition import created_bytes, heap_use_of_variants, workspace_of_variants
from packhorse.graph.sinks import store_gradients

_aten = torch.ops.aten
_COPIES: Final = (_aten.clone.default, _aten._to_copy.default, _aten.copy.default)


def cut_backward(code: BodyCode) -> HalvesCode | None:
    """Cut the backward of a body; None for a body without one."""
    backward = code.backward
    if backward is None:
        return None
    kinds = {kind for kind, _ in backward.bare.grads_of}
    if kinds != {"input", "parameter"}:
        return _leave_whole(code, backward, trains="parameter" in kinds)
    bare = _read_bare(code, backward)
    cut = _choose_cut(bare)
    stash = [node for node in _find_kept(bare, cut) if node not in bare.by_name]
    first = _make_input_half(backward, bare, cut, stash)
    second = _make_weight_half(backward, bare, cut, stash)
    graph = first.first.graph.graph
    kept = _results(graph)[len(first.input_grads) :]
    named = [node for node in graph.nodes if node.op == "placeholder" and node.name in bare.names]
    stash_bytes = bytes_of(kept, but=_keys(named))
    created = created_bytes(first.first, first.bare)
    waiting = [n for n in _find_kept(bare, cut) if n in bare.values]
    return HalvesCode(
        input=first,
        weight=second,
        stash_bytes=stash_bytes,
        kept_bytes=stash_bytes + bytes_of(waiting),
        input_workspace_bytes=max(0, peak_bytes(graph) - created - stash_bytes),
        weight_workspace_bytes=workspace_of_variants(second),
        input_heap=find_heap_use(graph),
        weight_heap=heap_use_of_variants(second),
    )


def _leave_whole(code: BodyCode, backward: BackwardCode, *, trains: bool) -> HalvesCode:
    work, heap = code.costs.backward_workspace_bytes, code.costs.backward_heap
    return HalvesCode(
        input=None if trains else backward,
        weight=backward if trains else None,
        stash_bytes=0,
        kept_bytes=code.costs.saved_bytes,
        input_workspace_bytes=0 if trains else work,
        weight_workspace_bytes=work if trains else 0,
        input_heap=find_heap_use() if trains else heap,
        weight_heap=heap if trains else find_heap_use(),
    )


@dataclass(frozen=True, slots=True)
class _Bare:
    # The nodes of a whole backward. `by_name` are the placeholders that a later task finds by their
    # names, parameters, constants, inputs, outputs and gradients of outputs, with their indices;
    # `roots` are running gradients of tied parameters, which the weight half alone is given. `lent`
    # are bytes of saved values that belong to other buffers, `changed` those that some operation
    # writes in place.
    nodes: list[fx.Node]
    saved: list[fx.Node]
    lent: frozenset[int]
    parameters: dict[fx.Node, int]
    constants: dict[fx.Node, int]
    inputs: dict[fx.Node, int]
    outputs: dict[fx.Node, int]
    tangents: dict[fx.Node, int]
    input_roots: dict[fx.Node, int]
    roots: list[fx.Node]
    grads: list[fx.Node]
    grads_of: GradsOf
    changed: frozenset[int]

    @property
    def values(self) -> dict[fx.Node, int]:
        return {**self.inputs, **self.outputs, **self.tangents}

    @property
    def by_name(self) -> dict[fx.Node, int]:
        return {**self.parameters, **self.constants, **self.values}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(node.name for node in (*self.by_name, *self.input_roots))

    def grads_with(self, kind: str) -> list[fx.Node]:
        pairs = zip(self.grads, self.grads_of, strict=True)
        return [grad for grad, (of, _) in pairs if of == kind]

    def of(self, kind: str) -> GradsOf:
        return tuple(pair for pair in self.grads_of if pair[0] == kind)


@dataclass(frozen=True, slots=True)
class _Cut:
    # Which operations run in which half; some in both.
    first: frozenset[fx.Node]
    second: frozenset[fx.Node]


def _read_bare(code: BodyCode, backward: BackwardCode) -> _Bare:
    nodes = list(backward.bare.graph.graph.nodes)
    holders = [node for node in nodes if node.op == "placeholder"]
    num_roots = sum(backward.bare.flow.parameter_roots)
    num_saved = len(code.saved.places)
    rest = iter(holders[num_saved : len(holders) - num_roots])

    def take(indices: Sequence[int]) -> dict[fx.Node, int]:
        return {next(rest): index for index in indices}

    saved = holders[:num_saved]
    lent = [n for n, place in zip(saved, code.saved.places, strict=True) if place is None]
    return _Bare(
        nodes=nodes,
        saved=saved,
        lent=_keys(lent),
        parameters=take(backward.parameters),
        constants=take(backward.constants),
        inputs=take(backward.inputs),
        outputs=take(backward.outputs),
        tangents=take(backward.tangents),
        input_roots=take(backward.input_roots),
        roots=holders[len(holders) - num_roots :],
        grads=_results(backward.bare.graph.graph),
        grads_of=backward.bare.grads_of,
        changed=_written(nodes),
    )


def _choose_cut(bare: _Bare) -> _Cut:
    inside = {node for node in bare.nodes if node.op == "call_function"}
    first = needed_for(bare.nodes, bare.grads_with("input"), inside)
    rest = needed_for(bare.nodes, bare.grads_with("parameter"), inside) - first
    _keep_together(bare, first, rest)
    pinned: set[fx.Node] = set()
    for node in bare.nodes:
        stays = _is_heavy(node) or writes_in_place(node)
        if node in rest and (stays or not {*pinned, *bare.roots}.isdisjoint(node.all_input_nodes)):
            pinned.add(node)
    cut = _Cut(frozenset(first), frozenset(rest))
    for node in reversed(bare.nodes):
        if node in cut.first or node not in cut.second or node in pinned:
            continue
        moved = needed_for(bare.nodes, [node], set(cut.second - cut.first))
        if moved.isdisjoint(pinned):
            cut = _smaller(bare, cut, _Cut(cut.first | moved, cut.second - moved))
    cut = _look_again(bare, cut)
    for node in _find_kept(bare, cut):
        cut = _compute_again(bare, cut, node)
    return _look_again(bare, cut)


def _keep_together(bare: _Bare, first: set[fx.Node], rest: set[fx.Node]) -> None:
    """Take into the input half what must not come after it.

    These are the parts of an operation's several results, and readers of bytes that it changes.
    """
    while True:
        written = _written(first)
        late = [
            node
            for node in rest
            if (node.target is operator.getitem and node.args[0] in first)
            or not written.isdisjoint(_keys((node, *node.all_input_nodes)))
            or not bare.input_roots.keys().isdisjoint(node.all_input_nodes)
        ]
        if not late:
            return
        moved = needed_for(bare.nodes, late, rest)
        first |= moved
        rest -= moved


def _look_again(bare: _Bare, cut: _Cut) -> _Cut:
    """Take views of what is read by name again, rather than stash them."""
    second = set(cut.second)
    named = _keys(bare.by_name)
    for node in _find_kept(bare, cut):
        chain: list[fx.Node] = []
        at = node
        while at in cut.first and _keys([at]) <= named and len(at.all_input_nodes) == 1:
            chain.append(at)
            at = at.all_input_nodes[0]
        if chain and at in bare.by_name and bare.changed.isdisjoint(_keys([node])):
            second.update(chain)
    return _Cut(cut.first, frozenset(second))


def _compute_again(bare: _Bare, cut: _Cut, node: fx.Node) -> _Cut:
    """Compute a kept value again from what is smaller, seen through operations with one source."""
    chain: set[fx.Node] = set()
    at = node
    while (
        at in cut.first
        and _is_cheap(at)
        and bare.changed.isdisjoint(_keys((at, *at.all_input_nodes)))
    ):
        chain.add(at)
        smaller = _smaller(bare, cut, _Cut(cut.first, cut.second | chain))
        if smaller is not cut:
            return smaller
        sources = [source for source in at.all_input_nodes if source in cut.first]
        if len(sources) != 1:
            return cut
        at = sources[0]
    return cut


def _smaller(bare: _Bare, cut: _Cut, other: _Cut) -> _Cut:
    """The other cut if less is kept with it."""
    kept = [bytes_of(_find_kept(bare, each), but=_keys(bare.constants)) for each in (cut, other)]
    return other if kept[1] < kept[0] else cut


def _find_kept(bare: _Bare, cut: _Cut) -> list[fx.Node]:
    """What the weight half reads and does not make, in order."""
    reads = {source for node in cut.second for source in node.all_input_nodes}
    reads.update(bare.grads_with("parameter"))
    return [n for n in bare.nodes if n in reads and n not in cut.second and n not in bare.roots]


def _make_input_half(
    backward: BackwardCode, bare: _Bare, cut: _Cut, stash: list[fx.Node]
) -> BackwardCode:
    results = [*bare.grads_with("input"), *stash]
    needed = needed_for(bare.nodes, results, set(cut.first))
    reads = {source for node in needed for source in node.all_input_nodes} | set(results)
    named = [
        _only(found, reads)
        for found in (bare.parameters, bare.constants, bare.inputs, bare.outputs, bare.tangents)
    ]
    holders = [*bare.saved, *(n for found in named for n in found), *bare.input_roots]
    module = extract_graph(bare.nodes, holders, results, needed)
    num_grads = len(results) - len(stash)
    _give_own_bytes(module, num_grads, named_keys=_keys(bare.by_name) | bare.lent)
    own = replace(backward.bare, graph=module, grads_of=bare.of("input"))
    only = BackwardVariant(graph=module, parameter_roots=(), sinks=(), parameter_grads=())
    parameters, constants, inputs, outputs, tangents = (tuple(n.values()) for n in named)
    return BackwardCode(
        bare=own,
        first=only,
        later=only,
        apart_first=only,
        apart_later=only,
        parameters=parameters,
        constants=constants,
        inputs=inputs,
        outputs=outputs,
        tangents=tangents,
        input_roots=backward.input_roots,
        input_grads=backward.input_grads,
    )


def _make_weight_half(
    backward: BackwardCode, bare: _Bare, cut: _Cut, stash: list[fx.Node]
) -> BackwardCode:
    kept = set(_find_kept(bare, cut))
    named = [
        _only(found, kept)
        for found in (bare.parameters, bare.constants, bare.inputs, bare.outputs, bare.tangents)
    ]
    holders = [*stash, *(n for found in named for n in found), *bare.roots]
    module = extract_graph(bare.nodes, holders, bare.grads_with("parameter"), set(cut.second))
    own = replace(backward.bare, graph=module, grads_of=bare.of("parameter"))
    variants = store_gradients(own)
    parameters, constants, inputs, outputs, tangents = (tuple(n.values()) for n in named)
    return BackwardCode(
        bare=own,
        first=variants.first,
        later=variants.later,
        apart_first=variants.apart_first,
        apart_later=variants.apart_later,
        parameters=parameters,
        constants=constants,
        inputs=inputs,
        outputs=outputs,
        tangents=tangents,
        input_roots=(),
        input_grads=(),
    )


def _give_own_bytes(module: fx.GraphModule, num_grads: int, *, named_keys: frozenset[int]) -> None:
    """Clone what is stashed but shares bytes with a gradient of an input or another buffer."""
    graph = module.graph
    results = _results(graph)
    shared = _keys(results[:num_grads]) | named_keys
    output = next(node for node in graph.nodes if node.op == "output")
    for place, node in enumerate(results):
        if place >= num_grads and not shared.isdisjoint(_keys([node])):
            with graph.inserting_before(output):
                clone = graph.call_function(_aten.clone.default, (node,))
            clone.meta = {"val": tensor_of(node).clone()}
            results[place] = clone
    output.args = (results,)
    module.recompile()


def _only(found: dict[fx.Node, int], wanted: set[fx.Node]) -> dict[fx.Node, int]:
    return {node: index for node, index in found.items() if node in wanted}


def _is_heavy(node: fx.Node) -> bool:
    """Tell whether an operation is worth deferring, whatever its result takes."""
    return node.target is _aten.embedding_dense_backward.default or count_node_flops(node) > 0


def _is_cheap(node: fx.Node) -> bool:
    """Tell whether an operation only passes over its operands, so that it may be done twice."""
    if not is_operation(node.target):
        return False
    views = _keys([node]) <= _keys(node.all_input_nodes)
    return views or node.target in _COPIES or torch.Tag.pointwise in node.target.tags


def _written(nodes: Iterable[fx.Node]) -> frozenset[int]:
    """The bytes that operations write in place."""
    targets = (node.args[0] for node in nodes if writes_in_place(node))
    return _keys(target for target in targets if isinstance(target, fx.Node))


def _results(graph: fx.Graph) -> list[fx.Node]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(output.args[0])


def _keys(nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(key for node in nodes for key, _ in storages_of(node.meta.get("val")))
