"""Trace a block's forward and backward into one plain aten graph.

In: a block's graph, fake inputs, and which gradients arrive from later blocks. Out: a `BodyCode`,
parted by `partition`, whose graphs run without autograd.

The backward is traced by `autograd.grad` with no decompositions, so its operations and their
order are eager's. A gradient that later blocks already summed for an input enters as an extra
root, which is where eager has it too: before the block's own contributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from packhorse.graph.code import BodyArguments, BodyCode, GradientFlow
from packhorse.graph.interpret import BlockInterpreter, Noise
from packhorse.graph.liveness import storages_of
from packhorse.graph.partition import JointParts, part_joint

_aten = torch.ops.aten


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
    return part_joint(joint, parts, arguments, flow, noise, evaluate)


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


def _trace_joint(
    graph: fx.Graph,
    arguments: BodyArguments,
    flow: GradientFlow | None,
    noise: tuple[Noise, ...],
    outputs: Sequence[Tensor],
    module: str,
    chunk_tokens: int | None,
) -> tuple[fx.GraphModule, JointParts]:
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
        forward_names.update(node.name for node in _graph_so_far().nodes)
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
        found = _differentiate(heads, [values[i] for i in wanted], grads)
        given: list[Tensor] = []
        for position, grad in zip(wanted, found, strict=True):
            is_parameter = position < num_parameters
            kind = "parameter" if is_parameter else "input"
            grads_of.append((kind, position if is_parameter else position - first_input))
            # What the loss does not depend on smoothly (an argmax, say) has a gradient of zeros.
            given.append(torch.zeros_like(values[position]) if grad is None else grad)
        return [*results, *_separate(given, grads_of, everything)]

    traced = make_fx(run)(*flat, *noise_tensors, *tangents, *(root for _, root in roots))
    _drop_identities(traced.graph)
    parts = JointParts(
        forward=frozenset(forward_names), num_outputs=len(outputs), grads_of=tuple(grads_of)
    )
    return traced, parts


def _graph_so_far() -> fx.Graph:
    """The graph that is being traced."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    return cast("fx.Graph", proxy_mode.tracer.graph)  # the tracer is untyped


def _differentiate(
    heads: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of inputs; None for one that the heads do not depend on."""
    return torch.autograd.grad(heads, inputs, grad_outputs=grads, allow_unused=True)


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


def _separate(
    grads: list[Tensor], grads_of: Sequence[tuple[str, int]], arguments: Sequence[Tensor]
) -> list[Tensor]:
    """Clone gradients of inputs that share bytes, as where a sum hands one gradient to both sides.

    Gradients of parameters are copied into chunks anyway.
    """
    inputs = [place for place, (kind, _) in enumerate(grads_of) if kind == "input"]
    separate = list(grads)
    distinct = _make_distinct([grads[place] for place in inputs], arguments)
    for place, grad in zip(inputs, distinct, strict=True):
        separate[place] = grad
    return separate


def _drop_identities(graph: fx.Graph) -> None:
    """Remove detach and alias: without autograd they change nothing."""
    for node in list(graph.nodes):
        if node.target in (_aten.detach.default, _aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
