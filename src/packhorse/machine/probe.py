"""Measures this machine: the first arrow of the picture, host to `Machine`.

In: budgets and a scratch folder. Out: a `Machine` with `source="probe"`. Takes about ten seconds;
the rates are kept by hardware fingerprint and measured once.
Without a CUDA device the `device` tier is the RAM that this process may use and there is no `host`
tier; with one, `device` is its memory and `host` the RAM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from packhorse.errors import InputError, StorageError
from packhorse.machine.budget import (
    DEFAULT_SCRATCH,
    Budget,
    DiskBudget,
    free_less_margin,
    grant_tiers,
)
from packhorse.machine.disks import find_disk
from packhorse.machine.limits import find_core_limit, find_cpu_model, find_memory_limit
from packhorse.machine.probe_cache import (
    default_cache_folder,
    load_measured,
    make_fingerprint,
    store_measured,
)
from packhorse.machine.probe_compute import (
    is_native,
    measure_link,
    measure_matmul,
    measure_memory,
    measure_update,
)
from packhorse.machine.probe_disk import DEFAULT_FILE_BYTES, measure_disk
from packhorse.machine.probe_heap import measure_heap
from packhorse.machine.spec import Link, Machine, Tier, TierName, UpdateRate

# Called before each part with what is measured next, its index, and the number of parts.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hardware:
    """What is there, before anything is measured."""

    name: str
    device: str
    num_cores: int
    num_threads: int
    tiers: tuple[Tier, ...]
    fingerprint: str

    def free_bytes(self, name: TierName) -> int:
        return next(tier.budget_bytes for tier in self.tiers if tier.name == name)


def probe_machine(
    *,
    budget: Budget,
    threads: int | None = None,
    scratch: str | None = None,
    device: str | None = None,
    fresh: bool = False,
    sustained: bool = False,
    file_bytes: int = DEFAULT_FILE_BYTES,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> Machine:
    """Measure this machine, or take its rates from the cache, and give its tiers the budget.

    Args:
        budget: as `parse_budget` reads it; what it does not name may use what is free less a
            margin.
        threads: compute threads to measure with; None takes what torch would use, at most the
            cores that this process may use.
        scratch: scratch folder when the budget names none.
        device: `cpu` or `cuda`; None takes CUDA where there is one.
        fresh: measure although the cache has this machine.
        sustained: write until the drive's rate is steady; never taken from the cache.
        file_bytes: size of the temporary file that the disk is measured with, at most the disk
            budget.
        cache_folder: None takes the user's cache folder.
        progress: called before each part.

    Raises:
        InputError: the budget exceeds what is there, or a path is unwritable.
        StorageError: the scratch disk fails.
    """
    disk = budget.disk or DiskBudget(path=scratch or DEFAULT_SCRATCH)
    budget = replace(budget, disk=disk)
    hardware = _look(threads=threads, scratch=disk.path, device=device)
    folder = cache_folder or default_cache_folder()
    tiers = grant_tiers(hardware.tiers, budget, owner=hardware.name, here=True)
    measured = None if fresh or sustained else load_measured(folder, hardware.fingerprint)
    if measured is None:
        disk_bytes = next(tier.budget_bytes for tier in tiers if tier.name == "disk")
        measured = _measure(
            # Measuring keeps to the budgets too.
            replace(hardware, tiers=tiers),
            disk.path,
            # A budget of nothing forbids the disk to plans; its rates are still worth knowing.
            file_bytes=min(file_bytes, disk_bytes or file_bytes),
            sustained=sustained,
            progress=progress or _ignore_progress,
        )
        _keep(folder, measured)
    return replace(measured, tiers=tiers)


def _look(*, threads: int | None, scratch: str, device: str | None) -> _Hardware:
    """Find what is there: cores, memory, disk, device."""
    cores = find_core_limit()
    memory = find_memory_limit()
    disk = find_disk(scratch)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise InputError(
            f"there is no device {device!r} here",
            fix="use cpu, or install a torch build for your GPU and check `nvidia-smi`",
        )
    num_threads = min(torch.get_num_threads(), cores.num_cores) if threads is None else threads
    if not 1 <= num_threads <= max(cores.num_cores, cores.num_allowed):
        raise InputError(
            f"cannot use {num_threads} threads: {cores.num_allowed} may run at once here",
            fix=f"use 1 to {cores.num_cores}",
        )
    ram = Tier(
        name="device" if device == "cpu" else "host",
        total_bytes=memory.limit_bytes,
        budget_bytes=free_less_margin(memory.available_bytes, "memory"),
    )
    disk_tier = Tier(
        name="disk",
        total_bytes=disk.free_bytes,
        budget_bytes=free_less_margin(disk.free_bytes, "disk"),
        path=scratch,
    )
    cpu_name = find_cpu_model()
    facts: dict[str, str | int] = {
        "cpu": cpu_name,
        "cores": cores.num_cores,
        "threads": num_threads,
        "memory_limit_bytes": memory.limit_bytes,
        "disk": f"{disk.file_system} {disk.drive}",
        "torch": torch.__version__,
        "device": device,
    }
    if device == "cpu":
        name, tiers = f"{cpu_name}, {cores.num_cores} cores", (ram, disk_tier)
    else:
        free, total = torch.cuda.mem_get_info()
        gpu = torch.cuda.get_device_name()
        facts |= {"gpu": gpu, "gpu_bytes": total, "cuda": str(torch.version.cuda)}
        on_gpu = Tier(
            name="device", total_bytes=total, budget_bytes=free_less_margin(free, "memory")
        )
        name, tiers = gpu, (on_gpu, ram, disk_tier)
    return _Hardware(
        name=name,
        device=device,
        num_cores=cores.num_cores,
        num_threads=num_threads,
        tiers=tiers,
        fingerprint=make_fingerprint(facts),
    )


def _measure(
    hardware: _Hardware, scratch: str, *, file_bytes: int, sustained: bool, progress: Progress
) -> Machine:
    device = hardware.device
    near: TierName = "device" if device == "cpu" else "host"
    num_parts = 6 if device == "cpu" else 7
    before = torch.get_num_threads()
    torch.set_num_threads(hardware.num_threads)
    try:
        progress("matrix products in fp32", 0, num_parts)
        fp32 = measure_matmul(device, torch.float32)
        progress("matrix products in bf16", 1, num_parts)
        bf16 = measure_matmul(device, torch.bfloat16)
        progress("memory", 2, num_parts)
        memory_bytes_per_s = measure_memory(device, hardware.free_bytes("device"))
        progress("optimizer updates", 3, num_parts)
        updates = [
            UpdateRate(
                tier="device",
                parameters_per_s=measure_update(device, hardware.free_bytes("device")),
            )
        ]
        if device != "cpu":
            rate = measure_update("cpu", hardware.free_bytes("host"))
            updates.append(UpdateRate(tier="host", parameters_per_s=rate))
        progress("heap modes", 4, num_parts)
        heap = measure_heap(hardware.num_threads)
        progress("scratch disk", 5, num_parts)
        disk = measure_disk(scratch, file_bytes=file_bytes, sustained=sustained)
        links: list[Link] = [*disk.links(near)]
        if device != "cpu":
            progress("links to the device", 6, num_parts)
            links += _measure_device_links(hardware)
    finally:
        torch.set_num_threads(before)
    return Machine(
        name=hardware.name,
        source="probe",
        fingerprint=hardware.fingerprint,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        num_cores=hardware.num_cores,
        num_threads=hardware.num_threads,
        bf16_native=is_native(bf16, fp32),
        tiers=hardware.tiers,
        links=tuple(links),
        matmul=(*fp32, *bf16),
        memory_bytes_per_s=memory_bytes_per_s,
        updates=tuple(updates),
        heap=heap,
    )


def _measure_device_links(hardware: _Hardware) -> tuple[Link, Link]:
    free = min(hardware.free_bytes("device"), hardware.free_bytes("host"))
    return measure_link("host", "device", free), measure_link("device", "host", free)


def _keep(folder: Path, machine: Machine) -> None:
    try:
        store_measured(folder, machine)
    except StorageError:
        # A home that cannot be written costs ten seconds at the next probe, not this result.
        return


def _ignore_progress(what: str, index: int, num_parts: int) -> None:
    """Take the place of a progress display that nobody asked for."""
