"""What a device is run with: its tiers of memory, and its lanes.

In: a device, and what the programs need. Out: `ChunkMemory` per tier, `Lanes`. On a CPU both tiers
are this process's memory, in ranges of their own. On a CUDA device every lane has a stream, and
what is not states of chunks comes from torch's allocator, which gets a limit.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch

from packhorse.program.buffers import Layout, Pool, TierName
from packhorse.program.lanes import has_transfers
from packhorse.program.program import Program
from packhorse.program.tasks import Recv, Send
from packhorse.runtime.lanes import STUCK_AFTER_S, InlineLanes, Lanes, ThreadLanes
from packhorse.runtime.memory.backing import HostBacking
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.runtime.memory.cuda import CudaBacking
from packhorse.runtime.openmp import release_team
from packhorse.runtime.streams import CudaStream, StreamLanes
from packhorse.storage.scratch_space import Scratch

STUCK_APART_S: Final = 7200.0
"""Of a rank among others: a message may be as late as the step of the slowest rank is long."""


def make_tiers(
    layout: Layout,
    device: torch.device,
    pools: Iterable[Pool],
    scratch: Path | Scratch | None = None,
) -> dict[TierName, ChunkMemory]:
    """Make the tiers of memory: the device's, and where a plan uses it, the host's.

    Args:
        pools: of the programs.
        scratch: says whether the disk wants the memory of this process in huge pages.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.init()  # the driver's calls need it
    huge_pages = not isinstance(scratch, Scratch) or scratch.huge_pages
    in_memory = partial(HostBacking, huge_pages=huge_pages)
    on_device = partial(CudaBacking, device=_index_of(device)) if is_cuda else in_memory
    made: dict[TierName, ChunkMemory] = {"device": ChunkMemory(layout, on_device)}
    if any(pool.tier == "host" for pool in pools):
        made["host"] = ChunkMemory(layout, partial(in_memory, pinned=is_cuda))
    return made


def find_own_pools(pools: Iterable[Pool], device: torch.device) -> list[Pool]:
    """The pools that are this process's memory."""
    tiers = {"host"} if device.type == "cuda" else {"device", "host"}
    return [pool for pool in pools if pool.tier in tiers]


def make_lanes(programs: Collection[Program], device: torch.device, num_threads: int) -> Lanes:
    """Make lanes of their own where something is moved, else the caller's thread for all."""
    lanes: Lanes = InlineLanes()
    if any(has_transfers(program.tasks) for program in programs):
        release_team()  # from now on the compute lane's thread computes
        prepare = partial(_prepare_thread, device, num_threads)
        # Who waits for a message waits for all that its sender does first; of a sender that is gone
        # others tell.
        talks = any(isinstance(task, Send | Recv) for each in programs for task in each.tasks)
        lanes = ThreadLanes(
            prepare=prepare, stuck_after_s=STUCK_APART_S if talks else STUCK_AFTER_S
        )
    if device.type == "cuda":
        return StreamLanes(lanes, partial(CudaStream, _index_of(device)))
    return lanes


@contextmanager
def limited_allocator(device: torch.device, limit_bytes: int) -> Generator[None]:
    """Hold torch's allocator on a CUDA device to so many bytes; on a CPU there is nothing to hold.

    Blocks that are idle in it count. At its limit it gives those back and tries again; a task that
    needs more then fails. States of chunks do not come from it.
    """
    if device.type != "cuda":
        yield
        return
    index = _index_of(device)
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info(index)
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total_bytes, 1.0), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def _prepare_thread(device: torch.device, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(_index_of(device))  # driver calls of this thread need its context


def _index_of(device: torch.device) -> int:
    return device.index or 0
