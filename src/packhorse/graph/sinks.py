"""Put parameter gradients into their chunks as soon as they exist.

In: a backward graph that returns every gradient. Out: its variants. Stored in place, a gradient
need not be held to the end of the backward:

    first  sink = grad          a matmul writes its product there directly
           sink = sink + own    where later blocks have begun a tied parameter's gradient in it
    later  sink = sink + grad   for a tied parameter only by its first user; the others return the
                                running sum

Where a tied parameter is summed once a step, each block's own gradients go to a sink of its own:

    apart  sink = own           in micro-batch 0
           sink = sink + own    in later ones

The additions are eager's own: a gradient that arrives as a root comes first, and a micro-batch's
whole gradient is added to the sum of the earlier ones. An embedding's gradient touches few rows:
only those are made and added, and the others keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from packhorse.graph.code import (
    BackwardVariant,
    BareBackward,
    BodyArguments,
    GradientFlow,
    GradsOf,
)
from packhorse.graph.nodes import node_of, tensor_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """All variants of a backward; see `BackwardCode`."""

    first: BackwardVariant
    later: BackwardVariant
    apart_first: BackwardVariant
    apart_later: BackwardVariant


def store_gradients(bare: BareBackward) -> Variants:
    """Make all variants; those that sum apart are the others where no tied parameter is summed."""
    parts = bare.graph, bare.grads_of, bare.arguments, bare.flow
    first, later = store_first(*parts), store_later(*parts)
    if not later.parameter_grads and not later.parameter_roots:
        return Variants(first=first, later=later, apart_first=first, apart_later=later)
    return Variants(
        first=first,
        later=later,
        apart_first=store_apart(*parts, adds=False),
        apart_later=store_apart(*parts, adds=True),
    )


def store_first(
    bare: fx.GraphModule, grads_of: GradsOf, arguments: BodyArguments, flow: GradientFlow
) -> BackwardVariant:
    """Make the variant of micro-batch 0: every parameter's gradient goes to its sink."""
    editor = _Editor(bare, grads_of, arguments, flow)
    for slot, index in editor.parameter_slots:
        if flow.parameter_roots[index]:
            editor.add_own(slot, index)
        else:
            editor.write(slot, index)
    sinks = tuple(index for _, index in editor.parameter_slots)
    return editor.finish(sinks=sinks, roots=(), handed_on=())


def store_later(
    bare: fx.GraphModule, grads_of: GradsOf, arguments: BodyArguments, flow: GradientFlow
) -> BackwardVariant:
    """Make the variant of the other micro-batches."""
    editor = _Editor(bare, grads_of, arguments, flow)
    handed_on = tuple((s, index) for s, index in editor.parameter_slots if not flow.sinks[index])
    for slot, index in editor.parameter_slots:
        editor.sum_in_place(slot, index)
        if flow.sinks[index]:
            editor.add(slot, index)
    return editor.finish(
        sinks=tuple(index for _, index in editor.parameter_slots if flow.sinks[index]),
        roots=tuple(index for index, given in enumerate(flow.parameter_roots) if given),
        handed_on=handed_on,
    )


def store_apart(
    bare: fx.GraphModule,
    grads_of: GradsOf,
    arguments: BodyArguments,
    flow: GradientFlow,
    *,
    adds: bool,
) -> BackwardVariant:
    """Make a variant in which a block sums its own gradients; `adds` after micro-batch 0."""
    editor = _Editor(bare, grads_of, arguments, flow)
    for slot, index in editor.parameter_slots:
        editor.drop_root(slot, index)
        if adds:
            editor.add(slot, index)
        else:
            editor.write(slot, index)
    sinks = tuple(index for _, index in editor.parameter_slots)
    return editor.finish(sinks=sinks, roots=(), handed_on=())


class _Editor:
    """A copy of a backward graph while its gradients are led to their sinks."""

    def __init__(
        self,
        bare: fx.GraphModule,
        grads_of: GradsOf,
        arguments: BodyArguments,
        flow: GradientFlow,
    ) -> None:
        self.arguments = arguments
        self.grads_of = grads_of
        self.graph = fx.Graph()
        results = self.graph.graph_copy(bare.graph, {})
        assert isinstance(results, list | tuple)
        self.results = [node_of(result) for result in results]
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        rooted = [index for index, given in enumerate(flow.parameter_roots) if given]
        self.roots = dict(zip(rooted, holders[len(holders) - len(rooted) :], strict=True))
        self.last_holder = holders[-1] if holders else None
        self.sinks: dict[int, fx.Node] = {}
        self.parameter_slots = tuple(
            (slot, index) for slot, (kind, index) in enumerate(grads_of) if kind == "parameter"
        )

    def write(self, slot: int, index: int) -> None:
        """Store a gradient in its sink."""
        sink, grad = self._sink(index), self.results[slot]
        product = _find_product(grad)
        if product is not None and _same_layout(product, self.arguments.parameters[index]):
            with self.graph.inserting_before(product):
                left, right = product.args
                self._call(_aten.mm.out, (left, right), index, kwargs={"out": sink})
            _erase_chain(self.graph, grad, product)
            return
        rows = _find_rows(grad)
        if rows is not None:
            with self.graph.inserting_after(grad):
                self._call(write_rows, (sink, *rows), index, scratch=rows[0])
            self.graph.erase_node(grad)
            return
        with self.graph.inserting_after(self._anchor(grad)):
            self._call(_aten.copy_.default, (sink, grad), index)

    def add_own(self, slot: int, index: int) -> None:
        """Add a block's own gradient to the running sum that later blocks left in the sink."""
        sink, grad, root = self._sink(index), self.results[slot], self.roots[index]
        if grad is root:
            return
        own = _other_addend(grad, root)
        if own is None:
            root.replace_all_uses_with(sink)
            with self.graph.inserting_after(grad):
                self._call(_aten.copy_.default, (sink, grad), index)
            return
        self._replace_sum(grad, own, sink, index)

    def add(self, slot: int, index: int) -> None:
        """Add a gradient to what earlier micro-batches left in the sink."""
        sink, grad = self._sink(index), self.results[slot]
        rows = _find_rows(grad)
        with self.graph.inserting_after(self._anchor(grad)):
            if rows is not None:
                self._call(add_rows, (sink, *rows), index, scratch=rows[0])
            else:
                self._call(_aten.add_.Tensor, (sink, grad), index)
        if rows is not None:
            self.graph.erase_node(grad)

    def sum_in_place(self, slot: int, index: int) -> None:
        """Let the sum of a root and the block's own gradient take the place of one of them.

        An embedding's few rows go into the root, which nothing reads after this backward; any
        other gradient takes the root in.
        """
        root = self.roots.get(index)
        grad = self.results[slot]
        own = _other_addend(grad, root) if root is not None else None
        if root is None or own is None or own.op == "placeholder" or len(own.users) != 1:
            return
        rows = _find_rows(own)
        with self.graph.inserting_before(grad):
            if rows is None:
                summed = self.graph.call_function(_aten.add_.Tensor, (own, root))
                summed.meta = {"val": tensor_of(own)}
            else:
                summed = self.graph.call_function(add_rows, (root, *rows))
                summed.meta = {"val": (tensor_of(root), _like(rows[0]))}
        grad.replace_all_uses_with(summed)
        self.graph.erase_node(grad)
        if rows is not None:
            self.graph.erase_node(own)
        self.results[slot] = summed

    def drop_root(self, slot: int, index: int) -> None:
        """Leave what later blocks have of a gradient out of it: the block's own part stays."""
        root = self.roots.get(index)
        if root is None:
            return
        if self.results[slot] is root:
            sink = self._sink(index)
            with self.graph.inserting_after(self.last_holder):
                own = self.graph.call_function(_aten.zeros_like.default, (sink,))
            own.meta = {"val": torch.empty_like(tensor_of(sink))}
            self.results[slot] = own
            return
        for summed in list(root.users):
            assert summed.target is _aten.add.Tensor, f"a root is used by {summed.target}"
            left, right = summed.args[:2]
            own = node_of(right if left is root else left)
            if summed is not self.results[slot]:
                # Something is added to the sum, perhaps in place: it stays a tensor of its own.
                with self.graph.inserting_before(summed):
                    copy = self.graph.call_function(_aten.clone.default, (own,))
                copy.meta = dict(summed.meta)
                own = copy
            self.results = [own if result is summed else result for result in self.results]
            summed.replace_all_uses_with(own)
            self.graph.erase_node(summed)

    def finish(
        self,
        *,
        sinks: tuple[int, ...],
        roots: tuple[int, ...],
        handed_on: Sequence[tuple[int, int]],
    ) -> BackwardVariant:
        """Close the graph: it returns the inputs' gradients and the running sums."""
        for index, holder in self.roots.items():
            if index not in roots:
                assert not holder.users, "a root is read, but not given"
                self.graph.erase_node(holder)
        inputs = [self.results[s] for s, (kind, _) in enumerate(self.grads_of) if kind == "input"]
        self.graph.output([*inputs, *(self.results[slot] for slot, _ in handed_on)])
        return BackwardVariant(
            graph=fx.GraphModule({}, self.graph),
            parameter_roots=roots,
            sinks=sinks,
            parameter_grads=tuple(index for _, index in handed_on),
        )

    def _replace_sum(self, grad: fx.Node, own: fx.Node, sink: fx.Node, index: int) -> None:
        rows = _find_rows(own)
        with self.graph.inserting_after(grad):
            if rows is not None:
                self._call(add_rows, (sink, *rows), index, scratch=rows[0])
            else:
                self._call(_aten.add_.Tensor, (sink, own), index)
        self.graph.erase_node(grad)
        if rows is not None:
            self.graph.erase_node(own)

    def _sink(self, index: int) -> fx.Node:
        if index in self.sinks:
            return self.sinks[index]
        with self.graph.inserting_after(self.last_holder):
            holder = self.graph.placeholder(f"sink_{index}")
        holder.meta = {"val": self.arguments.parameters[index].detach()}
        self.last_holder = holder
        self.sinks[index] = holder
        return holder

    def _anchor(self, grad: fx.Node) -> fx.Node:
        assert self.last_holder is not None
        return self.last_holder if grad.op == "placeholder" else grad

    def _call(
        self,
        target: object,
        args: tuple[object, ...],
        index: int,
        *,
        kwargs: dict[str, object] | None = None,
        scratch: fx.Node | None = None,
    ) -> None:
        node = self.graph.call_function(target, args, kwargs)  # pyright: ignore[reportArgumentType]  # any callable and nodes
        # The result is the sink itself; rows are summed in a scratch of at most their own size.
        value = self.arguments.parameters[index].detach()
        node.meta = {"val": value if scratch is None else (value, _like(scratch))}


def _like(node: fx.Node) -> Tensor:
    return torch.empty_like(tensor_of(node))


def _find_product(grad: fx.Node) -> fx.Node | None:
    """The matmul whose product is the gradient, seen through pairs of transposes."""
    node, transposed = grad, False
    while node.target is _aten.t.default and len(node.users) == (0 if node is grad else 1):
        node, transposed = node_of(node.args[0]), not transposed
    alone = len(node.users) == (0 if node is grad else 1)
    return node if node.target is _aten.mm.default and alone and not transposed else None


def _same_layout(product: fx.Node, parameter: Tensor) -> bool:
    value = tensor_of(product)
    return value.shape == parameter.shape and value.dtype == torch.float32


def _erase_chain(graph: fx.Graph, grad: fx.Node, product: fx.Node) -> None:
    node = grad
    while node is not product:
        source = node_of(node.args[0])
        graph.erase_node(node)
        node = source
    graph.erase_node(product)


def _other_addend(grad: fx.Node, root: fx.Node) -> fx.Node | None:
    """What a sum adds to the root, if the root is used only there."""
    if grad.target is not _aten.add.Tensor or len(grad.args) != 2 or set(root.users) != {grad}:
        return None
    left, right = grad.args
    own = right if left is root else left
    return own if isinstance(own, fx.Node) and own is not root else None


def _find_rows(grad: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Rows, indices and padding index of an embedding's gradient that nothing else reads."""
    if grad.target is not _aten.embedding_dense_backward.default or len(grad.users) > 1:
        return None
    rows, indices, _, padding, by_frequency = grad.args
    if by_frequency or not isinstance(padding, int):
        return None
    return node_of(rows), node_of(indices), padding


def sum_rows(rows: Tensor, indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Sum the rows of equal indices, in their order, as `embedding_dense_backward` does.

    Returns:
        The distinct indices but `padding`, ascending, and a row of sums for each.
    """
    unique = cast(Callable[..., tuple[Tensor, Tensor]], torch.unique)  # cast: it is untyped
    distinct, place = unique(indices, return_inverse=True)
    sums = _sum_dense(rows, place, distinct.numel())
    kept = distinct != padding
    return (distinct, sums) if bool(kept.all()) else (distinct[kept], sums[kept])


def write_rows(sink: Tensor, rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    """Store an embedding's gradient: zeros but for the rows that were looked up."""
    distinct, sums = sum_rows(rows, indices, padding)
    return sink.zero_().index_copy_(0, distinct, sums.to(sink.dtype))


def add_rows(sink: Tensor, rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    """Add an embedding's gradient to the sink; rows that were not looked up keep their bits."""
    distinct, sums = sum_rows(rows, indices, padding)
    return sink.index_add_(0, distinct, sums.to(sink.dtype))


def _sum_dense(rows: Tensor, place: Tensor, num_rows: int) -> Tensor:
    sums = _aten.embedding_dense_backward.default(rows, place, num_rows, -1, False)
    return cast(Tensor, sums)  # cast: operations have no declared result
