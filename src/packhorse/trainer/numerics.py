"""The numerics of a run in the words of its checkpoints.

In: a plan's numerics, and the CPU that computes. Out: JSON for a manifest, and what differs
between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from packhorse.checkpoint.json_values import JsonObject
from packhorse.machine.spec import Machine
from packhorse.plan.spec import Numerics

COMPUTE_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def find_instructions(machine: Machine) -> str | None:
    """Name the vector instructions that a machine computes with; None if it is not this one."""
    return _instructions_here(machine.device) if machine.source == "probe" else None


def say_other_instructions(numerics: Numerics) -> tuple[str, ...]:
    """Say so where a plan was made on a CPU with other instructions than this one has."""
    here = _instructions_here(numerics.device)
    if numerics.instructions in (None, here):
        return ()
    text = (
        f"the plan was made for {numerics.instructions} instructions, this CPU computes with"
        f" {here}: the curve is another in the last bits"
    )
    return (text,)


def _instructions_here(device: str) -> str | None:
    return torch.backends.cpu.get_cpu_capability().lower() if device == "cpu" else None


def describe_numerics(numerics: Numerics) -> JsonObject:
    """Give everything that equal bits depend on, as this process computes it."""
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
        "instructions": _instructions_here(numerics.device),
    }


def list_changes(before: JsonObject, now: JsonObject) -> tuple[str, ...]:
    """Say in words what a checkpoint was computed with otherwise."""
    return tuple(
        f"{name} was {before.get(name)}, is {value}"
        for name, value in now.items()
        if before.get(name) != value
    )
