"""The numerics of a run in the words of its checkpoints.

In: a plan's numerics. Out: JSON for a manifest, and what differs between two of them.
"""

from __future__ import annotations

from packhorse.checkpoint.json_values import JsonObject
from packhorse.plan.spec import Numerics


def describe_numerics(numerics: Numerics) -> JsonObject:
    """Give everything that equal bits depend on."""
    return {
        "microbatch_rows": numerics.microbatch_rows.value,
        "num_microbatches": numerics.num_microbatches,
        "num_workers": numerics.num_workers,
        "compute_dtype": numerics.compute_dtype,
        "loss_chunk_tokens": numerics.loss_chunk_tokens.value,
        "tied_sum": numerics.tied_sum,
        "attention": numerics.attention,
        "num_threads": numerics.num_threads,
        "device": numerics.device,
    }


def list_changes(before: JsonObject, now: JsonObject) -> tuple[str, ...]:
    """Say in words what a checkpoint was computed with otherwise."""
    return tuple(
        f"{name} was {before.get(name)}, is {value}"
        for name, value in now.items()
        if before.get(name) != value
    )
