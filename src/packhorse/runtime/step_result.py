"""What a step gives back: its values at once, and what it did when once it is complete.

In: a program on its way whose values are there. Out: loss, norm, and a timeline for who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from packhorse.model.spec import ValueId
from packhorse.program.buffers import LOSSES, BufferId, PoolId, value_id
from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gives back.

    `loss` is the float32 sum of `losses` in micro-batch order; `grad_norm` is the global norm
    before clipping. The last writes of the step may still be on their way.
    `began_ns` is when, by `time.perf_counter_ns`, the step before had its values; where nothing
    was on its way any more, when this step was asked for. So the times from there to the values
    add up over steps. `disk_read_bytes` and `disk_written_bytes` are what its tasks move, in whole
    pages. `complete` blocks until the step is complete.
    """

    loss: float
    losses: tuple[float, ...]
    grad_norm: float | None
    began_ns: int
    peak_bytes: Mapping[PoolId, int]
    disk_read_bytes: int
    disk_written_bytes: int
    complete: Callable[[], Timeline]

    @property
    def timeline(self) -> Timeline:
        """What the step did when; blocks until it is complete.

        Raises:
            InputError: its engine was closed before.
            StorageError: one of its last writes failed.
        """
        return self.complete()


def find_losses(
    emitted: Mapping[BufferId, Tensor], loss: ValueId, num_microbatches: int
) -> Sequence[Tensor]:
    """The losses of the micro-batches, which another rank may have sent all at once."""
    if LOSSES in emitted:
        return emitted[LOSSES].unbind()
    return [emitted[value_id(loss, microbatch)] for microbatch in range(num_microbatches)]
