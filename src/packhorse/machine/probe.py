"""Measures this machine: the first arrow of the picture, host to `Machine`.

In: budgets and scratch folders. Out: a `Machine` with `source="probe"`. Takes up to half a minute;
the rates are kept by hardware fingerprint and measured once, or again when the disk was measured
with a file much smaller than is asked for now.
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
    free_disk_bytes,
    free_less_margin,
    grant_tiers,
)
from packhorse.machine.contention import read_core_clocks
from packhorse.machine.disks import find_disk
from packhorse.machine.drives import usable_bytes
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
from packhorse.machine.probe_disk import (
    DEFAULT_FILE_BYTES,
    DEFAULT_LIMIT_NS,
    affordable_bytes,
    measure_disk,
)
from packhorse.machine.probe_heap import measure_heap
from packhorse.machine.probe_io import IoPath
from packhorse.machine.probe_saving import measure_saving
from packhorse.machine.probe_sustained import WriteLimits
from packhorse.machine.spec import Drive, Link, Machine, Tier, TierName, UpdateRate
from packhorse.units import MIB

# Called before each part with what is measured next, its index, and the number of parts; and, while
# writing until steady, with what is done, the bytes written and the most that will be.
Progress = Callable[[str, int, int], None]


# A file is about as large as another down to half of it; each of this many passes has its share of
# the time.
_NEAR = 2
_PASSES = 6

# Through the file until the limit of writing is reached; the first round counts for nothing.
_ROUNDS = 4
_MIN_SUSTAINED_BYTES = MIB


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
    sustained: WriteLimits | None = None,
    file_bytes: int | None = None,
    disk_limit_ns: int = DEFAULT_LIMIT_NS,
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
            budget and a quarter of what is free; None takes `DEFAULT_FILE_BYTES`, or with
            `sustained` a quarter of what is written at most.
        disk_limit_ns: what measuring the disk may take, beside writing until steady.
        cache_folder: None takes the user's cache folder.
        progress: called before each part.

    Raises:
        InputError: the budget exceeds what is there, or a path is unwritable.
        StorageError: the scratch disk fails.
    """
    disks = budget.disks or (DiskBudget(path=scratch or DEFAULT_SCRATCH),)
    budget = replace(budget, disks=disks)
    hardware = _look(threads=threads, folders=[disk.path for disk in disks], device=device)
    folder = cache_folder or default_cache_folder()
    tiers = grant_tiers(hardware.tiers, budget, owner=hardware.name, here=True)
    granted = next(tier for tier in tiers if tier.name == "disk")
    if file_bytes is None:
        file_bytes = DEFAULT_FILE_BYTES
        if sustained is not None:
            file_bytes = max(sustained.size_bytes // _ROUNDS, _MIN_SUSTAINED_BYTES)
    # Measuring keeps to the budgets too. A budget of nothing forbids the disk to plans; its rates
    # are still worth knowing.
    file_bytes = min(file_bytes, granted.budget_bytes or file_bytes)
    measured = None if fresh or sustained else load_measured(folder, hardware.fingerprint)
    if measured is None or not _is_enough(measured, granted, file_bytes, disk_limit_ns):
        measured = _measure(
            replace(hardware, tiers=tiers),
            file_bytes=file_bytes,
            disk_limit_ns=disk_limit_ns,
            sustained=sustained,
            progress=progress or _ignore_progress,
        )
        _keep(folder, measured)
    drives = _settle_drives(measured, granted)
    disk = replace(granted, drives=drives, budget_bytes=usable_bytes(drives))
    return replace(measured, tiers=tuple(disk if tier.name == "disk" else tier for tier in tiers))


def is_here(machine: Machine) -> bool:
    """Whether a machine is this very computer, as `probe_machine` would find it.

    Its rates were measured here, with the same cores, memory, drives, device and torch.
    """
    disk = machine.tier("disk")
    if machine.source != "probe" or machine.emulation is not None:
        return False
    if disk is None or disk.path is None:
        return False
    folders = [drive.path for drive in disk.drives] or [disk.path]
    try:
        found = _look(threads=machine.num_threads, folders=folders, device=machine.device)
    except InputError:
        return False  # it has a device or cores that are not here
    return found.fingerprint == machine.fingerprint


def _is_enough(measured: Machine, granted: Tier, file_bytes: int, limit_ns: int) -> bool:
    """Whether the disk was measured with a file of about the size that would be used now."""
    disk = measured.tier("disk")
    if disk is None or len(disk.drives) != len(granted.drives):
        return False
    wanted = min(affordable_bytes(drive.path, file_bytes) for drive in granted.drives)
    # What the time allows is all that another measurement would reach.
    rate = min(drive.write_bytes_per_s for drive in disk.drives)
    wanted = min(wanted, rate * limit_ns / 1e9 / _PASSES)
    return min(drive.measured_bytes for drive in disk.drives) >= wanted / _NEAR


def _settle_drives(measured: Machine, granted: Tier) -> tuple[Drive, ...]:
    """Give the measured drives the folders and budgets of now; both are in the same order."""
    disk = measured.tier("disk")
    assert disk is not None
    return tuple(
        replace(known, path=now.path, budget_bytes=now.budget_bytes)
        for known, now in zip(disk.drives, granted.drives, strict=True)
    )


def _look(*, threads: int | None, folders: list[str], device: str | None) -> _Hardware:
    """Find what is there: cores, memory, disk, device."""
    cores = find_core_limit()
    memory = find_memory_limit()
    disks = [find_disk(folder) for folder in folders]
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
    drives = tuple(
        _unmeasured(folder, free_less_margin(free, "disk"))
        for folder, free in free_disk_bytes(folders).items()
    )
    disk_tier = Tier(
        name="disk",
        total_bytes=sum({disk.drive: disk.free_bytes for disk in disks}.values()),
        budget_bytes=usable_bytes(drives),
        path=folders[0],
        drives=drives,
    )
    cpu_name = find_cpu_model()
    facts: dict[str, str | int] = {
        "cpu": cpu_name,
        "cores": cores.num_cores,
        "threads": num_threads,
        "memory_limit_bytes": memory.limit_bytes,
        "disk": ", ".join(f"{disk.file_system} {disk.drive}" for disk in disks),
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


def _unmeasured(folder: str, budget_bytes: int) -> Drive:
    """A drive like any other, until it is measured."""
    usual = IoPath()
    return Drive(
        path=folder,
        budget_bytes=budget_bytes,
        read_bytes_per_s=1.0,
        write_bytes_per_s=1.0,
        measured_bytes=0,
        direct=usual.direct,
        block_bytes=usual.block_bytes,
        num_threads=usual.num_threads,
        huge_pages=usual.huge_pages,
    )


def _measure(
    hardware: _Hardware,
    *,
    file_bytes: int,
    disk_limit_ns: int,
    sustained: WriteLimits | None,
    progress: Progress,
) -> Machine:
    device = hardware.device
    near: TierName = "device" if device == "cpu" else "host"
    num_parts = 7 if device == "cpu" else 8
    before = torch.get_num_threads()
    torch.set_num_threads(hardware.num_threads)
    began = read_core_clocks()
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
        busy_share = read_core_clocks().share_since(began, hardware.num_threads)
        progress("scratch disk", 5, num_parts)
        disk_tier = next(tier for tier in hardware.tiers if tier.name == "disk")
        disk = measure_disk(
            *(drive.path for drive in disk_tier.drives),
            file_bytes=file_bytes,
            limit_ns=disk_limit_ns,
            sustained=sustained,
            tell=progress,
        )
        links: list[Link] = [*disk.links(near)]
        progress("saving files", 6, num_parts)
        # A run folder lies beside the first scratch folder more often than anywhere else.
        saving = measure_saving(disk_tier.drives[0].path, file_bytes=file_bytes)
        if device != "cpu":
            progress("links to the device", 7, num_parts)
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
        tiers=tuple(
            replace(tier, drives=disk.drives) if tier.name == "disk" else tier
            for tier in hardware.tiers
        ),
        links=tuple(links),
        matmul=(*fp32, *bf16),
        memory_bytes_per_s=memory_bytes_per_s,
        updates=tuple(updates),
        heap=heap,
        saving=saving,
        busy_share=busy_share,
    )


def _measure_device_links(hardware: _Hardware) -> tuple[Link, Link]:
    free = min(hardware.free_bytes("device"), hardware.free_bytes("host"))
    return measure_link("host", "device", free), measure_link("device", "host", free)


def _keep(folder: Path, machine: Machine) -> None:
    try:
        store_measured(folder, machine)
    except StorageError:
        # A home that cannot be written costs half a minute at the next probe, not this result.
        return


def _ignore_progress(what: str, index: int, num_parts: int) -> None:
    """Take the place of a progress display that nobody asked for."""
