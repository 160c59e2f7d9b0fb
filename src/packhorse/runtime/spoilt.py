"""A loss or norm that is not finite, in words.

In: what was not finite, and where it came from. Out: a `NonFiniteError` that names step,
micro-batch, block and parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from packhorse.errors import NonFiniteError
from packhorse.model.parts import whole_of
from packhorse.model.spec import Model, ParameterName
from packhorse.program.buffers import LOSSES, NORM, BufferId

_FIX: Final = (
    "lower learning_rate, lengthen warmup_steps, set max_grad_norm: 1.0, or look at the rows of"
    " this batch;\nthe last checkpoint is from before"
)


class SpoiltError(Exception):
    """A loss or the norm is not finite; `parameters` have gradients that are not."""

    def __init__(self, buffer: BufferId, value: float, parameters: tuple[str, ...]) -> None:
        self.buffer = buffer
        self.value = value
        self.parameters = parameters
        super().__init__(f"{buffer} is {value}")


def explain_spoilt(
    error: SpoiltError, model: Model, *, step: int, find_block: Callable[[int], int | None]
) -> NonFiniteError:
    """Say where a loss or the norm was spoilt.

    Args:
        find_block: looks for the block in which a micro-batch was spoilt; not asked where the model
            is a part, which cannot tell.
    """
    if error.buffer == NORM:
        return spoilt_gradient(model, error.value, step=step, parameters=error.parameters)
    if error.buffer == LOSSES or model.part is not None:
        return NonFiniteError(
            f"the loss became {error.value} in step {step}",
            where=f"step {step}, {error.buffer}",
            fix=_FIX,
        )
    microbatch = int(error.buffer.rpartition("@")[2])
    return spoilt_loss(
        model, error.value, step=step, microbatch=microbatch, block=find_block(microbatch)
    )


def spoilt_loss(
    model: Model, loss: float, *, step: int, microbatch: int, block: int | None
) -> NonFiniteError:
    """Say in which block a loss was spoilt, None where no block did it by itself."""
    place = "no block by itself" if block is None else f"block {model.blocks[block].name}"
    return NonFiniteError(
        f"the loss became {loss} in step {step}",
        where=f"step {step}, micro-batch {microbatch}, first in {place}",
        fix=_FIX,
    )


def spoilt_gradient(
    model: Model, norm: float, *, step: int, parameters: tuple[str, ...]
) -> NonFiniteError:
    """Say which parameters have a gradient that is not finite, and in which block that began."""
    model = whole_of(model)
    last = max(
        (block for name in parameters for block in model.parameters[ParameterName(name)].blocks),
        default=None,
    )
    place = "no single parameter" if last is None else f"block {model.blocks[last].name}"
    return NonFiniteError(
        f"the gradient norm became {norm} in step {step}",
        where=f"step {step}, all micro-batches, first in {place}"
        + (f"\nparameters: {', '.join(parameters[:3])}" if parameters else "")
        + (f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""),
        fix=_FIX,
    )
