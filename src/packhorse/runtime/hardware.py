"""What a device is run with: its tiers of memory, and its lanes.

In: a device, and what the programs need. Out: `ChunkMemory` per tier, `Lanes`. On a CPU both tiers
are this process's memory, in ranges of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import torch

from packhorse.program.buffers import Layout, TierName
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program
from packhorse.runtime.lanes import InlineLanes, Lanes, ThreadLanes
from packhorse.runtime.memory.backing import HostBacking
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.runtime.memory.cuda import CudaBacking
from packhorse.runtime.openmp import release_team
from packhorse.storage.scratch_space import Scratch


def make_tiers(
    layout: Layout,
    device: torch.device,
    tiers: Collection[TierName],
    scratch: Path | Scratch | None = None,
) -> dict[TierName, ChunkMemory]:
    """Make the tiers of memory: the device's, and where a plan uses it, the host's.

    Args:
        scratch: says whether the disk wants the memory of this process in huge pages.
    """
    is_cuda = device.type == "cuda"
    huge_pages = not isinstance(scratch, Scratch) or scratch.huge_pages
    in_memory = partial(HostBacking, huge_pages=huge_pages)
    on_device = partial(CudaBacking, device=device.index or 0) if is_cuda else in_memory
    made: dict[TierName, ChunkMemory] = {"device": ChunkMemory(layout, on_device)}
    if "host" in tiers:
        made["host"] = ChunkMemory(layout, partial(in_memory, pinned=is_cuda))
    return made


def make_lanes(programs: Iterable[Program], device: torch.device, num_threads: int) -> Lanes:
    """Make lanes of their own where something is moved, else the caller's thread for all."""
    if device.type == "cuda":
        return InlineLanes(partial(torch.cuda.synchronize, device))
    if any(has_transfers(program.tasks) for program in programs):
        release_team()  # from now on the compute lane's thread computes
        return ThreadLanes(prepare=partial(torch.set_num_threads, num_threads))
    return InlineLanes()
