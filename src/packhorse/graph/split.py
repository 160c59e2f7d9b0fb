"""Cut an exported graph into blocks at its narrowest places.

In: an `Exported`. Out: `Piece`s in execution order: a small graph each, with the parameters,
constants, step inputs and crossing values that it takes and the values that it hands on.

Which places qualify follows from the graph, not from names: every node that depends on a
parameter lies on one line, in execution order; between two neighbours lies a possible cut. A cut
is considered where the two neighbours share the fewest enclosing modules, because that is where a
model's own structure repeats, and kept where few bytes cross. Values that depend on step inputs
alone (positions, RoPE tables, masks, shifted labels) are recomputed in every block that uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from torch import Tensor, fx

from packhorse.errors import ModelError
from packhorse.graph.export import Exported
from packhorse.graph.losses import LOSS_FIX
from packhorse.graph.nodes import schema_of, sizes_of, writes_in_place

MIN_BLOCKS: Final = 3
WIDE: Final = 3.0  # a cut this many times wider than both neighbours is no cut
TINY: Final = 0.02  # a block below this share of the largest block joins its neighbour

_DROPPED: Final = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block of the graph.

    The placeholders of `graph` are `parameters`, `constants`, `step_inputs`, `values`, in this
    order; its outputs are `outputs`. Names of values are names of nodes of the whole graph.
    `module` is the innermost module that holds the whole block.
    """

    graph: fx.Graph
    module: str
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    step_inputs: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]


def split_graph(exported: Exported) -> tuple[Piece, ...]:
    """Cut the graph into blocks; every operation that depends on a parameter is in one block."""
    graph = _clean(exported.graph)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    result = _output_of(graph).args[0]
    loss = result[0] if isinstance(result, tuple | list) else result
    value = loss.meta.get("val") if isinstance(loss, fx.Node) else None
    if not isinstance(loss, fx.Node) or not isinstance(value, Tensor):
        raise ModelError("the forward returns no loss tensor")
    if prod(value.shape) != 1:
        raise ModelError(
            f"the loss has shape {tuple(value.shape)}, not one element",
            where="what the forward returns",
            fix=LOSS_FIX,
        )
    rooted = _depend_on_parameters(graph, exported)
    line = [node for node in nodes if node in rooted]
    if not line or loss not in rooted:
        raise ModelError(
            "the loss does not depend on any parameter",
            where="what the forward returns",
            fix="compute it from the parameters, without .detach() and outside of no_grad",
        )
    bounds = _choose_cuts(line, loss, exported)
    pieces: list[Piece] = []
    for start, stop in zip([0, *bounds], [*bounds, len(line)], strict=True):
        pieces.append(_cut_piece(line, start, stop, loss, rooted, exported))
    return tuple(pieces)


def _clean(source: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    node = graph.output(graph.graph_copy(source, {}))
    node.meta = _output_of(source).meta
    for found in list(graph.nodes):
        if found.op == "call_function" and str(found.target) in _DROPPED:
            graph.erase_node(found)
    graph.eliminate_dead_code()
    return graph


def _output_of(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "output")


def _depend_on_parameters(graph: fx.Graph, exported: Exported) -> set[fx.Node]:
    rooted: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            if node.name in exported.parameters:
                rooted.add(node)
        elif any(source in rooted for source in node.all_input_nodes):
            rooted.add(node)
    # A node that only writes into a rooted tensor, or reads its size, stays on the line with it.
    return rooted


def _modules_of(node: fx.Node) -> tuple[str, ...]:
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return tuple(path for path, _ in stack.values())


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    depth = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        depth += 1
    return depth


def _bytes_of(node: fx.Node, rows: int) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return prod(sizes_of(value, rows)) * value.element_size()


def _choose_cuts(line: list[fx.Node], loss: fx.Node, exported: Exported) -> list[int]:
    place = {node: index for index, node in enumerate(line)}
    last_use = [max((place[u] for u in n.users if u in place), default=place[n]) for n in line]
    last_use[place[loss]] = len(line)
    widths = _crossing_bytes(line, last_use, exported.rows)
    views = _cuts_inside_tuples(line, place)
    depths = [
        _common(_modules_of(line[index - 1]), _modules_of(line[index]))
        for index in range(1, len(line))
    ]
    best: list[int] = []
    for depth in sorted(set(depths)):
        cuts = [
            index
            for index in range(1, len(line))
            if depths[index - 1] <= depth and index not in views
        ]
        cuts = _drop_wide(cuts, widths)
        cuts = _join_tiny(cuts, line, exported)
        if len(cuts) > len(best):
            best = cuts
        if len(best) + 1 >= MIN_BLOCKS:
            break
    return best


def _crossing_bytes(line: list[fx.Node], last_use: list[int], rows: int) -> list[int]:
    """Bytes that cross each cut; index i is the cut before node i."""
    change = [0] * (len(line) + 2)
    for index, node in enumerate(line):
        if last_use[index] > index:
            change[index + 1] += _bytes_of(node, rows)
            change[min(last_use[index], len(line)) + 1] -= _bytes_of(node, rows)
    widths: list[int] = []
    total = 0
    for index in range(len(line) + 1):
        total += change[index]
        widths.append(total)
    return widths


def _cuts_inside_tuples(line: list[fx.Node], place: Mapping[fx.Node, int]) -> set[int]:
    """Cuts that something other than tensors would cross, or an in-place write would reach over."""
    blocked: set[int] = set()
    for index, node in enumerate(line):
        users = [place[user] for user in node.users if user in place]
        if users and not isinstance(node.meta.get("val"), Tensor):
            blocked.update(range(index + 1, max(users) + 1))
        if writes_in_place(node):
            origin = node.args[0]
            while isinstance(origin, fx.Node) and origin in place:
                blocked.update(range(place[origin] + 1, index + 1))
                if not _is_view(origin):
                    break
                origin = origin.args[0]
    return blocked


def _is_view(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is not None and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in schema.arguments
    )


def _drop_wide(cuts: list[int], widths: list[int]) -> list[int]:
    """Keep the narrowest of each run of neighbouring cuts, and drop cuts that are far too wide."""
    return [
        cut
        for index, cut in enumerate(cuts)
        if not (
            (index == 0 or widths[cut] > WIDE * widths[cuts[index - 1]])
            and (index + 1 == len(cuts) or widths[cut] > WIDE * widths[cuts[index + 1]])
            and len(cuts) > 1
        )
        or _is_edge_ok(index, cuts, widths)
    ]


def _is_edge_ok(index: int, cuts: list[int], widths: list[int]) -> bool:
    """The first and last cut have one neighbour; they are too wide only against that one."""
    if index == 0:
        return widths[cuts[0]] <= WIDE * widths[cuts[1]]
    if index + 1 == len(cuts):
        return widths[cuts[-1]] <= WIDE * widths[cuts[-2]]
    return False


def _join_tiny(cuts: list[int], line: list[fx.Node], exported: Exported) -> list[int]:
    """Drop cuts that would leave a block with almost no work; it joins the block after it."""
    while cuts:
        bounds = [0, *cuts, len(line)]
        weights = [_weight(line[start:stop], exported) for start, stop in pairwise(bounds)]
        floor = TINY * max(weights)
        tiny = next((i for i, weight in enumerate(weights) if weight < floor), None)
        if tiny is None:
            return cuts
        gone = tiny if tiny < len(cuts) else tiny - 1
        cuts = cuts[:gone] + cuts[gone + 1 :]
    return cuts


def _weight(nodes: list[fx.Node], exported: Exported) -> float:
    """What a block costs to hold: elements of the parameters that it uses, each once."""
    used = {
        exported.parameters[source.name]
        for node in nodes
        for source in node.all_input_nodes
        if source.op == "placeholder" and source.name in exported.parameters
    }
    return float(sum(prod(exported.specs[name].shape) for name in used))


def _cut_piece(
    line: list[fx.Node],
    start: int,
    stop: int,
    loss: fx.Node,
    rooted: set[fx.Node],
    exported: Exported,
) -> Piece:
    inside = set(line[start:stop])
    outputs = [
        node
        for node in line[start:stop]
        if node is loss or any(user in rooted and user not in inside for user in node.users)
    ]
    shared = _shared_nodes(inside, rooted)
    needed = [node for node in line[start].graph.nodes if node in inside or node in shared]
    sources = {source for node in needed for source in node.all_input_nodes} - set(needed)
    order = [node for node in line[start].graph.nodes if node in sources]
    holders = {node.name: node for node in order if node.op == "placeholder"}
    parameters = [name for name in holders if name in exported.parameters]
    constants = [name for name in holders if name in exported.constants]
    step_inputs = [name for name in holders if name in exported.inputs]
    values = [node.name for node in order if node.op != "placeholder"]
    by_name = {node.name: node for node in order}
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for name in (*parameters, *constants, *step_inputs, *values):
        placeholder = graph.placeholder(name)
        placeholder.meta = dict(by_name[name].meta)
        mapping[by_name[name]] = placeholder
    for node in needed:
        mapping[node] = graph.node_copy(node, lambda source: mapping[source])
    graph.output(tuple(mapping[node] for node in outputs))
    return Piece(
        graph=graph,
        module=_enclosing_module(line[start:stop]),
        parameters=_unique(exported.parameters[name] for name in parameters),
        constants=tuple(constants),
        step_inputs=tuple(exported.inputs[name] for name in step_inputs),
        values=tuple(values),
        outputs=tuple(node.name for node in outputs),
    )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(names)
    assert len(set(found)) == len(found), "tied parameters have one placeholder each"
    return found


def _shared_nodes(inside: set[fx.Node], rooted: set[fx.Node]) -> set[fx.Node]:
    """Every node off the line that the block needs, transitively."""
    shared: set[fx.Node] = set()
    pending = [source for node in inside for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in rooted or node in shared or node.op == "placeholder":
            continue
        shared.add(node)
        pending += node.all_input_nodes
    return shared


def _enclosing_module(nodes: list[fx.Node]) -> str:
    stacks = [stack for stack in map(_modules_of, nodes) if stack]
    if not stacks:
        return ""
    shortest = min(stacks, key=len)
    depth = min(_common(shortest, stack) for stack in stacks)
    return shortest[depth - 1] if depth else ""
