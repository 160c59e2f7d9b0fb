"""FLOPs of a traced graph: 2 per multiply-add of matmul-like operations, as torch counts them."""

from __future__ import annotations

from math import prod

import torch
from torch import fx
from torch.fx.node import Argument
from torch.utils.flop_counter import flop_registry

from packhorse.graph.nodes import is_operation, node_of, tensor_of

_aten = torch.ops.aten
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
}


def count_flops(graph: fx.Graph) -> int:
    """Sum the FLOPs of a graph whose nodes carry fake tensors."""
    return sum(count_node_flops(node) for node in graph.nodes)


def count_node_flops(node: fx.Node) -> int:
    """The FLOPs of one operation; 0 for what is not like a matmul."""
    if node.op != "call_function" or not is_operation(node.target):
        return 0
    matmuls = _CPU_ATTENTION.get(node.target)
    if matmuls is not None:
        first = 1 if matmuls == 5 else 0
        query, key = (tensor_of(node_of(node.args[first + i])) for i in range(2))
        return matmuls * 2 * prod(query.shape) * key.shape[-2]
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return 0
    args = fx.map_arg(node.args, _value)
    kwargs = fx.map_arg(node.kwargs, _value)
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def _value(node: fx.Node) -> Argument:
    value: Argument = node.meta["val"]
    return value
