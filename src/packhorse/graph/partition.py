"""Part a joint graph into the forward, the saved values and the backward of a body.

In: the joint graph of a block. Out: a `BodyCode`. What the backward needs from the forward is
returned by the forward as saved values; views of arguments and of outputs are taken again instead
of saved, so that no saved value shares bytes with another buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from packhorse.graph.code import (
    BackwardCode,
    BackwardVariant,
    BareBackward,
    BodyArguments,
    BodyCode,
    BodyCosts,
    GradientFlow,
    SavedLayout,
)
from packhorse.graph.extract import extract_graph, needed_for
from packhorse.graph.flops import count_flops
from packhorse.graph.interpret import Noise
from packhorse.graph.liveness import (
    HeapUse,
    bytes_of,
    find_heap_use,
    moved_bytes,
    peak_bytes,
    storages_of,
)
from packhorse.graph.nodes import writes_in_place
from packhorse.graph.sinks import store_gradients


@dataclass(frozen=True, slots=True)
class JointParts:
    """The node names of the forward, and what each result of the joint graph is.

    `grads_of` gives for each gradient ("parameter" | "input", index).
    """

    forward: frozenset[str]
    num_outputs: int
    grads_of: tuple[tuple[str, int], ...]


def part_joint(
    joint: fx.GraphModule,
    parts: JointParts,
    arguments: BodyArguments,
    flow: GradientFlow | None,
    noise: tuple[Noise, ...],
    evaluate: fx.GraphModule,
) -> BodyCode:
    """Part the joint graph of a block, whose results are its outputs and then its gradients.

    Args:
        joint: its placeholders are the block's arguments, the noise, and the gradients that
            arrive from later blocks.
        flow: None for a block without a backward.
        noise: what the forward draws.
        evaluate: the graph without dropout, which becomes part of the result as it is.
    """
    nodes = list(joint.graph.nodes)
    holders = [node for node in nodes if node.op == "placeholder"]
    num_forward_args = len(arguments.flat) + len(noise)
    own, arriving = holders[:num_forward_args], holders[num_forward_args:]
    plain, drawn = own[: len(arguments.flat)], own[len(arguments.flat) :]
    results: list[fx.Node] = list(nodes[-1].args[0])
    outputs, grads = results[: parts.num_outputs], results[parts.num_outputs :]
    in_forward = {n for n in nodes if n.name in parts.forward and n.op == "call_function"}

    seeds = _needed_from_forward(nodes, in_forward, grads, own)
    argument_keys = _keys(plain)
    output_keys = _keys(outputs)
    replayed = _view_chains(seeds, argument_keys, output_keys, in_forward, outputs, plain)
    saved = [node for node in seeds if node not in replayed and node not in outputs]
    saved = [node for node in saved if node not in plain]
    keep = extract_graph(nodes, own, [*outputs, *saved], in_forward)
    discard = extract_graph(nodes, own, outputs, in_forward)
    fresh = frozenset(_keys(drawn))
    saved_bytes = bytes_of(saved, but=argument_keys | output_keys)
    output_bytes = bytes_of(outputs, but=argument_keys)
    backward, backward_peak, backward_graph = None, 0, None
    if grads:
        assert flow is not None
        backward, backward_graph, backward_peak = _build_backward(
            nodes,
            in_forward,
            replayed,
            saved,
            outputs,
            plain,
            arriving,
            grads,
            parts,
            arguments,
            flow,
        )
    num_inputs_from = len(arguments.parameters) + len(arguments.constants)
    used = tuple(
        i
        for i, node in enumerate(plain[num_inputs_from:])
        if node.users and _is_used(node, keep, backward_graph)
    )
    costs = BodyCosts(
        forward_flops=count_flops(discard.graph),
        backward_flops=count_flops(backward_graph) if backward_graph is not None else 0,
        forward_bytes=moved_bytes(discard.graph),
        backward_bytes=moved_bytes(backward_graph) if backward_graph is not None else 0,
        saved_bytes=saved_bytes,
        forward_workspace_bytes=max(
            0, peak_bytes(keep.graph, owned=fresh) - saved_bytes - output_bytes
        ),
        discard_workspace_bytes=max(0, peak_bytes(discard.graph, owned=fresh) - output_bytes),
        backward_workspace_bytes=backward_peak,
        first_backward_workspace_bytes=0 if backward is None else workspace_of_first(backward),
        forward_heap=find_heap_use(keep.graph, owned=fresh),
        backward_heap=find_heap_use() if backward is None else heap_use_of_variants(backward),
    )
    return BodyCode(
        keep=keep,
        discard=discard,
        evaluate=evaluate,
        backward=backward,
        num_outputs=parts.num_outputs,
        num_inputs=len(arguments.inputs),
        noise=noise,
        used_inputs=used,
        saved=_lay_out_saved(saved, argument_keys | output_keys),
        costs=costs,
    )


def _is_used(node: fx.Node, keep: fx.GraphModule, backward: fx.Graph | None) -> bool:
    graphs = [keep.graph, *([backward] if backward is not None else [])]
    return any(
        found.users and found.name == node.name
        for graph in graphs
        for found in graph.nodes
        if found.op == "placeholder"
    )


def _keys(nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(key for node in nodes for key, _ in storages_of(node.meta.get("val")))


def _lay_out_saved(saved: list[fx.Node], shared: frozenset[int]) -> SavedLayout:
    own: dict[int, int] = {}
    places: list[int | None] = []
    sizes: list[int] = []
    for node in saved:
        ((key, size_bytes),) = storages_of(node.meta.get("val"))
        if key not in shared and key not in own:
            own[key] = len(sizes)
            sizes.append(size_bytes)
        places.append(own.get(key))
    return SavedLayout(places=tuple(places), sizes_bytes=tuple(sizes))


def _needed_from_forward(
    nodes: list[fx.Node], in_forward: set[fx.Node], grads: list[fx.Node], own: list[fx.Node]
) -> list[fx.Node]:
    """Values of the forward (arguments included) that the backward reads, in order."""
    mine = in_forward | set(own)
    outside = {node for node in nodes if node.op == "call_function" and node not in in_forward}
    reached = needed_for(nodes, grads, outside)
    reads = {source for node in reached for source in node.all_input_nodes} | set(grads)
    return [node for node in nodes if node in reads and node in mine]


def _view_chains(
    seeds: list[fx.Node],
    argument_keys: frozenset[int],
    output_keys: frozenset[int],
    in_forward: set[fx.Node],
    outputs: list[fx.Node],
    plain: list[fx.Node],
) -> dict[fx.Node, list[fx.Node]]:
    """Seeds that are views of arguments or outputs, each with the nodes that make it again."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    for seed in seeds:
        if seed in outputs or seed in plain or not _keys([seed]) <= (argument_keys | output_keys):
            continue
        chain: list[fx.Node] = []
        node = seed
        while node in in_forward and node not in outputs and len(node.all_input_nodes) == 1:
            chain.append(node)
            node = node.all_input_nodes[0]
        if (node in outputs or node in plain) and not any(map(writes_in_place, chain)):
            chains[seed] = chain[::-1]
    return chains


def _build_backward(
    nodes: list[fx.Node],
    in_forward: set[fx.Node],
    replayed: dict[fx.Node, list[fx.Node]],
    saved: list[fx.Node],
    outputs: list[fx.Node],
    plain: list[fx.Node],
    arriving: list[fx.Node],
    grads: list[fx.Node],
    parts: JointParts,
    arguments: BodyArguments,
    flow: GradientFlow,
) -> tuple[BackwardCode, fx.Graph, int]:
    again = {node for chain in replayed.values() for node in chain}
    inside = {n for n in nodes if n.op == "call_function" and n not in in_forward} | again
    reached = needed_for(nodes, grads, inside)
    reads = {source for node in reached for source in node.all_input_nodes} | set(grads)
    reread = [node for node in plain if node in reads]
    out_read = [node for node in outputs if node in reads]
    holders = [*saved, *reread, *out_read, *arriving]
    bare = BareBackward(
        graph=extract_graph(nodes, holders, grads, inside),
        grads_of=parts.grads_of,
        arguments=arguments,
        flow=flow,
    )
    place = {node: index for index, node in enumerate(plain)}
    num_parameters, num_constants = len(arguments.parameters), len(arguments.constants)
    first_input = num_parameters + num_constants
    positions = [place[node] for node in reread]
    variants = store_gradients(bare)
    code = BackwardCode(
        bare=bare,
        first=variants.first,
        later=variants.later,
        apart_first=variants.apart_first,
        apart_later=variants.apart_later,
        parameters=tuple(p for p in positions if p < num_parameters),
        constants=tuple(p - num_parameters for p in positions if num_parameters <= p < first_input),
        inputs=tuple(p - first_input for p in positions if p >= first_input),
        outputs=tuple(index for index, node in enumerate(outputs) if node in out_read),
        tangents=tuple(index for index, given in enumerate(flow.tangents) if given),
        input_roots=tuple(index for index, given in enumerate(flow.input_roots) if given),
        input_grads=tuple(index for kind, index in parts.grads_of if kind == "input"),
    )
    return code, bare.graph.graph, workspace_of_variants(code)


def workspace_of_variants(code: BackwardCode) -> int:
    """What a backward, or a half of one, holds beyond its arguments and the buffers it creates."""
    # What the variants apart hold is no more, but for a gradient that `later` hands on.
    return _workspace_of(code, code.first, code.later)


def workspace_of_first(code: BackwardCode) -> int:
    """What a backward holds so in micro-batch 0."""
    return _workspace_of(code, code.first, code.apart_first)


def _workspace_of(code: BackwardCode, *variants: BackwardVariant) -> int:
    held = (peak_bytes(each.graph.graph) - created_bytes(each, code.bare) for each in variants)
    return max(0, *held)


def heap_use_of_variants(code: BackwardCode) -> HeapUse:
    """What a backward, or a half of one, takes of the heap, whichever of its variants runs."""
    variants = (code.first, code.later, code.apart_first, code.apart_later)
    return find_heap_use(*(variant.graph.graph for variant in variants))


def created_bytes(variant: BackwardVariant, bare: BareBackward) -> int:
    """Bytes of the gradients that are new buffers; one with a root takes its root's place."""
    created = sum(
        _size_of(bare.arguments.inputs[index])
        for kind, index in bare.grads_of
        if kind == "input" and not bare.flow.input_roots[index]
    )
    return created + sum(
        _size_of(bare.arguments.parameters[index])
        for index in variant.parameter_grads
        if not bare.flow.parameter_roots[index]
    )


def _size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
