"""What a microbatch costs along the depth of the model, and what ranks may hold.

In: times and bytes of one microbatch in each of several equal lengths of the model's depth. Out:
the same for any number of stages: a stage costs what its share of the depth costs, to the
nanosecond and byte, so that the stages of every cut sum to the same whole. Where a model was cut
with care, the parts are its stages, and costs are for that number of stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

UNIT_NS: Final = 1_000_000
UNIT_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one microbatch costs in one stretch of the model.

    `saved_bytes` are held from the start of its Forward to the end of its Backward or WeightGrad.
    `reduce_ns` is what summing the gradients over all replicas takes, once a step. `split_ns` is
    what a backward in halves takes on top of the whole one; it is part of the weight half.
    """

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    saved_bytes: int
    reduce_ns: int = 0
    split_ns: int = 0

    @property
    def backward_ns(self) -> int:
        """The whole backward."""
        return self.input_grad_ns + self.weight_grad_ns

    @property
    def weight_half_ns(self) -> int:
        """The weight half where it runs for itself."""
        return self.weight_grad_ns + self.split_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How long it takes what passes from a stage to the next, and the gradients that come back."""

    forward_ns: int
    gradient_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a model on its ranks.

    `parts` are the costs of equal lengths of the depth, first to last, as many as are known.
    `send_ns` is what a tensor takes from one rank to another, beside computing; on one rank it
    takes nothing. `cap_bytes` is how much each rank may save at once; None means any amount.
    `crossings`, where there are any, say in place of `send_ns` what each cut between the parts
    takes: the parts are the stages then, each of its own length.
    """

    parts: tuple[Cost, ...]
    send_ns: int = 0
    cap_bytes: tuple[int, ...] | None = None
    crossings: tuple[Crossing, ...] = ()

    def cut(self, num_stages: int) -> tuple[Cost, ...]:
        """Give the costs of each stage when the depth is cut into stages of equal length."""
        columns = (
            _cut_column((part.forward_ns for part in self.parts), num_stages),
            _cut_column((part.input_grad_ns for part in self.parts), num_stages),
            _cut_column((part.weight_grad_ns for part in self.parts), num_stages),
            _cut_column((part.saved_bytes for part in self.parts), num_stages),
            _cut_column((part.reduce_ns for part in self.parts), num_stages),
            _cut_column((part.split_ns for part in self.parts), num_stages),
        )
        return tuple(
            Cost(
                forward_ns=f,
                input_grad_ns=i,
                weight_grad_ns=w,
                saved_bytes=saved,
                reduce_ns=reduce,
                split_ns=split,
            )
            for f, i, w, saved, reduce, split in zip(*columns, strict=True)
        )

    def cross(self, num_stages: int) -> tuple[Crossing, ...]:
        """Give what passes behind each stage but the last, where the next is on another rank.

        Raises:
            ValueError: the crossings are those of another number of stages.
        """
        if not self.crossings:
            even = Crossing(forward_ns=self.send_ns, gradient_ns=self.send_ns)
            return (even,) * (num_stages - 1)
        if num_stages != len(self.crossings) + 1:
            raise ValueError(f"crossings of {len(self.crossings) + 1} stages, not {num_stages}")
        return self.crossings

    def share_bytes(self, num_ranks: int) -> int:
        """What one microbatch saves in one rank's share of the model, on average; at least 1."""
        return max(sum(part.saved_bytes for part in self.parts) // num_ranks, 1)


def even_costs(
    num_ranks: int,
    *,
    forward_ns: int = UNIT_NS,
    input_grad_ns: int = UNIT_NS,
    weight_grad_ns: int = UNIT_NS,
    saved_bytes: int = UNIT_BYTES,
    send_ns: int = 0,
    cap_bytes: tuple[int, ...] | None = None,
) -> Costs:
    """Give costs that are the same everywhere; times and bytes are those of a rank's share."""
    part = Cost(
        forward_ns=forward_ns,
        input_grad_ns=input_grad_ns,
        weight_grad_ns=weight_grad_ns,
        saved_bytes=saved_bytes,
    )
    return Costs(parts=(part,) * num_ranks, send_ns=send_ns, cap_bytes=cap_bytes)


def _cut_column(values: Iterable[int], num_stages: int) -> list[int]:
    column = list(values)
    sums = [0, *accumulate(column)]
    ends: list[int] = []
    for at in range(num_stages + 1):
        whole, rest = divmod(at * len(column), num_stages)
        ends.append(sums[whole] + (column[whole] * rest // num_stages if rest else 0))
    return [end - start for start, end in pairwise(ends)]
