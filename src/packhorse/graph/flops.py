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
    total = 0
    for node in graph.nodes:
        if node.op != "call_function" or not is_operation(node.target):
            continue
        matmuls = _CPU_ATTENTION.get(node.target)
        if matmuls is not None:
            first = 1 if matmuls == 5 else 0
            query, key = (tensor_of(node_of(node.args[first + i])) for i in range(2))
            total += matmuls * 2 * prod(query.shape) * key.shape[-2]
            continue
        count = flop_registry.get(node.target.overloadpacket)
        if count is not None:
            args = fx.map_arg(node.args, _value)
            kwargs = fx.map_arg(node.kwargs, _value)
            total += int(count(*args, **kwargs, out_val=node.meta["val"]))
    return total


def _value(node: fx.Node) -> Argument:
    value: Argument = node.meta["val"]
    return value
