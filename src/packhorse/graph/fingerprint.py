"""What makes a model the same model: its operations, how they are wired, and their constants.

In: an exported model and its blocks. Out: a digest that changes with a head count, an epsilon, a
RoPE base or a window, and does not change with weights, rows, length or what is frozen.

The graph knows the length, and the rows where they are not dynamic, only as numbers among others.
They are taken out where they stand
for sizes: in a shape that a view gives, the first number equal to the length; in a shape that is
filled or expanded, and in ranges, every one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, cast

import torch
from torch import Tensor, fx

from packhorse.graph.export import Exported
from packhorse.graph.split import Piece

_aten = torch.ops.aten
_VIEWS: Final = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_FILLED: Final = (
    _aten.expand.default,
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.ones.default,
    _aten.zeros.default,
    _aten.full.default,
    _aten.empty.memory_format,
    _aten.new_ones.default,
    _aten.new_zeros.default,
)


def fingerprint_model(exported: Exported, pieces: Sequence[Piece]) -> str:
    """Digest parameters by name and shape, constants by content, and the graphs of all blocks."""
    digest = hashlib.blake2b(digest_size=16)
    for name, spec in exported.specs.items():
        digest.update(f"{name} {spec.shape} {spec.aliases}\n".encode())
    for piece in pieces:
        digest.update(f"block {piece.parameters}\n".encode())
        for name in piece.constants:
            digest.update(_content_of(exported.constants[name]))
        number = {node: index for index, node in enumerate(piece.graph.nodes)}
        for node in piece.graph.nodes:
            digest.update(_line(node, number, exported).encode())
    return digest.hexdigest()


def _line(node: fx.Node, number: dict[fx.Node, int], exported: Exported) -> str:
    if node.op != "call_function":
        return f"{node.op}\n"
    args: object = node.args
    if node.target in _VIEWS or node.target in _FILLED:
        args = _without_sizes(node.args, exported, every=node.target in _FILLED)
    return f"{node.target} {_text(args, number)} {_text(node.kwargs, number)}\n"


def _text(argument: object, number: dict[fx.Node, int]) -> str:
    """An argument as text in which nodes are numbered."""
    if isinstance(argument, fx.Node):
        return f"%{number[argument]}"
    if isinstance(argument, tuple | list):
        items = cast(Sequence[object], argument)  # cast: items of fx arguments have no type
        return f"[{', '.join(_text(item, number) for item in items)}]"
    if isinstance(argument, Mapping):
        pairs = cast(Mapping[object, object], argument)  # cast: as above
        return f"{{{', '.join(f'{key}: {_text(item, number)}' for key, item in pairs.items())}}}"
    return repr(argument)


def _without_sizes(args: object, exported: Exported, *, every: bool) -> object:
    """Arguments with the numbers that are rows or length replaced by words."""
    seen: set[str] = set()
    sizes = [("length", exported.length)]
    if not exported.batch_is_dynamic:
        sizes.append(("rows", exported.rows))

    def replace(value: object) -> object:
        if isinstance(value, tuple | list):
            items = cast(Sequence[object], value)  # cast: items of fx arguments have no type
            return [replace(item) for item in items]
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        for word, size in sizes:
            if value == size and size > 1 and (every or word not in seen):
                seen.add(word)
                return word
        return value

    return replace(args)


def _content_of(constant: Tensor) -> bytes:
    values = constant.detach().cpu().contiguous()
    raw = values.view(torch.uint8) if values.dim() else values.reshape(1).view(torch.uint8)
    return f"{tuple(values.shape)} {values.dtype} ".encode() + raw.flatten().numpy().tobytes()
