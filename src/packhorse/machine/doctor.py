"""What `packhorse doctor` says about this machine: facts, warnings and what to do about them.

In: a scratch folder to look at, and a root path (`/`, or a made-up tree in tests). Out: `Finding`
values in a fixed order. Looks only, but for one empty file that tries direct I/O. Torch-free:
versions come from the packages' metadata.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from packhorse.machine.budget import DEFAULT_SCRATCH
from packhorse.machine.cgroups import read_text
from packhorse.machine.contention import BUSY_SHARE, CoreClocks
from packhorse.machine.disks import find_disk, takes_direct_io
from packhorse.machine.limits import REAL_ROOT, find_core_limit, find_cpu_model, find_memory_limit
from packhorse.units import GIB, format_bytes, format_part

_CORE: Final = ("packhorse", "numpy", "pydantic", "PyYAML", "typer", "psutil", "highspy")
_EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("torch", "safetensors"),
    "hf": ("transformers", "tokenizers", "gguf", "jinja2"),
    "data": ("pyarrow",),
}
_EXTRA_USES: Final[Mapping[str, str]] = {
    "train": "training and probing",
    "hf": "Hugging Face models, tokenizers and chat templates",
    "data": "parquet files",
}
_OPTIONAL_EXTRAS: Final = frozenset({"data"})
_LITTLE_DISK_BYTES: Final = 10 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `fix` says what to do and is None for plain facts."""

    level: Literal["ok", "note", "warning", "error"]
    what: str
    fix: str | None = None


def examine_machine(
    scratch: str | os.PathLike[str] = DEFAULT_SCRATCH,
    *,
    root: Path = REAL_ROOT,
    environment: Mapping[str, str] | None = None,
    looks: tuple[CoreClocks, CoreClocks] | None = None,
) -> tuple[Finding, ...]:
    """Look at versions, cores, memory, huge pages and the scratch disk of this machine.

    Args:
        scratch: the folder to look at; it need not exist.
        root: where /proc and /sys are found.
        environment: the environment variables; None takes this process's own.
        looks: two looks at the cores' clocks, some time apart; None says nothing of others.
    """
    env = os.environ if environment is None else environment
    return (
        *_examine_versions(),
        *_examine_cores(root, env),
        *(() if looks is None else _examine_others(*looks, root)),
        *_examine_memory(root),
        *_examine_huge_pages(root),
        *_examine_overcommit(root),
        *_examine_disk(scratch, root),
    )


def _examine_versions() -> list[Finding]:
    python = f"python {platform.python_version()}"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    findings = [Finding(level="ok", what=f"{python} on {system}")]
    if sys.platform != "linux":
        findings.append(
            Finding(
                level="error",
                what="this is no Linux: training needs its memory mapping and its direct I/O",
                fix="plan here, train on a Linux machine or in a Linux container",
            )
        )
    found = [f"{name} {_version(name) or 'not installed'}" for name in _CORE]
    findings.append(Finding(level="ok", what=", ".join(found)))
    for extra, names in _EXTRAS.items():
        missing = [name for name in names if _version(name) is None]
        if missing:
            findings.append(
                Finding(
                    level="note" if extra in _OPTIONAL_EXTRAS else "warning",
                    what=f"{_EXTRA_USES[extra]} not possible: {', '.join(missing)} not installed",
                    fix=f"pip install 'packhorse[{extra}]'",
                )
            )
        else:
            there = ", ".join(f"{name} {_version(name)}" for name in names)
            findings.append(Finding(level="ok", what=there))
    return findings


def _examine_cores(root: Path, env: Mapping[str, str]) -> list[Finding]:
    limit = find_core_limit(root)
    what = (
        f"{find_cpu_model(root)}: {limit.num_physical} cores ({limit.num_allowed} hardware threads)"
    )
    findings = [Finding(level="ok", what=what)]
    if limit.quota is not None and limit.quota < limit.num_physical:
        findings.append(
            Finding(
                level="warning",
                what=f"the container may use {limit.quota:.2f} of {limit.num_physical} cores"
                f" ({limit.quota_from}); {limit.num_cores} threads are used",
                fix="raise the container's cpu limit if this is not intended",
            )
        )
    threads = env.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) != limit.num_cores:
        more = int(threads) > limit.num_cores
        findings.append(
            Finding(
                level="warning" if more else "note",
                what=f"OMP_NUM_THREADS is {threads}, {limit.num_cores} cores may be used"
                + ("; too many threads slow each other down" if more else ""),
                fix=f"unset it, or set OMP_NUM_THREADS={limit.num_cores}",
            )
        )
    return findings


def _examine_others(before: CoreClocks, after: CoreClocks, root: Path) -> list[Finding]:
    taken, num_cores = after.others_since(before), after.num_cores
    load = (read_text(root / "proc/loadavg") or "").split(" ")[0]
    what = f"other processes use {taken:.1f} of {num_cores} cores now"
    what += f" (load average of the last minute: {load})" if load else ""
    if after.share_since(before, num_cores) < BUSY_SHARE:
        return [Finding(level="ok", what=what)]
    return [
        Finding(
            level="warning",
            what=f"busy: {what}; rates and block times that are measured meanwhile are too slow,"
            " and forecasts too long",
            fix="wait until they are done, then `packhorse probe --fresh`, and plan again",
        )
    ]


def _examine_memory(root: Path) -> list[Finding]:
    limit = find_memory_limit(root)
    findings = [
        Finding(
            level="ok",
            what=f"memory: {format_bytes(limit.limit_bytes)} may be used ({limit.limit_from}),"
            f" {format_bytes(limit.available_bytes)} free now ({limit.available_from})",
        )
    ]
    if limit.limit_bytes < limit.machine_bytes:
        findings.append(
            Finding(
                level="note",
                what=f"a limit holds: the machine has {format_bytes(limit.machine_bytes)}, this"
                f" process may use {format_bytes(limit.limit_bytes)}",
                fix="budgets count from the limit; raise it if this is not intended",
            )
        )
    if limit.available_bytes < limit.limit_bytes // 2:
        findings.append(
            Finding(
                level="warning",
                what="less than half of the memory is free:"
                f" {format_part(limit.available_bytes, limit.limit_bytes)}",
                fix="end other programs, or set a budget that leaves them their memory",
            )
        )
    return findings


def _examine_huge_pages(root: Path) -> list[Finding]:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = read_text(path)
    if text is None:
        return [
            Finding(
                level="warning",
                what="this kernel has no transparent huge pages: disk transfers will be slower",
                fix="use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            )
        ]
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return [
            Finding(
                level="warning",
                what="transparent huge pages are off: disk transfers run at a half to a quarter",
                fix=f"as root: echo madvise > {path}",
            )
        ]
    return [Finding(level="ok", what=f"transparent huge pages: {chosen}")]


def _examine_overcommit(root: Path) -> list[Finding]:
    path = root / "proc/sys/vm/overcommit_memory"
    if (read_text(path) or "").strip() != "2":
        return []
    return [
        Finding(
            level="warning",
            what="the kernel counts reserved memory as used (vm.overcommit_memory is 2): large"
            " models may be refused their address space",
            fix="as root: sysctl vm.overcommit_memory=0",
        )
    ]


def _examine_disk(scratch: str | os.PathLike[str], root: Path) -> list[Finding]:
    disk = find_disk(scratch, root)
    place = os.fspath(scratch)
    if not disk.writable:
        return [
            Finding(
                level="error",
                what=f"scratch folder {place}: {disk.folder} is not writable",
                fix="name another folder: --budget disk=FOLDER",
            )
        ]
    findings: list[Finding] = []
    try:
        direct = takes_direct_io(disk.folder)
    except OSError as error:
        return [
            Finding(
                level="error",
                what=f"scratch folder {place}: no file can be made there: {error.strerror}",
                fix="name another folder: --budget disk=FOLDER",
            )
        ]
    findings.append(
        Finding(
            level="ok",
            what=f"scratch folder {place}: {disk.file_system} on {disk.drive},"
            f" {format_part(disk.free_bytes, disk.total_bytes)} free,"
            f" direct I/O {'works' if direct else 'is not taken'}",
        )
    )
    if disk.in_memory:
        findings.append(
            Finding(
                level="warning",
                what=f"scratch folder {place} lies in memory ({disk.file_system}): what is moved"
                " there still counts as memory",
                fix="name a folder on a drive: --budget disk=FOLDER",
            )
        )
    elif disk.over_network:
        findings.append(
            Finding(
                level="warning",
                what=f"scratch folder {place} lies on a network file system ({disk.file_system})",
                fix="name a folder on a local drive: --budget disk=FOLDER",
            )
        )
    elif not direct:
        findings.append(
            Finding(
                level="note",
                what="transfers go through the page cache, which costs speed and some memory",
                fix="name a folder on ext4, xfs or btrfs: --budget disk=FOLDER",
            )
        )
    if disk.free_bytes < _LITTLE_DISK_BYTES:
        findings.append(
            Finding(
                level="warning",
                what=f"little space: {format_bytes(disk.free_bytes)} free; AdamW state takes 12"
                " bytes a parameter, a checkpoint as much again",
                fix="free some space or name another folder: --budget disk=FOLDER",
            )
        )
    return findings


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
