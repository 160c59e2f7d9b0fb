"""A loss or norm that is not finite, in words.

In: what was not finite, and where it came from. Out: a `NonFiniteError` that names step,
micro-batch, block and parameters.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import NonFiniteError
from packhorse.model.spec import Model, ParameterName
from packhorse.program.buffers import BufferId

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
