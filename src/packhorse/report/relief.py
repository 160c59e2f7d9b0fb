"""What bounds a plan, and what would relieve it, in figures.

In: a plan with its prediction. Out: sentences. Rates are read off the prediction itself, so they
are those of the machine that it was made for.
"""

from __future__ import annotations

from typing import Final

from packhorse.plan.spec import Plan, Prediction
from packhorse.units import GIB, format_bytes, format_ns, format_percent

# Below these shares of a step a cause is not worth a sentence.
_WORTH_DISK: Final = 0.05
_WORTH_RECOMPUTE: Final = 0.03


def find_relief(plan: Plan) -> tuple[str, ...]:
    """Say what would make the step shorter, the largest gain first."""
    prediction = plan.prediction
    if prediction is None or not prediction.step_ns:
        return ()
    found = [*_relieve_disk(plan, prediction), *_relieve_recompute(plan, prediction)]
    found.sort(key=lambda each: -each[0])
    if not found:
        found.append((0, "Nothing but compute: a faster device, or fewer operations."))
    return tuple(sentence for _, sentence in found)


def price_clipping(plan: Plan) -> str:
    """Say what clipping by the global norm costs."""
    if not plan.optimizer.clips:
        return "Gradients are not clipped, which costs nothing."
    norm_ns = plan.prediction.time_ns.get("norm", 0) if plan.prediction else 0
    held_bytes = 4 * sum(
        piece.stop - piece.start
        for chunk in plan.chunks
        if chunk.trainable
        for piece in chunk.pieces
    )
    on_disk = sum(chunk.gradients.value == "disk" for chunk in plan.chunks if chunk.trainable)
    where = f", those of {on_disk} chunks on disk" if on_disk else ""
    takes = f"takes {format_ns(norm_ns)} a step for the norm and " if norm_ns else ""
    return (
        f"Clipping {takes}keeps all gradients"
        f" ({format_bytes(held_bytes)}) until it is known{where}."
    )


def _relieve_disk(plan: Plan, prediction: Prediction) -> list[tuple[int, str]]:
    read_ns = prediction.time_ns.get("disk_read", 0)
    write_ns = prediction.time_ns.get("disk_write", 0)
    share = (read_ns + write_ns) / prediction.step_ns
    if share < _WORTH_DISK:
        return []
    saved_ns = sum(
        GIB * spent_ns // moved_bytes
        for spent_ns, moved_bytes in (
            (read_ns, prediction.disk_read_bytes),
            (write_ns, prediction.disk_written_bytes),
        )
        if moved_bytes
    )
    moved = prediction.disk_read_bytes + prediction.disk_written_bytes
    sentence = (
        f"Disk traffic is {format_percent(share)} of the step ({format_bytes(moved)})."
        f" Each GiB that need not be read and written again saves up to {format_ns(saved_ns)}:"
        " a larger device budget keeps more, a faster drive moves it sooner"
    )
    if any(chunk.optimizer.value == "disk" for chunk in plan.chunks if chunk.trainable):
        sentence += ", a larger global batch spreads the optimizer's share over more tokens"
    return [(read_ns + write_ns, sentence + ".")]


def _relieve_recompute(plan: Plan, prediction: Prediction) -> list[tuple[int, str]]:
    spent_ns = prediction.time_ns.get("recompute", 0)
    share = spent_ns / prediction.step_ns
    if share < _WORTH_RECOMPUTE:
        return []
    count = sum(block.activations.value == "recompute" for block in plan.blocks)
    sentence = (
        f"Recompute of {count} of {len(plan.blocks)} blocks is {format_percent(share)} of the step:"
        " a larger device budget keeps their activations, and so do fewer rows in a micro-batch."
    )
    return [(spent_ns, sentence)]
