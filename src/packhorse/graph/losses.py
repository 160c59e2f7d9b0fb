"""What a forward returned, as a loss: one number, or a sum and the count it is divided by.

In: the output of a module's forward, traced or not. Out: the tensor to learn from and, of a
(sum, count) pair, the count. What is no loss gets an error that says what came instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from packhorse.errors import ModelError

LOSS_FIX = (
    "return the loss alone, as a mean, as a (sum, count) pair, or under the name `loss`;"
    "\na forward that returns other things too is wrapped in a module that picks the loss"
)


def find_loss(module: nn.Module, output: object) -> tuple[Tensor, Tensor | float | None]:
    """Take the loss, and the count beside it, out of what a module's forward returned.

    Raises:
        ModelError: there is no loss in it, or it leads to no parameter that is trained.
    """
    named = _as_mapping(output)
    found: object = getattr(output, "loss", output) if named is None else named.get("loss")
    parts = as_tuple(found)
    count: object = None
    if parts is not None:
        if len(parts) != 2 or not _is_count(parts[1]):
            raise _no_loss(module, output)
        found, count = parts
    if not isinstance(found, Tensor):
        raise _no_loss(module, output)
    if found.is_complex() or not found.is_floating_point():
        raise _no_loss(module, output)
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if torch.is_grad_enabled() and trains and not found.requires_grad:
        raise ModelError(
            "the loss does not depend on any parameter that is trained",
            where=f"the forward of {type(module).__qualname__}",
            fix="compute it from the parameters, without .detach() and outside of no_grad",
        )
    return found, cast("Tensor | float | None", count)  # checked by _is_count


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 or tuple(value.shape) == (1,)
    number = isinstance(value, int | float | torch.SymInt | torch.SymFloat)
    return number and not isinstance(value, bool)


def _no_loss(module: nn.Module, output: object) -> ModelError:
    return ModelError(
        f"the forward returns no loss, but {_describe(output)}",
        where=f"the forward of {type(module).__qualname__}",
        fix=LOSS_FIX,
    )


def _describe(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"a tensor {str(value.dtype).removeprefix('torch.')}[{shape}]"
    names = _as_mapping(value)
    if names is not None:
        return f"a {kind} with {', '.join(str(name) for name in names) or 'nothing'}"
    parts = as_tuple(value)
    if parts is not None:
        return f"a tuple of {', '.join(_describe(part) for part in parts) or 'nothing'}"
    return "None" if value is None else f"a {kind}"


def _as_mapping(value: object) -> Mapping[object, object] | None:
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value)  # isinstance leaves its types unknown
    return None


def as_tuple(value: object) -> tuple[object, ...] | None:
    """The value if it is a tuple."""
    if isinstance(value, tuple):
        return cast("tuple[object, ...]", value)  # as above
    return None
