"""Typed readings of a traced graph's nodes, where fx itself leaves the types open.

In: nodes of a graph whose `meta` carries fake tensors. Out: their tensors, arguments and schemas.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import FunctionSchema, Tensor, fx
from torch._ops import OpOverload


def tensor_of(node: fx.Node) -> Tensor:
    """The fake tensor of a node that computes one."""
    value: object = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def node_of(argument: object) -> fx.Node:
    """An argument of a node that is a node itself."""
    assert isinstance(argument, fx.Node)
    return argument


def is_operation(target: object) -> TypeGuard[OpOverload[..., object]]:
    """Tell whether a node's target is an aten operation, rather than a function of our own."""
    return isinstance(target, OpOverload)


def schema_of(node: fx.Node) -> FunctionSchema | None:
    """The schema of the operation that a node calls, if it is one of torch's."""
    schema: object = getattr(node.target, "_schema", None)
    return schema if isinstance(schema, FunctionSchema) else None


def writes_in_place(node: fx.Node) -> bool:
    """Tell whether a node changes one of its arguments."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


def sizes_of(tensor: Tensor, rows: int) -> tuple[int, ...]:
    """The shape of a traced tensor, with `rows` for each symbolic size."""
    return tuple(_size_of(size, rows) for size in tensor.shape)


def _size_of(size: object, rows: int) -> int:
    return size if isinstance(size, int) else rows
