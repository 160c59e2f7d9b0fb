"""What cannot be traced, in words: which module, which line, what to change.

In: an exception of torch.export, or an exported graph. Out: a `ModelError` that names the innermost
module of the model at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Final, cast

import torch
from torch import Tensor, fx, nn

from packhorse.errors import ModelError
from packhorse.graph.liveness import storages_of
from packhorse.graph.nodes import schema_of

_aten = torch.ops.aten
_FIX: Final = (
    "the forward must not branch on tensor values, call .item() or change its inputs;"
    "\nit takes the batch as keyword arguments and returns a loss"
)
# Which arguments of these operations are running statistics, and which turns their use on.
_STATISTICS: Final[Mapping[object, tuple[int, int]]] = {
    _aten.batch_norm.default: (3, 5),
    _aten.instance_norm.default: (3, 5),
}


def module_of(node: fx.Node) -> str:
    """Path of the innermost module of the model that a node comes from; empty when unknown."""
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1].removeprefix("module").removeprefix(".") if paths else ""


def describe_place(node: fx.Node, *, block: str = "") -> str:
    """Say where in the model a node comes from; `block` is the module of its whole block."""
    path = module_of(node) or block
    return f"module {path!r}" if path else "the forward of the model"


def explain_failure(module: nn.Module, error: Exception) -> ModelError:
    """Turn what torch.export raised into an error that names module, class, line and reason."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    if "data-dependent" in reason:
        reason = f"what it does depends on the values of tensors ({reason})"
    place = f"the forward of {type(module).__qualname__}"
    frame, line = _find_frame(module, error)
    culprit = module
    if frame is not None:
        named = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())  # open in torch
        paths = {id(found): (name, found) for name, found in named}
        path, culprit = paths[id(frame.f_locals["self"])]
        place = f"module {path!r} ({type(culprit).__qualname__})" if path else place
        place += f"\n{frame.f_code.co_filename}:{line}"
    return ModelError(f"{type(culprit).__name__} cannot be traced: {reason}", where=place, fix=_FIX)


def check_changes(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Refuse a graph that changes a parameter, a buffer or an input of the model.

    Args:
        graph: exported, nodes carry fake tensors.
        names: what each placeholder is, in words, by its name.

    Raises:
        ModelError: names what is changed, and the module that does it.
    """
    owners = {
        key: node.name
        for node in graph.nodes
        if node.op == "placeholder"
        for key, _ in storages_of(node.meta.get("val"))
    }
    for node in graph.nodes:
        for changed in _changed_by(node):
            owner = next((owners[k] for k, _ in storages_of(changed) if k in owners), None)
            if owner is None:
                continue
            what = names.get(owner, owner)
            raise ModelError(
                f"the forward changes {what}",
                where=describe_place(node),
                fix="use a layer without running statistics: recomputing it would move them twice"
                if what.startswith("the buffer")
                else "compute a new tensor instead of changing this one in place",
            )


def _changed_by(node: fx.Node) -> Iterator[Tensor]:
    """The traced tensors that a node writes into."""
    found = _STATISTICS.get(node.target) if node.op == "call_function" else None
    if found is not None:
        statistics, switch = found
        if node.args[switch]:
            yield from _tensors(node.args[statistics])
        return
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            yield from _tensors(node.kwargs.get(argument.name, given))


def _tensors(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), Tensor):
        yield argument.meta["val"]
    elif isinstance(argument, list | tuple):
        for item in argument:  # pyright: ignore[reportUnknownVariableType]  # any argument of fx
            yield from _tensors(item)  # pyright: ignore[reportUnknownArgumentType]  # as above


def _find_frame(module: nn.Module, error: BaseException) -> tuple[FrameType | None, int]:
    """The innermost frame, of an error or of its causes, that runs a method of a submodule."""
    known = {id(found) for found in module.modules()}
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        frame, line = None, 0
        trace = current.__traceback__
        while trace is not None:
            if id(trace.tb_frame.f_locals.get("self")) in known and not _is_torchs(trace.tb_frame):
                frame, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        if frame is not None:
            return frame, line
        pending += [current.__cause__, current.__context__]
    return None, 0


def _is_torchs(frame: FrameType) -> bool:
    """Whether a frame is `nn.Module.__call__` and the like, rather than a forward."""
    return frame.f_code.co_filename.endswith(("torch/nn/modules/module.py",))
