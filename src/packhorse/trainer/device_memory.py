"""What a CUDA device holds for this process beside what a plan's ledger counts.

In: a device, a plan and its program. Out: the bytes that a plan sets aside as its base, and the
limit of torch's allocator. A device's budget is the driver's: everything that the driver says is in
use counts.

    base        context and the kernels loaded so far, measured; and what comes later, a constant
    states      mapped granule by granule beside torch's allocator; see `runtime/memory/cuda.py`
    heap        everything else that tasks make comes from torch's allocator, which keeps what is
                freed as a C heap does: a kept heap's live peak and its slack are its limit
"""

from __future__ import annotations

from math import ceil
from typing import Final

import torch

from packhorse.plan.spec import Plan
from packhorse.program.program import Program
from packhorse.units import MIB

# Workspaces of cuBLAS and cuBLASLt come from torch's allocator too, 32 MiB each on Hopper.
LIBRARY_BYTES: Final = 96 * MIB
# Besides: kernels are loaded when they are first used, and a chunk's state fills whole granules of
# 2 MiB, up to two more than its bytes. Not measured yet.
LATER_BYTES: Final = LIBRARY_BYTES + 384 * MIB


def measure_device_base(device: torch.device) -> int:
    """Tell what of the device is in use beside torch's allocator, and set aside what comes later.

    What other processes hold there counts as well: it cannot be told apart, and is as little there
    for this one. Makes the context, and loads what every training step does.
    """
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(256, 256, device=device, dtype=dtype)
        torch.mm(square, square)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device) + LATER_BYTES


def find_allocator_bytes(plan: Plan, program: Program) -> int:
    """What torch's allocator may hold on the device while a plan runs."""
    pool = next(pool for pool in program.pools if pool.id == program.workspace_pool)
    slack = plan.heap_slack if plan.heap.value == "keep" else 0.0
    return ceil(pool.capacity_bytes * (1 + slack)) + LIBRARY_BYTES
