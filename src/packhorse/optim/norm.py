"""The global gradient norm, the same bits under every layout and thread count.

In: gradients, or the pieces of them that chunks hold. Out: sums of squares per segment, the norm
in float64, and the clip coefficient.

A segment is 16,384 elements counted from the parameter's own start (the last may be short).

    squares = float64 norm of the segment, squared
    while more than one: squares = first half + second half         elementwise, so always exact
    norm = sqrt(that)                              over all segments, in the order of the parameters

A segment is one row of a row-wise reduction, which no thread shares and whose bits do not depend
on the other rows; what a row's sum rounds to does depend on the vector width of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

SEGMENT_ELEMENTS: Final = 16_384
_ROWS: Final = 4  # segments converted at a time: they stay in the cache
SCRATCH_BYTES: Final = 8 * _ROWS * SEGMENT_ELEMENTS


def count_segments(num_elements: int) -> int:
    """Count the segments of a parameter, or of a piece that begins at a segment."""
    return -(-num_elements // SEGMENT_ELEMENTS)


@torch.no_grad()
def segment_squares(pieces: Iterable[Tensor]) -> Tensor:
    """Sum the squares of each segment of each piece.

    A parameter may be cut into pieces at multiples of 16,384 elements from its start: the results
    of its pieces, one after the other, are those of the whole. Needs `SCRATCH_BYTES` beyond the
    result, whatever the size of the pieces.

    Args:
        pieces: contiguous gradients of any float dtype, all on one device, each beginning at a
            segment of its parameter.

    Returns:
        Float64, 1-D, the segments of all pieces in order.

    Raises:
        ValueError: a piece is not contiguous.
    """
    flats: list[Tensor] = []
    for piece in pieces:
        if not piece.is_contiguous():
            raise ValueError(f"a gradient of shape {tuple(piece.shape)} is not contiguous")
        flats.append(piece.view(-1))
    total = sum(count_segments(flat.numel()) for flat in flats)
    device = flats[0].device if flats else None
    squares = torch.empty(total, dtype=torch.float64, device=device)
    scratch = torch.empty((_ROWS, SEGMENT_ELEMENTS), dtype=torch.float64, device=device)
    done = 0
    for part in _batches(flats):
        num_rows = count_segments(part.numel())
        width = min(part.numel(), SEGMENT_ELEMENTS)
        rows = scratch.view(-1)[: part.numel()].view(num_rows, width)
        rows.copy_(part.view(num_rows, width))
        torch.linalg.vector_norm(rows, dim=1, out=squares[done : done + num_rows])
        done += num_rows
    return squares.mul_(squares)


@torch.no_grad()
def combine_norm(segments: Iterable[Tensor]) -> Tensor:
    """Give the norm from the segment squares of all parameters.

    Args:
        segments: float64, 1-D each, in the order of the parameters, and within a parameter in the
            order of its pieces. Where one tensor ends and the next begins makes no difference.

    Returns:
        The norm as a float64 scalar; zero when there are no segments.
    """
    parts = list(segments)
    total = sum(part.numel() for part in parts)
    if not total:
        return torch.zeros((), dtype=torch.float64)
    width = 1 << (total - 1).bit_length()
    row = torch.zeros((1, width), dtype=torch.float64, device=parts[0].device)
    torch.cat(parts, out=row[0, :total])
    _add_halves(_halves(row, 1))
    return row[0, 0].sqrt()


def global_norm(grads: Iterable[Tensor | None]) -> Tensor:
    """Give the global norm of whole gradients, for a plain loop to clip by.

    The bits are those that every plan reports when the order of the parameters is the same; None
    (a parameter without gradient) is skipped.

    Returns:
        The norm as a float64 scalar.
    """
    return combine_norm(
        [segment_squares([grad.detach().contiguous()]) for grad in grads if grad is not None]
    )


@torch.no_grad()
def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Give the factor that gradients are multiplied by, at most 1.

    Computed in float32 as `torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm.float())`
    does. A NaN or infinite norm gives NaN or zero, as there.

    Returns:
        A float32 scalar.
    """
    return torch.clamp(max_norm / (norm.to(torch.float32) + 1e-6), max=1.0)


def _batches(flats: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cut each piece into runs of at most `_ROWS` whole segments, and its short end alone."""
    for flat in flats:
        whole = flat.numel() // SEGMENT_ELEMENTS * SEGMENT_ELEMENTS
        if whole:
            yield from flat[:whole].split(_ROWS * SEGMENT_ELEMENTS)
        if whole < flat.numel():
            yield flat[whole:]


def _halves(rows: Tensor, until_width: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Give the halves to add, widest first, until rows of a power of two have `until_width`."""
    halves: list[tuple[Tensor, Tensor]] = []
    width = rows.shape[1]
    while width > until_width:
        width //= 2
        halves.append((rows[:, :width], rows[:, width : 2 * width]))
    return tuple(halves)


def _add_halves(halves: Iterable[tuple[Tensor, Tensor]]) -> None:
    for left, right in halves:
        left.add_(right)
