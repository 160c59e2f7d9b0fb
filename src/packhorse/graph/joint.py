"""Trace a block's forward and backward into plain aten graphs, and part them.

In: a block's graph, fake inputs, and which gradients arrive from later blocks. Out: a `BodyCode`:
graphs that run without autograd. What the backward needs from the forward is returned by the
forward as saved values; views of arguments and of outputs are taken again instead of saved.

The backward is traced by `autograd.grad` with no decompositions, so its operations and their
order are eager's. A gradient that later blocks already summed for an input enters as an extra
root, which is where eager has it too: before the block's own contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from packhorse.graph.flops import count_flops
from packhorse.graph.interpret import BlockInterpreter, Noise
from packhorse.graph.liveness import bytes_of, moved_bytes, peak_bytes, storages_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyArguments:
    """Fake inputs of a block, in the order of its placeholders."""

    parameters: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    num_step_inputs: int

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return (*self.parameters, *self.constants, *self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlow:
    """Which gradients reach a block and where its parameters' gradients go.

    `tangents`: per output, whether later blocks send a gradient. `input_roots` and
    `parameter_roots`: whether later blocks already have a gradient of the same input or tied
    parameter. `sinks`: per parameter, whether this block adds the gradient into its chunk
    (otherwise it hands the running sum on). `loss` is the index of the loss output, if it is here.
    """

    tangents: tuple[bool, ...]
    input_roots: tuple[bool, ...]
    parameter_roots: tuple[bool, ...]
    sinks: tuple[bool, ...]
    loss: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCode:
    """The backward of a body.

    Arguments: the saved values, then the named subsets of parameters, constants, inputs and
    outputs, the tangents that arrive, the input roots, the parameter roots, the sinks. It returns
    the gradients of `input_grads`, then the running sums of `parameter_grads`. `write` stores a
    parameter's gradient in its sink, `add` adds to what is there.
    """

    write: fx.GraphModule
    add: fx.GraphModule
    parameters: tuple[int, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    input_roots: tuple[int, ...]
    parameter_roots: tuple[int, ...]
    sinks: tuple[int, ...]
    input_grads: tuple[int, ...]
    parameter_grads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCosts:
    """Bytes and FLOPs of a body, as `model.spec.Body` means them."""

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    discard_workspace_bytes: int
    backward_workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCode:
    """What runs: `keep` returns outputs then saved values, `discard` and `evaluate` outputs only.

    Their arguments are parameters, constants, inputs, noise. `evaluate` has no noise: dropout is
    off.
    """

    keep: fx.GraphModule
    discard: fx.GraphModule
    evaluate: fx.GraphModule
    backward: BackwardCode | None
    num_outputs: int
    num_inputs: int
    noise: tuple[Noise, ...]
    used_inputs: tuple[int, ...]
    costs: BodyCosts


def trace_body(
    graph: fx.Graph,
    arguments: BodyArguments,
    flow: GradientFlow | None,
    *,
    module: str,
    mode: FakeTensorMode,
    chunk_tokens: int | None,
) -> BodyCode:
    """Trace one block; `flow` is None for a block without a backward."""
    with mode:
        probe = _interpreter(graph, module, None, chunk_tokens)
        with torch.no_grad():
            outputs = probe.run(*arguments.flat)
        noise = tuple(probe.requests)
        evaluate = _trace_evaluation(graph, arguments, module, chunk_tokens)
        joint, parts = _trace_joint(graph, arguments, flow, noise, outputs, module, chunk_tokens)
    return _part(joint, parts, arguments, flow, noise, evaluate)


def _interpreter(
    graph: fx.Graph, module: str, noise: Sequence[Tensor] | None, chunk_tokens: int | None
) -> BlockInterpreter:
    return BlockInterpreter(
        graph, module=module, training=True, noise=noise, chunk_tokens=chunk_tokens
    )


def _trace_evaluation(
    graph: fx.Graph, arguments: BodyArguments, module: str, chunk_tokens: int | None
) -> fx.GraphModule:
    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        interpreter = BlockInterpreter(
            graph, module=module, training=False, noise=(), chunk_tokens=chunk_tokens
        )
        with torch.no_grad():
            return interpreter.run(*flat)

    traced = make_fx(run)(*arguments.flat)
    _drop_identities(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


@dataclass(frozen=True, slots=True)
class _Parts:
    """The node names of the forward, and what each result of the joint graph is."""

    forward: frozenset[str]
    num_outputs: int
    grads_of: tuple[tuple[str, int], ...]


def _trace_joint(
    graph: fx.Graph,
    arguments: BodyArguments,
    flow: GradientFlow | None,
    noise: tuple[Noise, ...],
    outputs: Sequence[Tensor],
    module: str,
    chunk_tokens: int | None,
) -> tuple[fx.GraphModule, _Parts]:
    flat = arguments.flat
    num_parameters = len(arguments.parameters)
    first_input = num_parameters + len(arguments.constants)
    noise_tensors = tuple(torch.empty(n.shape, dtype=n.dtype) for n in noise)
    tangents: tuple[Tensor, ...] = ()
    roots: tuple[tuple[int, Tensor], ...] = ()
    if flow is not None:
        tangents = tuple(
            torch.empty_like(o) for o, given in zip(outputs, flow.tangents, strict=True) if given
        )
        input_roots = tuple(
            (first_input + i, torch.empty_like(x.detach()))
            for i, (x, given) in enumerate(zip(arguments.inputs, flow.input_roots, strict=True))
            if given
        )
        parameter_roots = tuple(
            (i, torch.empty_like(p.detach()))
            for i, (p, given) in enumerate(
                zip(arguments.parameters, flow.parameter_roots, strict=True)
            )
            if given
        )
        roots = (*input_roots, *parameter_roots)
    wanted = [i for i, tensor in enumerate(flat) if tensor.requires_grad] if flow else []
    forward_names: set[str] = set()
    grads_of: list[tuple[str, int]] = []

    def run(*everything: Tensor) -> list[Tensor]:
        values = everything[: len(flat)]
        drawn = everything[len(flat) : len(flat) + len(noise)]
        arriving = list(everything[len(flat) + len(noise) :])
        results = list(_interpreter(graph, module, drawn, chunk_tokens).run(*values))
        results = _make_distinct(results, values)
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        forward_names.update(node.name for node in proxy_mode.tracer.graph.nodes)
        if flow is None:
            return results
        heads: list[Tensor] = []
        grads: list[Tensor | None] = []
        for index, result in enumerate(results):
            if index == flow.loss:
                heads.append(result)
                grads.append(None)
            elif flow.tangents[index]:
                heads.append(result)
                grads.append(arriving.pop(0))
        for position, _ in roots:
            heads.append(values[position])
            grads.append(arriving.pop(0))
        found = torch.autograd.grad(
            heads, [values[i] for i in wanted], grad_outputs=grads, allow_unused=True
        )
        given: list[Tensor] = []
        for position, grad in zip(wanted, found, strict=True):
            if grad is not None:
                is_parameter = position < num_parameters
                kind, index = ("parameter", position) if is_parameter else ("input", position)
                grads_of.append((kind, index if is_parameter else index - first_input))
                given.append(grad)
        return [*results, *given]

    traced = make_fx(run)(*flat, *noise_tensors, *tangents, *(root for _, root in roots))
    _drop_identities(traced.graph)
    parts = _Parts(
        forward=frozenset(forward_names), num_outputs=len(outputs), grads_of=tuple(grads_of)
    )
    return traced, parts


def _make_distinct(results: list[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Clone outputs that share bytes with an argument or another output: buffers never overlap."""
    seen = {key for tensor in arguments for key, _ in storages_of(tensor)}
    distinct: list[Tensor] = []
    for result in results:
        keys = {key for key, _ in storages_of(result)}
        whole = result.untyped_storage().nbytes() == result.numel() * result.element_size()
        if keys & seen or not whole:
            result = result.clone(memory_format=torch.contiguous_format)
            keys = {key for key, _ in storages_of(result)}
        seen |= keys
        distinct.append(result)
    return distinct


def _drop_identities(graph: fx.Graph) -> None:
    """Remove detach and alias: without autograd they change nothing."""
    for node in list(graph.nodes):
        if node.target in (_aten.detach.default, _aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _part(
    joint: fx.GraphModule,
    parts: _Parts,
    arguments: BodyArguments,
    flow: GradientFlow | None,
    noise: tuple[Noise, ...],
    evaluate: fx.GraphModule,
) -> BodyCode:
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
    keep = _extract(nodes, own, [*outputs, *saved], in_forward)
    discard = _extract(nodes, own, outputs, in_forward)
    fresh = frozenset(_keys(drawn))
    saved_bytes = bytes_of(saved, but=argument_keys | output_keys)
    output_bytes = bytes_of(outputs, but=argument_keys)
    backward, backward_peak, backward_graph = None, 0, None
    if grads:
        assert flow is not None
        backward, backward_graph, backward_peak = _build_backward(
            nodes, in_forward, replayed, saved, outputs, plain, arriving, grads, parts, arguments, flow
        )
    num_inputs_from = len(arguments.parameters) + len(arguments.constants)
    used = tuple(
        i for i, node in enumerate(plain[num_inputs_from:]) if node.users and _is_used(node, keep, backward_graph)
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


def _needed_from_forward(
    nodes: list[fx.Node], in_forward: set[fx.Node], grads: list[fx.Node], own: list[fx.Node]
) -> list[fx.Node]:
    """Values of the forward (arguments included) that the backward reads, in order."""
    mine = in_forward | set(own)
    reached: set[fx.Node] = set()
    pending = list(grads)
    while pending:
        node = pending.pop()
        if node in reached:
            continue
        reached.add(node)
        if node not in mine:
            pending += node.all_input_nodes
    return [node for node in nodes if node in reached and node in mine]


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
        if node in outputs or node in plain:
            chains[seed] = chain[::-1]
    return chains


def _extract(
    nodes: list[fx.Node], holders: list[fx.Node], results: list[fx.Node], inside: set[fx.Node]
) -> fx.GraphModule:
    """Copy what `results` need out of the joint graph; in-place writes to kept bytes come along."""
    needed = _closure(results, inside)
    while True:
        kept = _keys(needed)
        writers = [
            node
            for node in nodes
            if node in inside
            and node not in needed
            and _mutates(node)
            and _keys([node.args[0]] if isinstance(node.args[0], fx.Node) else []) & kept
        ]
        if not writers:
            break
        needed |= _closure(writers, inside)
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


def _closure(results: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    pending = [node for node in results if node in inside]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [source for source in node.all_input_nodes if source in inside]
    return needed


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _build_backward(
    nodes: list[fx.Node],
    in_forward: set[fx.Node],
    replayed: dict[fx.Node, list[fx.Node]],
    saved: list[fx.Node],
    outputs: list[fx.Node],
    plain: list[fx.Node],
    arriving: list[fx.Node],
    grads: list[fx.Node],
    parts: _Parts,
    arguments: BodyArguments,
    flow: GradientFlow,
) -> tuple[BackwardCode, fx.Graph, int]:
    again = {node for chain in replayed.values() for node in chain}
    inside = {n for n in nodes if n.op == "call_function" and n not in in_forward} | again
    reached = _closure(grads, inside)
    reads = {source for node in reached for source in node.all_input_nodes} | set(grads)
    reread = [node for node in plain if node in reads]
    out_read = [node for node in outputs if node in reads]
    holders = [*saved, *reread, *out_read, *arriving]
    bare = _extract(nodes, holders, grads, inside)
    place = {node: index for index, node in enumerate(plain)}
    num_parameters, num_constants = len(arguments.parameters), len(arguments.constants)
    first_input = num_parameters + num_constants
    positions = [place[node] for node in reread]
    sink_grads = [
        (slot, index)
        for slot, (kind, index) in enumerate(parts.grads_of)
        if kind == "parameter" and flow.sinks[index]
    ]
    order = [s for s, (kind, _) in enumerate(parts.grads_of) if kind == "input"]
    order += [
        s for s, (k, index) in enumerate(parts.grads_of) if k == "parameter" and not flow.sinks[index]
    ]
    write = _with_sinks(bare.graph, sink_grads, order, arguments, _aten.copy_.default)
    add = _with_sinks(bare.graph, sink_grads, order, arguments, _aten.add_.Tensor)
    returned = [grads[slot] for slot in order]
    created = [
        node
        for slot, node in zip(order, returned, strict=True)
        if not _has_root(parts.grads_of[slot], flow)
    ]
    held = _keys(holders)
    peak = max(0, peak_bytes(write.graph) - bytes_of(created, but=held))
    code = BackwardCode(
        write=write,
        add=add,
        parameters=tuple(p for p in positions if p < num_parameters),
        constants=tuple(p - num_parameters for p in positions if num_parameters <= p < first_input),
        inputs=tuple(p - first_input for p in positions if p >= first_input),
        outputs=tuple(index for index, node in enumerate(outputs) if node in out_read),
        tangents=tuple(index for index, given in enumerate(flow.tangents) if given),
        input_roots=tuple(index for index, given in enumerate(flow.input_roots) if given),
        parameter_roots=tuple(index for index, given in enumerate(flow.parameter_roots) if given),
        sinks=tuple(index for _, index in sink_grads),
        input_grads=tuple(parts.grads_of[s][1] for s in order if parts.grads_of[s][0] == "input"),
        parameter_grads=tuple(
            parts.grads_of[s][1] for s in order if parts.grads_of[s][0] == "parameter"
        ),
    )
    return code, write.graph, peak


def _has_root(grad: tuple[str, int], flow: GradientFlow) -> bool:
    kind, index = grad
    return flow.input_roots[index] if kind == "input" else flow.parameter_roots[index]


def _with_sinks(
    source: fx.Graph,
    sinks: list[tuple[int, int]],
    order: list[int],
    arguments: BodyArguments,
    store: Callable[..., object],
) -> fx.GraphModule:
    """Store each parameter's gradient as soon as it exists, so that it is not held to the end."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(source, mapping)
    results: list[fx.Node] = [
        mapping[node] for node in next(n for n in source.nodes if n.op == "output").args[0]
    ]
    last_holder = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for slot, index in sinks:
        with graph.inserting_after(*last_holder):
            holder = graph.placeholder(f"sink_{index}")
        holder.meta = {"val": arguments.parameters[index].detach()}
        last_holder = [holder]
        grad = results[slot]
        anchor = grad if grad.op != "placeholder" else last_holder[0]
        with graph.inserting_after(anchor):
            stored = graph.call_function(store, (holder, grad))  # pyright: ignore[reportArgumentType]  # an OpOverload
        stored.meta = {"val": arguments.parameters[index].detach()}
    graph.output([results[slot] for slot in order])
    return fx.GraphModule({}, graph)
